"""The mixture of an ensemble's members, and checks of logits and labels, for `metrics` and `calibration`."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tdfunc.core.context import has_values, require_values
from tdfunc.core.errors import LeafMismatchError, brief, error, explain

# Any: numbers of any dtype, in sequences of sequences.
Numbers: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]


def as_tensor(values: Numbers, device: torch.device | None = None) -> Tensor:
    """Return a tensor as it is, and lists and arrays as tensors on a device."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        # A copy: torch takes no arrays that cannot be written, or whose strides are negative.
        return torch.as_tensor(np.array(values), device=device)
    found = torch.as_tensor(values, device=device)
    if not found.is_floating_point():
        return found
    # In 16 bits, if they are torch's default, numbers of Python would be rounded.
    return torch.as_tensor(values, dtype=torch.promote_types(found.dtype, torch.float32), device=device)


# Any: tensors, or lists and arrays of their values.
def predicted(call: str, y: Any, t: Any, weights: Any) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, of the mixture if there are members, and the checked labels."""
    y = as_tensor(y)
    check_outputs(call, y, 1)
    t = as_tensor(t, y.device)
    has_members = y.dim() == t.dim() + 2
    t = check_labels(call, y, t, y.shape[has_members:-1])
    warn_probabilities(call, y)
    log_q = widen(y).log_softmax(-1)
    if has_members:
        return log_mixture(log_q, member_weights(y, weights)), t
    if weights is not None:
        raise LeafMismatchError(
            f"{call}: there are weights, and no members to weigh.",
            expected=f"logits of shape (E, *{list(t.shape)}, C)",
            got=f"shape {list(y.shape)}",
        )
    return log_q, t


def check_labels(call: str, y: Tensor, t: Tensor, shape: torch.Size) -> Tensor:
    """Return labels as int64, which must be integers of this shape that name the classes of outputs."""
    is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
    if not y.is_floating_point() or t.shape != shape or not is_integer:
        dtype = str(t.dtype).removeprefix("torch.")
        raise LeafMismatchError(
            f"{call}: the labels do not fit the outputs.",
            expected=f"integers of shape {list(shape)}, for {list(y.shape)}",
            got=f"{dtype} of shape {list(t.shape)}, for {y.dtype}",
        )
    if not t.numel():
        raise error(ValueError, f"{call}: there are no labels.", got=f"shape {list(t.shape)}")
    # Narrow integers cannot be compared with the number of classes.
    t = t.long()
    classes = y.shape[-1]

    def failure() -> ValueError:
        got = f"{int(t.min())} to {int(t.max())}" if has_values() else None
        return error(
            ValueError, f"{call}: a label is not the number of a class.", expected=f"0 <= t < {classes}", got=got
        )

    require_values((t >= 0) & (t < classes), failure)
    return t


def widen(y: Tensor) -> Tensor:
    """Return numbers in at least float32."""
    return y.to(torch.promote_types(y.dtype, torch.float32))


def as_real(values: Tensor) -> Tensor:
    """Return numbers of float32 at least; integers, which float32 may round, become float64."""
    if values.is_floating_point():
        return widen(values)
    return values.to(torch.float64)


def warn_probabilities(call: str, y: Tensor) -> None:
    """Warn if logits are probabilities: then the softmax would be taken of a softmax."""
    if not has_values() or y.is_meta or y.shape[-1] < 2 or not y.numel():
        return
    own = y.detach()
    if not bool(((own >= 0) & (own <= 1)).all()):
        return
    sums = widen(own).sum(-1)
    rounding = max(torch.finfo(y.dtype).eps * y.shape[-1], 1e-4)
    if bool(((sums - 1).abs() <= rounding).all()):
        message = explain(
            f"{call}: y looks like probabilities, and is read as logits.",
            expected="logits, as the model returns them",
            got="values from 0 to 1 that sum to 1 for each example",
            hint="give y.log(), whose softmax is y; a warnings filter hides this.",
        )
        warnings.warn(message, stacklevel=4)


# Any: a tensor, or a list or array of its values.
def member_weights(y: Tensor, weights: Any) -> Tensor:
    """Return the members' weights, summing to 1, as a column over the members of y."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    members = y.shape[0]
    if weights is None:
        w = torch.full((members,), 1 / members, dtype=dtype, device=y.device)
    else:
        if isinstance(weights, Tensor):
            w = weights
        else:
            w = torch.tensor(np.array(weights), dtype=torch.float64, device="cpu")
        _check_weights(w, members)
        # Divided before the sum, which may overflow, and before the cast, which may round all to 0.
        w = w.to(torch.promote_types(w.dtype, dtype)) / w.detach().amax()
        w = (w / w.sum()).to(y.device, dtype)
    return w.reshape(-1, *[1] * (y.dim() - 1))


def _check_weights(w: Tensor, members: int) -> None:
    """Raise unless there is a weight for each member; and, where values can be read, unless they have a sum."""
    if w.shape != (members,):
        raise LeafMismatchError(
            "weights: there is not one for each member.",
            expected=f"shape [{members}]",
            got=f"shape {list(w.shape)}",
        )
    if not has_values():
        return
    own = w.detach()
    are_valid = bool((own.isfinite() & (own >= 0)).all())
    if not are_valid or not bool((own > 0).any()):
        raise error(
            ValueError,
            "weights: they are out of range.",
            expected="finite, >= 0, and not all 0",
            got=brief(own.tolist()),
        )


def log_mixture(log_q: Tensor, w: Tensor) -> Tensor:
    """Return the log of the average of exp(log_q): logsumexp, but with a gradient where all members have -inf."""
    z = log_q + w.log()
    top = z.detach().amax(0)
    top = torch.where(top == -torch.inf, 0, top)
    total = (z - top).exp().sum(0)
    nothing = total == 0
    # The inner where also keeps the log of 0 out of the gradient.
    log_total = torch.where(nothing, 1, total).log()
    return torch.where(nothing, -torch.inf, log_total + top)


def check_outputs(call: str, y: Tensor, dims: int) -> None:
    """Raise unless outputs are numbers of at least one member, with so many dimensions."""
    if not y.is_floating_point() or y.dim() < dims or y.shape[0] == 0:
        raise LeafMismatchError(
            f"{call}: y is not the outputs of members.",
            expected=f"a floating-point tensor of {dims} or more dimensions, not empty in the first",
            got=f"shape {list(y.shape)}, {y.dtype}",
            hint="give raw outputs of shape (members, batch, classes), as Ensemble returns them.",
        )
