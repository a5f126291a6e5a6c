"""How trees print: `repr` in the form of the seeds, keys sorted, absent fields last."""

from typing import Any

import torch
from torch import Tensor

from tdfunc._collection import TensorCollection, iter_leaves


def describe_leaf(leaf: Any) -> str:
    """Return the one-line form of a leaf."""
    if isinstance(leaf, Tensor):
        try:
            shape = leaf.shape
        except RuntimeError:
            return f"{type(leaf).__name__}(uninitialized)"
        # A batched tensor (inside vmap) and other wrappers cannot be asked for shared memory.
        return f"{_name(leaf)}(shape={shape}, device={leaf.device}, dtype={leaf.dtype}, is_shared={_is_shared(leaf)})"
    return repr(leaf)


def _name(leaf: Tensor) -> str:
    return type(leaf).__name__


def _is_shared(leaf: Tensor) -> bool:
    try:
        return leaf.is_shared()
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def common_device(tree: TensorCollection) -> torch.device | None:
    """Return the device of the tree: its own, or meta when every leaf is there."""
    return tree._device


def render(tree: TensorCollection, absent: tuple[str, ...] = ()) -> str:
    """Return the multi-line form; `absent` names typed fields that hold None."""
    lines = [f"        {key}: {_child(tree._get(key))}" for key in sorted(tree._keys())]
    lines += [f"        {key}: None" for key in absent]
    fields = ",\n".join(lines)
    shared = bool(tree._data) and all(_is_shared(x) for _, x in iter_leaves(tree) if isinstance(x, Tensor)) and any(True for _ in iter_leaves(tree))
    names = f",\n    names={list(tree._names)}" if tree._names is not None else ""
    return (
        f"{type(tree).__name__}(\n    fields={{\n{fields}}},\n    batch_size={tree._batch_size},\n"
        f"    device={common_device(tree)},\n    is_shared={shared}{names})"
    )


def _child(node: Any) -> str:
    text = repr(node) if not isinstance(node, Tensor) else describe_leaf(node)
    return text.replace("\n", "\n    " + "    ") if isinstance(node, TensorCollection) else text


class ShowMethods(TensorCollection):
    """`repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return render(self)
