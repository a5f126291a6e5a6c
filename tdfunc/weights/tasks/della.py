"""`della` and `della_linear`: random dropping by magnitude, with the vote on signs or without."""

from torch import Tensor

from tdfunc.random.draws import KeyLike
from tdfunc.weights.method import PerModel, method
from tdfunc.weights.tasks.core import add_up, keep_by_rank


@method(
    "b + lambda sum_k w_k m_k r_k d_k / p_k / sum_k w_k m_k, with p_k by rank, density +- epsilon",
    source="Deep et al., DELLA (arXiv 2406.11617)",
)
def della(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    epsilon: PerModel = 0.15,
    normalize: bool = True,
    rescale: bool = True,
    lambda_: float | Tensor = 1.0,
    key: KeyLike,
) -> Tensor:
    """Merge task vectors whose small numbers are dropped more often, by a vote on signs.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        epsilon: Half the distance between the least and the largest probability.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Divide each number by its probability, so that its expectation stays.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.
        key: A random key, a seed or a generator.

    Source:
        Deep et al., "DELLA-Merging: reducing interference in model merging" (2024).
    """
    x = keep_by_rank(stacked - base, density, epsilon, key, rescale)
    return add_up(base, x, weights, vote=True, normalize=normalize, lambda_=lambda_)


@method(
    "b + lambda sum_k w_k r_k d_k / p_k, with p_k by rank, density +- epsilon",
    source="Deep et al., DELLA (arXiv 2406.11617)",
)
def della_linear(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    epsilon: PerModel = 0.15,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float | Tensor = 1.0,
    key: KeyLike,
) -> Tensor:
    """Merge task vectors whose small numbers are dropped more often, by their weighted sum.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        epsilon: Half the distance between the least and the largest probability.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Divide each number by its probability, so that its expectation stays.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.
        key: A random key, a seed or a generator.

    Source:
        Deep et al., "DELLA-Merging: reducing interference in model merging" (2024).
    """
    x = keep_by_rank(stacked - base, density, epsilon, key, rescale)
    return add_up(base, x, weights, vote=False, normalize=normalize, lambda_=lambda_)
