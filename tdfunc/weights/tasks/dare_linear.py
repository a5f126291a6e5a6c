"""`dare_linear`: the weighted sum of task vectors of which a random part is dropped."""

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
    p = columns(per_model(density, base).reshape(-1), stacked)
    x = keep_random(stacked - base, p, key, rescale)
    return add_up(base, x, weights, vote=False, normalize=normalize, lambda_=lambda_)
