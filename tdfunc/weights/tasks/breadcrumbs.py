"""`breadcrumbs` and `breadcrumbs_ties`: task vectors without their largest and smallest numbers."""

from torch import Tensor

from tdfunc.weights.method import PerModel, method
from tdfunc.weights.tasks.core import add_up, keep_middle


@method(
    "b + lambda sum_k w_k cut(d_k), where cut drops the largest gamma and the smallest 1 - density - gamma",
    source="Davari and Belilovsky, Model Breadcrumbs (arXiv 2312.06795)",
)
def breadcrumbs(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    gamma: PerModel = 0.01,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float | Tensor = 1.0,
) -> Tensor:
    """Merge the numbers of middle size of the task vectors, by their weighted sum.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        gamma: The share of the largest numbers to drop.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Scale the numbers that are left to the sum of absolute values before.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.

    Source:
        Davari and Belilovsky, "Model breadcrumbs" (2023).
    """
    x = keep_middle(stacked - base, density, gamma, rescale)
    return add_up(base, x, weights, vote=False, normalize=normalize, lambda_=lambda_)


@method(
    "b + lambda sum_k w_k m_k cut(d_k), with m_k as in ties and cut as in breadcrumbs",
    source="Davari and Belilovsky, Model Breadcrumbs (arXiv 2312.06795)",
)
def breadcrumbs_ties(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    gamma: PerModel = 0.01,
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float | Tensor = 1.0,
) -> Tensor:
    """Merge as `breadcrumbs`, and of each number only those that agree with the sign of their sum.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        gamma: The share of the largest numbers to drop.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Scale the numbers that are left to the sum of absolute values before.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.

    Source:
        Davari and Belilovsky, "Model breadcrumbs" (2023).
    """
    x = keep_middle(stacked - base, density, gamma, rescale)
    return add_up(base, x, weights, vote=True, normalize=normalize, lambda_=lambda_)
