"""Libraries that ask whether their tensors are traced: yes while `jit` records in their thread, and no elsewhere."""

import functools
import threading
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import tdfunc as tdf
from tdfunc._jit import jit
from tdfunc.core.context import deferral

TRANSFORMS = {
    "itself": lambda fn: fn,
    "grad": lambda fn: torch.func.grad(lambda w: fn(w).sum()),
    "vmap": torch.vmap,
    "vmap of grad": lambda fn: torch.vmap(torch.func.grad(lambda w: fn(w).sum())),
    "grad of grad": lambda fn: torch.func.grad(lambda w: torch.func.grad(lambda w: fn(w).sum())(w).sum()),
}


def asks(question, answers):
    """Return a function that appends the answer to a question and returns its argument's square."""

    def fn(w):
        answers.append(question(w))
        return w * w

    return fn


QUESTIONS = {
    "is_compiling": lambda w: bool(torch.compiler.is_compiling()),
    "joined": lambda w: False | torch.compiler.is_compiling() | False,
    "and": lambda w: True & torch.compiler.is_compiling(),
    "equal": lambda w: torch.compiler.is_compiling() == True,  # noqa: E712
    "is_fake": is_fake,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_yes_while_a_function_is_recorded(question, transform):
    """Every question that torch offers and that can be answered by the library's code is."""
    answers = []
    w = torch.ones(3, 3) if "vmap" in transform else torch.ones(3)
    jit(TRANSFORMS[transform](asks(QUESTIONS[question], answers)))(w)

    assert answers == [True]


def test_transformers_is_answered():
    """The library's own question is answered through grad and vmap."""
    is_tracing = pytest.importorskip("transformers.utils").is_tracing
    answers = []
    jit(TRANSFORMS["vmap of grad"](asks(is_tracing, answers)))(torch.ones(3, 3))

    assert answers == [True]


def test_another_thread_is_told_no():
    """The answer is local to the thread that records."""
    answers = []

    def fn(w):
        thread = threading.Thread(target=lambda: answers.append(bool(torch.compiler.is_compiling())))
        thread.start()
        thread.join()
        return w * 2

    jit(fn)(torch.ones(2))

    assert answers == [False]


def test_the_answer_ends_with_the_record():
    """After a record, and after one that failed, torch's mark is as it was."""
    jit(lambda w: w * 2)(torch.ones(2))
    with pytest.raises(ZeroDivisionError):
        jit(lambda w: w / (1 // 0))(torch.ones(2))

    assert torch.compiler.is_compiling() is False


def test_our_own_package_is_told_no():
    """The package asks for compilers alone: its own calls are deferred to the replay, which compilers cannot read."""
    answers = []
    jit(asks(lambda w: deferral() is not None, answers))(torch.ones(2))

    assert answers == [True]


def test_torch_itself_is_told_no():
    """Functions of torch do in a record what they do outside: it asks by its own modules."""
    asker = types.FunctionType(
        (lambda: bool(torch.compiler.is_compiling())).__code__, {"torch": torch, "__name__": "torch.nn.modules"}
    )
    answers = []
    jit(asks(lambda w: asker(), answers))(torch.ones(2))

    assert answers == [False]


class Cached(nn.Module):
    """Fills a cache unless it is traced, as libraries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.make = functools.lru_cache(torch.arange)

    def forward(self, x):
        table = torch.arange(3) if torch.compiler.is_compiling() else self.make(3)
        return self.layer(x) + table


def test_a_cache_of_a_library_is_left_alone():
    """A table that the library caches outside of a trace is made anew inside."""
    apply, params, _ = tdf.functional(Cached())
    x = torch.randn(2, 3)
    expected = apply(params, x)

    torch.testing.assert_close(jit(lambda p, x: apply(p, x))(params, x), expected)
