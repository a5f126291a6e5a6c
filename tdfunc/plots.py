"""Pictures of runs: `training_curve`, with a band over the members, and `sweep_table`, the members of a sweep in order.

matplotlib is imported when a function is called. Both return the `Axes` that they drew on.
"""

import os
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, as_count, brief, error, needs
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.ops.base.reading import iter_items
from tdfunc.storage.manager.manager import CheckpointManager
from tdfunc.sweep.choose import Mode, Results, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["sweep_table", "training_curve"]

# Any: values of each name and step, a number or one for each member.
Curves: TypeAlias = "Mapping[str, Any] | TensorCollection | CheckpointManager | str | os.PathLike[str]"
# The quantiles of the members between which the band is.
_BAND = (0.1, 0.9)
# The lengths of texts in a table, in characters, and the sizes of its cells in inches.
_SHORTEST = 8
_LONGEST = 24
_CHARACTER_INCHES = 0.1
_ROW_INCHES = 0.3


def training_curve(curves: Curves, *, ax: "Axes | None" = None) -> "Axes":
    """Draw values over the steps of a run: a line for each name, and for several members their median and a band.

    The band contains the middle 80% of the members at each step. Values that are not finite are left out.

    Args:
        curves: The values of each step by name, in a dict or a tree; or a `CheckpointManager` or the folder of a run,
            whose metadata have numbers, or lists of a number for each member.
        ax: The axes to draw on; by default new ones in a new figure.

    Returns:
        The axes. `ax.set_yscale("log")` changes them, and `ax.figure.savefig("curve.png")` saves the picture.

    Shapes:
        Values of a name are (steps,), or (steps, E) for E members.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw, or values have other dimensions.

    Examples:
        >>> losses = torch.rand(100, 8).cumsum(0).flip(0)
        >>> ax = training_curve({"train": losses, "valid": losses + 1})
        >>> [line.get_label() for line in ax.lines]
        ['train (median of 8)', 'valid (median of 8)']
    """
    lines = _lines_of(curves)
    if not lines:
        raise error(
            ValueError,
            "training_curve: there is nothing to draw.",
            expected="numbers by name, for each step",
            got=brief(curves),
            hint='save(step, tree, metadata={"loss": loss}) keeps numbers of a step.',
        )
    ax = _axes(ax, "training_curve", (6.4, 3.8))
    for place, (name, (steps, values)) in enumerate(lines.items()):
        _draw_line(ax, f"C{place}", name, steps, values)
    ax.set_xlabel("step")
    if len(lines) == 1:
        ax.set_ylabel(next(iter(lines)))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.01)
    ax.legend(frameon=False)
    return ax


