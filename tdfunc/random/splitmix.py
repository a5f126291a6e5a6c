"""SplitMix64: the keys that a key and numbers give, and the words and masks that a key gives, by the fastest way.

All ways give the same bits. Plain tensor operations run everywhere. On CPU tensors outside of transforms, a few keys
cost less in Python's integers, and everything else in numpy, block by block. A trace that takes deferred calls holds
one operation, inside transforms as well, which chooses at each replay.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with a gamma for each key.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor
from torch.autograd import Function

from tdfunc.core.context import deferral, has_values, in_functorch, is_compiling, is_tracing

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
# Different derivations of keys start from different constants, so that none gives the keys of another.
SEED, SPLIT, FOLD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
_WORD = (1 << 64) - 1
# Stafford's and Murmur's rounds: shift, and factor.
_STATE = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)
_GAMMA = (33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, None)
_SEED, _SPLIT = np.uint64(SEED), np.uint64(SPLIT)
# In rows for the state and the gamma.
_LANE_ROUNDS = [
    (np.array([[a], [b]], np.uint64), None if c is None or d is None else np.array([[c], [d]], np.uint64))
    for (a, c), (b, d) in zip(_STATE, _GAMMA, strict=True)
]
_ODD_BITS = 0xAAAAAAAAAAAAAAAA
# Up to so many keys, Python's integers cost less than calls of numpy.
_FEW = 8
# Words that stay in the processor's first caches.
_BLOCK = 8192
_INDEX = np.arange(1, _BLOCK + 1, dtype=np.uint64)
# Above it, three threads of torch take less time than numpy's one.
_MANY = 1 << 16


@dataclass(frozen=True)
class Mask:
    """A mask of dropout: `kept` where random bits, read as integers of a dtype, are below a bound, and 0 elsewhere."""

    size: tuple[int, ...]
    dtype: torch.dtype
    bits: torch.dtype
    bound: int
    kept: float

    @property
    def in_word(self) -> int:
        """How many numbers a word serves."""
        return 8 // self.bits.itemsize


def signed(number: int) -> int:
    """Return the int64 of the lowest 64 bits of an integer."""
    return (number + 2**63) % 2**64 - 2**63


def derive(key: Tensor, number: Tensor | int | tuple[int, ...], salt: int) -> Tensor:
    """Return the keys of a key and numbers; different salts give different keys.

    Args:
        key: The key.
        number: Numbers, or a shape of numbers that are counted from 0.
        salt: The constant that derivations of this kind start from.

    Shapes:
        key (2,) and number (*S) give (*S, 2), int64.
    """
    if isinstance(number, int) and _is_read(key) and has_values():
        state, gamma = key.tolist()
        return torch.tensor(_derive_integers(state, gamma, number, salt))
    if _stays_plain():
        return _derive_plain(key, number, salt)
    if isinstance(number, tuple):
        return _run(partial(_derive, salt=salt, counted=number), key, None)
    return _run(partial(_derive, salt=salt), key, number)


def words(key: Tensor, count: int) -> Tensor:
    """Return 64 random bits for each of so many numbers.

    Shapes:
        keys (*B, 2) give (*B, count), int64.
    """
    return _words_plain(key, count) if _stays_plain() else _run(partial(_words, count=count), key, None)


def half_words(key: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return 32 random bits for each number: halves of words.

    Shapes:
        keys (*B, 2) give (*B, *size), int32.
    """
    count = math.prod(size)
    return words(key, (count + 1) // 2).view(torch.int32)[..., :count].reshape((*key.shape[:-1], *size))


def half_bound(p: float) -> int:
    """Return the bound that half a word is below with probability p, to within 2^-24."""
    return (math.ceil(p * 2**24) - 2**23) << 8


def mask(key: Tensor, size: tuple[int, ...], p: float, dtype: torch.dtype, *, fold: int | None = None) -> Tensor:
    """Return 1 / p with probability p, and 0 elsewhere.

    A number takes 16 bits, and p is rounded to a multiple of 2^-16, in `1 / p` as well; near 0 and 1 it takes 32 bits.

    Args:
        key: The key.
        size: The shape of the result.
        p: The probability.
        dtype: A floating-point dtype.
        fold: The number that is folded into the key first.

    Shapes:
        key (2,) gives `size`.
    """
    steps = round(p * 2**16)
    if 2**7 <= steps <= 2**16 - 2**7:
        what = Mask(size, dtype, torch.int16, steps - 2**15, 2**16 / steps)
    else:
        what = Mask(size, dtype, torch.int32, half_bound(p), 1.0 / (p or 1.0))
    if what.bound == 2**31:
        return torch.full(size, what.kept, dtype=dtype, device=key.device)
    if _stays_plain():
        return _mask_plain(key, fold, what)
    return _run(partial(_mask, what=what), key, fold)


def shift(word: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (word >> count).bitwise_and_((1 << (64 - count)) - 1)


# -- ways -----------------------------------------------------------------------------------------------------------


def _stays_plain() -> bool:
    """Return True if a compiler, a transform or another trace of the caller looks into the operations."""
    return is_compiling() or ((in_functorch() or is_tracing()) and deferral() is None)


def _run(run: Callable[..., Tensor], key: Tensor, number: Tensor | int | None) -> Tensor:
    return _Batched.apply(key, number, run) if in_functorch() else run(key, number)


# Any: torch's protocol.
class _Batched(Function):
    """A function of keys (*A, 2) and numbers (*B) under transforms: their batch dimensions come first."""

    @staticmethod
    def forward(key: Any, number: Any, run: Any) -> Any:
        return run(key, number)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        (key, number, run), (key_dim, number_dim, _) = args, in_dims
        dims = key.dim() - 1 - (key_dim is not None)
        if isinstance(number, Tensor):
            dims = max(dims, number.dim() - (number_dim is not None))
        if key_dim is not None:
            key = key.movedim(key_dim, 0)
            key = key.reshape(key.shape[0], *[1] * (dims + 2 - key.dim()), *key.shape[1:])
        if number_dim is not None:
            number = number.movedim(number_dim, 0)
            number = number.reshape(number.shape[0], *[1] * (dims + 1 - number.dim()), *number.shape[1:])
        return _Batched.apply(key, number, run), 0


def _derive(key: Tensor, number: Tensor | int | None, salt: int, counted: tuple[int, ...] | None = None) -> Tensor:
    """Return the keys (*S, 2) of keys (*A, 2) and numbers (*B), which broadcast; counted numbers come after A."""
    # The function below must not hold a tensor of a trace.
    tensors, fixed = ([number], 0) if isinstance(number, Tensor) else ([], number)
    lead = [1] * len(counted or ())
    size = torch.broadcast_shapes((*key.shape[:-1], *lead), counted or (), *[x.shape for x in tensors])
    count = math.prod(size)

    def make(reads: list[Tensor]) -> list[Tensor]:
        key, *given = reads
        number: Any = given[0] if given else fixed if counted is None else counted
        if count <= _FEW and key.numel() == 2 and _is_read(key):
            state, gamma = key.flatten().tolist()
            column: Any = number.flatten().tolist() if isinstance(number, Tensor) else [number]
            made = [_derive_integers(state, gamma, n, salt) for n in (column if counted is None else range(count))]
            return [torch.tensor(made, dtype=torch.int64).view(*size, 2)]
        key = key.reshape(*key.shape[:-1], *lead, 2) if lead else key
        if not _is_read(key):
            return [_derive_plain(key, number, salt)]
        out = torch.empty((*size, 2), dtype=torch.int64, device="cpu")
        _derive_numpy(_unsigned(key), _words_of(number), salt, _unsigned(out))
        return [out]

    return _made(make, Size((*size, 2)), torch.int64, [key, *tensors])


def _words(key: Tensor, number: None, count: int) -> Tensor:
    """Return the words (*B, count) of keys (*B, 2)."""

    def make(reads: list[Tensor]) -> list[Tensor]:
        key, members = reads[0], reads[0].numel() // 2
        if not _is_read(key) or not _takes_numpy(members * count):
            return [_words_plain(key, count)]
        out = np.empty((members, count), np.uint64)
        for _ in _blocks(_unsigned(key).reshape(-1, 2), count, out):
            pass
        return [torch.from_numpy(out.view(np.int64)).view(*key.shape[:-1], count)]

    return _made(make, Size((*key.shape[:-1], count)), torch.int64, [key])


def _mask(key: Tensor, number: int | None, what: Mask) -> Tensor:
    """Return the masks (*B, *size) of keys (*B, 2)."""
    return _made(_Masks((number, what)), Size((*key.shape[:-1], *what.size)), what.dtype, [key])


class _Masks:
    """The call that makes masks of one key, each by the number that is folded into it."""

    def __init__(self, *parts: tuple[int | None, Mask]) -> None:
        self._parts = parts
        # By kind, the places of its masks among all.
        kinds: dict[Mask, list[int]] = {}
        for i, (_, what) in enumerate(parts):
            kinds.setdefault(what, []).append(i)
        self._kinds = list(kinds.items())
        self._numbers = [number for number, _ in parts]
        self._most = max([math.prod(what.size) for what in kinds])
        self._is_read = all([what.dtype is not torch.bfloat16 for what in kinds])

    def join(self, other: "_Masks") -> "_Masks":
        """Return the call that makes the masks of both, which costs less than two."""
        return _Masks(*self._parts, *other._parts)

    def __call__(self, reads: list[Tensor]) -> list[Tensor]:
        key, size = reads[0], reads[0].shape[:-1]
        if not self._is_read or not _is_read(key) or not _takes_numpy(key.numel() // 4 * self._most):
            return [_mask_plain(key, number, what) for number, what in self._parts]
        keys = _fold_numpy(_unsigned(key).reshape(-1, 2), self._numbers)
        if len(self._kinds) == 1:
            return self._make(keys, self._kinds[0][0], size)
        outs: dict[int, Tensor] = {}
        for what, places in self._kinds:
            outs |= zip(places, self._make(keys[places], what, size), strict=True)
        return [outs[i] for i in range(len(outs))]

    def _make(self, keys: Words, what: Mask, size: Size) -> list[Tensor]:
        # Memory of torch, which is aligned for the vectors of its kernels.
        made = torch.empty((len(keys), *size, *what.size), dtype=what.dtype, device="cpu")
        _mask_numpy(keys.reshape(-1, 2), made.numpy().reshape(keys.size // 2, math.prod(what.size)), what)
        return list(made.unbind(0))


def _fold_numpy(keys: Words, numbers: list[int | None]) -> Words:
    """Return the keys (K, E, 2) of keys (E, 2), with each of K numbers folded in, or None."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return np.stack([keys if number is None else _fold_numpy(keys, [number])[0] for number in numbers])
    if len(keys) * len(known) > _FEW:
        column = np.array([[number & _WORD] for number in known], np.uint64)
        return _derive_numpy(keys, column, FOLD, np.empty((len(known), *keys.shape), np.uint64))
    pairs: list[list[int]] = keys.tolist()
    made = [[_derive_integers(state, gamma, number, FOLD) for state, gamma in pairs] for number in known]
    return np.array(made, np.int64).view(np.uint64)


def _made(make: Callable[[list[Tensor]], list[Tensor]], size: Size, dtype: torch.dtype, reads: list[Tensor]) -> Tensor:
    """Return the first of the tensors that `make` returns, now or at each replay."""
    call = deferral()
    return make(reads)[0] if call is None else call(make, lambda: reads[0].new_empty(size, dtype=dtype), reads)


def _takes_numpy(count: int) -> bool:
    return count <= _MANY or torch.get_num_threads() < 3


def _is_read(tensor: Tensor) -> bool:
    """Return True if numpy and Python read a tensor's values, if it has any."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _unsigned(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint64)


# -- tensor operations ----------------------------------------------------------------------------------------------


def _derive_plain(key: Tensor, number: Tensor | int | tuple[int, ...], salt: int) -> Tensor:
    if isinstance(number, tuple):
        number = torch.arange(math.prod(number), device=key.device).reshape(number)
    elif not isinstance(number, Tensor):
        number = torch.full((), signed(number), device=key.device)
    (state, gamma), salt = key.unbind(-1), signed(salt)
    new_state = _mix(_mix(number * signed(SEED) + (gamma ^ salt)) ^ state)
    new_gamma = _mix(_mix(number * signed(SPLIT) + (state ^ salt)) + gamma, _GAMMA) | 1
    # A gamma of few changes between neighbouring bits hardly mixes (section 5 of the paper).
    few = _count_bits(new_gamma ^ shift(new_gamma, 1)) < 24
    return torch.stack([new_state, torch.where(few, new_gamma ^ signed(_ODD_BITS), new_gamma)], -1)


def _mix(word: Tensor, rounds: Sequence[tuple[int, int | None]] = _STATE) -> Tensor:
    """Hash words one to one, in their own memory."""
    for count, factor in rounds:
        word = word.bitwise_xor_(shift(word, count))
        word = word if factor is None else word.mul_(signed(factor))
    return word


def _count_bits(word: Tensor) -> Tensor:
    """Count the bits of each word (Warren, "Hacker's delight", section 5-1)."""
    word = word - (shift(word, 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + (shift(word, 2) & 0x3333333333333333)
    word = (word + shift(word, 4)) & 0x0F0F0F0F0F0F0F0F
    return shift(word * 0x0101010101010101, 56)


def _words_plain(key: Tensor, count: int) -> Tensor:
    index = torch.arange(1, count + 1, device=key.device)
    return _mix(index * key[..., 1:] + key[..., :1])


def _mask_plain(key: Tensor, number: int | None, what: Mask) -> Tensor:
    key = key if number is None else _derive_plain(key, number, FOLD)
    count = math.prod(what.size)
    drawn = _words_plain(key, -(-count // what.in_word)).view(what.bits)[..., :count]
    return (drawn < what.bound).to(what.dtype).mul_(what.kept).reshape(*key.shape[:-1], *what.size)


# -- Python's integers ----------------------------------------------------------------------------------------------


def _derive_integers(state: int, gamma: int, number: int, salt: int) -> tuple[int, int]:
    state, gamma = state & _WORD, gamma & _WORD
    new_state = _mix_integer(_mix_integer(number * SEED + (gamma ^ salt)) ^ state)
    word = _mix_integer(number * SPLIT + (state ^ salt)) + gamma & _WORD
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    new_gamma = (word ^ word >> 33) | 1
    if (new_gamma ^ (new_gamma >> 1)).bit_count() < 24:
        new_gamma ^= _ODD_BITS
    return signed(new_state), signed(new_gamma)


def _mix_integer(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


# -- numpy ----------------------------------------------------------------------------------------------------------


def _words_of(number: Any) -> Words:
    if isinstance(number, tuple):
        return np.arange(math.prod(number), dtype=np.uint64).reshape(number)
    return _unsigned(number) if isinstance(number, Tensor) else np.array(number & _WORD, np.uint64)


def _derive_numpy(keys: Words, numbers: Words, salt: int, out: Words) -> Words:
    """Fill the keys (*S, 2) of keys (*A, 2) and numbers (*B), which broadcast."""
    state, gamma = keys[..., 0], keys[..., 1]
    lanes = np.empty((2, *out.shape[:-1]), np.uint64)
    # The first hash of a lane starts from the other word of the key.
    for lane, factor, other in ((lanes[0], _SEED, gamma), (lanes[1], _SPLIT, state)):
        np.add(numbers * factor, other ^ np.uint64(salt), out=lane)
    flat = lanes.reshape(2, -1)
    shifted = np.empty_like(flat)
    _mix_numpy(flat, shifted, _STATE)
    lanes[0] ^= state
    lanes[1] += gamma
    new_state, new_gamma = _mix_numpy(flat, shifted, _LANE_ROUNDS)
    new_gamma |= np.uint64(1)
    few = np.bitwise_count(new_gamma ^ (new_gamma >> np.uint64(1))) < 24
    pairs = out.reshape(-1, 2)
    pairs[:, 0] = new_state
    np.bitwise_xor(new_gamma, few * np.uint64(_ODD_BITS), out=pairs[:, 1])
    return out


# Any: an array of a floating dtype.
def _mask_numpy(keys: Words, out: Any, what: Mask) -> None:
    """Fill the masks (E, count) of keys (E, 2)."""
    count, parts, kept = math.prod(what.size), what.in_word, out.dtype.type(what.kept)
    kind = np.int16 if what.bits is torch.int16 else np.int32
    for rows, columns, block in _blocks(keys, -(-count // parts)):
        place = out[rows, parts * columns.start : parts * columns.stop]
        np.multiply(block.view(kind)[:, : place.shape[1]] < what.bound, kept, out=place)


def _blocks(keys: Words, count: int, out: Words | None = None) -> Iterator[tuple[slice, slice, Words]]:
    """Yield words of keys (E, 2), as many at a time as stay in the cache: which keys, which numbers, and the words.

    The words are in `out`, or overwritten by the next.
    """
    at_once, state, gamma = max(1, _BLOCK // max(1, count)), keys[:, :1], keys[:, 1:]
    size = (2, min(at_once, len(keys)), min(count, _BLOCK))
    memory = _unsigned(torch.empty(size, dtype=torch.int64, device="cpu"))
    for begin in range(0, count, _BLOCK):
        columns = slice(begin, min(begin + _BLOCK, count))
        index = _INDEX[: columns.stop - begin]
        for i in range(0, len(keys), at_once):
            rows = slice(i, min(i + at_once, len(keys)))
            block, shifted = memory[:, : rows.stop - i, : len(index)]
            block = np.multiply(index, gamma[rows], out=block if out is None else out[rows, columns])
            block += state[rows] + gamma[rows] * np.uint64(begin) if begin else state[rows]
            yield rows, columns, _mix_numpy(block, shifted, _STATE)


# Any: numbers, or a column of two.
def _mix_numpy(word: Words, shifted: Words, rounds: Sequence[tuple[Any, Any]]) -> Words:
    """Hash words one to one, in their own memory."""
    for count, factor in rounds:
        word ^= np.right_shift(word, count, out=shifted)
        if factor is not None:
            word *= factor
    return word
