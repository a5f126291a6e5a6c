"""Lazy stacks as text and as lists."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tdfunc._lazystack.ragged import common_size
from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.ops.cast import all_shared
from tdfunc.ops.display.text import describe_leaf, printable, repr_of


def as_list(tree: Any, convert: bool) -> Any:
    """Return nested lists over the batch dimensions of a tree, with a dict for each element."""
    # A class of trees may have a form of its own, such as the messages of a conversation.
    own = getattr(tree, "tolist", None)
    if own is not None:
        return own(convert_tensors=True) if convert else own()
    if tree._batch_size:
        return [as_list(row, convert) for row in tree]
    return {key: _as_value(tree[key], convert) for key in tree._keys()}


def _as_value(value: Any, convert: bool) -> Any:
    if isinstance(value, TensorCollection):
        return as_list(value, convert)
    return value.tolist() if convert and isinstance(value, Tensor) else value


def render(stack: Any) -> str:
    """Return the multi-line form, as trees have it: sizes that differ are -1."""
    lines = [f"        {printable(key, None)}: {_describe(stack._get(key))}" for key in sorted(stack._keys())]
    exclusive = [f"        {printable(key, None)}: {text}" for key, text in absent(stack).items()]
    parts = ["    fields={\n" + ",\n".join(lines) + "}"]
    if exclusive:
        parts.append("    exclusive_fields={\n" + ",\n".join(exclusive) + "}")
    parts += [
        f"    batch_size={stack._batch_size}",
        f"    device={stack._device}",
        f"    is_shared={all_shared(stack)}",
    ]
    parts.append(f"    stack_dim={stack._dim}")
    if stack._names is not None:
        parts.append(f"    names={list(stack._names)}")
    return f"{type(stack).__name__}(\n" + ",\n".join(parts) + ")"


def absent(stack: Any) -> dict[str, str]:
    """Return the keys that only some trees have, and which trees these are."""
    return {key: f"in trees {having}" for key, having in stack._some_keys().items()}


def _describe(node: Any) -> str:
    if isinstance(node, TensorCollection):
        return repr(node).replace("\n", "\n        ")
    if isinstance(node, NonTensorBase):
        return printable(repr_of(node.value), None)
    leaves = list(_flat(node))
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = {(type(x).__name__, str(getattr(x, "dtype", "")), str(getattr(x, "device", ""))) for x in leaves}
    if len(kinds) > 1 or len(shapes) < len(leaves) or len(set(map(len, shapes))) > 1:
        return "(" + ", ".join(map(describe_leaf, leaves)) + ")"
    ((name, dtype, device),) = kinds
    return f"{len(leaves)} x {name}(shape={common_size(shapes)}, device={device}, dtype={dtype})"


def _flat(node: Any) -> Iterator[Any]:
    if not isinstance(node, tuple):
        yield node
        return
    items: tuple[Any, ...] = node
    for item in items:
        yield from _flat(item)
