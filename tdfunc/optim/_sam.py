"""Sharpness-aware minimization: a gradient taken uphill from the parameters."""

import functools
from collections.abc import Callable
from typing import Any

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.optim.checks import check_dense, check_hyper, check_tree
from tdfunc.optim.gradient_maps import member_norm
from tdfunc.optim.lists import widen


# Any: functions of any arguments, which may return more than gradients.
def sam(grad_fn: Callable[..., Any], rho: float = 0.05, *, adaptive: bool = False) -> Callable[..., Any]:
    """Return a function for the gradient at the worst point near the parameters, for any optimizer.

    It takes the gradient twice: at the parameters, and again a step of length `rho` up along it. It has no state, and
    works wherever `grad_fn` does. The members of a stack take steps of that length each.

    Args:
        grad_fn: A function of the parameters and other arguments that returns the gradients, as `torch.func.grad` and
            `tdfunc.grad` make, or a tuple that begins with them. Leaves without a gradient stay as they are.
        rho: The length of the step uphill.
        adaptive: Measure the step by the size of each element.

    Returns:
        A function with the arguments of `grad_fn`. Other entries of a tuple are taken at the given parameters.

    Raises:
        ValueError: `rho` is negative or nan.
        TypeError: In a call, `grad_fn` returned no tree of gradients first.

    Source:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization"; Kwon et al., "ASAM" for
        `adaptive`; `optax.contrib.sam`.

    Examples:
        >>> params = TensorDict({"w": torch.tensor([3.0, 4.0])})
        >>> grad = tdf.grad(lambda p: p["w"].square().sum() / 2)
        >>> tdf.optim.sam(grad, rho=0.5)(params)["w"]
        tensor([3.3000, 4.4000])
    """
    check_hyper("sam", "rho", rho, 0.0)

    @functools.wraps(grad_fn)
    def run(params: TensorCollection, *args: Any, **kwargs: Any) -> Any:
        check_tree("sam", "params", params)
        first = grad_fn(params, *args, **kwargs)
        grads = first[0] if isinstance(first, tuple) else first
        _check_gradients(first, grads)
        second = grad_fn(_ascend(params, grads, rho, adaptive), *args, **kwargs)
        if isinstance(first, tuple):
            return (second[0], *first[1:])
        return second

    return run


# Any: what a function returned.
def _check_gradients(found: Any, grads: Any) -> None:
    """Raise unless a function for gradients returned a tree of them, or a tuple that begins with it."""
    if isinstance(grads, TensorCollection):
        return
    got = type(grads).__name__
    hint = None
    if isinstance(found, tuple):
        got = f"a tuple that begins with a {got}"
        if any([isinstance(item, TensorCollection) for item in found]):
            hint = "value_and_grad returns (value, gradients): pass lambda *args: value_and_grad(loss)(*args)[::-1]."
    raise error(
        TypeError,
        "sam: grad_fn returned neither a tree of gradients nor a tuple that begins with one.",
        expected="gradients, as tdfunc.grad returns them; (gradients, value) of torch.func.grad_and_value",
        got=got,
        hint=hint,
    )


def _ascend(params: TensorCollection, grads: TensorCollection, rho: float, adaptive: bool) -> TensorCollection:
    """Return the parameters a step up along the gradients."""
    check_dense("sam", grads)
    leaves = dict(zip(list_paths(params), list_leaves(params), strict=True))
    paths = list_paths(grads)
    dims = len(grads._batch_size)
    # In 16 bits squared sizes and the inverse of a small norm would overflow.
    slopes = widen(list_leaves(grads))
    starts = widen([leaves[path] for path in paths])
    sizes = [start.abs() if adaptive else 1.0 for start in starts]
    norm = member_norm([slope * size for slope, size in zip(slopes, sizes, strict=True)], dims)
    for path, start, slope, size in zip(paths, starts, slopes, sizes, strict=True):
        scale = (rho / (norm + 1e-12)).reshape((*norm.shape, *[1] * (slope.dim() - dims)))
        moved = start + slope * size**2 * scale.to(slope.dtype)
        leaves[path] = moved.to(leaves[path].dtype)
    return rebuild(params, list(leaves.values()))
