"""Concurrent calls of one `apply`: a barrier in forward, a tiny switch interval, exceptions in half of the calls."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tdfunc import functional
from tests.models import Norm

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


@pytest.mark.filterwarnings("ignore:apply. forward of Meeting writes the attributes:UserWarning")
def test_calls_meet_inside_forward():
    """Calls that are all inside forward at once run with their own weights and buffers."""
    model = Meeting()
    apply, params, buffers = functional(model)
    trees = [params * float(i + 1) for i in range(THREADS)]

    def work(i):
        return [apply.with_buffers(trees[i], buffers, X) for _ in range(20)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))

    hidden = [X @ tree["first", "weight"].T + tree["first", "bias"] for tree in trees]
    outs = [h @ tree["second", "weight"].T + tree["second", "bias"] for h, tree in zip(hidden, trees, strict=True)]
    torch.testing.assert_close([[out for out, _ in mine] for mine in results], [[out] * 20 for out in outs])
    calls = [[new["calls"] for _, new in mine] for mine in results]
    torch.testing.assert_close(calls, [[h.sum()] * 20 for h in hidden], rtol=1e-4, atol=1e-4)
    assert len(apply._pool) == THREADS
    assert not hasattr(apply._pool[0].module, "last")


class Failing(Norm):
    """Raises at the end of forward when told to."""

    def forward(self, x, fail=False):
        y = super().forward(x)
        if fail:
            raise ValueError(f"{y.sum()}")
        return y


@pytest.mark.usefixtures("fast_switching")
def test_modes_trees_and_exceptions_of_many_threads():
    """Calls in two modes, on own and shared trees, half of which raise, read their own plans and weights."""
    evaluated, params, buffers = functional(Failing().eval())
    trained = evaluated.train()
    trees = [params * float(i + 1) for i in range(THREADS)]
    stacked = torch.stack([params, params]), torch.stack([buffers, buffers])
    expected = {apply: [apply(tree, X, buffers=buffers) for tree in trees] for apply in (evaluated, trained)}
    wrong = []

    def work(i):
        for n in range(100):
            apply = (evaluated, trained)[n // 2 % 2]
            for tree, right in ((trees[i], expected[apply][i]), (trees[0], expected[apply][0])):
                try:
                    same = torch.equal(apply(tree, X, n % 2 == 0, buffers=buffers), right)
                except ValueError as err:
                    same = str(err) == f"{right.sum()}"
                wrong.extend([] if same else [i])
            apply.leaves(*stacked, torch.Size([2]))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))

    assert not wrong
    assert len(evaluated._pool) <= THREADS + 1
