"""Warnings of what the forward of a module writes and no call returns, each kind once."""

from collections.abc import Sequence

from tdfunc.core.errors import brief, explain, warn_user
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path


class Lost:
    """The warnings of one function.

    Args:
        name: The class of its module.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: set[str] = set()

    def warn_of_parameters(self, paths: Sequence[Path]) -> None:
        """Warn that a call returns buffers, but no parameters."""
        self._warn(
            "parameters",
            f"apply: forward of {self._name} writes the parameters {_names(paths)}. "
            "The call computes with the new values, and the tree keeps its own: the writes are lost.",
            "make them buffers (register_buffer) and call apply.with_buffers, which returns them; or compute the new "
            "weights outside of forward, and put them into the tree.",
        )

    def warn_of_scaled_rows(self, paths: Sequence[Path]) -> None:
        """Warn that training steps from other rows than in a module: torch scales them in the weight itself."""
        self._warn(
            "rows",
            f"apply: forward of {self._name} scales rows of {_names(paths)}, which are longer than max_norm. The call "
            "computes with the scaled rows, and the tree keeps its own: an optimizer steps from the longer rows.",
            "scale them in the tree before each step, as the module does: params.at[path].apply(lambda w: "
            "w * (max_norm / (w.norm(dim=-1, keepdim=True) + 1e-7)).clamp(max=1)).",
        )

    def warn_of_attributes(self, names: Sequence[str]) -> None:
        """Warn that each call begins with the same attributes."""
        self._warn(
            "attributes",
            f"apply: forward of {self._name} writes the attributes {brief(list(names))} of its module. Each call "
            "begins with their values at the time of `functional`, and what it writes is lost.",
            "state that the next call reads is a buffer (register_buffer), which apply.with_buffers returns; a result "
            "is returned by forward. For a cache or a record of values, ignore this warning.",
        )

    def _warn(self, kind: str, what: str, hint: str) -> None:
        if kind in self._given:
            return
        warn_user(explain(what, hint=hint))
        # Afterwards: a warning that is an error also comes from the next call.
        self._given.add(kind)


def _names(paths: Sequence[Path]) -> str:
    return brief([dotted(path) for path in paths])
