"""How trees print: keys sorted, absent fields last."""

from typing import Any

from torch import Tensor

from tdfunc._collection import TensorCollection
from tdfunc.ops.cast import all_shared, is_shared


def describe_leaf(leaf: Any) -> str:
    """Return the one-line form of a leaf."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    name = type(leaf).__name__
    try:
        shape = leaf.shape
    except RuntimeError:
        return f"{name}(uninitialized, device={leaf.device}, dtype={leaf.dtype})"
    return f"{name}(shape={shape}, device={leaf.device}, dtype={leaf.dtype}, is_shared={is_shared(leaf)})"


def render(tree: TensorCollection, absent: tuple[str, ...] = (), indent: str = "") -> str:
    """Return the multi-line form; `absent` names typed fields that hold None."""
    lines: list[str] = []
    for key in sorted(tree._keys()):
        node = tree._get(key)
        # A class with a form of its own gets to use it; the plain form is called directly, to save stack.
        if isinstance(node, TensorCollection) and type(node).__repr__ is ShowMethods.__repr__:
            text = render(node, indent=f"{indent}        ")
        elif isinstance(node, TensorCollection):
            text = repr(node).replace("\n", f"\n{indent}        ")
        else:
            text = describe_leaf(node)
        lines.append(f"{indent}        {key}: {text}")
    lines += [f"{indent}        {key}: None" for key in absent]
    fields = ",\n".join(lines)
    names = f",\n{indent}    names={list(tree._names)}" if tree._names is not None else ""
    return (
        f"{type(tree).__name__}(\n{indent}    fields={{\n{fields}}},\n{indent}    batch_size={tree._batch_size},\n"
        f"{indent}    device={tree._device},\n{indent}    is_shared={all_shared(tree)}{names})"
    )


class ShowMethods(TensorCollection):
    """`repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return render(self)
