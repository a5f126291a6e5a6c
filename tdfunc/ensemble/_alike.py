"""Whether two modules would compute the same from the same weights: classes, slots and hyperparameters compared.

Hyperparameters are what a module keeps in its `__dict__` beside its slots: numbers, strings, functions, constant
tensors, containers of these, and objects that define `==`. Objects that do not are taken to be alike.
"""

import functools
import types
import weakref
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tdfunc._errors import TreeStructureError, explain
from tdfunc._keys import dotted
from tdfunc._types import Path
from tdfunc.modules.slots import unwrap

# What nn.Module itself keeps in every `__dict__`; of these only the mode is a property of the architecture.
_BASE = frozenset(nn.Module().__dict__) - {"training"}
_ATOMS = (int, float, complex, bool, str, bytes, type(None), Enum, type, torch.dtype, torch.device, torch.Size)
_EXACT = frozenset((int, float, complex, bool, str, bytes, type(None)))
_TABLES = ("_parameters", "_buffers", "_modules")


# Any: hyperparameters are of every type.
def hyperparameters(module: nn.Module) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return the names of the attributes that `==` compares fully (the mode among them), and all other attributes."""
    own = module.__dict__
    names = own.keys() - _BASE
    plain = [name for name in names if _is_plain(own[name])]
    others = [(name, own[name]) for name in names.difference(plain)] if len(plain) < len(names) else []
    return plain, others


def _is_plain(value: Any) -> bool:
    return type(value) in _EXACT or (type(value) in (tuple, list) and _EXACT.issuperset(map(type, value)))


def alike(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are the same, as far as can be told; weights are never compared."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _ATOMS):
        return a == b or (a != a and b != b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor):
        return _tensors_alike(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, types.FunctionType):
        return _functions_alike(a, b)
    if isinstance(a, functools.partial):
        return alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, (nn.Module, weakref.ref, torch.Generator)) or type(a).__eq__ is object.__eq__:
        return True
    return _says_equal(a, b)


def _tensors_alike(a: Tensor, b: Tensor) -> bool:
    # Parameters and what is computed from them differ by design; RNNs list their weights in an attribute.
    if isinstance(a, nn.Parameter) or a.requires_grad:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or bool(torch.equal(a, b)))


def _functions_alike(a: types.FunctionType, b: types.FunctionType) -> bool:
    if a.__code__ is not b.__code__ or not alike(a.__defaults__, b.__defaults__):
        return False
    return all(alike(_contents(x), _contents(y)) for x, y in zip(a.__closure__ or (), b.__closure__ or (), strict=True))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never assigned
        return None


def _says_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    # An object's own comparison may raise anything, or give no single truth value: it says nothing then.
    except Exception:
        return True


def check_alike(first: nn.Module, other: nn.Module, who: str, at: Path = ()) -> None:
    """Compare two modules and their children.

    Raises:
        TreeStructureError: Classes, slots, children, modes or hyperparameters differ; the message names the first
            difference.
    """
    if other is first:
        return
    where = repr(dotted(at)) if at else "the root"
    # By name: every parametrized module has a class of its own.
    if type(first) is not type(other) and type(first).__qualname__ != type(other).__qualname__:
        raise _unlike(who, where, "class", type(first).__qualname__, type(other).__qualname__)
    mine, theirs = first.__dict__, other.__dict__
    for table in _TABLES:
        _check_table(mine[table], theirs[table], table[1:], who, where)
    for name in [name for name in (*mine, *theirs) if name not in _BASE]:
        if name not in mine or name not in theirs:
            raise _unlike(
                who, where, name, *[repr(d[name]) if name in d else "no such attribute" for d in (mine, theirs)]
            )
        if not alike(mine[name], theirs[name]):
            raise _unlike(who, where, name, repr(mine[name]), repr(theirs[name]))
    for name, child in mine["_modules"].items():
        if child is not None:
            pair = [unwrap(m, "stack_modules") for m in (child, theirs["_modules"][name])]
            check_alike(pair[0], pair[1], who, (*at, name))


def _check_table(mine: dict[str, Any], theirs: dict[str, Any], table: str, who: str, where: str) -> None:
    if list(mine) != list(theirs):
        raise _unlike(who, where, table, list(mine), list(theirs))
    for name, value in mine.items():
        if (value is None) is not (theirs[name] is None):
            state = ["None" if x is None else type(x).__name__ for x in (value, theirs[name])]
            raise _unlike(who, where, f"{table}.{name}", *state)


def _unlike(who: str, where: str, what: str, expected: object, got: object) -> TreeStructureError:
    hint = "one forward runs all members, so their structure must agree; average the outputs of models that differ."
    if what == "training":
        hint = "call train() or eval() on all of them."
    return TreeStructureError(
        explain(
            f"stack_modules: {who} differs from member 0 in {what!r} of {where}.",
            expected=expected,
            got=got,
            hint=hint,
        )
    )
