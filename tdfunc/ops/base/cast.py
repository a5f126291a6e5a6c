"""Devices, dtypes and autograd: `to`, `clone`, `detach`."""

from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import LeafOp, TensorCollection, iter_leaves
from tdfunc.core.keys import assign
from tdfunc.core.types import Path
from tdfunc.core.walk import replace
from tdfunc.ops.base.foreach import foreach_leaves
from tdfunc.ops.base.reading import entries

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


_CASTS: dict[torch.dtype | None, str] = {
    torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.int64: "long", torch.int32: "int", torch.int16: "short", torch.int8: "char", torch.uint8: "byte",
    torch.bool: "bool",
}  # fmt: skip


def as_device(device: Any) -> torch.device | None:
    """Return a device as tensors report it: with the index of the current one where there may be several."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.empty(0, device=device).device


def to(tree: T, device: torch.device | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> T:
    """Move or cast every leaf; the tree itself when nothing changes."""
    if not _is_at(tree, device, dtype):
        options: dict[str, Any] = {"non_blocking": non_blocking}
        if device is not None:
            options["device"] = device
        if dtype is not None:
            options["dtype"] = dtype
        # The methods named after a dtype take half the time of `to`.
        method = _CASTS.get(dtype) if device is None else None
        plain = None if method is None else lambda _: methodcaller(method)
        tree = tree._map(LeafOp("to", lambda x: x.to(**options), plain=plain))
    if device is None:
        return tree
    return on_device(tree, device)


def _is_at(tree: TensorCollection, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Return True if every leaf has the device and the dtype already; None stands for any."""
    for _, leaf in iter_leaves(tree):
        if device is not None and leaf.device != device:
            return False
        if dtype is not None and leaf.dtype != dtype:
            return False
    return True


def on_device(tree: T, device: torch.device | None) -> T:
    """Record the device at every node."""
    nodes = tree._data
    data = {key: on_device(x, device) if isinstance(x, TensorCollection) else x for key, x in nodes.items()}
    if tree._device == device and all(data[key] is x for key, x in nodes.items()):
        return tree
    return tree._make(data, tree._batch_size, device, tree._names, tree._static)


def to_each(tree: T, where: dict[Any, Any], *, non_blocking: bool = False) -> T:
    """Move or cast each leaf to the value of the first filter that matches it; the tree itself when nothing changes."""
    found = [entry for entry in entries(tree) if isinstance(entry.leaf, Tensor)]
    changed: dict[Path, Tensor] = {}
    moved: list[Tensor] = []
    for entry, place in zip(found, assign(found, where, "to"), strict=True):
        leaf = entry.leaf.to(place, non_blocking=non_blocking)
        moved.append(leaf)
        if leaf is not entry.leaf:
            for path in entry.paths:
                changed[path] = leaf
    if not changed:
        return tree
    tree = replace(tree, changed)
    if any(leaf.device != tree._device for leaf in moved):
        return on_device(tree, None)
    return tree


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a cast loses only floating-point precision: no float becomes an int, no int a narrower one."""
    if source is target or source is torch.bool or target.is_complex:
        return True
    if source.is_complex or target is torch.bool:
        return False
    if source.is_floating_point or target.is_floating_point:
        return target.is_floating_point
    given = torch.iinfo(source)
    kept = torch.iinfo(target)
    return kept.min <= given.min and given.max <= kept.max


def keeps_number(number: Any, dtype: torch.dtype) -> bool:
    """Return True if a dtype holds a Python number, up to floating-point precision."""
    if dtype.is_complex or isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_floating_point:
        return True
    if dtype is torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return number == number // 1 and limits.min <= number <= limits.max


def clone(tree: T, recurse: bool) -> T:
    """Copy every leaf (ties stay one tensor), or share them."""
    if not recurse:
        return tree
    done = foreach_leaves(tree, "_foreach_clone")
    if done is not None:
        return done
    return tree._map(LeafOp("clone", methodcaller("clone")))


def detach(tree: T) -> T:
    """Share every leaf without its autograd history."""
    return tree._map(LeafOp("detach", methodcaller("detach")))


def is_shared(leaf: Any) -> bool:
    """Return True if a leaf's memory is shared between processes."""
    # A batched tensor (inside vmap), an uninitialised parameter and other wrappers raise.
    try:
        return isinstance(leaf, Tensor) and leaf.is_shared()
    except (RuntimeError, ValueError, AttributeError):
        return False


def all_shared(tree: TensorCollection) -> bool:
    """Return True if the tree has leaves and all are in shared memory."""
    leaves = [leaf for _, leaf in iter_leaves(tree)]
    return bool(leaves) and all(is_shared(leaf) for leaf in leaves)


class CastMethods(TensorCollection):
    """Devices, dtypes, copies."""

    __slots__ = ()

    @property
    def device(self) -> torch.device | None:
        """The device of every leaf, or None if leaves may be on any device."""
        return self._device

    def to(self, *args: Any, **kwargs: Any) -> "Self":
        """Return the tree on a device, of a dtype, or on the device of another tree.

        If nothing changes, the result is the tree itself. A dtype applies to every leaf, including integers; a dict
        gives each leaf the dtype or device of the first filter that matches it.

        Args:
            *args: A device, a dtype, a tensor that has both, a tree that has a device, or a dict of dtypes or devices
                by filter.
            **kwargs: `device`, `dtype` and `non_blocking`, as for `Tensor.to`.

        Raises:
            TypeError: An unknown argument.
            FilterError: A pattern of the dict matches no leaf, or no filter matches a leaf.

        Examples:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.to("meta").device, td.to(torch.float64)["a"].dtype, td.to(torch.float32) is td
            (device(type='meta'), torch.float64, True)
            >>> params = TensorDict({"norm": {"scale": torch.ones(2)}, "w": torch.ones(2)})
            >>> low = params.to({"norm.*": torch.float32, "*": torch.bfloat16})
            >>> low["norm", "scale"].dtype, low["w"].dtype
            (torch.float32, torch.bfloat16)
        """
        if args and isinstance(args[0], dict):
            return to_each(self, *args, **kwargs)
        if args and isinstance(args[0], TensorCollection):
            return to(self, args[0]._device, **kwargs)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return to(self, as_device(device), dtype, non_blocking)

    def cpu(self) -> "Self":
        """Return the tree on the CPU."""
        return to(self, torch.device("cpu"))

    def cuda(self, device: Any = None) -> "Self":
        """Return the tree on a CUDA device, given as a device or an index; by default the current one."""
        return to(self, as_device("cuda" if device is None else device))

    def clone(self, recurse: bool = True) -> "Self":
        """Return a copy of the tree with its own tensors; gradients flow through it.

        Args:
            recurse: Copy the tensors; otherwise the result is the tree itself, which never changes.
        """
        return clone(self, recurse)

    def detach(self) -> "Self":
        """Return the tree with every leaf detached; the leaves share memory with the originals."""
        return detach(self)

    def is_shared(self) -> bool:
        """Return True if there are leaves and all are in shared memory."""
        return all_shared(self)
