"""Methods that are annotated as returning a tree of the same class do so."""

import inspect

import pytest
import torch
from torch import Tensor

from tdfunc import TensorClass, TensorDict, lazy_stack
from tdfunc._tensordict import TreeMethods


class Rows(TensorClass):
    """Two fields over rows."""

    x: Tensor
    y: Tensor


ROWS = Rows(torch.rand(4, 1), torch.rand(4), batch_size=[4])
MASK = torch.tensor([True, False, True, True])
# method -> arguments; those that take none are not listed.
ARGUMENTS = {
    "__getitems__": [[0, 1]], "clamp": [0], "lerp": [ROWS, 0.5],
    "addcmul": [ROWS, ROWS], "addcdiv": [ROWS, ROWS],
    "masked_fill": [MASK, 0], "softmax": [0], "cumsum": [0], "cumprod": [0], "to": [torch.float64], "set": ["x", MASK],
    "update": [{"x": MASK}], "delete": ["y"], "set_": ["x", 0.0], "update_": [{"x": ROWS.x}],
    "copy_": [ROWS], "gather": [0, torch.tensor([1])], "masked_select": [MASK], "where": [MASK, ROWS],
    "new_zeros": [2], "new_ones": [2], "new_empty": [2], "new_full": [[2], 1.0],
    "apply": [torch.abs], "named_apply": [lambda name, x: x], "flip": [0],
    "repeat": [2], "repeat_interleave": [2], "reshape": [-1], "view": [2, 2], "unflatten": [0, (2, 2)],
    "permute": [0], "transpose": [0, 0], "unsqueeze": [0], "expand": [2, 4], "expand_as": [ROWS], "select": ["x", "y"],
    "exclude": ["y"], "rename_key": ["x", "y"], "with_batch_size": [[]], "with_names": [["row"]], "type": [torch.half],
    "unbind": [], "split": [2], "chunk": [2], "__getitem__": [0], "__deepcopy__": [{}],
    "load_state_dict": [ROWS.state_dict()],
    }  # fmt: skip
# Methods that need another tree.
APART = {
    "share_memory_": lambda: ROWS.clone().share_memory_(),
    "grad": lambda: ROWS.apply(lambda x: x.detach().requires_grad_()),
    "bitwise_not": lambda: ~(ROWS > 0),
    "__invert__": lambda: ~(ROWS > 0),
}


# These take an accelerator, a module's tied parameters, files, or other ranks.
ELSEWHERE = {
    "cuda", "pin_memory", "untie", "load_", "load_memmap_", "memmap_refresh_",
    "all_reduce", "broadcast", "recv", "recv_", "scatter",
}  # fmt: skip


def annotated(kind):
    """Names of the methods and properties of trees that are annotated so."""
    found = []
    public = [name for name in dir(TreeMethods) if name.startswith("__") or not name.startswith("_")]
    for name in sorted({*public} - ELSEWHERE):
        member = inspect.getattr_static(TreeMethods, name)
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and function.__annotations__.get("return") == kind:
            found.append(name)
    return found


def result(name):
    """The result of a method of the typed tree."""
    if name in APART:
        return APART[name]()
    member = inspect.getattr_static(TreeMethods, name)
    if isinstance(member, property):
        return getattr(ROWS.clone(), name)
    bits = "bitwise" in name or name.strip("_").lstrip("r") in ("and", "or", "xor")
    tree = ROWS > 0 if bits else ROWS.clone()
    arguments = ARGUMENTS.get(name)
    if arguments is None:
        given = [p for p in inspect.signature(member).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        other = 2.0 if name.startswith("__r") and not bits else tree
        arguments = [other] if any(p.name == "other" for p in given) else []
    return getattr(tree, name)(*arguments)


@pytest.mark.parametrize("name", annotated("Self"))
def test_the_class_is_kept(name):
    """Methods that return a tree of the class are annotated with it."""
    assert type(result(name)) is Rows


@pytest.mark.parametrize("name", annotated("tuple[Self, ...]"))
def test_parts_are_of_the_class(name):
    """Methods that return parts are annotated with the class of the parts."""
    assert {type(part) for part in result(name)} == {Rows}


def test_annotations_are_found():
    """The tests above find methods, rows and parts to check."""
    assert {"reshape", "to", "set", "__add__", "float", "grad"} <= set(annotated("Self"))
    assert set(annotated("tuple[Self, ...]")) == {"unbind", "split", "chunk"}
    assert type(ROWS[0]) is type(next(iter(ROWS))) is type(ROWS[None, MASK]) is Rows


def test_rows_of_a_lazy_stack_are_trees():
    """A row of a lazy stack is a tree to type checkers."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(n)}, [n]) for n in (1, 2)])

    assert type(lazy[0]) is type(lazy.unbind()[0]) is TensorDict
