"""`__torch_function__`: torch's own functions on trees."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Size
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.nn import functional as F

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import BatchSizeError, ImmutableError, UnsupportedError
from tdfunc.core.shapes import dim_index
from tdfunc.ops import autograd
from tdfunc.ops.base import cast
from tdfunc.ops.base.foreach import binary, broadcast_size, check_same, reversed_binary, unary
from tdfunc.ops.base.reading import check_trees
from tdfunc.ops.batch import index, join, rearrange, shape
from tdfunc.ops.batch.index import gather
from tdfunc.ops.batch.shape import reshape
from tdfunc.ops.math import arithmetic, compare
from tdfunc.ops.math.arithmetic import ArithmeticMethods
from tdfunc.ops.math.reduce import ReduceMethods, extreme, extremes, reduce, truth
from tdfunc.ops.math.tables import (
    BINARY,
    BINARY_LEAFWISE,
    COMMUTATIVE,
    OPERATORS,
    REVERSED,
    UNARY,
    UNARY_LEAFWISE,
)

REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "nansum", "nanmean", "logsumexp")
# Second names of functions in torch.
ALIASES = {
    "absolute": "abs", "negative": "neg", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "fix": "trunc",
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "arctan2": "atan2", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "clip": "clamp",
}  # fmt: skip
# Functions of a leaf that keep its shape, and of two, without methods of trees.
LEAFWISE = (
    "acosh", "arccosh", "asinh", "arcsinh", "atanh", "arctanh", "angle", "conj", "resolve_conj", "resolve_neg",
    "deg2rad", "rad2deg", "digamma", "exp2", "i0", "imag", "logit", "nan_to_num", "positive", "real", "relu", "sgn",
    "signbit", "sinc", "celu", "conj_physical", "hardshrink", "selu",
)  # fmt: skip
PAIRWISE = (
    "bitwise_left_shift", "bitwise_right_shift", "copysign", "float_power", "fmax", "fmin", "gcd", "heaviside",
    "hypot", "lcm", "ldexp", "logaddexp", "logaddexp2", "nextafter", "xlogy",
    "complex", "igamma", "igammac", "polar",
)  # fmt: skip
# The same of torch.nn.functional.
ACTIVATIONS = (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
    "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
)  # fmt: skip
# Parameters are called as torch calls them, since both positions and names may be used.
Handler = Callable[..., Any]


def _leafwise(fn: Handler) -> Handler:
    # `inplace` of activations saves memory only: the tree is not written to.
    def call(input: TensorCollection, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        return input._map(LeafOp(fn.__name__, lambda x: fn(x, *args, **kwargs)))

    return call


def _like(fn: Handler) -> Handler:
    def call(input: TensorCollection, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None and not args and not kwargs:
            return input._map(LeafOp(fn.__name__, fn))
        place = cast.as_device(device)
        made = input._map(LeafOp(fn.__name__, lambda x: fn(x, *args, device=place, **kwargs)))
        if place is None:
            return made
        return cast.on_device(made, place)

    return call


def _unary(name: str) -> Handler:
    kernel = None
    if name in UNARY:
        kernel = f"_foreach_{name}"

    def call(input: TensorCollection, **kwargs: Any) -> Any:
        return unary(input, name, kernel, **kwargs)

    return call


def _binary(name: str) -> Handler:
    kernel = None
    if name in BINARY:
        kernel = f"_foreach_{name}"

    def call(input: Any, other: Any, **kwargs: Any) -> Any:
        if isinstance(input, TensorCollection):
            return binary(input, other, name, kernel, **kwargs)
        return reversed_binary(other, input, name, **kwargs)

    return call


def _swap(handler: Handler) -> Handler:
    def call(input: Any, other: Any) -> Any:
        return handler(other, input)

    return call


def _where(condition: Any, input: Any, other: Any) -> Any:
    if isinstance(input, TensorCollection):
        return index.where(condition, input, other)
    if not isinstance(other, TensorCollection):
        index.check_condition(condition, condition, "where")
    return index.where(~condition, other, input)


def _reduction(name: str) -> Handler:
    def call(input: TensorCollection, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return reduce(input, name, dim, keepdim, None, **kwargs)

    return call


def _deviation(name: str) -> Handler:
    # The third position is `unbiased`, not `keepdim`, and so is a bool in the second.
    def call(
        input: TensorCollection,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: Any = None,
    ) -> Any:
        if isinstance(dim, bool):
            unbiased = dim
            dim = None
        if correction is None:
            correction = int(unbiased)
        return reduce(input, name, dim, keepdim, None, correction=correction)

    return call


def _along(name: str) -> Handler:
    return lambda input, dim, **kwargs: arithmetic.along(input, name, dim, **kwargs)


def _softmax(name: str) -> Handler:
    # `torch.nn.functional` and `torch` have other positions after the dimension.
    def call(input: TensorCollection, dim: int, _stacklevel: int = 3, dtype: Any = None) -> Any:
        return arithmetic.along(input, name, dim, dtype=dtype)

    return call


def _loss(fn: Handler) -> Handler:
    """Return a loss of two trees, leaf by leaf: for each leaf one number, or with `reduction="none"` its elements."""
    name = fn.__name__

    def call(
        input: TensorCollection,
        target: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Any:
        check_trees(f"torch.nn.functional.{name}", input, target)
        check_same(input, target, name)
        if input._batch_size != target._batch_size or broadcast_size(input, target, name) is not None:
            raise BatchSizeError(
                f"{name}: the batch sizes differ.", expected=list(input._batch_size), got=list(target._batch_size)
            )
        size = None if reduction == "none" else lambda _: Size()
        options = {key: value for key, value in options.items() if value is not None}
        return input._map(LeafOp(name, lambda x, y: fn(x, y, reduction=reduction, **options), size), target)

    return call


def _isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    return _binary("isclose")(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


def _at_index(tree: TensorCollection, dim: int, index: Any, call: str) -> Any:
    before = (slice(None),) * dim_index(dim, len(tree._batch_size), call)
    return tree._index((*before, index))


def _extreme(name: str, of_two: Handler) -> Handler:
    def call(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        # As torch: the second position is a dimension or the other operand.
        if isinstance(dim, (TensorCollection, torch.Tensor)):
            return of_two(input, dim)
        if other is not None:
            return of_two(input, other)
        return extreme(input, name, dim, keepdim, None, True)

    return call


def _checkpoint(function: Handler, /, *args: Any, **kwargs: Any) -> Any:
    # Dynamo calls the arguments' handler before it captures `torch.utils.checkpoint`, and lifts closed-over values.
    options = {name: kwargs.pop(name) for name in _CHECKPOINT_OPTIONS if name in kwargs}
    return tag_activation_checkpoint(lambda: function(*args, **kwargs), **options)


_CHECKPOINT_OPTIONS = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state",
)  # fmt: skip
FUNCTIONS: dict[Any, Handler] = {
    torch.stack: lambda tensors, dim=0: join.stack(tensors, dim),
    torch.unbind: lambda input, dim=0: index.unbind(input, dim),
    torch.split: lambda tensor, split_size_or_sections, dim=0: shape.split(tensor, split_size_or_sections, dim),
    torch.split_with_sizes: lambda input, split_sizes, dim=0: shape.split(input, split_sizes, dim),
    torch.chunk: lambda input, chunks, dim=0: shape.chunk(input, chunks, dim),
    torch.gather: lambda input, dim, index: gather(input, dim, index),
    torch.index_select: lambda input, dim, index: _at_index(input, dim, index, "index_select"),
    torch.select: lambda input, dim, index: _at_index(input, dim, int(index), "select"),
    torch.masked_select: lambda input, mask: index.masked_select(input, mask),
    torch.where: _where,
    torch.reshape: lambda input, shape: reshape(input, tuple(shape)),
    torch.permute: lambda input, dims: shape.permute(input, tuple(dims)),
    torch.squeeze: lambda input, dim=None: shape.squeeze(input, dim),
    torch.unsqueeze: lambda input, dim: shape.unsqueeze(input, dim),
    torch.flatten: lambda input, start_dim=0, end_dim=-1: shape.flatten(input, start_dim, end_dim),
    torch.unflatten: lambda input, dim, sizes: shape.unflatten(input, dim, sizes),
    torch.broadcast_to: lambda input, size: shape.expand(input, tuple(size)),
    torch.flip: lambda input, dims: rearrange.flip(input, dims),
    torch.repeat_interleave: lambda input, repeats, dim=None, *, output_size=None: rearrange.repeat_interleave(
        input, repeats, dim, output_size
    ),
    torch.transpose: lambda input, dim0, dim1: shape.transpose(input, dim0, dim1),
    torch.clamp: lambda input, min=None, max=None: arithmetic.clamp(input, min, max),
    torch.lerp: lambda input, end, weight: arithmetic.lerp(input, end, weight),
    torch.addcmul: lambda input, tensor1, tensor2, *, value=1: ArithmeticMethods.addcmul(
        input, tensor1, tensor2, value=value
    ),
    torch.addcdiv: lambda input, tensor1, tensor2, *, value=1: ArithmeticMethods.addcdiv(
        input, tensor1, tensor2, value=value
    ),
    torch.masked_fill: lambda input, mask, value: arithmetic.masked_fill(input, mask, value),
    torch.isclose: _isclose,
    torch.clone: lambda input: cast.clone(input, True),
    torch.detach: lambda input: cast.detach(input),
    torch.all: lambda input, dim=None, keepdim=False: truth(input, dim, keepdim, "all"),
    torch.any: lambda input, dim=None, keepdim=False: truth(input, dim, keepdim, "any"),
    torch.equal: lambda input, other: compare.equal(input, other),
    torch.allclose: lambda input, other, rtol=1e-5, atol=1e-8, equal_nan=False: compare.all_close(
        input, other, rtol, atol, equal_nan
    ),
    torch.linalg.vector_norm: lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: reduce(
        x, "norm", dim, keepdim, None, p=ord, dtype=dtype
    ),
    torch.quantile: lambda input, q, dim=None, keepdim=False, *, interpolation="linear": ReduceMethods.quantile(
        input, q, dim, keepdim, interpolation=interpolation
    ),
    torch.std: _deviation("std"),
    torch.var: _deviation("var"),
    torch.max: _extreme("max", _binary("maximum")),
    torch.min: _extreme("min", _binary("minimum")),
    torch.argmax: lambda input, dim=None, keepdim=False: extremes(input, "argmax", dim, keepdim),
    torch.argmin: lambda input, dim=None, keepdim=False: extremes(input, "argmin", dim, keepdim),
    torch.autograd.grad: autograd.grad,
}
FUNCTIONS.update(
    {fn: lambda tensors, dim=0: join.cat(tensors, dim) for fn in (torch.cat, torch.concat, torch.concatenate)}
)
for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint"):
    FUNCTIONS[getattr(torch, f"{name}_like")] = _like(getattr(torch, f"{name}_like"))
FUNCTIONS.update({getattr(torch, name): _leafwise(getattr(torch, name)) for name in LEAFWISE})
FUNCTIONS.update({getattr(F, name): _leafwise(getattr(F, name)) for name in ACTIVATIONS})
FUNCTIONS.update({getattr(torch, name): _unary(name) for name in UNARY | UNARY_LEAFWISE})
FUNCTIONS.update({getattr(torch, name): _binary(name) for name in [*BINARY, *BINARY_LEAFWISE, *PAIRWISE]})
FUNCTIONS.update({getattr(torch, name): _along(name) for name in ("cumsum", "cumprod", "logcumsumexp")})
FUNCTIONS.update({getattr(owner, name): _softmax(name) for name in ("softmax", "log_softmax") for owner in (torch, F)})
FUNCTIONS.update({fn: _loss(fn) for fn in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)})
FUNCTIONS.update({getattr(torch, name): FUNCTIONS[getattr(torch, same)] for name, same in ALIASES.items()})
FUNCTIONS.update({getattr(torch, name): _reduction(name) for name in REDUCTIONS})
# An operator with a tensor on one side arrives as the tensor's method. By name, as dynamo has other objects
# for the methods that torch writes in Python.
_NAMED = ("add", "sub", "mul", "div", "pow", "remainder", "eq", "ne", "lt", "le", "gt", "ge")
METHODS: dict[str, Handler] = {name: _binary(name) for name in _NAMED} | {
    m: _binary(name) for m, name in OPERATORS.items()
}
METHODS.update({"__eq__": _binary("eq"), "__ne__": _binary("ne"), "__rdiv__": _swap(_binary("div"))})
METHODS.update({m: _swap(_binary(name)) for m, name in (REVERSED | COMMUTATIVE).items()})
# Python calls these for an operator, and the tree's own where torch's have no handler.
_OPERATOR_NAMES = list(dict.fromkeys([*METHODS, *[name for name in dir(torch.Tensor) if name.startswith("__")]]))


class DispatchMethods(TensorCollection):
    """The hook that torch calls if one of its functions is given a tree."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        # Not a key of the table: dynamo has another object for it.
        if handler is None and func is tag_activation_checkpoint:
            handler = _checkpoint
        if handler is None:
            name = _method_name(func)
            if not name:
                raise _undefined(func, args)
            handler = METHODS.get(name)
            # Python then calls the tree's own method.
            if handler is None:
                return NotImplemented
        if kwargs and kwargs.get("out") is not None:
            raise ImmutableError(
                f"{_title(func)}: out= would write to a tree.",
                hint="use the result of the function; td.update_(result) copies values into existing storage.",
            )
        return handler(*args, **(kwargs or {}))


def _undefined(func: Any, args: Any) -> UnsupportedError:
    title = _title(func)
    call = f"td.apply(lambda x: {title}(x, ...))"
    # A function of several tensors, as torch.stack.
    if args and isinstance(args[0], (list, tuple)):
        call = f"a.apply(lambda x, y: {title}((x, y), ...), b)"
    return UnsupportedError(f"{title} is not defined on trees.", hint=f"{call} calls it on every leaf.")


def _method_name(func: Any) -> str:
    """Return the name under which `torch.Tensor` has a function, or an empty one.

    Under a compiler some of torch's methods have another `__name__`, which is a hint and no more.
    """
    hint = getattr(func, "__name__", "")
    if hint and getattr(torch.Tensor, hint, None) is func:
        return hint
    for name in _OPERATOR_NAMES:
        if getattr(torch.Tensor, name, None) is func:
            return name
    return ""


def _title(func: Any) -> str:
    name = getattr(func, "__name__", repr(func))
    if name.startswith("special_"):
        return f"torch.special.{name.removeprefix('special_')}"
    if getattr(func, "__module__", "") == "torch.nn.functional":
        return f"torch.nn.functional.{name}"
    return f"torch.{name}"
