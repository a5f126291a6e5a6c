"""The methods that print a tree, show it in a notebook and complete its keys at a prompt."""

from itertools import islice
from typing import Any

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Path
from tdfunc.ops.base.spelling import PURE_CALLS
from tdfunc.ops.display.html import render_html
from tdfunc.ops.display.summary import Summary, summary
from tdfunc.ops.display.text import tree_repr

# Keys that a prompt is offered.
COMPLETIONS = 10_000


class ShowMethods(TensorCollection):
    """A tree as text, in a notebook and as a table; and the completions of a prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return tree_repr(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    def summary(self, *, depth: int | None = None, where: "FilterLike | None" = None) -> Summary:
        """Return a table of the leaves with their totals, by dtype and by kind; needs the package rich.

        The result is not printed. A prompt, a notebook, `print` and `rich.print` show it, and it has the totals as
        attributes. A tensor at several paths counts once.

        Args:
            depth: The number of keys after which the leaves of a tree share one line.
            where: A glob on the dotted path, or a `Filter`: only these leaves.

        Raises:
            ImportError: rich is not installed; the message names the extra that has it.
            FilterError: The filter matches no leaf.

        Examples:
            >>> params = TensorDict.from_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
            >>> found = params.summary(where="*.weight")
            >>> found.leaves, found.elements, found.by_kind
            (2, 24, {'parameter': (2, 24, 96)})
        """
        return summary(self, depth, where)

    def __dir__(self) -> list[str]:
        ours: set[str] = set()
        for cls in type(self).__mro__:
            if cls.__module__.startswith("tdfunc."):
                ours.update(vars(cls))

        def is_shown(name: str) -> bool:
            # Private helpers of tdfunc's own classes; a subclass keeps its helpers.
            if name.startswith("_") and not name.startswith("__") and name in ours:
                return False
            # Names that raise.
            return name not in PURE_CALLS or hasattr(self, name)

        return [name for name in object.__dir__(self) if is_shown(name)]

    def _ipython_key_completions_(self) -> list[Any]:
        """Return the first keys level by level, nested ones as tuples: IPython completes `td["a", "` from these."""
        paths: list[Path] = []
        level: list[tuple[Path, TensorCollection]] = [((), self)]
        while level and len(paths) < COMPLETIONS:
            deeper: list[tuple[Path, TensorCollection]] = []
            for at, node in level:
                for key in islice(node._keys(), COMPLETIONS - len(paths)):
                    paths.append((*at, key))
                    child = node._get(key)
                    if isinstance(child, TensorCollection):
                        deeper.append(((*at, key), child))
            level = deeper
        return [path[0] if len(path) == 1 else path for path in paths]

    def _show_heading(self) -> list[str]:
        """Return the parts of the HTML heading that a class of trees adds."""
        return []
