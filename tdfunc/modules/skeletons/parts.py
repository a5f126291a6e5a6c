"""The parts of an object that a deep copy enters, and whether one object leads to another."""

import copyreg
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATOMS = (str, bytes, int, float, complex, type(None), type, range, torch.dtype, torch.device, torch.layout)
_SEQUENCES = (list, tuple, set, frozenset, deque)
# Closures are followed through these: an object of any other class may hold a whole program.
_FOLLOWED = (dict, *_SEQUENCES, types.FunctionType, types.MethodType, functools.partial, nn.Module)


def reachable(root: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object), each object once, of all that a copy looks into; known objects are not entered."""
    seen = {id(root)}
    queue: deque[tuple[str, Any]] = deque([("", root)])
    while queue:
        name, value = queue.popleft()
        yield name, value
        if id(value) in known:
            continue
        for inner, child in children_of(value):
            if id(child) not in seen and not isinstance(child, ATOMS):
                seen.add(id(child))
                queue.append((inner, child))


def children_of(value: Any) -> list[tuple[str, Any]]:
    """Return (name, value) of the parts of an object that a deep copy enters, and closures of functions."""
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, _SEQUENCES):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(name, cell.cell_contents) for name, cell in cells if is_filled(cell)]
        return [*inner, ("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *vars(value).items()]
    if isinstance(value, (*ATOMS, Tensor)):
        return []
    if isinstance(value, nn.Module) or is_plain(value):
        slots = [(name, getattr(value, name)) for name in slots_of(value) if hasattr(value, name)]
        return [*getattr(value, "__dict__", {}).items(), *slots]
    return []


def slots_of(value: Any) -> list[str]:
    """Return the names of the slots of an object's class."""
    # As `copy` finds them, where the names of private slots are mangled.
    return copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]


def is_plain(value: Any) -> bool:
    """Return whether an object is copied attribute by attribute, rather than in a way of its class's own."""
    cls = type(value)
    if isinstance(value, (types.ModuleType, weakref.ref)) or hasattr(cls, "__deepcopy__"):
        return False
    return cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__


def is_filled(cell: types.CellType) -> bool:
    """Return whether the variable of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    # A variable that was never assigned.
    except ValueError:
        return False


def reaches(value: Any, targets: set[int]) -> bool:
    """Return whether containers, closures, partials, methods and modules lead from an object to one of the targets."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if id(value) in targets:
            return True
        if id(value) not in seen and isinstance(value, _FOLLOWED):
            seen.add(id(value))
            stack += [child for _, child in children_of(value)]
    return False


def leads_to(value: Any, targets: set[int]) -> bool:
    """Return whether an object, one that a deep copy of it enters, or a table of attributes is one of the targets."""
    for _, part in reachable(value, set()):
        if id(part) in targets or id(getattr(part, "__dict__", None)) in targets:
            return True
    return False
