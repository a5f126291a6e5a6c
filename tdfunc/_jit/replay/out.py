"""Calls of operations that write their results into tensors that are there."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


def _scaled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that takes `alpha` by its place, as the overloads for numbers do; `fn` takes it by name."""

    def call(x: Tensor, number: Any, alpha: Any = 1, *, out: Tensor) -> Tensor:
        return fn(x, number, alpha=alpha, out=out)

    return call


# Of `x + number`, torch has a kernel that writes into `out` under the name for two tensors only.
_WITH_NUMBERS: dict[Any, Callable[..., Tensor]] = {
    aten.add.Scalar: _scaled(aten.add.out._op),
    aten.sub.Scalar: _scaled(aten.sub.out._op),
    aten.mul.Scalar: aten.mul.out._op,
    aten.div.Scalar: aten.div.out._op,
}
# Their kernels write into `out`, although torch registers them for all devices at once.
_FOR_ALL_DEVICES = (aten.stack.out,)
# torch 2.13 writes all elements before it reduces them, in an `out` that it makes larger.
_RESIZED = (aten.binary_cross_entropy.out,)


class OutCall(NamedTuple):
    """A function of an operation's arguments that writes into the tensors under these keywords."""

    fn: Callable[..., Any]
    names: tuple[str, ...]


def _copy(x: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    return out.copy_(x)


def _leave(*_args: Any, out: Tensor, **_: Any) -> Tensor:
    return out


def _zero(*_args: Any, out: Tensor, **_: Any) -> Tensor:
    return out.zero_()


def _one(*_args: Any, out: Tensor, **_: Any) -> Tensor:
    return out.fill_(1)


def _fill(_size: Any, value: Any, *, out: Tensor, **_: Any) -> Tensor:
    return out.fill_(value)


def _slice_backward(grad: Tensor, _sizes: list[int], *where: int, out: Tensor) -> Tensor:
    aten.slice.Tensor(out.zero_(), *where).copy_(grad)
    return out


def _select_backward(grad: Tensor, _sizes: list[int], *where: int, out: Tensor) -> Tensor:
    aten.select.int(out.zero_(), *where).copy_(grad)
    return out


def _batch_norm(x: Tensor, *args: Any, out: Tensor, **outs: Tensor) -> Any:
    # torch 2.13 leaves `save_mean` as it is, and reads it, where these are not contiguous.
    if x.is_contiguous() and out.is_contiguous():
        return aten.native_batch_norm.out(x, *args, out=out, **outs)
    return aten.native_batch_norm.default(x, *args)


# What they compute is written here: the overloads that torch has generated for them compute a result and copy it.
_WRITTEN: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.empty_like.default: _leave,
    aten.full.default: _fill,
    aten.full_like.default: _fill,
    aten.zeros.default: _zero,
    aten.zeros_like.default: _zero,
    aten.new_zeros.default: _zero,
    aten.ones.default: _one,
    aten.ones_like.default: _one,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
}


# Any: an overload of torch.ops.
@functools.cache
def find_out(operation: Any) -> OutCall | None:
    """Return the call that computes an operation on the CPU into given tensors; None where torch would copy.

    torch has generated such an overload for most operations, and most of these compute a result and copy it. Those
    with a kernel of the CPU are the others.
    """
    if operation in _WRITTEN:
        return OutCall(_WRITTEN[operation], ("out",))
    if operation is aten.native_batch_norm.default:
        return OutCall(_batch_norm, ("out", "save_mean", "save_invstd"))
    if operation in _WITH_NUMBERS:
        return OutCall(_WITH_NUMBERS[operation], ("out",))
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.returns or schema.is_mutable:
        return None
    if any([result.alias_info is not None for result in schema.returns]):
        return None
    packet = operation.overloadpacket
    for overload in map(functools.partial(getattr, packet), packet.overloads()):
        outs = [argument.name for argument in overload._schema.arguments if argument.is_write]
        if len(outs) == len(schema.returns) and _describe(overload, outs) == _describe(operation, []):
            if _has_own_kernel(overload):
                return OutCall(overload._op, tuple(outs))
            return None
    return None


def _describe(operation: Any, left_out: list[str]) -> list[tuple[str, str]]:
    arguments = operation._schema.arguments
    return [(argument.name, str(argument.type)) for argument in arguments if argument.name not in left_out]


def _has_own_kernel(overload: Any) -> bool:
    if overload in _RESIZED:
        return False
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return overload in _FOR_ALL_DEVICES or has_kernel(
        overload._schema.name + "." + overload._schema.overload_name, "CPU"
    )
