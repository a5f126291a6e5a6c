"""How trees print, show in a notebook and complete at a prompt."""

from typing import Any

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import FilterLike
from tdfunc.core.shapes import shape_of
from tdfunc.ops.cast import all_shared, is_shared
from tdfunc.ops.display.facts import repr_of, walk_limited
from tdfunc.ops.display.html import render_html
from tdfunc.ops.display.summary import Summary, summary

# A prompt shows no more, and waits for them.
COMPLETIONS = 10_000


def describe_leaf(leaf: Any) -> str:
    """Return the one-line form of a leaf."""
    if not isinstance(leaf, Tensor):
        return shown(repr_of(leaf))
    name = type(leaf).__name__
    shape = shape_of(leaf)
    if shape is None:
        return f"{name}(uninitialized, device={leaf.device}, dtype={leaf.dtype})"
    return f"{name}(shape={shape}, device={leaf.device}, dtype={leaf.dtype}, is_shared={is_shared(leaf)})"


def shown(text: str) -> str:
    """Return text as it stands on one line: what would break it, move the cursor or not be encoded is escaped."""
    return text if text.isprintable() else "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


def render(tree: TensorCollection, indent: str = "") -> str:
    """Return the multi-line form, keys sorted."""
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
        lines.append(f"{indent}        {shown(key)}: {text}")
    fields = ",\n".join(lines) or f"{indent}    "
    names = f",\n{indent}    names={list(tree._names)}" if tree._names is not None else ""
    return (
        f"{type(tree).__name__}(\n{indent}    fields={{\n{fields}}},\n{indent}    batch_size={tree._batch_size},\n"
        f"{indent}    device={tree._device},\n{indent}    is_shared={all_shared(tree)}{names})"
    )


class ShowMethods(TensorCollection):
    """How a tree looks: as text, in a notebook, as a table; and what a prompt completes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    def summary(self, *, depth: int | None = None, where: "FilterLike | None" = None) -> Summary:
        """Return a table of the leaves with their totals, by dtype and by kind; needs the package rich.

        The result is not printed: it is shown by a prompt or notebook, by `print` and by `rich.print`, and has the
        totals as attributes. A tensor at several paths counts once.

        Args:
            depth: Put the leaves of each tree that lies so many keys deep on one line.
            where: A glob on the dotted path, or a `Filter`: only these leaves.

        Raises:
            ImportError: rich is not installed; the message names the extra that has it.
            FilterError: The filter matches no leaf.
            ValueError: `depth` is no positive int.

        Examples:
            >>> params = TensorDict.from_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
            >>> found = params.summary(where="*.weight")
            >>> found.leaves, found.elements, found.by_kind
            (2, 24, {'parameter': (2, 24, 96)})
        """
        return summary(self, depth, where)

    def __dir__(self) -> list[str]:
        # What a user can call. The helpers of tdfunc's own classes are left out; names of a subclass are its own.
        own = {name for cls in type(self).__mro__ if cls.__module__.startswith("tdfunc.") for name in vars(cls)}
        return [name for name in object.__dir__(self) if name[:1] != "_" or name[:2] == "__" or name not in own]

    def _ipython_key_completions_(self) -> list[Any]:
        """Return the keys, and the nested ones as tuples: IPython completes `td["a", "` from these."""
        return [path[0] if len(path) == 1 else path for path in walk_limited(self, COMPLETIONS)]

    # -- what a class of its own adds ---------------------------------------------------------------------------

    def _show_heading(self) -> list[str]:
        """Return what the heading says of a tree beside its batch size."""
        return []

    def _show_absent(self) -> dict[str, str]:
        """Return the keys that have no one value here, and what is said of them."""
        return {}
