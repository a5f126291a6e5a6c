"""`passthrough`: one model as it is."""

from torch import Tensor

from tdfunc.weights.method import method


@method("w x", source="mergekit, passthrough", base="unused", most=1, weight="scale")
def passthrough(base: Tensor | None, stacked: Tensor, weights: Tensor) -> Tensor:
    """Return the one model times its weight; with `stack_layers`, models of many layers.

    Args:
        base: Not used.
        stacked: One model.
        weights: A factor.

    Source:
        mergekit's `passthrough`.
    """
    del base
    return weights[0] * stacked[0]