def sweep_table(
    hyper: TensorCollection | Results,
    scores: Tensor | None = None,
    *,
    mode: Mode = "min",
    rows: int = 20,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the hyperparameters and scores of members as a table, the best member first.

    In each column of numbers, the color shows the rank of a value among all members: dark is high. The score is green
    where it is good.

    Args:
        hyper: The hyperparameters, one of each for each member, as `sweep.grid` returns them; or `sweep.Results`, which
            contain the scores and their mode.
        scores: A number for each member, as `sweep.best` takes it.
        mode: `"min"` if small scores are good, `"max"` if large scores are good.
        rows: The largest number of members to draw.
        ax: The axes to draw on; by default new ones in a figure that fits the table.

    Returns:
        The axes. `ax.figure.savefig("sweep.png")` saves the picture.

    Raises:
        ImportError: matplotlib is not installed.
        BatchSizeError: A hyperparameter is not one value for each member.
        TypeError: There are hyperparameters and no scores.

    Examples:
        >>> hyper = tdf.sweep.grid(lr=[1e-3, 1e-2, 1e-1], weight_decay=[0.0, 1e-2])
        >>> ax = sweep_table(hyper, torch.rand(6))
        >>> [text.get_text() for text in ax.texts[:4]]
        ['member', 'lr', 'weight_decay', 'score']
    """
    rows = as_count("sweep_table: rows", rows)
    if isinstance(hyper, Results):
        mode = hyper.mode
        scores = hyper.scores
        hyper = hyper.hyper
    if scores is None:
        raise error(TypeError, "sweep_table: there are no scores.", hint="sweep_table(hyper, scores) or Results.")
    scores = scores.detach().cpu()
    columns = _columns_of(hyper, scores)
    order = rank(scores, mode=mode)[:rows]
    goodness = _shades(scores)
    if mode == "min":
        goodness = 1 - goodness
    texts = [["member", *map(_text, columns), "score"]]
    colors: list[list[Any]] = [["white"] * len(texts[0])]
    for member in order.tolist():
        values = [column.values[member] for column in columns.values()]
        shades = [column.shades[member] for column in columns.values()]
        texts.append([str(member), *map(_text, values), _text(float(scores[member]))])
        colors.append(["white", *map(_blue, shades), _green(float(goodness[member]))])
    n_rows = len(order)
    edges = _edges(texts)
    ax = _axes(ax, "sweep_table", (_CHARACTER_INCHES * edges[-1], _ROW_INCHES * (n_rows + 1.6)))
    for row, line in enumerate(texts):
        _draw_row(ax, row, edges, line, colors[row])
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(n_rows + 1, 0)
    ax.axis("off")
    if n_rows < len(scores):
        ax.set_title(f"the best {n_rows} of {len(scores)} members", fontsize=9, color="0.35")
    return ax


def _axes(ax: "Axes | None", call: str, size: tuple[float, float]) -> "Axes":
    if ax is not None:
        return ax
    with needs(call, "matplotlib", "tdfunc[plot]"):
        from matplotlib import pyplot
    return pyplot.subplots(figsize=size, layout="constrained")[1]


# -- curves -------------------------------------------------------------------------------------------------------

# Any: arrays of numpy, of steps and of values (steps, members).
_Line: TypeAlias = "tuple[Any, Any]"


def _lines_of(curves: Curves) -> dict[str, _Line]:
    """Return the steps and values of each name."""
    if isinstance(curves, (str, os.PathLike)):
        curves = CheckpointManager(curves)
    if isinstance(curves, CheckpointManager):
        return _read_metadata(curves)
    if isinstance(curves, TensorCollection):
        named: dict[str, Any] = {dotted(path): leaf for path, leaf in iter_items(curves, True, True)}
    else:
        named = dict(curves)
    lines: dict[str, _Line] = {}
    for name, values in named.items():
        if not isinstance(values, NonTensorBase):
            values = _as_values(name, values)
            lines[name] = (np.arange(len(values)), values)
    return lines


def _read_metadata(manager: CheckpointManager) -> dict[str, _Line]:
    """Return the entries of a run's metadata that are numbers or lists of numbers."""
    steps: dict[str, list[int]] = {}
    found: dict[str, list[Any]] = {}
    for step in manager.steps():
        for name, value in manager.metadata(step).items():
            members = value if isinstance(value, list) else [value]
            if members and all([isinstance(each, Real) and not isinstance(each, bool) for each in members]):
                steps.setdefault(name, []).append(step)
                found.setdefault(name, []).append(members)
    lines: dict[str, _Line] = {}
    for name, values in found.items():
        widths = {len(members) for members in values}
        if len(widths) > 1:
            raise error(
                ValueError,
                f"training_curve: {name!r} has another number of members at some steps.",
                expected="one number of members",
                got=sorted(widths),
            )
        lines[name] = (np.array(steps[name]), _as_values(name, values))
    return lines


# Any: tensors, arrays, or lists of numbers or of tensors.
def _as_values(name: str, values: Any) -> Any:
    """Return the values of a name as an array (steps, members)."""
    if isinstance(values, (list, tuple)) and any([isinstance(each, Tensor) for each in cast("list[Any]", values)]):
        values = torch.stack([torch.as_tensor(each) for each in cast("list[Any]", values)])
    array: Any = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().numpy()
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not array.size:
        raise error(
            ValueError,
            f"training_curve: {name!r} is not a row of values.",
            expected="shape (steps,) or (steps, members)",
            got=f"shape {tuple(np.shape(values))}",
        )
    return np.where(np.isfinite(array), array, np.nan)


def _draw_line(ax: "Axes", color: str, name: str, steps: Any, values: Any) -> None:
    members = values.shape[1]
    is_drawn = np.isfinite(values).any(1)
    steps = steps[is_drawn]
    values = values[is_drawn]
    label = name
    if members > 1:
        label = f"{name} (median of {members})"
        low, high = np.nanquantile(values, _BAND, axis=1)
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    marker = "o" if len(steps) == 1 else None
    ax.plot(steps, np.nanmedian(values, axis=1), color=color, label=label, linewidth=1.6, marker=marker)


# -- tables -------------------------------------------------------------------------------------------------------


class _Column:
    """The values of a hyperparameter, and how dark each is: from 0 to 1, or None for text."""

    def __init__(self, values: list[Any], shades: list[float | None]) -> None:
        self.values = values
        self.shades = shades


def _columns_of(hyper: TensorCollection, scores: Tensor) -> dict[str, _Column]:
    members = scores.shape[0]
    columns: dict[str, _Column] = {}
    for path, node in iter_items(hyper, True, True):
        shape = tuple(node.shape)
        if shape != (members,) or scores.dim() != 1:
            raise BatchSizeError(
                f"sweep_table: {dotted(path)!r} is not one value for each score.",
                expected=f"shape [{members}]",
                got=f"shape {list(shape)}, scores of shape {list(scores.shape)}",
                hint='pass the hyperparameters alone: run["hyper"].',
            )
        if isinstance(node, Tensor):
            node = node.detach().cpu()
            columns[dotted(path)] = _Column(node.tolist(), [float(shade) for shade in _shades(node)])
        else:
            columns[dotted(path)] = _Column(node.tolist(), [None] * members)
    return columns


def _shades(values: Tensor) -> Tensor:
    """Return the rank of each value among the values that differ, from 0 to 1; a nan has 0.5."""
    values = values.double()
    distinct = values[~values.isnan()].unique()
    if len(distinct) < 2:
        return torch.full(values.shape, 0.5, dtype=torch.float64)
    shades = torch.searchsorted(distinct, values) / (len(distinct) - 1)
    return shades.where(~values.isnan(), 0.5)


def _blue(shade: float | None) -> Any:
    return "white" if shade is None else _mixed((0.55, 0.72, 0.9), shade)


def _green(shade: float) -> Any:
    return _mixed((0.45, 0.78, 0.5), shade)


def _mixed(color: tuple[float, float, float], shade: float) -> tuple[float, ...]:
    """Return a color between white and the darkest of a column, on which black text can be read."""
    return tuple([1 - (1 - part) * (0.12 + 0.88 * shade) for part in color])


def _edges(texts: list[list[str]]) -> list[float]:
    """Return the left edges of the columns, and the right edge of the last, in characters."""
    edges = [0.0]
    for column in zip(*texts, strict=True):
        longest = max(map(len, column))
        edges.append(edges[-1] + max(longest, _SHORTEST) + 2)
    return edges


def _draw_row(ax: "Axes", row: int, edges: list[float], texts: list[str], colors: list[Any]) -> None:
    weight = "normal" if row else "bold"
    for left, right, text, color in zip(edges, edges[1:], texts, colors, strict=False):
        ax.fill_between([left + 0.2, right - 0.2], row + 0.03, row + 0.97, color=color, linewidth=0)
        ax.text((left + right) / 2, row + 0.5, text, ha="center", va="center", fontsize=9, weight=weight)


# Any: a number or text.
def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    if len(text) > _LONGEST:
        # The end of a path is its name.
        text = "..." + text[3 - _LONGEST :]
    return text
