"""Optimizers: public reports of other projects that no other test shows."""

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, optim
from tests.helpers import TiedLM, assert_trees_equal

RATE = 0.0625
RATES = {
    "float": RATE,
    "numpy float32": np.float32(RATE),
    "numpy float64": np.float64(RATE),
    "bfloat16 tensor": torch.tensor(RATE, dtype=torch.bfloat16),
    "float32 tensor": torch.tensor(RATE),
    "schedule": lambda step: RATE,
}
rounds_steps = pytest.mark.filterwarnings("ignore:.*rounding parameters to 16 bits")


def trained(opt, params, grads):
    """The parameters after a step for each gradient."""
    state = opt.init(params)
    for grad in grads:
        params, state = opt.update(params, grad, state)
    return params


@rounds_steps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", RATES)
def test_a_rate_of_any_kind_trains_alike(kind, dtype, generator):
    """A power of two, which each kind has exactly: the same parameters, in their own dtype."""
    trees = [TensorDict({"w": torch.randn(4, generator=generator, dtype=dtype)}) for _ in range(6)]

    found = trained(optim.adam(lr=RATES[kind]), trees[0], trees[1:])

    assert_trees_equal(found, trained(optim.adam(lr=RATE), trees[0], trees[1:]))


def test_a_boundary_at_0_leaves_the_first_schedule_out():
    """The second one begins with its own first value."""
    second = optim.schedules.exponential_decay(1.0, 1, 0.5)
    joined = optim.schedules.join_schedules([optim.schedules.constant(0.1), second], [0])

    assert [joined(torch.tensor(step)).item() for step in range(4)] == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("make", [optim.clip_by_global_norm, optim.clip_by_member_norm])
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_a_norm_of_0_gives_zeros(make, value):
    """Also for gradients of zeros, whose norm it is."""
    grads = TensorDict({"w": torch.full((2, 3), value)}, [2])

    assert make(0.0)(grads)["w"].tolist() == [[0.0] * 3] * 2


def test_muon_refuses_a_1d_convolution():
    """The message names the leaf and the way to another rule for it."""
    params = tdf.from_module(nn.Sequential(nn.Conv1d(2, 3, 3, bias=False))).detach()

    with pytest.raises(tdf.LeafMismatchError, match=r"(?s)'0.weight'.*is not a matrix.*\[3, 2, 3\].*multi\("):
        optim.muon().init(params)


def test_an_average_of_a_tree_with_counters_is_refused():
    """The hint names the function that separates buffers."""
    params = tdf.from_module(nn.BatchNorm1d(3)).detach()

    with pytest.raises(tdf.LeafMismatchError, match=r"(?s)ema: the leaf 'num_batches_tracked'.*tdfunc.split"):
        optim.ema(optim.sgd(), 0.9).init(params)


def test_a_tie_over_two_groups_is_refused():
    """A tied leaf has one rule: a group that gets no other leaf is an error."""
    params = tdf.from_module(TiedLM()).detach()

    with pytest.raises(tdf.FilterError, match=r"(?s)no leaf is left for.*'out\*'.*in groups before it"):
        optim.multi({"emb*": optim.sgd(), "out*": optim.adam(), "*": optim.sgd()}).init(params)


@pytest.mark.parametrize("wrap", [lambda update: update, tdf.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: optim.schedule_free(optim.adam(lr=0.1)),
        lambda: optim.apply_if_finite(optim.adam(lr=0.1), 3),
        lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adam(lr=0.1)),
    ],
    ids=["schedule free", "if finite", "clip"],
)
@rounds_steps
def test_accumulation_of_16_bits_around_other_wrappers(inner, wrap, generator):
    """Two gradients accumulated are one step by their mean, in the dtype of the parameters."""
    params, grad = [TensorDict({"w": torch.randn(4, generator=generator).bfloat16()}) for _ in range(2)]
    opt = optim.accumulate(inner(), 2)
    update = wrap(opt.update)
    state = opt.init(params)
    found = params
    for _ in range(4):
        found, state = update(found, grad, state)

    assert_trees_equal(found, trained(inner(), params, [grad, grad]))
