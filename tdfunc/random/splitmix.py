"""SplitMix64: the keys that a key and numbers give, and the words and masks that a key gives, by the fastest way.

All ways give the same bits. Plain tensor operations run everywhere. On CPU tensors outside of transforms, a few keys
cost less in Python's integers, and everything else in numpy, block by block. A trace that takes deferred calls holds
one operation, inside transforms as well, which chooses at each replay.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with a gamma for each key.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
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
SEED = 0x9E3779B97F4A7C15
SPLIT = 0xD1B54A32D192ED03
FOLD = 0x8CB92BA72F3D8DD7
_WORD = (1 << 64) - 1
# Stafford's and Murmur's rounds: shift, and factor.
_STATE = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)
_GAMMA = (33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, None)
# Arrays, which numpy reads twice as fast as numbers.
_SEED = np.array(SEED, np.uint64)
_SPLIT = np.array(SPLIT, np.uint64)
_ROUNDS = [(np.array(a, np.uint64), None if b is None else np.array(b, np.uint64)) for a, b in _STATE]
# In rows for the state and the gamma.
_LANE_ROUNDS = [
    (np.array([[a], [b]], np.uint64), None if c is None or d is None else np.array([[c], [d]], np.uint64))
    for (a, c), (b, d) in zip(_STATE, _GAMMA, strict=True)
]
_ODD_BITS = 0xAAAAAAAAAAAAAAAA
# Up to so many keys, Python's integers cost less than calls of numpy, whose code a step finds in no cache.
_FEW = 32
# Words that stay in the processor's first caches.
_BLOCK = 16384
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

    Args:
        key: The key.
        number: One number, or many.
        salt: The constant that derivations of this kind start from.

    Shapes:
        key (2,) and number (*S) give (*S, 2), int64.
    """
    if isinstance(number, int) and _is_read(key) and has_values():
        return _derive_integers(key, [number], salt)
    if _stays_plain():
        return _derive_plain(key, number, salt)
    return _run(partial(_derive, salt=salt), key, number)


def words(key: Tensor, count: int) -> Tensor:
    """Return 64 random bits for each of so many numbers.

    Shapes:
        keys (*B, 2) give (*B, count), int64.
    """
    if _stays_plain():
        return _words_plain(key, count)
    return _run(partial(_words, count=count), key, None)


