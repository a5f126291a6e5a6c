"""The merging methods by name, and their table.

The mapping cannot be changed. For more methods make a new mapping, `{**METHODS, "mine": mine}`, and give it to `table`.
So no import changes the meaning of a name elsewhere.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tdfunc.weights.averages.karcher import karcher
from tdfunc.weights.averages.linear import linear
from tdfunc.weights.averages.model_stock import model_stock
from tdfunc.weights.averages.multislerp import multislerp
from tdfunc.weights.averages.nuslerp import nuslerp
from tdfunc.weights.averages.slerp import slerp
from tdfunc.weights.method import Method
from tdfunc.weights.swaps.arcee_fusion import arcee_fusion
from tdfunc.weights.swaps.nearswap import nearswap
from tdfunc.weights.swaps.passthrough import passthrough
from tdfunc.weights.tasks.breadcrumbs import breadcrumbs, breadcrumbs_ties
from tdfunc.weights.tasks.dare import dare_linear, dare_ties
from tdfunc.weights.tasks.della import della, della_linear
from tdfunc.weights.tasks.ram import ram, ramplus_tl
from tdfunc.weights.tasks.sce import sce
from tdfunc.weights.tasks.task_arithmetic import task_arithmetic
from tdfunc.weights.tasks.ties import ties

Methods = Mapping[str, Method[...]]

# In the order of the table.
_ALL: tuple[Method[...], ...] = (
    linear,
    slerp,
    nuslerp,
    multislerp,
    karcher,
    model_stock,
    task_arithmetic,
    ties,
    dare_linear,
    dare_ties,
    della,
    della_linear,
    breadcrumbs,
    breadcrumbs_ties,
    sce,
    ram,
    ramplus_tl,
    nearswap,
    arcee_fusion,
    passthrough,
)
HEADER = ("method", "definition", "base", "models", "options", "source")
METHODS: Methods = MappingProxyType({one.name: one for one in _ALL})


def table(methods: Methods = METHODS) -> str:
    """Return the table of methods for the documentation, in Markdown.

    Examples:
        >>> print(table({"linear": tdf.weights.linear}))
        | method | definition | base | models | options | source |
        |---|---|---|---|---|---|
        | `linear` | `sum_k w_k x_k / sum_k w_k` | unused | any | `normalize=True` | Wortsman et al., Model soups \
(arXiv 2203.05482) |
    """
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for name, formula, base, models, options, source in rows(methods):
        # A bar would end the cell.
        definition = f"`{formula}`".replace("|", "\\|")
        if options:
            options = f"`{options}`"
        cells = (f"`{name}`", definition, base, models, options, source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(methods: Methods = METHODS) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row for each method."""
    found: list[tuple[str, ...]] = []
    for name, one in methods.items():
        if one.least == one.most:
            models = str(one.least)
        elif one.least == 1:
            models = "any"
        else:
            models = f"{one.least} or more"
        options = [f"{key}={value!r}" for key, value in one.options.items()]
        if one.is_random:
            options.append("key")
        found.append((name, one.formula, one.base, models, ", ".join(options), one.source))
    return found
