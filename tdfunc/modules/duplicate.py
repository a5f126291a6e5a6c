"""Deep copies of modules that `copy.deepcopy` alone gets wrong: locks, closures over weights, weak references.

`copy.deepcopy` gives up at the first lock or generator, keeps closures and weak references pointing at the original,
and refuses tensors with a gradient history. Here what cannot be copied is shared, and references follow the copy.
"""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tdfunc.core.errors import UnsupportedError
from tdfunc.modules.slots import unwrap

# Gives the tensor that stands in for one found in an attribute of this name; None to copy it.
StandIn: TypeAlias = Callable[[Tensor, str], "Tensor | None"]
_ATOMS = (str, bytes, int, float, complex, type(None), type, range, torch.dtype, torch.device, torch.layout)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_SYNCHRONISING = frozenset({"threading", "queue", "concurrent", "multiprocessing", "asyncio", "logging"})
# What a closure is followed through: an object of any other class may hold a whole program.
_FOLLOWED = (dict, *_SEQUENCES, types.FunctionType, types.MethodType, functools.partial, nn.Module)


class Copied(NamedTuple):
    """A copy of a module, the objects that it shares with the original, and (copy, original) of plain tensors."""

    module: nn.Module
    shared: list[Any]
    tensors: list[tuple[Tensor, Tensor]]


def duplicate(
    module: nn.Module, memo: dict[int, Any], shared: Sequence[Any] = (), stand_in: StandIn | None = None
) -> Copied:
    """Return a deep copy of a module.

    Args:
        module: What to copy. Submodules wrapped by `torch.compile` come out unwrapped.
        memo: As for `copy.deepcopy`: what replaces the object of each id.
        shared: Objects that the copy is to share.
        stand_in: What to put in place of tensors that are neither in the memo nor plain constants.

    Raises:
        UnsupportedError: An object that holds a part of the module refuses to be copied.
    """
    memo = {**memo, **{id(x): x for x in shared}}
    # The list keeps everything alive, so that ids stay valid.
    found = list(_reachable(module, set(memo)))
    own = _parts(module)
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    for name, value in found:
        if id(value) in memo:
            continue
        if isinstance(value, Tensor):
            other = stand_in(value, name) if stand_in is not None else None
            if other is not None:
                memo[id(value)] = other
        elif isinstance(value, torch.Generator) or _is_shared_by_nature(value):
            memo[id(value)] = value
        elif isinstance(value, types.FunctionType) and _reaches(value, own):
            functions.append((value, _with_new_cells(value, own)))
            memo[id(value)] = functions[-1][1]
    copied, memo = _deepcopy(module, found, memo, own)
    for old, new in functions:
        _fill_cells(old, new, memo)
    if any(type(value) is weakref.ref for _, value in found):
        _redirect_weakrefs(copied, memo)
    kept = list(shared)
    # A copy of a copy shares what the copy shared.
    if not shared:
        ids = {id(value) for _, value in found}
        kept = [x for _, x in _reachable(copied, set()) if id(x) in ids and not isinstance(x, nn.Module)]
    pairs = [(memo[id(t)], t) for _, t in found if isinstance(t, Tensor) and memo.get(id(t), t) is not t]
    return Copied(copied, kept, pairs)


def _parts(module: nn.Module) -> set[int]:
    """Return the ids of a module's submodules, parameters and buffers."""
    modules = list(module.modules())
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    return {id(x) for x in (*modules, *tensors)}


