"""The pool of large blocks: what the caller holds stays, and everything else is used again."""

import copy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc._jit.replay import pool
from tests.helpers import assert_trees_equal, examples
from tests.jit.blocks import pool_all_sizes


@pytest.fixture(autouse=True)
def _all_sizes():
    with pool_all_sizes():
        yield


def make_step():
    """Return a jitted function whose result is new memory: twice its argument, and one more."""
    return tdf.jit(lambda x: (x * 2).add(1))


def square(x):
    """Return a result whose node of autograd keeps its argument."""
    return x.requires_grad_().square()


def read_saved(held):
    """Return the argument of `square` by its gradient."""
    (grad,) = torch.autograd.grad(held.sum(), held.grad_fn.next_functions[0][0].variable, retain_graph=True)
    return grad / 2


# How a result is held by something other than its tensor, and how to read it.
HOLDERS = {
    "tensor": (lambda x: x, lambda held: held),
    "detached": (lambda x: x.detach(), lambda held: held),
    "view": (lambda x: x[1:], lambda held: held),
    "view of another dtype": (lambda x: x.view(torch.int32), lambda held: held.view(torch.float32)),
    "parameter": (torch.nn.Parameter, lambda held: held.detach()),
    "tree": (lambda x: tdf.TensorDict({"x": x}), lambda held: held["x"]),
    "numpy": (lambda x: x.numpy(), torch.from_numpy),
    "memoryview": (lambda x: memoryview(x.numpy()), lambda held: torch.from_numpy(np.asarray(held))),
    "dlpack": (torch.from_dlpack, lambda held: held),
    "capsule": (lambda x: x.__dlpack__(), torch.utils.dlpack.from_dlpack),
    "storage": (
        lambda x: x.untyped_storage(),
        lambda held: torch.empty(0).set_(held, 0, (held.nbytes() // 4,), (1,)),
    ),
    "autograd": (square, read_saved),
    "closure": (lambda x: lambda: x, lambda held: held()),
    "shared memory": (lambda x: x.share_memory_(), lambda held: held),
    "copy on write": (torch._lazy_clone, lambda held: held),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_result_stays_whatever_holds_it(name):
    """Memory is not used again as long as something refers to it."""
    hold, read = HOLDERS[name]
    step = make_step()
    x = torch.randn(8)
    held = hold(step(x))
    for i in range(6):
        step(torch.full((8,), float(i)))
    expected = (x * 2 + 1)[-len(read(held)) :] if name != "capsule" else x * 2 + 1

    assert torch.equal(read(held).detach(), expected)


@pytest.mark.parametrize("name", [name for name in HOLDERS if name != "shared memory"])
def test_memory_is_used_again_when_its_holder_has_gone(name):
    """Nothing that a holder leaves behind keeps a block from being used."""
    hold, _ = HOLDERS[name]
    step = make_step()
    x = torch.randn(8)
    result = step(x)
    address = result.data_ptr()
    held = hold(result)
    del result, held

    assert address in [step(x).data_ptr() for _ in range(3)]


@examples(1)
@given(st.lists(st.tuples(st.sampled_from(sorted(HOLDERS)), st.integers(0, 9)), min_size=2, max_size=14))
def test_random_holders(actions):
    """Results that are held in any way, and dropped in any order, keep their values."""
    step = tdf.jit(lambda x: [x * 2, (x + 1).exp(), torch.stack([x, x]).sum(0)])
    kept = []
    for number, (name, drop) in enumerate(actions):
        results = step(torch.full((8,), float(number)))
        result = results[drop % 3]
        # A capsule is read once.
        if name != "capsule":
            expected = result.tolist()
            kept.append((name, HOLDERS[name][0](result), expected))
        del results, result
        if kept and drop > 5:
            kept.pop(drop % len(kept))
    differ = [
        name for name, held, expected in kept if (got := HOLDERS[name][1](held).tolist()) != expected[-len(got) :]
    ]

    assert differ == []


def test_a_step_allocates_nothing_after_its_third_call():
    """Two generations of results are in use in turn."""
    step = tdf.jit(lambda x, y: (x @ y, x + y))
    x = y = torch.eye(3)
    seen = []
    for _ in range(8):
        x, y = step(x, y)
        seen.append({x.data_ptr(), y.data_ptr()})

    assert set.union(*seen[3:]) <= set.union(*seen[:3])


def test_kept_results_do_not_make_the_pool_grow():
    """Of a hundred results that a caller has kept, the pool holds what two calls use."""
    step = make_step()
    kept = [step(torch.ones(8)) for _ in range(100)]

    assert step.cache_info().held_bytes <= 4 * 32
    assert len({x.data_ptr() for x in kept}) == 100


def test_many_shapes_do_not_make_the_pool_grow():
    """The records of all shapes together hold what the largest of them uses."""
    step = make_step()
    for size in range(8, 40):
        step(torch.ones(size))

    assert step.cache_info().held_bytes <= 4 * 39 * 4


def test_many_shapes_leave_the_blocks_that_all_of_them_use():
    """Blocks of the size that was taken longest ago are forgotten first, and blocks of the parameters stay."""
    step = tdf.jit(lambda params, x: (params * 2, x + 1))
    params = torch.randn(7)
    for size in range(8, 40):
        params, _ = step(params, torch.ones(size))

    assert len(step._pool._rows[params.nbytes]) == 2


@pytest.mark.parametrize("limit", [0, 31, 64])
def test_keep_bytes_is_a_limit(limit):
    """More is not kept, and results are right."""
    step = tdf.jit(lambda x: [x * 2, x.exp(), x + 1], keep_bytes=limit)
    x = torch.randn(8)
    results = [step(x) for _ in range(4)]

    assert step.cache_info().held_bytes <= limit
    assert all(torch.equal(a, b) for found in results for a, b in zip(found, [x * 2, x.exp(), x + 1], strict=True))


def test_keep_bytes_below_zero_are_refused():
    """The message names the option."""
    with pytest.raises(ValueError, match="jit: keep_bytes must be at least 0"):
        tdf.jit(keep_bytes=-1)


def test_cache_clear_frees_the_blocks():
    """Nothing is held, and a result from before stays."""
    step = make_step()
    x = torch.randn(8)
    result = step(x)
    assert step.cache_info().held_bytes > 0
    step.cache_clear()

    assert step.cache_info().held_bytes == 0
    assert torch.equal(result, x * 2 + 1)


@pytest.mark.parametrize(
    "change", [lambda x: x.resize_(64), lambda x: x.share_memory_(), lambda x: x.untyped_storage().resize_(128)]
)
def test_a_block_whose_memory_was_changed_is_left(change):
    """The next results have memory of the right size."""
    step = make_step()
    x = torch.randn(8)
    change(step(x))

    assert [step(x).untyped_storage().nbytes() for _ in range(3)] == [32] * 3


def test_a_copy_has_blocks_of_its_own():
    """Two functions do not hand out one block."""
    step = make_step()
    other = copy.deepcopy(step)
    x = torch.randn(8)
    results = [step(x), other(x + 1), step(x + 2), other(x + 3)]

    assert [torch.equal(result, (x + i) * 2 + 1) for i, result in enumerate(results)] == [True] * 4


def test_threads_do_not_share_a_block():
    """Four threads, each stepping from its last results, end where one thread ends."""
    step = tdf.jit(lambda x, y: ((x @ y).tanh(), y + x))
    starts = [(torch.randn(6, 6), torch.randn(6, 6)) for _ in range(4)]
    step(*starts[0])

    def run(x, y):
        for _ in range(60):
            x, y = step(x, y)
        return x, y

    found = [None] * 4
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, run(*starts[i]))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [run(*start) for start in starts]

    assert_trees_equal(found, expected)


def test_after_an_error_half_way_results_are_right():
    """What a failed replay has taken is used again, and what was returned before stays."""
    step = tdf.jit(lambda x, index: (x + 1) * 2 + F.one_hot(index, 8)[0])
    x = torch.randn(8)
    before = step(x, torch.tensor([3]))
    with pytest.raises(RuntimeError):
        step(x * 5, torch.tensor([9]))
    after = step(x, torch.tensor([4]))

    assert torch.equal(before, (x + 1) * 2 + F.one_hot(torch.tensor(3), 8))
    assert torch.equal(after, (x + 1) * 2 + F.one_hot(torch.tensor(4), 8))


def test_a_call_inside_of_a_replay():
    """A schedule that reads its own tensor is called by each replay, and takes other blocks."""
    inner = tdf.jit(lambda x: (x + 1).exp() * 3)
    rates = torch.full((8,), 0.1)

    def schedule(count):
        return rates.mean() + inner(rates).sum() * 0 + count * 0

    opt = tdf.optim.sgd(schedule)
    params = tdf.TensorDict({"w": torch.zeros(8)})
    state = opt.init(params)
    step = tdf.jit(lambda p, s, x: opt.update(p, p.apply(lambda w: inner(w * 0) + x), s))
    for _ in range(5):
        params, state = step(params, state, torch.ones(8))

    assert torch.allclose(params["w"], torch.full((8,), -0.5 * (3 * torch.e + 1)))


def test_a_signal_handler_that_calls_the_step():
    """A call between any two lines of a replay takes other blocks."""
    step = tdf.jit(lambda x: [(x + i).tanh() for i in range(200)])
    x = torch.randn(8)
    step(x)
    caught = []

    def handle(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        caught.append(step(x + 1)[7].clone())
        signal.setitimer(signal.ITIMER_REAL, 1e-3)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        results = [step(x) for _ in range(12)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert all(torch.equal(item, (x + i).tanh()) for found in results for i, item in enumerate(found))
    assert all(torch.equal(item, (x + 8).tanh()) for item in caught)


_FORK = """
import os, torch, tdfunc as tdf
from tdfunc._jit.replay import pool
pool.MIN_BYTES = 1
torch.set_num_threads(1)
step = tdf.jit(lambda x: (x * 2).add(1))
x = torch.arange(8.0)
kept = step(x)
child = os.fork()
for i in range(5):
    other = step(x + i + (child == 0))
assert torch.equal(kept, x * 2 + 1)
assert torch.equal(other, (x + 4 + (child == 0)) * 2 + 1)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork.")
def test_a_child_after_fork_computes_on():
    """The results of both processes are right, and a result from before the fork stays in both."""
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_of_the_mode_of_the_call(grad):
    """A block that one mode has left is used in another, as a new tensor."""
    step = make_step()
    x = torch.randn(8)
    step(x)
    with grad():
        result = step(x)
        expected = (x * 2).add(1)

    assert torch.equal(result, expected)
    assert (result.is_inference(), result.requires_grad) == (expected.is_inference(), False)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.mT.contiguous(), id="copy"),
        pytest.param(lambda x: x.double() + 1, id="cast"),
        pytest.param(lambda x: torch.ops.aten.add.Scalar(x, 1, 2), id="number times alpha"),
        pytest.param(lambda x: x[:, None].expand(2, 3, 2) * 1.5, id="expanded"),
        pytest.param(lambda x: F.max_pool1d(x[None], 2, return_indices=True), id="two results"),
        pytest.param(lambda x: (x > 0) & (x < 1), id="bools"),
        pytest.param(lambda x: torch.complex(x, x) * 2j, id="complex"),
        pytest.param(lambda x: x[:0] + 1, id="empty"),
        pytest.param(lambda x: x.sum() + 1, id="0-d"),
        pytest.param(lambda x: x.to("meta") + 1, id="meta"),
    ],
)
def test_results_of_all_kinds(make):
    """Values, shapes, strides, dtypes and devices equal what the function returns."""
    step = tdf.jit(make)
    x = torch.randn(2, 2)
    step(x)
    got, expected = torch.utils._pytree.tree_leaves(step(x)), torch.utils._pytree.tree_leaves(make(x))

    assert [(a.shape, a.stride(), a.dtype, a.device) for a in got] == [
        (b.shape, b.stride(), b.dtype, b.device) for b in expected
    ]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_without_the_expected_counts_nothing_is_pooled(monkeypatch):
    """Where another build of torch or Python counts otherwise, results are new memory."""
    monkeypatch.setattr(pool, "_ALONE", None)
    step = make_step()
    step(torch.ones(8))

    assert step.cache_info().held_bytes == 0


@pytest.mark.parametrize("count", [None, lambda _: 1, lambda _: 2], ids=["absent", "always one", "always two"])
def test_a_count_that_does_not_show_owners_is_found_out(monkeypatch, count):
    """The function is private in torch: another version may lack it, or mean something else."""
    monkeypatch.setattr(pool, "_count_owners", count)

    assert pool._probe() is None


def test_small_results_are_not_pooled(monkeypatch):
    """Malloc keeps them as well."""
    monkeypatch.setattr(pool, "MIN_BYTES", 33)
    step = make_step()
    step(torch.ones(8))

    assert step.cache_info().held_bytes == 0


def flags_of(address):
    """Return the flags of the mapping that has an address."""
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and ":" not in name:
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            flags = rest
    return flags.split()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this system has no large pages"
)
def test_large_blocks_have_large_pages():
    """A block of the pool is mapped by large pages where the system has them."""
    step = tdf.jit(lambda x: x * 2)
    x = torch.randn(12 << 20)
    y = step(x)

    assert "hg" in flags_of(y.data_ptr() + y.nbytes // 2)
    assert "hg" not in flags_of(x.data_ptr() + x.nbytes // 2)
