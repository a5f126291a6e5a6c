"""Messages are bounded, whatever the values in them."""

import time
from collections import Counter, OrderedDict

import pytest
import torch

from tdfunc.core.errors import brief, error


def nested(depth, make=list):
    """A value of ten references a level, whose whole repr has 10 ** depth parts."""
    value = "x"
    for _ in range(depth):
        value = make([value] * 10)
    return value


class Wide(list):
    """A list of a class of its own."""


class Broken:
    """A value whose repr raises."""

    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "value",
    [
        nested(12),
        nested(12, tuple),
        nested(12, Wide),
        nested(12, lambda parts: OrderedDict(enumerate(parts))),
        {i: nested(12) for i in range(100)},
        "x" * 10**6,
        b"x" * 10**6,
        10**10_000,
        Counter(range(10**5)),
        range(10**9),
        Broken(),
    ],
    # pytest would write the number whole.
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_any_size_has_a_short_text(value):
    """Length and time are bounded: items, levels, characters and digits are cut."""
    begin = time.process_time()

    text = brief(value)

    assert len(text) < 400
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("value", [1, True, None, 0.5, "text", [1, "a"], {"a": [1]}, (1,), {1}])
def test_small_values_have_their_repr(value):
    """What is short is shown as Python does."""
    assert brief(value) == repr(value)


@pytest.mark.parametrize("make", [torch.Tensor, torch.nn.Parameter])
def test_a_large_tensor_is_shown_by_its_shape(make):
    """A message has no pages of numbers."""
    value = make(torch.ones(40, 3))

    assert brief({"a": value}) == f"{{'a': {type(value).__name__} of shape (40, 3), torch.float32}}"


@pytest.mark.parametrize("part", ["expected", "got"])
def test_parts_of_a_message_are_cut(part):
    """A text of a file does not make a message of megabytes."""
    message = str(error(ValueError, "wrong.", **{part: "x" * 10**6}))

    assert len(message) < 2_200
    assert "(1,000,000 characters)" in message
