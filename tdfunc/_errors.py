"""The exceptions of tdfunc, and `explain`, which gives every message the same four parts."""

from dataclasses import FrozenInstanceError


def explain(what: str, *, expected: object = None, got: object = None, hint: str | None = None) -> str:
    """Return a message that says where, what was expected, what came and what to do."""
    lines = [what]
    if expected is not None:
        lines.append(f"  expected: {expected}")
    if got is not None:
        lines.append(f"  got:      {got}")
    if hint is not None:
        lines.append(f"  hint:     {hint}")
    return "\n".join(lines)


class ImmutableError(TypeError, FrozenInstanceError):
    """An assignment to a tree; the message is the pure call to write instead."""


class MissingKeyError(KeyError):
    """A key path that the tree does not have."""

    # KeyError prints the repr of its argument, which would show `\n` instead of lines.
    def __str__(self) -> str:
        return str(self.args[0])


class BatchSizeError(ValueError):
    """A leaf or tree whose leading dimensions are not the batch size."""


class LeafMismatchError(ValueError):
    """A leaf whose shape, dtype or kind does not fit the place it is put in."""


class TreeStructureError(ValueError):
    """Trees (or a tree and a module) whose key paths differ."""


class TieError(ValueError):
    """An edit that would give two paths of one tied tensor different values."""


class FilterError(ValueError):
    """A filter that cannot be read, or a pattern that matches no leaf."""


class LeakError(RuntimeError):
    """A forward that used an original weight instead of the one it was given."""


class ConcurrencyError(RuntimeError):
    """Two threads, or two blocks out of order, inside one module; or a leaf that changed while it was saved."""


class UnsupportedError(TypeError):
    """A module, tensor or call that tdfunc cannot treat as a pure function."""


class CaptureError(RuntimeError):
    """A traced function that uses a tensor which is not one of its arguments."""


class CorruptCheckpointError(ValueError):
    """A file that is not what was saved: torn, altered, or no checkpoint at all."""


class WorkerError(RuntimeError):
    """A worker process of `map` that died, could not start, or raised what cannot be sent back."""
