"""Concurrent calls of one `apply`: a barrier in forward, a tiny switch interval, exceptions in half of the calls."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tdfunc import functional
from tests.models import Norm, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)
THREADS = 4


@pytest.fixture
def fast_switching():
    """Let Python change threads every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


BARRIER = threading.Barrier(THREADS)


class Meeting(nn.Module):
    """Waits in the middle of forward until all threads are there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.first(x)
        BARRIER.wait(10)
        self.calls += y.sum()
        self.last = y
        BARRIER.wait(10)
        return self.second(self.last)


def test_calls_meet_inside_forward():
    """Calls that are all inside forward at once would run with each other's weights or buffers."""
    model = Meeting()
    apply, params, buffers = functional(model)
    trees = [params * float(i + 1) for i in range(THREADS)]

    def work(i):
        return [apply.with_buffers(trees[i], buffers, X) for _ in range(20)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))

    for tree, mine in zip(trees, results, strict=True):
        hidden = X @ tree["first", "weight"].T + tree["first", "bias"]
        expected = hidden @ tree["second", "weight"].T + tree["second", "bias"]
        for out, new in mine:
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(new["calls"], hidden.sum(), rtol=1e-4, atol=1e-4)
    assert len(apply._pool) == THREADS
    assert not hasattr(apply._pool[0].module, "last")


class Failing(nn.Module):
    """Raises in the middle of forward when told to."""

    def __init__(self):
        super().__init__()
        self.body = make_mlp()

    def forward(self, x, fail):
        y = self.body(x)
        if fail:
            raise ValueError(f"{y.sum()}")
        return y


@pytest.mark.usefixtures("fast_switching")
def test_exceptions_in_half_of_the_calls():
    """A call that raises would leave its weights in a skeleton that another thread then uses."""
    apply, params, _ = functional(Failing())
    trees = [params * float(i + 1) for i in range(THREADS)]
    expected = [apply(tree, X, False) for tree in trees]
    wrong = []

    def work(i):
        for n in range(150):
            try:
                out = apply(trees[i], X, n % 2 == 0)
            except ValueError as err:
                if str(err) != f"{expected[i].sum()}":
                    wrong.append(i)
            else:
                if not torch.equal(out, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert len(apply._pool) <= THREADS + 1


@pytest.mark.usefixtures("fast_switching")
def test_modes_and_trees_shared_by_threads():
    """The caches that a tree and an apply keep would be mixed up by two functions on one tree."""
    model = Norm()
    apply, params, buffers = functional(model.eval())
    other = apply.train()
    expected = [apply(params, X, buffers=buffers), other.with_buffers(params, buffers, X)[0]]
    stacked = torch.stack([params, params])
    wrong = []

    def work(i):
        for _ in range(100):
            if i % 3 == 0:
                wrong.extend([] if torch.equal(apply(params, X, buffers=buffers), expected[0]) else [i])
            elif i % 3 == 1:
                wrong.extend([] if torch.equal(other(params, X, buffers=buffers), expected[1]) else [i])
            else:
                apply.leaves(stacked, torch.stack([buffers, buffers]), torch.Size([2]))
                apply.leaves(params, buffers)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS + 2)))

    assert not wrong
