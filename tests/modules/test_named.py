"""torch's checkpoint by its name: who answers it, in which threads, and for how long."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.modules.checkpoint import recomputing_by_name

NAMES = {
    "imported": lambda fn, *args: checkpoint(fn, *args, use_reentrant=False),
    "of the module": lambda fn, *args: torch_checkpoint.checkpoint(fn, *args, use_reentrant=False),
    "in full": lambda fn, *args: torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False),
    "reentrant": lambda fn, *args: checkpoint(fn, *args, use_reentrant=True),
}


def square(params, x, run):
    """A loss whose layers run by a function."""
    for name in ("a", "b"):
        x = run(lambda w, x: torch.tanh(x @ w), params[name], x)
    return x.square().sum()


@pytest.mark.parametrize("run", NAMES.values(), ids=NAMES)
def test_functions_of_trees(run):
    """A function without a module has the gradients that it has without recomputation."""
    params = TensorDict({name: torch.randn(3, 3, dtype=torch.float64) for name in "ab"})
    x = torch.randn(4, 3, dtype=torch.float64)

    found = tdf.grad(square)(params, x, run)
    tdf.assert_close(found, tdf.grad(square)(params, x, lambda fn, *args: fn(*args)))


@given(depth=st.integers(1, 5), segments=st.integers(1, 5), members=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_a_sequence_in_segments(depth, segments, members, seed):
    """Any number of segments gives the gradients of the layers in a row, for each member."""
    torch.manual_seed(seed)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(depth)]).double()
    x = torch.randn(3, 2, dtype=torch.float64)

    class InSegments(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint_sequential(self.layers, min(segments, depth), x, use_reentrant=False)

    apply, params, _ = tdf.functional(InSegments())
    plain, own, _ = tdf.functional(layers)
    stacked = tdf.stack([params * (i + 1) for i in range(members)])
    found = vmap(grad(lambda p: apply(p, x).square().sum()))(stacked)

    expected = [grad(lambda p: plain(p, x).square().sum())(own * (i + 1)) for i in range(members)]
    tdf.assert_close(found["layers"], tdf.stack(expected))


def test_options_of_torch_are_taken():
    """Options of torch's function do not reach the function that runs."""
    x = torch.randn(3)
    found = tdf.grad(
        lambda p: checkpoint(
            lambda x, *, by: x["x"].sin() * by, p, by=2.0, use_reentrant=False, early_stop=False,
            preserve_rng_state=False, determinism_check="none", debug=False,
        ).sum()
    )(TensorDict({"x": x}))  # fmt: skip

    torch.testing.assert_close(found["x"], 2 * x.cos())


def test_torch_is_as_before():
    """After a call, torch's own transforms raise torch's error as they did."""
    tdf.grad(square)(TensorDict({name: torch.eye(3) for name in "ab"}), torch.ones(3), NAMES["imported"])

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad(lambda x: NAMES["imported"](torch.sin, x).sum())(torch.ones(3))


def test_other_threads_have_torchs():
    """While a thread recomputes by our function, another one has torch's, with its errors and its gradients."""
    found = []

    def other():
        x = torch.ones(2, requires_grad=True)
        NAMES["imported"](torch.sin, x).sum().backward()
        found.append(x.grad.tolist())
        try:
            grad(lambda x: NAMES["imported"](torch.sin, x).sum())(torch.ones(3))
        except RuntimeError as err:
            found.append(str(err))

    def loss(params):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return NAMES["imported"](torch.sin, params["x"]).sum()

    tdf.grad(loss)(TensorDict({"x": torch.ones(3)}))
    assert found[0] == torch.ones(2).cos().tolist()
    assert "saved tensor hooks" in found[1]


def test_outside_of_transforms_it_is_torchs():
    """Code in a call of ours that no transform runs has torch's function, nested as well."""
    x = torch.randn(3, requires_grad=True)
    with recomputing_by_name():
        out = checkpoint(lambda x: checkpoint(torch.sin, x, use_reentrant=False) * 2, x, use_reentrant=False)
    out.sum().backward()

    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


MARKS = {
    "assigned": lambda x: setattr(x, "requires_grad", True),
    "called": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("run", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_a_tensor_that_the_function_marks(mark, run):
    """T5 marks its position bias, which torch refuses or takes for a tensor from outside."""
    params = TensorDict({"w": torch.randn(3, 3, dtype=torch.float64)})
    x = torch.randn(4, 3, dtype=torch.float64)

    def layer(w, x):
        bias = torch.ones(3, dtype=torch.float64)
        mark(bias)
        return torch.tanh(x @ w + bias)

    found = tdf.grad(lambda params: run(layer, params["w"], x).square().sum())(params)

    wanted = grad(lambda w: torch.tanh(x @ w + 1).square().sum())(params["w"])
    torch.testing.assert_close(found["w"], wanted)
