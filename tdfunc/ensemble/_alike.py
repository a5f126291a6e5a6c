"""Whether two modules would compute the same from the same weights: classes, slots and hyperparameters compared.

Hyperparameters are what a module keeps in its `__dict__` beside its slots: numbers, strings, functions, constant
tensors, containers of these, objects that define `==`, and other objects by their attributes and slots.
"""

import functools
import types
import weakref
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tdfunc.core.errors import TreeStructureError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.modules.extract import unwrap

# What nn.Module itself keeps in every `__dict__`; of these only the mode is a property of the architecture.
# torch.compile leaves marks on the module that it is given.
_MARKS = {"_is_torch_compile", "_compiled_call_impl"}
_BASE = frozenset(nn.Module().__dict__) - {"training"} | _MARKS
_ATOMS = (int, float, complex, bool, str, bytes, type(None), Enum, type, torch.dtype, torch.device, torch.Size)
_EXACT = frozenset((int, float, complex, bool, str, bytes, type(None)))
_ROWS = frozenset((tuple, list))
_EXACT_OR_ROWS = _EXACT | _ROWS
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOW_CALLED = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# What is nested deeper is taken to be alike.
_MAX_DEPTH = 50
_MISSING = object()


# Any: hyperparameters are of every type.
def hyperparameters(module: nn.Module) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return the names of the attributes that `==` compares fully (the mode among them), and all other attributes."""
    own = module.__dict__
    names = own.keys() - _BASE
    # In C for the modules of most models; looking at attributes one by one takes three times as long.
    values = list(map(own.__getitem__, names))
    rows = [value for value in values if type(value) in _ROWS]
    if _EXACT_OR_ROWS.issuperset(map(type, values)) and _EXACT.issuperset(map(type, chain.from_iterable(rows))):
        return list(names), []
    plain = [name for name in names if type(own[name]) in _EXACT or _is_row(own[name])]
    others = [(name, own[name]) for name in names.difference(plain)] if len(plain) < len(names) else []
    return plain, others


def _is_row(value: Any) -> bool:
    return type(value) in _ROWS and _EXACT.issuperset(map(type, value))


def has_hooks(own: dict[str, Any]) -> bool:
    """Whether a module, given by its `__dict__`, has hooks."""
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def alike(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are the same, as far as can be told; weights are never compared."""
    return _alike(a, b, frozenset())


def _alike(a: Any, b: Any, around: frozenset[tuple[int, int]]) -> bool:
    """Compare two values; `around` has the pairs that hold them, by identity."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _ATOMS):
        return a == b or (a != a and b != b)
    if isinstance(a, Tensor):
        return _tensors_alike(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (nn.Module, weakref.ref, torch.Generator, RemovableHandle)):
        return True
    if isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
        return False
    pair = id(a), id(b)
    if pair in around or len(around) >= _MAX_DEPTH:
        return True
    around |= {pair}
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all([_alike(x, y, around) for x, y in zip(a, b, strict=True)])
    if isinstance(a, dict):
        return a.keys() == b.keys() and all([_alike(value, b[key], around) for key, value in a.items()])
    if type(a).__eq__ is not object.__eq__ and not isinstance(a, types.MethodType):
        equal = _says_equal(a, b)
        if equal is not None:
            return equal
    return all([_alike(x, y, around) for x, y in zip(_parts(a), _parts(b), strict=True)])


def _tensors_alike(a: Tensor, b: Tensor) -> bool:
    # Parameters and what is computed from them differ by design; RNNs list their weights in an attribute.
    if isinstance(a, nn.Parameter) or a.requires_grad:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or bool(torch.equal(a, b)))


def _parts(value: Any) -> list[Any]:
    """Return what makes an object: of two objects of one type as many parts."""
    if isinstance(value, types.FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    slots = [d for cls in type(value).__mro__ for d in vars(cls).values() if isinstance(d, types.MemberDescriptorType)]
    return [getattr(value, "__dict__", None), *[getattr(value, slot.__name__, _MISSING) for slot in slots]]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never assigned
        return None


def _says_equal(a: Any, b: Any) -> bool | None:
    try:
        return bool(a == b)
    # An object's own comparison may raise anything, or give no single truth value: it says nothing then.
    except Exception:
        return None


def check_alike(first: nn.Module, other: nn.Module, who: str, at: Path = ()) -> None:
    """Compare two modules and their children.

    Raises:
        TreeStructureError: Classes, slots, children, hooks, modes or hyperparameters differ; the message names the
            first difference.
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
    for table in _HOOKS:
        if not alike(*[_calls(own, table) for own in (mine, theirs)]):
            raise _unlike(who, where, table, *[repr(list(own[table].values())) for own in (mine, theirs)])
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


def _calls(own: dict[str, Any], table: str) -> list[Any]:
    """Return the hooks of a table, each with how it is called."""
    return [(hook, *[key in own[flags] for flags in _HOW_CALLED]) for key, hook in own[table].items()]


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
        f"stack_modules: {who} differs from member 0 in {what!r} of {where}.",
        expected=expected,
        got=got,
        hint=hint,
    )
