"""`arcee_fusion`: the changes of a second model that are important."""

import torch
from torch import Tensor

from tdfunc.weights.method import method


@method(
    "b + w d where s >= median(s) + 1.5 IQR(s), with s = |d| KL(softmax(x) || softmax(b)) for each row",
    source="Arcee, Arcee Fusion (2024)",
    most=1,
    weight=None,
)
def arcee_fusion(base: Tensor, stacked: Tensor, weights: Tensor) -> Tensor:
    """Merge the most important changes of the model, which are outliers of a score.

    Args:
        base: The first model.
        stacked: One model.
        weights: A factor of the changes, 1 in mergekit.

    Source:
        mergekit's `arcee_fusion`, which takes the quantiles of a random sample above a million numbers.
    """
    delta = stacked[0] - base
    p = torch.softmax(stacked[0], -1) + 1e-8
    q = torch.softmax(base, -1) + 1e-8
    score = delta.abs() * (p * torch.log(p / q)).sum(-1, keepdim=True)
    ordered = score.reshape(-1).sort().values
    n = ordered.shape[0]
    low, middle, high = (ordered[int(share * (n - 1))] for share in (0.25, 0.5, 0.75))
    is_outlier = (score >= middle + 1.5 * (high - low)).to(score.dtype)
    # Without a score nothing is known of a change.
    chosen = torch.where(score.isnan(), score, is_outlier)
    return base + weights[0] * delta * chosen
