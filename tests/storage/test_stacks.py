"""Lazy stacks in every kind of file: their class follows from that of their trees."""

import pytest
import torch

import tdfunc
from tdfunc import CorruptCheckpointError, LazyStack, TensorClass, TensorDict, lazy_stack
from tests.storage.trees import forge


class Point(TensorClass):
    x: torch.Tensor
    note: str = "none"


def points():
    """A lazy stack of typed trees, in a tree and in a lazy stack of its own."""
    stack = lazy_stack([Point(torch.rand(n, 2), "é", batch_size=[n]) for n in (1, 3)], dim=1)
    return TensorDict({"one": stack, "two": lazy_stack([stack, stack.detach()])})


def test_stacks_without_their_class(tmp_path):
    """With `classes=TensorDict` a stack would become a tree whose batch size its leaves do not have."""
    tdfunc.save(points(), tmp_path / "x.safetensors")

    back = tdfunc.load(tmp_path / "x.safetensors", classes=TensorDict)

    assert type(back["one"]) is LazyStack
    assert [type(part) for part in back["one"].trees] == [TensorDict, TensorDict]
    assert back["two"].batch_size == points()["two"].batch_size


NODE = {"keys": ["s"], "items": [{"tree": 1}]}
STACK = {"size": [2], "class": "tdfunc._lazystack.stack:LazyStack", "own": -1}
PART = {"size": [], "keys": [], "items": []}
TWO = {"keys": ["0", "1"], "items": [{"tree": 2}, {"tree": 3}]}


@pytest.mark.parametrize(
    ("stack", "parts", "expected"),
    [
        ({**STACK, "keys": ["0", "2"], "items": TWO["items"]}, [PART, PART], r"in order\n  got:      \['0', '2'\]"),
        ({**STACK, "keys": [], "items": []}, [], r"in order\n  got:      \[\]"),
        (
            {**STACK, "keys": ["0", "1"], "items": [{"value": 1}, {"value": 2}]},
            [],
            r"in order\n  got:      \['0', '1'\]",
        ),
        ({**STACK, **TWO}, [PART, {**PART, "size": [2]}], r"number of dimensions, in order"),
        ({**STACK, **TWO, "own": -2}, [PART, PART], r"batch size is \[2\]\n  got:      -2"),
        ({**STACK, **TWO, "own": 0}, [PART, PART], r"batch size is \[2\]\n  got:      0"),
        ({**STACK, **TWO, "own": None}, [PART, PART], r"batch size is \[2\]\n  got:      None"),
        ({**STACK, **TWO, "size": [3]}, [PART, PART], r"batch size \[3\]\n  got:      \[2\]"),
    ],
)
def test_stacks_that_lie(stack, parts, expected, tmp_path):
    """A file could make a stack whose size, dimension or trees are not what it says, and fail when it is used."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(forge({"specs": [], "nodes": [NODE, stack, *parts], "ties": []}, []))

    with pytest.raises(CorruptCheckpointError, match=expected):
        tdfunc.load(path)