def children_of(value: Any, everything: bool = False) -> list[tuple[str, Any]]:
    """Return (name, value) of what a deep copy of an object looks into, and closures of functions.

    With `everything`, also the attributes of objects that are copied in a way of their own.
    """
    if isinstance(value, _ATOMS):
        return []
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, _SEQUENCES):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        return [*inner, ("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *vars(value).items()]
    if isinstance(value, (types.ModuleType, weakref.ref, Tensor)):
        return []
    if not everything and not isinstance(value, nn.Module) and not is_plain(value):
        return []
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return [*getattr(value, "__dict__", {}).items(), *[(n, getattr(value, n)) for n in slots if hasattr(value, n)]]


def is_plain(value: Any) -> bool:
    """Whether an object is copied attribute by attribute, rather than in a way of its class's own."""
    cls = type(value)
    if (
        isinstance(value, (types.ModuleType, weakref.ref))
        or hasattr(cls, "__deepcopy__")
        or _is_shared_by_nature(value)
    ):
        return False
    return cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__


def _is_shared_by_nature(value: Any) -> bool:
    """Whether it is a barrier, event, queue or pool: a copy would synchronise with nothing."""
    return type(value).__module__.partition(".")[0] in _SYNCHRONISING


def _slots(cls: type) -> list[str]:
    names = cls.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that was never assigned
        return False


def _reachable(root: Any, known: set[int], everything: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (name, object), each object once, of all that a copy looks into; known objects are not entered."""
    seen = {id(root)}
    queue: deque[tuple[str, Any]] = deque([("", root)])
    while queue:
        name, value = queue.popleft()
        yield name, value
        if id(value) in known:
            continue
        for inner, child in children_of(value, everything):
            if id(child) not in seen and not isinstance(child, _ATOMS):
                seen.add(id(child))
                queue.append((inner, child))


def _reaches(value: Any, targets: set[int]) -> bool:
    """Whether an object leads to one of the targets by containers, closures, partials, methods and modules."""
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


def _with_new_cells(function: types.FunctionType, targets: set[int]) -> types.FunctionType:
    """Return the function with empty cells in place of those that lead to the targets; the others stay shared."""
    cells = [
        types.CellType() if _is_filled(cell) and _reaches(cell.cell_contents, targets) else cell
        for cell in function.__closure__ or ()
    ]
    name, defaults = function.__name__, function.__defaults__
    new = types.FunctionType(function.__code__, function.__globals__, name, defaults, tuple(cells) or None)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    return new


def _fill_cells(old: types.FunctionType, new: types.FunctionType, memo: dict[int, Any]) -> None:
    for cell, source in zip(new.__closure__ or (), old.__closure__ or (), strict=True):
        if cell is not source:
            cell.cell_contents = copy.deepcopy(source.cell_contents, memo)
    new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
    new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)


def _deepcopy(
    module: nn.Module, found: list[tuple[str, Any]], memo: dict[int, Any], own: set[int]
) -> tuple[nn.Module, dict[int, Any]]:
    """Return the copy and the memo after it; what refuses to be copied is shared."""
    try:
        return _attempt(module, found, memo)
    # A class's own __deepcopy__ or __reduce__ may raise anything.
    except Exception:
        memo = memo | {id(value): value for value in _refusing(module, found, memo, own)}
    try:
        return _attempt(module, found, memo)
    except Exception as err:
        raise _uncopyable(module, f"{type(err).__name__}: {err}") from err


def _attempt(module: nn.Module, found: list[tuple[str, Any]], memo: dict[int, Any]) -> tuple[nn.Module, dict[int, Any]]:
    memo = dict(memo)
    # The wrappers of torch.compile: the innermost first.
    for _, value in reversed(found):
        if isinstance(value, nn.Module) and unwrap(value, "functional") is not value:
            memo[id(value)] = copy.deepcopy(unwrap(value, "functional"), memo)
    return copy.deepcopy(module, memo), memo


def _refusing(module: nn.Module, found: list[tuple[str, Any]], memo: dict[int, Any], own: set[int]) -> list[Any]:
    """Return the objects that refuse to be copied: locks, files, generators and what wraps them."""
    memo = dict(memo)
    refused: list[Any] = []
    single = [(name, x) for name, x in reversed(found) if not isinstance(x, (nn.Module, Tensor, *_FOLLOWED))]
    # First those that hold nothing else, then (the deepest first) those that refuse although all they hold is copied.
    for holding in (False, True):
        for name, value in single:
            if id(value) in memo or bool(children_of(value)) is not holding or _copies(value, memo):
                continue
            if any(id(inner) in own for _, inner in _reachable(value, set(), everything=True)):
                raise _uncopyable(
                    module, f"attribute {name!r} of type {type(value).__name__}, which holds a part of it"
                )
            memo[id(value)] = value
            refused.append(value)
        if _copies(module, memo):
            break
    return refused


def _copies(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _uncopyable(module: nn.Module, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"functional: {type(module).__name__} cannot be copied.",
        expected="attributes that copy.deepcopy accepts",
        got=what,
        hint="give that object's class a __deepcopy__, or make the object inside forward.",
    )


def _redirect_weakrefs(copied: nn.Module, memo: dict[int, Any]) -> None:
    """Let weak references to parts of the original refer to their copies."""
    for _, holder in list(_reachable(copied, set())):
        place = holder if isinstance(holder, (dict, list)) else None
        if isinstance(holder, nn.Module) or (place is None and is_plain(holder)):
            place = getattr(holder, "__dict__", None)
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place or ())):
            if type(value) is weakref.ref and value() is not None and id(value()) in memo:
                place[key] = weakref.ref(memo[id(value())])  # pyright: ignore[reportOptionalSubscript]
