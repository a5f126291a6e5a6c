"""`linear`: the weighted mean, a model soup."""

from torch import Tensor

from tdfunc.weights.method import columns, method


@method(
    "sum_k w_k x_k / sum_k w_k",
    source="Wortsman et al., Model soups (arXiv 2203.05482)",
    base="unused",
    mean="normalize",
)
def linear(base: Tensor | None, stacked: Tensor, weights: Tensor, *, normalize: bool = True) -> Tensor:
    """Merge by the weighted mean of the models.

    Args:
        base: Not used.
        stacked: The models.
        weights: The weight of each.
        normalize: Divide by the sum of the weights.

    Source:
        Wortsman et al., "Model soups" (2022).

    Examples:
        >>> models = TensorDict({"w": torch.tensor([[0.0], [4.0]])}, [2])
        >>> tdf.weights.linear(None, models, [3.0, 1.0])["w"]
        tensor([1.])
    """
    del base
    total = (columns(weights, stacked) * stacked).sum(0)
    if normalize:
        return total / weights.sum()
    return total
