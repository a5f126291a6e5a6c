"""`ram` and `ramplus_tl`: numbers that one model changed are kept, those that several changed are averaged."""

import torch
from torch import Tensor

from tdfunc.weights.method import columns, method

_SOURCE = "Reinforced agent merging (arXiv 2601.13572)"


@method("b + sum_k w_k m_k d_k / max(1, sum_k m_k), with m_k where |d_k| > epsilon", source=_SOURCE, weight=None)
def ram(base: Tensor, stacked: Tensor, weights: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Merge by the mean, for each number, over the models that changed it.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: A factor of each task vector, 1 in the paper.
        epsilon: The size above which a number counts as changed.

    Source:
        "Behavior knowledge merge in reinforced agentic models" (2026), RAM.
    """
    x = stacked - base
    x = x * (x.abs() > epsilon)
    return base + (columns(weights, x) * x).sum(0) / (x != 0).sum(0).clamp(min=1)


@method(
    "as ram, and d_k times 1 + r min(alpha, shared_k / unique_k) where only model k changed a number",
    source=_SOURCE,
    weight=None,
)
def ramplus_tl(
    base: Tensor, stacked: Tensor, weights: Tensor, *, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5
) -> Tensor:
    """Merge as `ram`, with more weight on the changes of one model the more of its changes others share.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: A factor of each task vector, 1 in the paper.
        r: The slope of that weight.
        alpha: The bound of the ratio of shared to unique changes.
        epsilon: The size above which a number counts as changed.

    Source:
        "Behavior knowledge merge in reinforced agentic models" (2026), RAM+, for each leaf by itself.
    """
    x = stacked - base
    is_changed = x.abs() > epsilon
    count = is_changed.sum(0)
    own = is_changed & (count == 1)
    shared = is_changed & (count > 1)
    shared_counts = shared.reshape(x.shape[0], -1).sum(1)
    own_counts = own.reshape(x.shape[0], -1).sum(1)
    ratio = shared_counts / own_counts.clamp(min=epsilon)
    factor = columns((1 + r * ratio.clamp(0, alpha)).to(x.dtype), x)
    # A NaN is above no epsilon, and stays.
    rest = torch.where(x.isnan(), x, 0)
    not_own = torch.where(shared, x / count.clamp(min=1), rest)
    x = torch.where(own, x * factor, not_own)
    return base + (columns(weights, x) * x).sum(0)
