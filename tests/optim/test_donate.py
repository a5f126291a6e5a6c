"""`donate=True` where leaves share memory."""

import numpy as np
import pytest
import torch

from tdfunc import TensorDict, UnsupportedError
from tdfunc._jit import jit
from tdfunc.optim import accumulate, adam, adamw, ema, masked, masters, multi, nadam, sgd
from tests.helpers import assert_trees_equal

SHARED = {
    "one object": lambda x: {"w": x, "v": x},
    "overlapping views": lambda x: {"w": x[:5], "v": x[3:]},
    "one inside the other": lambda x: {"a": x, "w": x[:2], "v": x[4:]},
    "interleaved": lambda x: {"w": x[::2], "v": x[1::2]},
    "expanded": lambda x: {"w": x[:1].expand(4), "v": x[1:]},
    "windows": lambda x: {"w": x.unfold(0, 3, 1)},
    "empty": lambda x: {"w": x[:0], "v": x[8:], "u": x},
}


OPTIMIZERS = {
    "sgd": sgd(lr=0.1, momentum=0.9),
    "adam": adam(lr=0.1),
    "masked": masked(sgd(lr=0.1), "w"),
    "nadam": nadam(lr=0.1),
    "masters": masters(sgd(lr=0.1)),
    "accumulate": accumulate(sgd(lr=0.1), 1),
    "multi": multi({"w": sgd(lr=0.1), "*": adam(lr=0.1)}),
}


def ones_like(tree):
    """Return gradients in memory of their own."""
    return tree.apply(lambda leaf: torch.ones(leaf.shape))


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_shared_memory_is_copied(make, opt, wrap):
    """Leaves that share memory are stepped once each, as without `donate`."""
    given, kept = TensorDict(make(torch.arange(8.0))), TensorDict(make(torch.arange(8.0)))
    update = wrap(lambda p, g, s: opt.update(p, g, s, donate=True))

    got, state = update(given, ones_like(given), opt.init(given))

    expected, expected_state = opt.update(kept, ones_like(kept), opt.init(kept))
    assert_trees_equal(got, expected)
    assert_trees_equal(state, expected_state)


def test_memory_that_does_not_overlap_is_overwritten():
    """Weights packed into one buffer stay in it, also where gradients share memory with each other."""
    buffer, shared, opt = torch.zeros(8), torch.ones(4), sgd(lr=0.5)
    params = TensorDict({"w": buffer[:4], "v": buffer[4:]})

    got, _ = opt.update(params, TensorDict({"w": shared, "v": shared[:]}), opt.init(params), donate=True)

    assert got["w"] is params["w"]
    assert buffer.tolist() == [-0.5] * 8


ONES, ZEROS = TensorDict({"w": torch.ones(4)}), TensorDict({"w": torch.zeros(4)})
STATES = {
    "two slots": (adam(lr=0.1), lambda state, params: state.set("exp_avg", ZEROS).set("exp_avg_sq", ZEROS)),
    "parameters": (ema(sgd(0.5), 0.5, debias=False), lambda state, params: state.set("average", params)),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("opt", "change"), STATES.values(), ids=STATES)
def test_state_that_shares_memory_is_copied(opt, change, wrap):
    """Averages that share memory with each other or with the parameters are not overwritten."""
    params = ONES.clone()
    expected = opt.update(params, ONES, opt.init(params))
    update = wrap(lambda p, g, s: opt.update(p, g, s, donate=True))

    got = update(params, ONES, change(opt.init(params), params))

    assert_trees_equal(got[0], expected[0])
    assert_trees_equal(got[1], expected[1])
    assert not ZEROS["w"].any()


def test_gradients_that_are_the_weights_are_kept():
    """Gradients that are the weights keep their values for the whole step."""
    opt = adamw(lr=torch.tensor(0.1), weight_decay=0.5)
    params = TensorDict({"w": torch.ones(4)})
    expected = opt.update(params, params.clone(), opt.init(params))
    given = params.clone()

    got = opt.update(given, given, opt.init(params), donate=True)

    assert_trees_equal(got[1], expected[1])
    assert given["w"].tolist() == [1, 1, 1, 1]


def test_a_copy_requires_grad_as_its_leaf():
    """A copied leaf requires grad if the given one does."""
    x = torch.zeros(4).requires_grad_()
    params = TensorDict({"w": x, "v": x})
    opt = sgd(lr=0.1)

    got, _ = opt.update(params, ones_like(params), opt.init(params), donate=True)

    assert got["w"].requires_grad


@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replay_refuses_memory_that_its_trace_did_not_share(opt):
    """A trace of weights that lie apart refuses ones that would overwrite each other."""
    update = jit(lambda p, g, s: opt.update(p, g, s, donate=True))
    x = torch.zeros(6)
    apart, shared = TensorDict({"w": x[:2], "v": x[2:4]}), TensorDict({"w": x[:2], "v": x[1:3]})
    state = opt.init(apart)
    update(apart, ones_like(apart), state)

    with pytest.raises(UnsupportedError, match=r"'w' and 'v' share memory[\s\S]*shapes \[2\] and \[2\]"):
        update(shared, ones_like(shared), state)


def replayed():
    """A replay of gradients that lie beside weights, that takes those at a place of the same memory, and the memory."""
    x, opt = torch.ones(8), sgd(lr=0.1)
    params = TensorDict({"w": x[2:4], "v": x[4:6]})
    update = jit(lambda p, start, s: opt.update(p, p.set("w", start).set("v", start), s, donate=True))
    state = opt.init(params)
    run = lambda start: update(params, start, state)  # noqa: E731
    run(torch.ones(2))
    return run, x


@pytest.mark.parametrize("start", [0, 6])
def test_a_replay_takes_gradients_beside_weights(start):
    """A trace of gradients that lie apart takes those side by side with weights."""
    run, x = replayed()

    run(x[start : start + 2])


@pytest.mark.parametrize("start", range(1, 6))
def test_a_replay_refuses_gradients_in_the_memory_of_weights(start):
    """A trace of gradients that lie apart refuses ones that a step would overwrite."""
    run, x = replayed()

    with pytest.raises(UnsupportedError, match=r"'gradient of [wv]'.* share memory"):
        run(x[start : start + 2])


def frozen():
    """Return an array that cannot be written to, as `np.load(mmap_mode="r")` gives."""
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_arrays_are_copied():
    """A write to a read-only map would end the process."""
    array = frozen()
    params, opt = TensorDict({"w": array}), sgd(0.5)
    got, _ = opt.update(params, ones_like(params), opt.init(params), donate=True)

    assert got["w"].tolist() == [0.5] * 3
    assert array.tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("calls", [0, 2])
def test_a_replay_refuses_a_read_only_array(calls):
    """A trace is made for memory that can be written to."""
    array, opt = frozen(), sgd(0.5)
    update = jit(lambda p, g, s: opt.update(p, g, s, donate=True))
    for _ in range(calls):
        params = TensorDict({"w": torch.ones(3)})
        update(params, ones_like(params), opt.init(params))
    params = TensorDict({"w": array})

    with pytest.raises(UnsupportedError, match="'w' is on a read-only array"):
        update(params, ones_like(params), opt.init(params))
    assert array.tolist() == [1.0] * 3