def half_words(key: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return 32 random bits for each number: halves of words.

    Shapes:
        keys (*B, 2) give (*B, *size), int32.
    """
    count = math.prod(size)
    # numpy's arrays of zero words have strides of which torch 2.13 takes no view of another dtype.
    drawn = words(key, max(1, (count + 1) // 2))
    halves = drawn.view(torch.int32)[..., :count]
    return halves.reshape((*key.shape[:-1], *size))


def half_bound(p: float) -> int:
    """Return the bound that half a word is below with probability p, to within 2^-24."""
    return (math.ceil(p * 2**24) - 2**23) << 8


def mask(key: Tensor, size: tuple[int, ...], p: float, dtype: torch.dtype, *, number: int = 0) -> Tensor:
    """Return 1 / p with probability p, and 0 elsewhere.

    A number takes 16 bits, and p is rounded to a multiple of 2^-16, in `1 / p` as well; near 0 and 1 it takes 32 bits.
    Masks of one key read its words from other places on, which no other draw of the key reads.

    Args:
        key: The key.
        size: The shape of the result.
        p: The probability.
        dtype: A floating-point dtype.
        number: Which of the masks of the key.

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
    jump = signed(SEED * (number + 1))
    if _stays_plain():
        return _mask_plain(key, jump, what)
    return _run(partial(_mask, what=what), key, jump)


def mask_by(key: Tensor, size: tuple[int, ...], p: Tensor, dtype: torch.dtype, *, number: int = 0) -> Tensor:
    """Return the numbers of `mask` for a probability that is a tensor without dimensions, whose value is not read."""
    p = p.detach().double()
    jump = signed(SEED * (number + 1))
    state, gamma = key.unbind(-1)
    key = torch.stack([state + gamma * jump, gamma], -1)
    count = math.prod(size)
    # As `mask` for this probability would draw: 16 bits a number, near 0 and 1 it has 32.
    steps = (p * 2**16).round()
    half = _words_plain(key, -(-count // 2)).view(torch.int32)[..., :count]
    quarter = _words_plain(key, -(-count // 4)).view(torch.int16)[..., :count]
    is_coarse = (steps >= 2**7) & (steps <= 2**16 - 2**7)
    kept_coarse = quarter < steps - 2**15
    kept_fine = half.double() < ((p * 2**24).ceil() - 2**23) * 2**8
    kept = torch.where(is_coarse, kept_coarse, kept_fine)
    scale_coarse = 2**16 / steps.clamp(min=1)
    scale_fine = 1.0 / torch.where(p > 0, p, 1.0)
    scale = torch.where(is_coarse, scale_coarse, scale_fine)
    # Kernels multiply 16-bit numbers in float32.
    scale = scale.to(torch.promote_types(dtype, torch.float32)).to(dtype)
    return (kept.to(dtype) * scale).reshape(*key.shape[:-1], *size)


def shift(word: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (word >> count).bitwise_and_((1 << (64 - count)) - 1)


# -- ways -----------------------------------------------------------------------------------------------------------


def _stays_plain() -> bool:
    """Return True if a compiler, a transform or another trace of the caller looks into the operations."""
    return is_compiling() or ((in_functorch() or is_tracing()) and deferral() is None)


def _run(run: Callable[..., Tensor], key: Tensor, number: Tensor | int | None) -> Tensor:
    if in_functorch():
        return _Batched.apply(key, number, run)
    return run(key, number)


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
        key, number, run = args
        key_dim, number_dim, _ = in_dims
        # The dimensions that keys and numbers broadcast to, without the one that is mapped.
        dims = key.dim() - 1 - (key_dim is not None)
        if isinstance(number, Tensor):
            dims = max(dims, number.dim() - (number_dim is not None))
        if key_dim is not None:
            key = _put_first(key, key_dim, dims + 2)
        if number_dim is not None:
            number = _put_first(number, number_dim, dims + 1)
        return _Batched.apply(key, number, run), 0


def _put_first(x: Tensor, dim: int, dims: int) -> Tensor:
    """Return a view with a dimension in first place, and after it as many new ones as make `dims` in all."""
    x = x.movedim(dim, 0)
    new = [1] * (dims - x.dim())
    return x.reshape(x.shape[0], *new, *x.shape[1:])


def _derive(key: Tensor, number: Tensor | int, salt: int) -> Tensor:
    """Return the keys (*S, 2) of keys (*A, 2) and numbers (*B), which broadcast."""
    # The function below must not hold a tensor of a trace: it gets a number that is one from its arguments.
    tensors: list[Tensor] = []
    fixed = 0
    if isinstance(number, Tensor):
        tensors = [number]
    else:
        fixed = number
    size = torch.broadcast_shapes(key.shape[:-1], *[x.shape for x in tensors])

    def make(reads: list[Tensor]) -> list[Tensor]:
        key = reads[0]
        number = reads[1] if len(reads) > 1 else fixed
        if not _is_read(key):
            return [_derive_plain(key, number, salt)]
        if 0 < size.numel() <= _FEW and key.numel() == 2:
            if isinstance(number, Tensor):
                column = number.flatten().tolist()
            else:
                column = [number]
            return [_derive_integers(key, column, salt).view(*size, 2)]
        out = torch.empty((*size, 2), dtype=torch.int64, device="cpu")
        if isinstance(number, Tensor):
            words = _unsigned(number)
        else:
            words = np.array(number & _WORD, np.uint64)
        _derive_numpy(_unsigned(key), words, salt, _unsigned(out))
        return [out]

    return _made(make, Size((*size, 2)), torch.int64, [key, *tensors])


def _words(key: Tensor, number: None, count: int) -> Tensor:
    """Return the words (*B, count) of keys (*B, 2)."""

    def make(reads: list[Tensor]) -> list[Tensor]:
        key = reads[0]
        members = reads[0].numel() // 2
        if not _is_read(key) or not _takes_numpy(members * count):
            return [_words_plain(key, count)]
        out = np.empty((members, count), np.uint64)
        keys = _unsigned(key).reshape(-1, 2)
        for _ in _blocks(keys[:, :1], keys[:, 1:], count, out):
            pass
        return [torch.from_numpy(out.view(np.int64)).view(*key.shape[:-1], count)]

    return _made(make, Size((*key.shape[:-1], count)), torch.int64, [key])


def _mask(key: Tensor, jump: int, what: Mask) -> Tensor:
    """Return the masks (*B, *size) of keys (*B, 2)."""
    return _made(_Masks((jump, what)), Size((*key.shape[:-1], *what.size)), what.dtype, [key])


# Masks of one kind: the kind, its numpy dtype, the places of the masks among all, and where each begins in the words.
# A plain tuple for speed: each mask makes one. Any: a floating dtype.
_Kind: TypeAlias = tuple[Mask, np.dtype[Any], list[int], list[int]]


class _Masks:
    """The call that makes masks of one key, each from another place in its words on."""

    def __init__(self, *parts: tuple[int, Mask]) -> None:
        self._parts = parts
        # By kind, the places of its masks among all.
        kinds: dict[Mask, list[int]] = {}
        for i, (_, what) in enumerate(parts):
            kinds.setdefault(what, []).append(i)
        self._kinds: list[_Kind] = []
        for what, places in kinds.items():
            # numpy has no bfloat16, and warns of a number that a dtype does not hold.
            if what.dtype is torch.bfloat16 or what.kept > torch.finfo(what.dtype).max:
                continue
            dtype = np.dtype(str(what.dtype).removeprefix("torch."))
            jumps = [parts[i][0] for i in places]
            self._kinds.append((what, dtype, places, jumps))
        # The numbers of the largest mask.
        self._most = max([math.prod(what.size) for what in kinds])
        # Whether numpy makes all kinds.
        self._is_read = len(self._kinds) == len(kinds)

    def join(self, other: "_Masks") -> "_Masks":
        """Return the call that makes the masks of both, which costs less than two."""
        return _Masks(*self._parts, *other._parts)

    def __call__(self, reads: list[Tensor]) -> list[Tensor]:
        key = reads[0]
        if not self._is_read or not _is_read(key) or not _takes_numpy(key.numel() // 4 * self._most):
            return [_mask_plain(key, jump, what) for jump, what in self._parts]
        outs: dict[int, Tensor] = {}
        for what, dtype, places, jumps in self._kinds:
            made = np.empty((len(places), *key.shape[:-1], *what.size), dtype)
            begin, step = _jump(key, jumps)
            _mask_numpy(begin, step, made.reshape(len(begin), math.prod(what.size)), what)
            outs |= zip(places, map(torch.from_numpy, made), strict=True)
        return [outs[i] for i in range(len(outs))]


def _jump(key: Tensor, jumps: list[int]) -> Words:
    """Return where masks of keys (*B, 2) begin, and the steps of the keys: columns (2, R, 1), in the order of jumps."""
    words: list[int] = key.flatten().tolist()
    pairs = [*zip(words[::2], words[1::2], strict=True)]
    begins: list[int] = []
    for jump in jumps:
        begins += [state + gamma * jump & _WORD for state, gamma in pairs]
    steps = [gamma & _WORD for _, gamma in pairs] * len(jumps)
    return np.array([begins, steps], np.uint64)[..., None]


def _made(make: Callable[[list[Tensor]], list[Tensor]], size: Size, dtype: torch.dtype, reads: list[Tensor]) -> Tensor:
    """Return the first of the tensors that `make` returns, now or at each replay."""
    call = deferral()
    if call is None:
        return make(reads)[0]
    return call(make, lambda: reads[0].new_empty(size, dtype=dtype), reads)


def _takes_numpy(count: int) -> bool:
    return count <= _MANY or torch.get_num_threads() < 3


def _is_read(tensor: Tensor) -> bool:
    """Return True if numpy and Python read a tensor's values, if it has any."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _unsigned(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint64)


# -- tensor operations ----------------------------------------------------------------------------------------------


def _derive_plain(key: Tensor, number: Tensor | int, salt: int) -> Tensor:
    if not isinstance(number, Tensor):
        number = torch.full((), signed(number), device=key.device)
    state, gamma = key.unbind(-1)
    salt = signed(salt)
    new_state = _mix(_mix(number * signed(SEED) + (gamma ^ salt)) ^ state)
    new_gamma = _mix(_mix(number * signed(SPLIT) + (state ^ salt)) + gamma, _GAMMA) | 1
    # A gamma of few changes between neighbouring bits hardly mixes (section 5 of the paper).
    few = _count_bits(new_gamma ^ shift(new_gamma, 1)) < 24
    return torch.stack([new_state, torch.where(few, new_gamma ^ signed(_ODD_BITS), new_gamma)], -1)


def _mix(word: Tensor, rounds: Sequence[tuple[int, int | None]] = _STATE) -> Tensor:
    """Hash words one to one, in their own memory."""
    for count, factor in rounds:
        word = word.bitwise_xor_(shift(word, count))
        if factor is not None:
            word = word.mul_(signed(factor))
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


def _mask_plain(key: Tensor, jump: int, what: Mask) -> Tensor:
    state, gamma = key.unbind(-1)
    count = math.prod(what.size)
    key = torch.stack([state + gamma * jump, gamma], -1)
    drawn = _words_plain(key, -(-count // what.in_word)).view(what.bits)[..., :count]
    return (drawn < what.bound).to(what.dtype).mul_(what.kept).reshape(*key.shape[:-1], *what.size)


# -- Python's integers ----------------------------------------------------------------------------------------------


def _derive_integers(key: Tensor, numbers: Iterable[int], salt: int) -> Tensor:
    """Return the keys of one key and numbers, in a row."""
    state, gamma = [word & _WORD for word in key.flatten().tolist()]
    first = gamma ^ salt
    second = state ^ salt
    words = array("Q")
    for number in numbers:
        new_state = _mix_integer(_mix_integer(number * SEED + first & _WORD) ^ state)
        word = _mix_integer(number * SPLIT + second & _WORD) + gamma & _WORD
        # The rounds of `_GAMMA`, written out for speed.
        word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
        word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
        word = (word ^ word >> 33) | 1
        if (word ^ word >> 1).bit_count() < 24:
            word ^= _ODD_BITS
        words.append(new_state)
        words.append(word)
    return torch.frombuffer(words, dtype=torch.int64)


def _mix_integer(word: int) -> int:
    # The rounds of `_STATE`, written out for speed.
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


# -- numpy ----------------------------------------------------------------------------------------------------------


def _derive_numpy(keys: Words, numbers: Words, salt: int, out: Words) -> Words:
    """Fill the keys (*S, 2) of keys (*A, 2) and numbers (*B), which broadcast."""
    state = keys[..., 0]
    gamma = keys[..., 1]
    lanes = np.empty((2, *out.shape[:-1]), np.uint64)
    # The first hash of a lane starts from the other word of the key.
    start = np.uint64(salt)
    np.add(numbers * _SEED, gamma ^ start, out=lanes[0])
    np.add(numbers * _SPLIT, state ^ start, out=lanes[1])
    flat = lanes.reshape(2, -1)
    shifted = np.empty_like(flat)
    _mix_numpy(flat, shifted, _ROUNDS)
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
def _mask_numpy(begin: Words, step: Words, out: Any, what: Mask) -> None:
    """Fill the masks (R, count) of columns (R, 1), as `_blocks` reads them."""
    parts = what.in_word
    kind = np.int16 if what.bits is torch.int16 else np.int32
    bound = np.array(what.bound, kind)
    kept = np.array(what.kept, out.dtype)
    for rows, columns, block in _blocks(begin, step, -(-out.shape[1] // parts)):
        place = out[rows, parts * columns.start : parts * columns.stop]
        # In two passes, of which the first converts: fewer instructions than their product, which converts in pieces.
        np.copyto(place, block.view(kind)[:, : place.shape[1]] < bound)
        np.multiply(place, kept, place)


def _blocks(begin: Words, step: Words, count: int, out: Words | None = None) -> Iterator[tuple[slice, slice, Words]]:
    """Yield words hash(begin + i * step) of columns (R, 1), as many as stay in the cache: rows, numbers, the words.

    The words are in `out`, or overwritten by the next.
    """
    at_once = max(1, _BLOCK // max(1, count))
    memory = np.empty((2, min(at_once, len(begin)), min(count, _BLOCK)), np.uint64)
    for first in range(0, count, _BLOCK):
        columns = slice(first, min(first + _BLOCK, count))
        index = _INDEX[: columns.stop - first]
        for i in range(0, len(begin), at_once):
            rows = slice(i, min(i + at_once, len(begin)))
            block, shifted = memory[:, : rows.stop - i, : len(index)]
            if out is not None:
                block = out[rows, columns]
            start = begin[rows]
            if first:
                start = start + step[rows] * np.uint64(first)
            np.multiply(index, step[rows], block)
            np.add(block, start, block)
            yield rows, columns, _mix_numpy(block, shifted, _ROUNDS)


# Any: numbers, or a column of two.
def _mix_numpy(word: Words, shifted: Words, rounds: Sequence[tuple[Any, Any]]) -> Words:
    """Hash words one to one, in their own memory."""
    for count, factor in rounds:
        np.bitwise_xor(word, np.right_shift(word, count, shifted), word)
        if factor is not None:
            np.multiply(word, factor, word)
    return word
