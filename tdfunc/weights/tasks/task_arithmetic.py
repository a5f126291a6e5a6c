"""`task_arithmetic`: the weighted sum of task vectors."""

from torch import Tensor

from tdfunc.weights.method import method
from tdfunc.weights.tasks.core import add_up


@method("b + lambda sum_k w_k d_k", source="Ilharco et al., Editing models with task arithmetic (arXiv 2212.04089)")
def task_arithmetic(
    base: Tensor,
    stacked: Tensor,
    weights: Tensor,
    *,
    normalize: bool = False,
    lambda_: float | Tensor = 1.0,
) -> Tensor:
    """Merge by adding weighted task vectors to the base; a negative weight removes a task.

    Args:
        base: The pretrained model.
        stacked: The models tuned from it.
        weights: The weight of each task vector.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        lambda_: A factor of the merged task vector, `lambda` in files of mergekit.

    Source:
        Ilharco et al., "Editing models with task arithmetic" (2022).
    """
    x = stacked - base
    return add_up(base, x, weights, vote=False, normalize=normalize, lambda_=lambda_)
