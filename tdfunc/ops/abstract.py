"""Shapes and dtypes of a function's results without its work: `eval_shape`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only


# Any: fn takes and returns what it likes.
def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function as tensors on the meta device, which have shapes and dtypes but no memory.

    `load(path, like=...)` compares a file with such a tree.

    Args:
        fn: The function. It runs on fake tensors: nothing is computed or allocated, and it cannot branch on values.
        *args: Its arguments. Only the shape, dtype and device of tensors count, also inside trees. A tensor on the meta
            device stands for one on the default device.
        **kwargs: Its keyword arguments.

    Source:
        `jax.eval_shape`.

    Examples:
        >>> spec = tdf.eval_shape(lambda: tdf.from_module(torch.nn.Linear(10**6, 10**6)))
        >>> spec["weight"].shape, spec["weight"].device
        (torch.Size([1000000, 1000000]), device(type='meta'))
    """
    mode = detect_fake_mode(tree_leaves((args, kwargs))) or FakeTensorMode(allow_non_fake_inputs=True)

    def enter(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return mode.from_tensor(tensor)
        with mode:
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
            )

    args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))
    with mode:
        out = fn(*args, **kwargs)
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), out)
