"""The key of a call: everything about its arguments except the values of their tensors."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards  # pyright: ignore[reportMissingModuleSource]
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as torch_pytree
from torch.utils._device import DeviceContext

from tdfunc._jit.attributes import has_attributes
from tdfunc._jit.environment import by_equality, freeze, static_part
from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.pytree import Context, flatten

_MAX_CONTEXTS = 4096
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Arguments(NamedTuple):
    """Flattened arguments: the tensors, the trees and non-tensor data among them, and the rest, which keys compare."""

    leaves: list[Tensor]
    nodes: list[TensorCollection | NonTensorBase]
    # With `None` in the place of each tensor.
    parts: list[Any]
    # The place and value of each object, whose attributes the function may read.
    objects: list[tuple[str, Any]]


class Contexts:
    """Small numbers for the static data of tree nodes, so that keys compare fast."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        # By identity; the context is kept, so its id stays its own.
        self._known: dict[int, tuple[Any, int]] = {}
        self._next = count()
        # Another object after each `clear`: what trees have noted under an older one has ended.
        self.epoch = object()

    def clear(self) -> None:
        """Forget the numbers; none of them is given again, since a call in another thread may still hold one."""
        self._numbers.clear()
        self._known.clear()
        self.epoch = object()

    def number(self, cls: type, context: Context) -> int:
        """Return one number for equal static data: class, batch size, device, names, kinds, ties and key order."""
        found = self._known.get(id(context))
        if found is not None and found[0] is context:
            return found[1]
        if len(self._known) >= _MAX_CONTEXTS:
            self._known.clear()
        # All that a context holds: its own == leaves most of it out.
        static = context.static or Static()
        own = (tuple(static.kinds.items()), static.ties, _frozen(static.own))
        size = context.batch_size, context.device, context.names
        key = (cls, context.keys, context.order, context.ties, *size, own, context.grafts)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_CONTEXTS:
                self.clear()
            number = self._numbers.setdefault(key, next(self._next))
        self._known[id(context)] = (context, number)
        return number


def _frozen(value: Any) -> Any:
    """Return the key of static data: 1, 1.0 and True are equal, and a function can tell them apart."""
    return freeze(value, by_tensor=True, other=by_equality)


def _key_part(key: Any) -> Any:
    """Return the key of a dict's key: nearly all are texts, which equal no value of another type."""
    if type(key) is str:
        return key
    return _frozen(key)


