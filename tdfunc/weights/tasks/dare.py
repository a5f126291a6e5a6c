"""`dare_linear` and `dare_ties`: task vectors of which a random part is dropped, with the vote on signs or without."""

from torch import Tensor

from tdfunc.random.draws import KeyLike
from tdfunc.weights.method import PerModel, columns, method
from tdfunc.weights.tasks.core import add_up, keep_random, per_model


@method(
    "b + lambda sum_k w_k r_k d_k / p, with r_k 1 with probability p = density, else 0",
    source="Yu et al., DARE (arXiv 2311.03099)",
)
def dare_linear(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float | Tensor = 1.0,
    key: KeyLike,
) -> Tensor:
    """Merge task vectors after dropping numbers at random; the rest is divided by the density.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Divide each number by its probability, so that its expectation stays.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.
        key: A random key, a seed or a generator.

    Source:
        Yu et al., "Language models are super mario" (2023). mergekit rescales to the old sum of absolute values.
    """
    x = _drop(stacked - base, density, key, rescale)
    return add_up(base, x, weights, vote=False, normalize=normalize, lambda_=lambda_)


@method(
    "b + lambda sum_k w_k m_k r_k d_k / p, with m_k as in ties and r_k as in dare_linear",
    source="Yu et al., DARE (arXiv 2311.03099)",
)
def dare_ties(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    density: PerModel = 1.0,
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float | Tensor = 1.0,
    key: KeyLike,
) -> Tensor:
    """Merge as `dare_linear`, and of each number only those that agree with the sign of their sum.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        density: The share of numbers to keep; one number, or one for each model.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        rescale: Divide each number by its probability, so that its expectation stays.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.
        key: A random key, a seed or a generator.

    Source:
        Yu et al., "Language models are super mario" (2023). mergekit rescales to the old sum of absolute values.
    """
    x = _drop(stacked - base, density, key, rescale)
    return add_up(base, x, weights, vote=True, normalize=normalize, lambda_=lambda_)


def _drop(x: Tensor, density: PerModel, key: KeyLike, rescale: bool) -> Tensor:
    """Return task vectors [K, *S] of which each number is kept with the probability `density`."""
    probability = columns(per_model(density, x).reshape(-1), x)
    return keep_random(x, probability, key, rescale)
