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
from itertools import repeat
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


def derive(key: Tensor, number: Tensor | int, salt: int) -> Tensor:
    """Return the keys of a key and numbers; different salts give different keys.

    Shapes:
        key (2,) and number (*S) give (*S, 2), int64.
    """
    if not isinstance(number, Tensor) and _is_read(key) and has_values():
        state, gamma = key.tolist()
        return torch.tensor(_derive_integers(state, gamma, number, salt))
    if _stays_plain():
        return _derive_plain(key, number, salt)
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
    """Return whether a compiler, a transform or another trace of the caller looks into the operations."""
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


def _derive(key: Tensor, number: Tensor | int, salt: int) -> Tensor:
    """Return the keys (*S, 2) of keys (*A, 2) and numbers (*B), which broadcast."""
    # The function below must not hold a tensor of a trace.
    tensors, fixed = ([number], 0) if isinstance(number, Tensor) else ([], number)
    size = torch.broadcast_shapes(key.shape[:-1], *[x.shape for x in tensors])

    def fill(out: Tensor, key: Tensor, number: Tensor | int = fixed) -> None:
        if not _is_read(out):
            out.copy_(_derive_plain(key, number, salt))
        elif out.numel() > 2 * _FEW:
            _derive_numpy(_unsigned(key), number, salt, _unsigned(out))
        else:
            pairs: list[list[int]] = key.expand(*size, 2).reshape(-1, 2).tolist()
            column: Any = number.expand(size).flatten().tolist() if isinstance(number, Tensor) else repeat(number)
            rows = [_derive_integers(state, gamma, n, salt) for (state, gamma), n in zip(pairs, column, strict=False)]
            out.numpy().reshape(-1)[:] = [word for row in rows for word in row]

    return _filled(fill, Size((*size, 2)), torch.int64, [key, *tensors])


def _words(key: Tensor, number: None, count: int) -> Tensor:
    """Return the words (*B, count) of keys (*B, 2)."""

    def fill(out: Tensor, key: Tensor) -> None:
        if _is_read(out) and _takes_numpy(out.numel()):
            words = _unsigned(out).reshape(key.shape[:-1].numel(), count)
            for _ in _blocks(_unsigned(key).reshape(-1, 2), count, words):
                pass
        else:
            out.copy_(_words_plain(key, count))

    return _filled(fill, Size((*key.shape[:-1], count)), torch.int64, [key])


def _mask(key: Tensor, number: int | None, what: Mask) -> Tensor:
    """Return the masks (*B, *size) of keys (*B, 2)."""

    def fill(out: Tensor, key: Tensor) -> None:
        if not _is_read(out) or what.dtype is torch.bfloat16 or not _takes_numpy(out.numel() // 2):
            out.copy_(_mask_plain(key, number, what))
            return
        keys = _unsigned(key).reshape(-1, 2)
        if number is not None and len(keys) > _FEW:
            keys = _derive_numpy(keys, number, FOLD, np.empty_like(keys))
        elif number is not None:
            pairs: list[list[int]] = keys.tolist()
            made = [[n & _WORD for n in _derive_integers(state, gamma, number, FOLD)] for state, gamma in pairs]
            keys = np.array(made, np.uint64)
        _mask_numpy(keys, out.numpy().reshape(len(keys), math.prod(what.size)), what)

    return _filled(fill, Size((*key.shape[:-1], *what.size)), what.dtype, [key])


def _filled(fill: Callable[..., None], size: Size, dtype: torch.dtype, reads: list[Tensor]) -> Tensor:
    """Return new memory that `fill` has written to, or writes to at each replay."""
    out = torch.empty(size, dtype=dtype, device=reads[0].device)
    call = deferral()
    if call is None:
        fill(out, *reads)
    else:
        call(lambda writes, reads: fill(*writes, *reads), [out], reads)
    return out


def _takes_numpy(count: int) -> bool:
    return count <= _MANY or torch.get_num_threads() < 3


def _is_read(tensor: Tensor) -> bool:
    """Return whether numpy and Python read a tensor's values, if it has any."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _unsigned(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint64)


# -- tensor operations ----------------------------------------------------------------------------------------------


def _derive_plain(key: Tensor, number: Tensor | int, salt: int) -> Tensor:
    number = number if isinstance(number, Tensor) else torch.full((), signed(number), device=key.device)
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


def _mix_integer(word: int, rounds: Sequence[tuple[int, int | None]]) -> int:
    word &= _WORD
    for count, factor in rounds:
        word ^= word >> count
        if factor is not None:
            word = word * factor & _WORD
    return word


# -- numpy ----------------------------------------------------------------------------------------------------------


def _derive_numpy(key: Words, number: Tensor | int, salt: int, out: Words) -> Words:
    # Lanes of the new state and the new gamma: the first hash of a lane starts from the other word of the key.
    numbers = _unsigned(number)[..., None] if isinstance(number, Tensor) else np.array([number & _WORD], np.uint64)
    lanes = _mix_numpy(np.add(numbers * _LANES, key[..., ::-1] ^ np.uint64(salt), out=np.empty_like(out)), _STATE)
    lanes[..., 0] ^= key[..., 0]
    lanes[..., 1] += key[..., 1]
    shifted = np.empty_like(lanes)
    for (count, factor), (other, own) in zip(_STATE, _GAMMA, strict=True):
        lanes ^= np.right_shift(lanes, np.array([count, other], np.uint64), out=shifted)
        if factor is not None and own is not None:
            lanes *= np.array([factor, own], np.uint64)
    gamma = lanes[..., 1] | np.uint64(1)
    few = np.bitwise_count(gamma ^ (gamma >> np.uint64(1))) < 24
    out[..., 0] = lanes[..., 0]
    out[..., 1] = np.where(few, gamma ^ np.uint64(_ODD_BITS), gamma)
    return out


# Any: an array of a floating dtype.
def _mask_numpy(keys: Words, out: Any, what: Mask) -> None:
    count, parts, kept = out.shape[1], what.in_word, out.dtype.type(what.kept)
    bits = np.int16 if what.bits is torch.int16 else np.int32
    for rows, columns, block in _blocks(keys, -(-count // parts)):
        place = out[rows, parts * columns.start : parts * columns.stop]
        np.multiply(block.view(bits)[:, : place.shape[1]] < what.bound, kept, out=place)


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