def describe(contexts: Contexts, value: Any, out: Arguments, where: str = "") -> None:
    """Append the tensors, trees and key parts of one argument."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        out.leaves.append(value)
        out.parts.append(None)
    elif isinstance(value, TensorCollection):
        _describe_tree(contexts, value, out, where)
    elif isinstance(value, Tensor):
        raise UnsupportedError(
            f"jit: the argument {where} is, or holds, a tensor subclass.",
            expected="torch.Tensor or nn.Parameter",
            got=kind.__name__,
            hint="call the function without jit, or hand it to torch.compile.",
        )
    elif isinstance(value, (tuple, list)):
        out.parts.append((kind, len(value)))
        _describe_each(contexts, value, out, where, numbered=True)
    elif kind is dict:
        out.parts.append((kind, tuple([_key_part(key) for key in value])))
        for key, item in value.items():
            describe(contexts, item, out, f"{where}[{key!r}]")
    elif isinstance(value, NonTensorBase):
        out.nodes.append(value)
        if isinstance(value, NonTensorData):
            values = [value.data]
        else:
            values = value._array.ravel().tolist()
        # A copy of their present contents: a list or array in a tree may change, and the key stays.
        frozen = tuple([static_part(item, f"{where}'s non-tensor data") for item in values])
        out.parts.append((kind, frozen, value.shape))
    elif kind in torch_pytree.SUPPORTED_NODES:
        children, context = torch_pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        out.parts.append((kind, _frozen(context), len(children)))
        _describe_each(contexts, children, out, where, numbered=True)
    else:
        out.parts.append(static_part(value, where))
        if has_attributes(kind):
            out.objects.append((where, value))


def _describe_tree(contexts: Contexts, tree: TensorCollection, out: Arguments, where: str) -> None:
    """Describe a tree, from its second call on by a note in it: its structure and the objects in it never change."""
    leaves, nodes, parts, _ = out
    nodes.append(tree)
    # Without the tree itself, which would keep itself alive.
    note = getattr(tree, "_note", None)
    epoch = contexts.epoch
    if type(note) is tuple and note[0] is epoch:
        leaves += note[1]
        nodes += note[2]
        parts += note[3]
        return
    begins = len(leaves), len(nodes), len(parts)
    children, context = flatten(tree)
    parts.append(contexts.number(type(tree), context))
    _describe_each(contexts, children, out, where)
    # Other values than tensors and trees may change and stay the same object.
    if note is epoch and _FIXED.issuperset(map(type, parts[begins[2] :])):
        note_description(tree, epoch, leaves[begins[0] :], nodes[begins[1] :], parts[begins[2] :])
    elif note is not epoch:
        object.__setattr__(tree, "_note", epoch)


def note_description(
    tree: TensorCollection, epoch: object, leaves: list[Tensor], nodes: list[Any], parts: list[Any]
) -> None:
    """Note in a tree what `describe` would append for it, the tree itself left out of the nodes."""
    object.__setattr__(tree, "_note", (epoch, leaves, nodes, parts))


# The parts of trees and tensors.
_FIXED = {int, type(None)}


def _describe_each(
    contexts: Contexts, values: Iterable[Any], out: Arguments, where: str, *, numbered: bool = False
) -> None:
    leaves = out.leaves
    parts = out.parts
    for i, value in enumerate(values):
        # Spelled out: every call runs this loop over all leaves.
        if type(value) is Tensor:
            leaves.append(value)
            parts.append(None)
        else:
            describe(contexts, value, out, f"{where}[{i}]" if numbered else where)


def layouts(leaves: list[Tensor]) -> tuple[Any, ...]:
    """Return everything about tensors that a key compares."""
    return tuple([_layout(leaf) for leaf in leaves])


def _layout(leaf: Tensor) -> tuple[Any, ...]:
    if leaf.layout is not torch.strided:
        return type(leaf), leaf.shape, leaf.layout
    own = (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride())
    return type(leaf), *own, leaf.is_conj(), leaf.is_neg()


def describe_sizes(names: list[str], calls: list[tuple[Any, ...]]) -> list[str]:
    """Return a sentence for each tensor whose sizes vary between calls, which are given by their `layouts`."""
    found: list[str] = []
    for i, name in enumerate(names):
        shapes = [call[i][1] for call in calls]
        dims = {len(shape) for shape in shapes}
        if len(dims) > 1:
            found.append(f"{name} has from {min(dims)} to {max(dims)} dimensions")
            continue
        for dim, column in enumerate(zip(*shapes, strict=True)):
            if len(set(column)) > 1:
                found.append(f"dimension {dim} of {name} varies, from {min(column)} to {max(column)}")
    return found


def make_guard(leaves: list[Tensor]) -> Callable[..., bool]:
    """Return the check that as many tensors have the layouts of these; what it passes has equal `layouts`."""
    if not leaves:
        return _is_true
    # The check of torch.compile's guards, in C++; it keeps no tensor.
    return guards.TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _is_true() -> bool:
    return True


def aliases(leaves: list[Tensor]) -> tuple[int, ...] | None:
    """Return for each tensor the first place of the same object, or None if no two are the same."""
    ids = list(map(id, leaves))
    if len(set(ids)) == len(ids):
        return None
    first: dict[int, int] = {}
    return tuple([first.setdefault(number, i) for i, number in enumerate(ids)])


def refill(value: Any, leaves: Iterator[Any], nodes: list[Any]) -> Any:
    """Return the arguments around other leaves, collecting the new nodes in the order of `describe`."""
    kind = type(value)
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[refill(item, leaves, nodes) for item in value])
    if isinstance(value, (tuple, list)):
        return kind([refill(item, leaves, nodes) for item in value])  # pyright: ignore[reportCallIssue]
    if kind is dict:
        return {key: refill(item, leaves, nodes) for key, item in value.items()}
    if isinstance(value, NonTensorBase):
        nodes.append(value)
        return value
    registered = torch_pytree.SUPPORTED_NODES.get(kind)
    if registered is None:
        return value
    place = len(nodes)
    is_tree = isinstance(value, TensorCollection)
    if is_tree:
        nodes.append(value)
    children, context = registered.flatten_fn(value)
    new = registered.unflatten_fn([refill(child, leaves, nodes) for child in children], context)
    if is_tree:
        nodes[place] = new
    return new


def in_function_mode() -> bool:
    """Return whether a torch function mode other than a default device sees the calls of the caller."""
    return torch._C._len_torch_function_stack() > 0 and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    )


def modes() -> tuple[Any, ...]:
    """Return the thread's settings that change the results of torch functions."""
    # torch.get_default_device (2.13) makes a tensor to find the index of a device without one.
    devices: tuple[torch.device, ...] = ()
    if torch._C._len_torch_function_stack():
        devices = tuple([m.device for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)])
    autocast: Any = None
    if torch._C._is_any_autocast_enabled():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        autocast = tuple(filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        devices,
        # Called by torch.are_deterministic_algorithms_enabled() and the like.
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        # Also without autocast: the function may enable it.
        *[torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES],
        autocast,
    )
