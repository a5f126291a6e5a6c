"""`torch.autograd.grad` with trees among its inputs and outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection, iter_leaves, leaf_paths
from tdfunc.core.errors import error
from tdfunc.ops.foreach import check_same


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """Return the gradients of the outputs: a tree for a tree, one tuple for several inputs.

    A leaf without a gradient (`allow_unused=True`) is dropped.
    """
    sources, targets = _items(outputs), _items(inputs)
    given = None if grad_outputs is None else _leaves_of(_weights(sources, _items(grad_outputs)))
    # A leaf that is not used has None, which torch's annotations do not say.
    found: Any = torch.autograd.grad(_leaves_of(sources), _leaves_of(targets), given, **options)
    grads = iter(found)
    # Gradients of a batch of weights have its dimension in front.
    lead = next(x.shape[:1] for x in found if x is not None) if options.get("is_grads_batched") else Size()
    made = tuple([_around(item, lambda _: next(grads), lead) for item in targets])
    return made[0] if len(made) == 1 and isinstance(targets[0], TensorCollection) else made


def _items(given: Any) -> Sequence[Any]:
    return (given,) if isinstance(given, (Tensor, TensorCollection)) else tuple(given)


def _leaves_of(items: Sequence[Any]) -> list[Any]:
    leaves: list[Any] = []
    for item in items:
        if isinstance(item, TensorCollection):
            found = dict(iter_leaves(item))
            leaves += [found[path] for path in leaf_paths(item)]
        else:
            leaves.append(item)
    return leaves


def _weights(sources: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
    """Return `grad_outputs` laid out as the outputs: a tree for each tree, with the same keys in the same order."""
    if [isinstance(x, TensorCollection) for x in sources] != [isinstance(x, TensorCollection) for x in given]:
        what = "grad: grad_outputs has a tree for each tree of outputs, and a tensor for each tensor."
        expected, got = (str([type(x).__name__ for x in items]) for items in (sources, given))
        raise error(TypeError, what, expected=expected, got=got)
    made: list[Any] = []
    for source, item in zip(sources, given, strict=True):
        if isinstance(source, TensorCollection):
            check_same(source, item, "grad")
            item = source._map(LeafOp("grad", lambda _, weight: weight), item)
        made.append(item)
    return made


def _around(item: Any, leaf: Callable[[Any], Any], lead: Size) -> Any:
    if not isinstance(item, TensorCollection):
        return leaf(item)
    if not lead:
        return item._map(LeafOp("grad", leaf, drops=True))
    return item._map(LeafOp("grad", leaf, lambda old: lead + old, lambda names: (None, *names), drops=True))
