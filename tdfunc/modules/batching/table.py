"""The table of rules, by the function of torch that each serves; a file a family."""

from typing import Any

from tdfunc.modules.batching import (
    attention,
    embedding,
    grouped,
    indexing,
    linear,
    losses,
    packing,
    pointwise,
    pooling,
    recurrent,
)
from tdfunc.modules.batching.rule import Rule

RULES: dict[Any, Rule] = {
    **attention.RULES,
    **embedding.RULES,
    **grouped.RULES,
    **indexing.RULES,
    **linear.RULES,
    **losses.RULES,
    **packing.RULES,
    **pointwise.RULES,
    **pooling.RULES,
    **recurrent.RULES,
}
# The rules that packed sequences need in transforms without members as well.
PACKED: dict[Any, Rule] = {**packing.RULES, **recurrent.LAYERS}
