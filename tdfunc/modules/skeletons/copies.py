"""Copies of a module that share nothing writable with it, and templates: copies with poison where weights belong."""

import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from tdfunc.core.errors import LeakError, UnsupportedError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.modules.checkpoint import stand_in as checkpoint
from tdfunc.modules.extract import Slot, unwrap, walk
from tdfunc.modules.poison import Poison, storage_of
from tdfunc.modules.skeletons.parts import is_filled, reachable, reaches

# A copy shares them: generators move on from call to call, and a lock in several copies guards nothing.
_SHARED = (torch.Generator, type(threading.Lock()), type(threading.RLock()))


def duplicate(
    module: nn.Module, memo: dict[int, Any], stand_in: Callable[[Tensor, str], Tensor | None] = lambda *_: None
) -> nn.Module:
    """Return a deep copy of a module.

    Unlike with `copy.deepcopy` alone, closures over parts of the module follow the copy, generators and locks are
    shared, and submodules wrapped by `torch.compile` come out unwrapped.

    Args:
        module: The module.
        memo: The replacement of each object by its id, as for `copy.deepcopy`. It is filled.
        stand_in: A function that returns the replacement of a tensor in an attribute of this name, or None to copy it.

    Raises:
        UnsupportedError: `copy.deepcopy` refuses an object in the module, such as a file.
    """
    # The list keeps everything alive, so that ids stay valid.
    found = [item for item in reachable(module, set(memo)) if id(item[1]) not in memo]
    own = _ids_of_parts(module)
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    for name, value in found:
        replacement = None
        if isinstance(value, Tensor):
            replacement = stand_in(value, name)
        elif isinstance(value, _SHARED):
            replacement = value
        elif isinstance(value, types.FunctionType) and reaches(value, own):
            replacement = _copy_unfilled(value, own)
            functions.append((value, replacement))
        if replacement is not None:
            memo[id(value)] = replacement
    try:
        # The wrappers of torch.compile: the innermost first.
        for _, value in reversed(found):
            if isinstance(value, nn.Module):
                inner = unwrap(value, "functional")
                if inner is not value:
                    memo[id(value)] = copy.deepcopy(inner, memo)
        copied = copy.deepcopy(module, memo)
        for old, new in functions:
            _fill_function(new, old, memo)
    # A class's own __deepcopy__ or __reduce__ may raise anything.
    except Exception as err:
        raise UnsupportedError(
            f"functional: {type(module).__name__} cannot be copied.",
            expected="attributes that copy.deepcopy accepts",
            got=f"{type(err).__name__}: {err}",
            hint="give the class of the object a __deepcopy__, or make the object inside forward.",
        ) from err
    return copied


def _ids_of_parts(module: nn.Module) -> set[int]:
    """Return the ids of a module's submodules, parameters and buffers."""
    ids: set[int] = set()
    for sub in module.modules():
        ids.add(id(sub))
        for tensor in (*sub._parameters.values(), *sub._buffers.values()):
            if tensor is not None:
                ids.add(id(tensor))
    return ids


def _copy_unfilled(function: types.FunctionType, own: set[int]) -> types.FunctionType:
    """Return a copy of a function with empty cells where a variable leads to a part of the module.

    It shares the other cells, and has no defaults: `_fill_function` completes it.
    """
    cells: list[types.CellType] = []
    for cell in function.__closure__ or ():
        if is_filled(cell) and reaches(cell.cell_contents, own):
            cells.append(types.CellType())
        else:
            cells.append(cell)
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells) or None)
    copied.__dict__.update(function.__dict__)
    return copied


def _fill_function(new: types.FunctionType, old: types.FunctionType, memo: dict[int, Any]) -> None:
    """Fill the empty cells and the defaults of a copied function with copies of what the original has there."""
    for cell, source in zip(new.__closure__ or (), old.__closure__ or (), strict=True):
        if cell is not source:
            cell.cell_contents = copy.deepcopy(source.cell_contents, memo)
    new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
    new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)


def make_template(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which every reference to one of its weights is poison.

    Attributes that hold `torch.utils.checkpoint.checkpoint` get one that also works in transforms.

    Raises:
        UnsupportedError: It cannot be copied, or its copy keeps a weight of the original.
    """
    slots = weight_slots(module)
    memo: dict[int, Any] = {id(torch_checkpoint.checkpoint): checkpoint}
    # The path of the first weight in each storage.
    storages: dict[Any, Path] = {}
    for slot in slots:
        if id(slot.value) not in memo:
            memo[id(slot.value)] = Poison.of(slot.value, slot.path)
            storages.setdefault(storage_of(slot.value), slot.path)
    # Tensors without memory share nothing.
    storages.pop(None, None)

    def stand_in(tensor: Tensor, name: str) -> Tensor | None:
        # A view of a weight, or a tensor computed from one, is stale under other weights.
        path = storages.get(storage_of(tensor))
        if path is None and tensor.grad_fn is not None:
            path = (name,)
        if path is None:
            return None
        return Poison.of(tensor, path)

    _refuse_numpy_views(module, set(memo), storages)
    template = duplicate(module, memo, stand_in)
    _check_independent(type(module).__name__, slots, weight_slots(template))
    return template


def weight_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of parameters and buffers: all but extra state."""
    return [slot for slot in walk(module, "functional") if slot.store is not None]


def _check_independent(name: str, slots: list[Slot], copies: list[Slot]) -> None:
    """Raise unless a copy has the slots of its module, with poison in each."""
    kept = [dotted(slot.path) for slot in copies if not isinstance(slot.value, Poison)]
    if not kept and [slot.path for slot in copies] == [slot.path for slot in slots]:
        return
    raise UnsupportedError(
        f"functional: the copy of {name} is not independent of it.",
        expected="a copy with the same parameters and buffers, none of them shared",
        got=f"its own weights at {brief(kept)}" if kept else "other slots",
        hint="a __deepcopy__ must make a new module and pass its memo on to copy.deepcopy for every attribute.",
    )


def _refuse_numpy_views(module: nn.Module, known: set[int], storages: dict[Any, Path]) -> None:
    """Raise if the module has a numpy array that shares the memory of a weight: poison cannot take its place."""
    for name, value in reachable(module, known):
        if not isinstance(value, np.ndarray):
            continue
        base = value
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, Tensor) and storage_of(base) in storages:
            raise LeakError(
                f"functional: the numpy array {name!r} shares the memory of a weight.",
                expected="weights read from their module at each call",
                got=f"a view of {dotted(storages[storage_of(base)])!r}, which is not the weight of a call",
                hint="make it inside forward: self.weight.detach().numpy().",
            )


def is_recomputing(template: nn.Module) -> bool:
    """Return whether a template has an attribute that recomputes a part."""
    return any(value is checkpoint for _, value in reachable(template, set()))


def find_hooked(template: nn.Module) -> list[str]:
    """Return the names of the modules that have hooks of the backward pass."""
    found: list[str] = []
    for name, module in template.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            found.append(name or type(module).__name__)
    return found
