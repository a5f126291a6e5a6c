"""New values for the parameters of a module, by the `reset_parameters` of its submodules, in place or in a tree."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import dotted
from tdfunc.modules.extract import from_module, walk
from tdfunc.modules.skeletons.copies import duplicate

T = TypeVar("T", bound=TensorCollection)


def reset_module(module: nn.Module) -> None:
    """Reset the parameters of a module and its submodules in place."""
    _warn_of(reset(module))


def reset(module: nn.Module) -> list[str]:
    """Reset a module in place, submodules first; return the names of the parameters that no method resets."""
    kept: list[str] = []
    for name, sub in _inner_first(module, "", set()):
        method = _method_of(sub)
        if method is not None:
            method()
        else:
            kept += [f"{name}{each}" for each, value in sub._parameters.items() if value is not None]
    return kept


def _inner_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    for key, child in module.named_children():
        if child not in seen:
            yield from _inner_first(child, f"{name}{key}.", seen)
    yield name, module


def _method_of(module: nn.Module) -> Callable[[], object] | None:
    # torch's own spelling in these two classes.
    if type(module) in (nn.MultiheadAttention, nn.Transformer):
        return module._reset_parameters  # pyright: ignore[reportReturnType]
    return getattr(module, "reset_parameters", None)


def _warn_of(kept: list[str]) -> None:
    if kept:
        warnings.warn(
            f"reset_parameters_recursive: {', '.join(map(repr, kept))} keep their values: "
            "their modules have no reset_parameters().",
            stacklevel=4,
        )


def reset_tree(module: nn.Module, parameters: T) -> T:
    """Return a tree with new values for the leaves of a tree of a module's parameters."""
    # The copy's slots are empty: only those that the tree has are reset.
    memo: dict[int, Any] = {}
    for slot in walk(module, "reset_parameters_recursive"):
        if slot.store is not None and id(slot.value) not in memo:
            empty = torch.empty_like(slot.value, device="meta")
            memo[id(slot.value)] = nn.Parameter(empty, requires_grad=slot.value.requires_grad)
    private = duplicate(module, memo)
    tree: Any = parameters
    fresh = tree.apply(lambda leaf: leaf.detach().clone())
    fresh.to_module(private, strict=False)
    kept = set(reset(private))
    _warn_of([dotted(path) for path in tree.paths() if dotted(path) in kept])
    found = from_module(private)
    return tree.named_apply(
        lambda path, leaf: found[path].detach().requires_grad_(leaf.requires_grad), nested_keys=True
    )
