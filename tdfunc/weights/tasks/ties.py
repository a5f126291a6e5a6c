"""`ties`: trim, elect a sign, and average those who agree."""

from torch import Tensor

from tdfunc.weights.method import PerModel, method
from tdfunc.weights.tasks.core import add_up, keep_largest


@method(
    "b + lambda sum_k w_k m_k trim(d_k) / sum_k w_k m_k, with m_k where w_k trim(d_k) has the sign of the sum",
    source="Yadav et al., TIES-Merging (arXiv 2306.01708)",
)
def ties(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float | Tensor = 1.0,
) -> Tensor:
    """Merge the largest numbers of the task vectors that agree with the sign of their sum.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Scale the numbers that are left to the sum of absolute values before.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.

    Source:
        Yadav et al., "TIES-Merging: resolving interference when merging models" (2023).
    """
    x = keep_largest(stacked - base, density, rescale)
    return add_up(base, x, weights, vote=True, normalize=normalize, lambda_=lambda_)
