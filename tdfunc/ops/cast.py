"""Devices, dtypes and autograd: `to`, `clone`, `detach` and the views that go with them."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from tdfunc._collection import LeafOp, TensorCollection, iter_leaves, with_leaves
from tdfunc._errors import explain
from tdfunc.ops.pointwise_base import foreach_leaves

T = TypeVar("T", bound=TensorCollection)


def to(tree: T, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> T:
    """Move or cast every leaf; the tree itself when nothing changes."""
    if device is not None and device.index is None and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    unchanged = all(
        isinstance(x, Tensor) and (device is None or x.device == device) and (dtype is None or x.dtype == dtype) for _, x in iter_leaves(tree)
    )
    if unchanged and (device is None or tree._device == device):
        return tree
    options: dict[str, Any] = {"non_blocking": non_blocking}
    if device is not None:
        options["device"] = device
    if dtype is not None:
        options["dtype"] = dtype
    out = tree._map(LeafOp("to", lambda x: x.to(**options)))
    return on_device(out, device) if device is not None else out


def on_device(tree: T, device: torch.device | None) -> T:
    """Record the device at every node."""
    data = {key: on_device(node, device) if isinstance(node, TensorCollection) else node for key, node in tree._data.items()}
    return tree._make(data, tree._batch_size, device, tree._names, tree._static)


def parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Read the arguments of `Tensor.to`, or another tree whose device is taken."""
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    non_blocking = bool(kwargs.pop("non_blocking", False))
    if kwargs:
        raise TypeError(explain("to: unknown arguments.", expected="device, dtype, non_blocking", got=str(sorted(kwargs))))
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            device, dtype = arg.device, arg.dtype
        elif isinstance(arg, TensorCollection):
            device = arg._device
        elif arg is not None:
            device = arg
    return None if device is None else torch.device(device), dtype, non_blocking


def clone(tree: T, recurse: bool) -> T:
    """Copy every leaf (ties stay one tensor), or share them."""
    if not recurse:
        return tree
    done = foreach_leaves(tree, "_foreach_clone")
    return done if done is not None else tree._map(LeafOp("clone", lambda x: x.clone()))


class CastMethods(TensorCollection):
    """Devices, dtypes, copies."""

    __slots__ = ()

    @property
    def device(self) -> torch.device | None:
        """The device that every leaf is put on, or None when leaves may be anywhere."""
        return self._device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tree on a device, of a dtype, or on the device of another tree.

        The tree itself comes back when nothing changes.
        """
        return to(self, *parse_to(args, kwargs))

    def cpu(self) -> Any:
        """Return the tree on the CPU."""
        return to(self, torch.device("cpu"), None, False)

    def cuda(self, device: Any = None) -> Any:
        """Return the tree on a CUDA device."""
        return to(self, torch.device("cuda" if device is None else device), None, False)

    def clone(self, recurse: bool = True) -> Any:
        """Return a copy of the tree with its own tensors; gradients flow through it."""
        return clone(self, recurse)

    def detach(self) -> Any:
        """Return the tree of detached leaves, which share memory."""
        return self._map(LeafOp("detach", lambda x: x.detach()))

    def clear_device(self) -> Any:
        """Return the tree without a device of its own: leaves may be anywhere."""
        return on_device(self, None)


__all__ = ["with_leaves"]
