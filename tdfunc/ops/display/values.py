"""What the values of leaves are like: range, mean, a histogram, the share of NaN; large leaves by a sample."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc.ops.display.facts import UNINITIALIZED, ask, flat

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
# Up to this many elements all are looked at; of more, runs of neighbours spread evenly over the leaf.
EXACT, RUNS, RUN = 1 << 14, 128, 32
BINS = 16
HOME = "cpu"
_TENSOR: Any = Tensor


class Values(NamedTuple):
    """Statistics of the elements that were looked at; those that are finite, but for the two shares."""

    low: Any = None
    high: Any = None
    mean: float | None = None
    share_nan: float = 0.0
    share_inf: float = 0.0
    counts: tuple[int, ...] = ()
    # "sample", "local shard", "magnitude", ...: what the numbers are of, where it is not all elements.
    of: tuple[str, ...] = ()
    # One bool, number or the share of True: the text replaces the range.
    text: str | None = None


def values_of(leaves: Sequence[Any]) -> list[Values | None]:
    """Look at the values of leaves; None for those that have none to look at, or cannot be asked.

    What lies on an accelerator comes over in one copy for each device and dtype.
    """
    taken: list[tuple[Tensor, tuple[str, ...]] | None] = []
    with torch.no_grad():
        for leaf in leaves:
            try:
                taken.append(_take(leaf))
            except Exception:
                taken.append(None)
        here = _to_cpu([None if item is None else item[0] for item in taken])
    found: list[Values | None] = []
    for item, sample in zip(taken, here, strict=True):
        try:
            found.append(None if item is None or sample is None else _summary(sample, item[1]))
        except Exception:
            found.append(None)
    return found


def _take(leaf: Any) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return elements to look at, as a flat tensor, and what they are of."""
    if isinstance(leaf, tuple):
        parts = list(flat(leaf))  # pyright: ignore[reportUnknownArgumentType]
        step = max(1, len(parts) // 16)
        pieces = [_take(part) for part in parts[::step]]
        known = [piece for piece in pieces if piece is not None]
        if len(known) < len(pieces) or not known:
            return None
        noted = dict.fromkeys([note for _, notes in known for note in notes] + ["sample"] * (step > 1))
        return torch.cat([piece for piece, _ in known]), tuple(noted)
    if not isinstance(leaf, Tensor) or _functorch.is_functorch_wrapped_tensor(leaf):
        return None
    plain, note = (None, "") if isinstance(leaf, UNINITIALIZED) else _plain(leaf)
    if plain is None or plain.device.type == "meta":
        return None
    of = (note,) if note else ()
    if plain.numel() > EXACT:
        return _sample(plain), (*of, "sample")
    return plain.detach().reshape(-1), of


# Any: what kinds of tensors have beside the methods of all.
def _plain(leaf: Any) -> tuple[Tensor | None, str]:
    """Return the ordinary tensor that holds a leaf's values, and a note where it does not hold all of them."""
    kind, base = type(leaf), _TENSOR
    if ask(leaf, "placements") is not None:
        # Only what this process holds: an operation on the whole would wait for the other processes.
        return leaf.to_local(), "local shard"
    if leaf.is_nested:
        return (leaf._values if leaf.layout is torch.jagged else leaf.values()), ""
    if leaf.layout is not torch.strided:
        return (leaf._values() if leaf.layout is torch.sparse_coo else leaf.values()), "stored values"
    if leaf.is_quantized:
        return (leaf.dequantize() if leaf.numel() <= EXACT else None), "dequantised"
    # A class that intercepts operations may do anything with them, or hold no values: fake tensors.
    if kind not in (Tensor, Parameter) and kind.__torch_dispatch__ is not base.__torch_dispatch__:
        return None, ""
    return leaf.as_subclass(Tensor), ""


def _sample(leaf: Tensor) -> Tensor:
    """Return evenly spread runs of neighbouring elements: few pages of a file, and no one column."""
    # An odd step, so that rows of an even length are not always met at the same place.
    step = ((leaf.numel() - RUN) // (RUNS - 1) - 1) | 1
    if leaf.is_contiguous():
        return leaf.detach().view(-1).as_strided((RUNS, RUN), (step, 1)).reshape(-1)
    # In numpy: these are many small steps, and torch's threads would wait for each other.
    where = (np.arange(RUNS)[:, None] * step + np.arange(RUN)).reshape(-1)
    index = [torch.from_numpy(places).to(leaf.device) for places in np.unravel_index(where, tuple(leaf.shape))]
    return leaf.detach()[tuple(index)]


def _to_cpu(samples: Sequence[Tensor | None]) -> list[Tensor | None]:
    here = list(samples)
    groups: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        if sample is not None and sample.device.type != HOME:
            groups.setdefault((sample.device, sample.dtype), []).append(i)
    for places in groups.values():
        parts = [sample for i in places if (sample := samples[i]) is not None]
        try:
            moved: Sequence[Tensor | None] = torch.cat(parts).cpu().split([len(part) for part in parts])
        except Exception:
            moved = [None] * len(places)
        for i, part in zip(places, moved, strict=True):
            here[i] = part
    return here


def _summary(sample: Tensor, of: tuple[str, ...]) -> Values | None:
    if not len(sample):
        return Values(of=of, text="empty")
    sample = sample.resolve_conj().resolve_neg()
    if sample.dtype is torch.bool:
        true = int(sample.sum())
        if len(sample) == 1:
            return Values(of=of, text=str(bool(true)))
        return Values(False, True, true / len(sample), counts=(len(sample) - true, true), of=of)
    if sample.is_complex():
        sample, of = sample.abs(), (*of, "magnitude")
    # numpy knows neither bfloat16 nor the small floats.
    array: Any = sample.numpy() if not sample.is_floating_point() else sample.double().numpy()
    # Sums of large numbers overflow, which is no warning that the reader's own code deserves.
    with np.errstate(all="ignore"):
        return _describe(array, of)


def _describe(array: Any, of: tuple[str, ...]) -> Values:
    finite, nan, inf = array, 0.0, 0.0
    if array.dtype.kind == "f":
        nan, inf = float(np.isnan(array).mean()), float(np.isinf(array).mean())
        finite = array[np.isfinite(array)] if nan or inf else array
    if not len(finite):
        return Values(share_nan=nan, share_inf=inf, of=of)
    low, high = finite.min().item(), finite.max().item()
    mean = float(finite.mean(dtype=np.float64))
    if len(array) == 1:
        return Values(low, high, mean, of=of, text=number_text(low))
    return Values(low, high, mean, nan, inf, _histogram(finite, low, high), of)


def _histogram(finite: Any, low: Any, high: Any) -> tuple[int, ...]:
    width = float(high) - float(low)
    if not 0 < width < float("inf"):
        return ()
    bins = high - low + 1 if isinstance(low, int) and high - low < BINS else BINS
    place = (finite.astype(np.float64) - float(low)) * (bins / (width + (bins != BINS)))
    return tuple(np.bincount(np.clip(place, 0, bins - 1).astype(np.int64), minlength=bins).tolist())


def number_text(value: Any) -> str:
    """Return a number in four digits; whole numbers whole."""
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:.4g}"
