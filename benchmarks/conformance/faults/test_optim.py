"""What torch's own optimizers and clipping do to stacked members, beside what `tdfunc.optim` does."""

import pytest
import torch
from torch import nn

from tdfunc import TensorDict
from tdfunc.optim import adam, clip_by_member_norm, sgd

GRADS = torch.tensor([[3.0, 4.0], [30.0, 40.0], [3000.0, 4000.0]])
LRS = torch.tensor([0.1, 0.2, 0.3])


def leaf_with_gradient(grads, values=0.0):
    """A Parameter of some values."""
    leaf = nn.Parameter(torch.zeros_like(grads) + values)
    leaf.grad = grads.clone()
    return leaf


def test_clipping_couples_members():
    """Here torch clips the stacked leaf by one norm: a member with a huge gradient silences the others."""
    leaf = leaf_with_gradient(GRADS)
    nn.utils.clip_grad_norm_([leaf], 1.0)
    theirs = leaf.grad.norm(dim=1)
    assert theirs[0] < 0.01
    assert theirs[2] > 0.99

    ours = clip_by_member_norm(1.0)(TensorDict({"w": GRADS}, [3]))
    torch.testing.assert_close(ours["w"].norm(dim=1), torch.ones(3))


def test_a_learning_rate_for_each_member():
    """The optimizers of torch take one number."""
    with pytest.raises(ValueError, match="1-element"):
        torch.optim.SGD([leaf_with_gradient(GRADS)], lr=LRS)

    params = TensorDict({"w": torch.zeros(3, 2)}, [3])
    opt = sgd(lr=LRS)
    new, _ = opt.update(params, TensorDict({"w": GRADS}, [3]), opt.init(params))
    torch.testing.assert_close(new["w"], -LRS[:, None] * GRADS)


def test_optimizers_that_mix_elements():
    """Adafactor of torch gives a stacked member another step than it has alone, and Muon refuses the leaf."""
    grads = torch.linspace(-1, 1, 24).reshape(2, 3, 4) * torch.tensor([1.0, 100.0])[:, None, None]
    scales = torch.tensor([1.0, 100.0])[:, None, None]
    stacked = leaf_with_gradient(grads, scales)
    torch.optim.Adafactor([stacked], lr=0.1).step()
    alone = leaf_with_gradient(grads[0], scales[0])
    torch.optim.Adafactor([alone], lr=0.1).step()
    assert (stacked[0] - 1).norm() > 10 * (alone - 1).norm()
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([leaf_with_gradient(grads)])

    params, opt = TensorDict({"w": torch.zeros(2, 3, 4)}, [2]), adam(lr=0.1)
    new, _ = opt.update(params, TensorDict({"w": grads}, [2]), opt.init(params))
    one, _ = opt.update(params[0], TensorDict({"w": grads[0]}), opt.init(params[0]))
    torch.testing.assert_close(new["w"][0], one["w"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_update_inside_vmap():
    """The kernels that are fast have no batching rule; a rule of ours is stepped inside vmap as outside."""
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda g: torch._foreach_mul([g], 2.0)[0])(GRADS)

    params, grads, opt = TensorDict({"w": torch.zeros(3, 2)}, [3]), TensorDict({"w": GRADS}, [3]), adam(lr=0.1)
    inside, _ = torch.vmap(opt.update)(params, grads, torch.vmap(opt.init)(params))
    outside, _ = opt.update(params, grads, opt.init(params))
    torch.testing.assert_close(inside["w"], outside["w"])
