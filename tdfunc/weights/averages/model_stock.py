"""`model_stock`: the mean of the models, drawn towards the base the more they disagree."""

import torch
from torch import Tensor

from tdfunc.weights.averages.sphere import units
from tdfunc.weights.method import columns, method, shares


@method(
    "t m + (1 - t) b, with m the mean of x, t = K c / (1 + (K - 1) c), and c the mean cosine of two d",
    source="Jang et al., Model Stock (arXiv 2403.19522)",
    least=2,
    weight=None,
    mean=True,
)
def model_stock(base: Tensor, stacked: Tensor, weights: Tensor, *, filter_wise: bool = False) -> Tensor:
    """Merge by the mean of the models, as near to the base as the angles between them require.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weights of the mean, equal in the paper.
        filter_wise: Take each row of the last dimension as a vector, not the leaf.

    Source:
        Jang et al., "Model Stock: all we need is just a few fine-tuned models" (2024), equation 7.
    """
    count = stacked.shape[0]
    shape = base.shape if filter_wise and base.dim() else (-1,)
    own = base.reshape(shape)
    x = stacked.reshape(count, *shape)
    u, _ = units(x - own, 1e-6)
    pairs = torch.einsum("k...n,j...n->...kj", u, u).triu(1)
    cos = pairs.sum((-2, -1)).unsqueeze(-1) / (count * (count - 1) / 2)
    below = 1 + (count - 1) * cos
    is_singular = below.abs() < 1e-6
    t = torch.where(is_singular, 0, count * cos / torch.where(is_singular, 1, below))
    mean = (columns(shares(weights), x) * x).sum(0)
    return (t * mean + (1 - t) * own).reshape(base.shape)
