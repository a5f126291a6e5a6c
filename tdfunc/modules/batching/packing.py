"""Packed sequences: torch's kernels read the lengths by address, which no tensor has in transforms and traces.

Here the kernels pack and pad the places of the numbers, outside of the transforms: the members share the lengths. The
numbers are then read at those places. A trace takes the lengths as constants; `jit` records again for others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode

from tdfunc.core.context import in_functorch, is_known, is_recording, outside
from tdfunc.modules.batching.fold import is_batched
from tdfunc.modules.batching.recurrent.levels import unwrap_gradient
from tdfunc.modules.batching.rule import Rule

_torch: Any = torch


def _hides_addresses() -> bool:
    """Return True if tensors have no address here: in transforms, and while a trace is recorded."""
    return in_functorch() or is_recording()


def _plain(tensor: Tensor) -> Tensor | None:
    """Return a tensor as no transform has wrapped it; None where torch's kernel can read it, or members differ."""
    if not _hides_addresses() or is_batched(tensor):
        return None
    if is_recording():
        # A trace knows constants; for other tensors `jit` raises its error.
        values = tensor.tolist()
        with outside():
            return torch.tensor(values, dtype=tensor.dtype)
    if not is_known(tensor):
        return None
    tensor = unwrap_gradient(tensor)
    return None if _functorch.is_functorch_wrapped_tensor(tensor) else tensor


def _here(tensor: Tensor) -> Tensor:
    """Return a tensor that was made outside, as a constant of the trace that runs, if one does."""
    if not is_recording():
        return tensor
    with outside():
        values = tensor.tolist()
    return torch.tensor(values, dtype=tensor.dtype, device=tensor.device)


def _pack(
    mode: TorchFunctionMode, func: Any, /, input: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    known = _plain(lengths)
    if known is None or input.dim() < 2 or not input.numel():
        return func(input, lengths, batch_first)
    with outside():
        places = torch.arange(input.shape[0] * input.shape[1], device="cpu").view(input.shape[:2])
        # The kernel also checks the lengths.
        order, batch_sizes = _torch._pack_padded_sequence(places, known, batch_first)
        order = order.to(input.device)
    return input.flatten(0, 1).index_select(0, _here(order)), _here(batch_sizes)


def _pad(
    mode: TorchFunctionMode, func: Any, /, data: Tensor, batch_sizes: Tensor, batch_first: bool,
    padding_value: float, total_length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    known = _plain(batch_sizes)
    if known is None or not data.dim() or not data.numel():
        return func(data, batch_sizes, batch_first, padding_value, total_length)
    with outside():
        places, lengths = _torch._pad_packed_sequence(
            torch.arange(len(data), device="cpu"), known, batch_first, -1, total_length
        )
        places = places.to(data.device)
        missing = places < 0
        order = places.clamp(min=0).flatten()
    rows = data.index_select(0, _here(order)).unflatten(0, places.shape)
    missing = _here(missing).view(*places.shape, *[1] * (data.dim() - 1))
    return rows.masked_fill(missing, padding_value), _here(lengths)


def reads_packed(module: nn.Module) -> bool:
    """Return True if a module has layers whose inputs may be packed."""
    return any([isinstance(part, nn.RNNBase) for part in module.modules()])


RULES: dict[Any, Rule] = {_torch._pack_padded_sequence: _pack, _torch._pad_packed_sequence: _pad}
