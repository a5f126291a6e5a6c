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
_LANES = np.array([SEED, SPLIT], np.uint64)
_LANE_ROUNDS = [
    (np.array([a, b], np.uint64), None if c is None or d is None else np.array([c, d], np.uint64))
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

    def fill(writes: list[Tensor], reads: list[Tensor]) -> None:
        (out,), (key, *given) = writes, reads
        number: Any = given[0] if given else fixed if counted is None else counted
        is_one = key.numel() == 2
        if lead and not is_one:
            key = key.reshape(*key.shape[:-1], *lead, 2)
        if not _is_read(out):
            out.copy_(_derive_plain(key, number, salt))
        elif count <= _FEW and is_one:
            state, gamma = key.flatten().tolist()
            column: Any = number.flatten().tolist() if isinstance(number, Tensor) else [number]
            column = column if counted is None else range(count)
            out.numpy().reshape(-1)[:] = [word for n in column for word in _derive_integers(state, gamma, n, salt)]
        else:
            _derive_numpy(_unsigned(key), _words_of(number), salt, _unsigned(out))

    return _filled(fill, Size((*size, 2)), torch.int64, [key, *tensors])


def _words(key: Tensor, number: None, count: int) -> Tensor:
    """Return the words (*B, count) of keys (*B, 2)."""

    def fill(writes: list[Tensor], reads: list[Tensor]) -> None:
        (out,), (key,) = writes, reads
        if _is_read(out) and _takes_numpy(out.numel()):
            words = _unsigned(out).reshape(key.shape[:-1].numel(), count)
            for _ in _blocks(_unsigned(key).reshape(-1, 2), count, words):
                pass
        else:
            out.copy_(_words_plain(key, count))

    return _filled(fill, Size((*key.shape[:-1], count)), torch.int64, [key])


def _mask(key: Tensor, number: int | None, what: Mask) -> Tensor:
    """Return the masks (*B, *size) of keys (*B, 2)."""
    return _filled(_Masks(((number, what),)), Size((*key.shape[:-1], *what.size)), what.dtype, [key])


@dataclass(frozen=True)
class _Masks:
    """The call that fills masks of one key, each by the number that is folded into it."""

    parts: tuple[tuple[int | None, Mask], ...]

    def join(self, other: "_Masks") -> "_Masks":
        """Return the call that fills the masks of both, which costs less than two."""
        return _Masks((*self.parts, *other.parts))

    def __call__(self, writes: list[Tensor], reads: list[Tensor]) -> None:
        key, numbers = reads[0], [number for number, _ in self.parts if number is not None]
        if not all([_is_read(x) and x.dtype is not torch.bfloat16 and _takes_numpy(x.numel() // 2) for x in writes]):
            for out, (number, what) in zip(writes, self.parts, strict=True):
                out.copy_(_mask_plain(key, number, what))
            return
        keys = _unsigned(key).reshape(-1, 2)
        folded = iter(_fold_numpy(keys, numbers) if numbers else ())
        kinds: dict[Mask, list[tuple[Words, Any]]] = {}
        for out, (number, what) in zip(writes, self.parts, strict=True):
            row = keys if number is None else next(folded), out.numpy().reshape(len(keys), math.prod(what.size))
            kinds.setdefault(what, []).append(row)
        for what, rows in kinds.items():
            _mask_numpy(np.concatenate([own for own, _ in rows]), [out for _, out in rows], what)


def _fold_numpy(keys: Words, numbers: list[int]) -> Words:
    """Return the keys (K, E, 2) of keys (E, 2), with each of K numbers folded in."""
    if len(keys) * len(numbers) > _FEW:
        column = np.array([[number & _WORD] for number in numbers], np.uint64)
        return _derive_numpy(keys, column, FOLD, np.empty((len(numbers), *keys.shape), np.uint64))
    pairs: list[list[int]] = keys.tolist()
    made = [[_derive_integers(state, gamma, number, FOLD) for state, gamma in pairs] for number in numbers]
    return np.array(made, np.int64).view(np.uint64)


def _filled(
    fill: Callable[[list[Tensor], list[Tensor]], None], size: Size, dtype: torch.dtype, reads: list[Tensor]
) -> Tensor:
    """Return new memory that `fill` has written to, or writes to at each replay."""
    out = torch.empty(size, dtype=dtype, device=reads[0].device)
    call = deferral()
    if call is None:
        fill([out], reads)
    else:
        call(fill, [out], reads)
    return out


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
    new_state = _mix_integer(_mix_integer(number * SEED + (gamma ^ salt), _STATE) ^ state, _STATE)
    new_gamma = _mix_integer(_mix_integer(number * SPLIT + (state ^ salt), _STATE) + gamma, _GAMMA) | 1
    if (new_gamma ^ (new_gamma >> 1)).bit_count() < 24:
        new_gamma ^= _ODD_BITS
    return signed(new_state), signed(new_gamma)


# Any: a round without a factor ends the hash.
def _mix_integer(word: int, rounds: Any) -> int:
    (first, factor), (second, other), (third, _) = rounds
    word &= _WORD
    word = (word ^ word >> first) * factor & _WORD
    word = (word ^ word >> second) * other & _WORD
    return word ^ word >> third


# -- numpy ----------------------------------------------------------------------------------------------------------


def _words_of(number: Any) -> Words:
    if isinstance(number, tuple):
        return np.arange(math.prod(number), dtype=np.uint64).reshape(number)
    return _unsigned(number) if isinstance(number, Tensor) else np.array(number & _WORD, np.uint64)


def _derive_numpy(key: Words, numbers: Words, salt: int, out: Words) -> Words:
    # Lanes of the new state and the new gamma: the first hash of a lane starts from the other word of the key.
    start = key[..., ::-1] ^ np.uint64(salt)
    lanes = _mix_numpy(np.add(numbers[..., None] * _LANES, start, out=np.empty_like(out)), _STATE)
    lanes[..., 0] ^= key[..., 0]
    lanes[..., 1] += key[..., 1]
    shifted = np.empty_like(lanes)
    for shifts, factors in _LANE_ROUNDS:
        lanes ^= np.right_shift(lanes, shifts, out=shifted)
        if factors is not None:
            lanes *= factors
    gamma = lanes[..., 1] | np.uint64(1)
    few = np.bitwise_count(gamma ^ (gamma >> np.uint64(1))) < 24
    out[..., 0] = lanes[..., 0]
    out[..., 1] = np.where(few, gamma ^ np.uint64(_ODD_BITS), gamma)
    return out


# Any: arrays of a floating dtype.
def _mask_numpy(keys: Words, outs: list[Any], what: Mask) -> None:
    """Fill masks of E rows each, of as many keys as they have rows together."""
    (size, count), parts, kept = outs[0].shape, what.in_word, outs[0].dtype.type(what.kept)
    kind = np.int16 if what.bits is torch.int16 else np.int32
    for rows, columns, block in _blocks(keys, -(-count // parts)):
        bits = block.view(kind)
        for k in range(rows.start // size, -(-min(rows.stop, len(keys)) // size)):
            begin, end = max(rows.start, k * size), min(rows.stop, (k + 1) * size)
            place = outs[k][begin - k * size : end - k * size, parts * columns.start : parts * columns.stop]
            own = bits[begin - rows.start : end - rows.start, : place.shape[1]]
            np.multiply(own < what.bound, kept, out=place)


def _blocks(keys: Words, count: int, out: Words | None = None) -> Iterator[tuple[slice, slice, Words]]:
    """Yield words of keys (E, 2), as many at a time as stay in the cache: which keys, which numbers, and the words."""
    at_once = max(1, _BLOCK // max(1, count))
    for begin in range(0, count, _BLOCK):
        columns = slice(begin, min(begin + _BLOCK, count))
        for i in range(0, len(keys), at_once):
            rows = slice(i, i + at_once)
            state, gamma = keys[rows, :1], keys[rows, 1:]
            block = np.multiply(_INDEX[: columns.stop - begin], gamma, out=None if out is None else out[rows, columns])
            block += state + gamma * np.uint64(begin) if begin else state
            yield rows, columns, _mix_numpy(block, _STATE)


def _mix_numpy(word: Words, rounds: Sequence[tuple[int, int | None]]) -> Words:
    """Hash words one to one, in their own memory."""
    shifted = np.empty_like(word)
    for count, factor in rounds:
        word ^= np.right_shift(word, np.uint64(count), out=shifted)
        if factor is not None:
            word *= np.uint64(factor)
    return word
