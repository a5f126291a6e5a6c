"""`sce`: select by variance, weigh by energy, erase the minority's signs."""

import torch
from torch import Tensor

from tdfunc.weights.method import columns, method
from tdfunc.weights.tasks.core import elect, keep_ranks, share_of


@method(
    "b + sum_k c_k m_k d_k / sum_k c_k m_k, with c_k = w_k mean(d_k^2) / sum_j mean(d_j^2) and m_k as in ties",
    source="Wan et al., FuseChat (arXiv 2408.07990)",
    weight=None,
    mean=True,
    sign="not negative",
)
def sce(base: Tensor, stacked: Tensor, weights: Tensor, *, select_topk: float | Tensor = 1.0) -> Tensor:
    """Merge the numbers in which the models differ most, each model weighted by the size of its task vector.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: A factor of each model's weight, 1 in the paper; not negative.
        select_topk: The share of numbers to keep among the numbers with a variance; the largest variances are kept.

    Source:
        Wan et al., "FuseChat: knowledge fusion of chat models" (2024), section 3.2.
    """
    x = stacked - base
    flat = x.reshape(x.shape[0], -1)
    variance = flat.var(0, unbiased=False, keepdim=True)
    share = share_of("select_topk", select_topk, flat)
    n = flat.shape[1]
    count = ((variance != 0).sum() * share).floor()
    first = torch.where(share >= 1, 0, n - count)
    kept = keep_ranks(variance, first, count.new_tensor(n))
    x = x * kept.reshape(base.shape)
    energy = x.square().reshape(x.shape[0], -1).mean(1)
    total = energy.sum()
    is_small = total.abs() < 1e-6
    energy = torch.where(is_small, 1 / x.shape[0], energy / torch.where(is_small, 1, total))
    c = columns(energy * weights, x) * elect(x)
    return base + (c * x).sum(0) / c.sum(0).clamp(min=1e-6)
