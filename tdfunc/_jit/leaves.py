"""Trees as flat lists and back, at the speed of their cached contexts; and where a call runs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils import _pytree as torch_pytree

from tdfunc.core.collection import TensorCollection
from tdfunc.core.pytree import Context, _Flat, flatten, unflatten
from tdfunc.core.types import Path

T = TypeVar("T", bound=TensorCollection)
_peek: Callable[[], Any] = _functorch.peek_interpreter_stack


def in_transform() -> bool:
    """Whether a functorch transform or a compiler is running the caller."""
    return torch.compiler.is_compiling() or _peek() is not None


# Any: inside tree transformations a leaf may be anything.
def collect(tree: TensorCollection) -> list[Any]:
    """Return the leaves in the order of the pytree registration: sorted keys, a tied leaf once, no non-tensor data."""
    if torch.compiler.is_compiling():
        return torch_pytree.tree_leaves(tree)
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def _collect(tree: TensorCollection, leaves: list[Any]) -> None:
    for child in children_of(tree)[0]:
        if isinstance(child, TensorCollection):
            _collect(child, leaves)
        elif isinstance(child, torch.Tensor) or type(child) not in torch_pytree.SUPPORTED_NODES:
            leaves.append(child)


def paths(tree: TensorCollection, at: Path = ()) -> Iterator[Path]:
    """Yield the path of each leaf, in the order of `collect`."""
    for entries, _ in torch_pytree.tree_flatten_with_path(tree)[0]:
        yield (*at, *(str(getattr(entry, "key", entry)) for entry in entries))


def rebuild(tree: T, leaves: Sequence[Any]) -> T:
    """Return a tree like this one around other leaves of the same shapes, in the order of `collect`."""
    if torch.compiler.is_compiling():
        return torch_pytree.tree_unflatten(list(leaves), torch_pytree.tree_structure(tree))
    return _rebuild(tree, iter(leaves))


def _rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    old, context = children_of(tree)
    children: list[Any] = []
    same = True
    for child in old:
        if isinstance(child, TensorCollection):
            new = _rebuild(child, leaves)
        elif isinstance(child, torch.Tensor) or type(child) not in torch_pytree.SUPPORTED_NODES:
            new = next(leaves)
        else:
            new = child
        same = same and new is child
        children.append(new)
    return tree if same else node_like(type(tree), context, tuple(children))


def children_of(tree: TensorCollection) -> tuple[tuple[Any, ...], Any]:
    """Return what the class's own pytree registration returns."""
    cls = type(tree)
    if is_plain(cls):
        return flatten(tree)
    children, context = torch_pytree.SUPPORTED_NODES[cls].flatten_fn(tree)
    return tuple(children), context


def is_plain(cls: type[TensorCollection]) -> bool:
    """Whether trees of this class are what `_pytree.flatten` says they are (a lazy stack is not)."""
    return torch_pytree.SUPPORTED_NODES[cls].flatten_fn is flatten


def node_like(cls: type[T], context: Any, children: tuple[Any, ...]) -> T:
    """Return a node with this context around children of the shapes it was made with."""
    if not is_plain(cls):
        return torch_pytree.SUPPORTED_NODES[cls].unflatten_fn(children, context)
    if not isinstance(context, Context) or context.grafts:
        return unflatten(cls, context, children)
    data = dict(zip(context.keys, children, strict=True))
    if context.order != context.keys:
        data = {key: data[key] for key in context.order}
    new = cls._make(data, context.batch_size, context.device, context.names, context.static)
    # The children stand in the order of the context already: no need to sort them again.
    object.__setattr__(new, "_cache", _Flat(children, context))
    return new


def same_keys(a: TensorCollection, b: TensorCollection) -> bool:
    """Whether two trees have the same leaf paths."""
    if torch.compiler.is_compiling():
        return torch_pytree.tree_structure(a) == torch_pytree.tree_structure(b)
    (mine, context), (theirs, other) = children_of(a), children_of(b)
    if context is not other and context != other:
        return False
    for x, y in zip(mine, theirs, strict=True):
        nested = isinstance(x, TensorCollection)
        if nested != isinstance(y, TensorCollection) or (nested and not same_keys(x, y)):
            return False
    return True
