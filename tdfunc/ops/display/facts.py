"""What can be told of a node for people to read: it never raises, never writes, and costs the same for any size."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.types import Kind, Path

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = (Tensor, Parameter)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)


class Facts(NamedTuple):
    """A leaf in words; None and "" stand for what cannot be asked of it."""

    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    elements: int | None = None
    size_bytes: int | None = None
    # What its shape and dtype do not say: frozen, expanded, sparse, sharded, ...
    notes: tuple[str, ...] = ()


class Totals(NamedTuple):
    """Sums over the leaves of a tree, each tensor counted once; `complete` is False where the count was cut short."""

    leaves: int
    elements: int
    size_bytes: int
    complete: bool


def ask(obj: Any, *names: str) -> Any:
    """Return the first of these attributes that can be read (of methods: what they return), or None."""
    for name in names:
        # A wrapper may raise anything from anything.
        try:
            found = getattr(obj, name)
            return found() if callable(found) else found
        except Exception:
            continue
    return None


def printable(text: str, limit: int = 120) -> str:
    """Return text on one line that shows what it holds: no control characters, no more than `limit` characters."""
    if len(text) > limit:
        keep = limit // 2
        text = f"{text[:keep]}...{text[-keep // 2 :]} ({len(text):,} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def count_text(n: int, word: str) -> str:
    """Return `1 leaf`, `2 leaves`."""
    plural = {"leaf": "leaves", "entry": "entries"}.get(word, f"{word}s")
    return f"{n:,} {word if n == 1 else plural}"


def bytes_text(size: int) -> str:
    """Return a size in the unit that gives it three digits."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def kind_text(kind: Kind | None) -> str:
    """Return a kind in words."""
    return "" if kind is None else kind.value.replace("_", " ").replace("non persistent", "buffer, not saved")


# -- one leaf ---------------------------------------------------------------------------------------------------


def facts_of(leaf: Any) -> Facts:
    """Describe any node that is no tree: a tensor, the tensors of a lazy stack, non-tensor data, anything."""
    if isinstance(leaf, Tensor):
        return _tensor_facts(leaf)
    parts = list(flat(leaf))
    if isinstance(leaf, tuple) and parts and all([isinstance(part, Tensor) for part in parts]):
        return _ragged_facts(parts)
    return Facts(leaf_type(leaf))


def leaf_type(leaf: Any) -> str:
    """Return the class of a leaf; of non-tensor data the class of its value, or `list` where each row has one."""
    if isinstance(leaf, NonTensorBase):
        return type(leaf.data).__name__ if isinstance(leaf, NonTensorData) else "list"
    return type(leaf).__name__


def flat(leaf: Any) -> Iterator[Any]:
    """Yield the tensors of a leaf: several in a lazy stack."""
    if not isinstance(leaf, tuple):
        yield leaf
        return
    items: tuple[Any, ...] = leaf
    for item in items:
        yield from flat(item)


def _tensor_facts(leaf: Tensor) -> Facts:
    sizes = sizes_of(leaf)
    dtype, device = ask(leaf, "dtype"), ask(leaf, "device")
    return Facts(
        type(leaf).__name__,
        "not initialised" if sizes is None else f"[{', '.join(map(str, sizes))}]",
        str(dtype).removeprefix("torch."),
        str(device),
        *_amount(leaf),
        _notes(leaf),
    )


def _ragged_facts(parts: Sequence[Tensor]) -> Facts:
    """Describe the tensors of a lazy stack as one: sizes that differ are -1."""
    # Nearly always they are of a few kinds, of which one each is asked.
    kinds: dict[Any, list[Tensor]] = {}
    for part in parts:
        plain = type(part) in _PLAIN and part.layout is torch.strided and not part.is_nested
        key = (type(part), part.shape, part.dtype, part.device, part.requires_grad) if plain else id(part)
        kinds.setdefault(key, []).append(part)
    each = [(_tensor_facts(group[0]), sizes_of(group[0]), len(group)) for group in kinds.values()]
    sizes = [size for _, size, _ in each if size is not None]
    shape = "shapes differ"
    if len(sizes) == len(each) and len(set(map(len, sizes))) == 1:
        columns = zip(*sizes, strict=True)
        common = [column[0] if len(set(map(str, column))) == 1 else -1 for column in columns]
        shape = f"[{', '.join(map(str, common))}]"
    known = all(facts.elements is not None for facts, _, _ in each)
    return Facts(
        _agreed([facts.type for facts, _, _ in each]),
        f"{len(parts):,} x {shape}",
        _agreed([facts.dtype for facts, _, _ in each]),
        _agreed([facts.device for facts, _, _ in each]),
        sum((facts.elements or 0) * n for facts, _, n in each) if known else None,
        sum((facts.size_bytes or 0) * n for facts, _, n in each) if known else None,
        tuple(dict.fromkeys(note for facts, _, _ in each for note in facts.notes)),
    )


def _agreed(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else "differ"


def sizes_of(leaf: Tensor) -> list[Any] | None:
    """Return the shape, with -1 for a ragged dimension; None for a parameter that has none yet."""
    if isinstance(leaf, UNINITIALIZED):
        return None
    try:
        sizes = leaf.shape
        # A symbolic size has the name that its graph gives it; that of a nested tensor says nothing.
        return [int(s) if type(s) is int else (-1 if leaf.is_nested else str(s)) for s in sizes]
    except Exception:
        return _strided_sizes(leaf)


def _strided_sizes(leaf: Tensor) -> list[Any] | None:
    """Return the shape of a strided nested tensor, which torch refuses to give."""
    rows: Any = ask(leaf, "_nested_tensor_size")
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        return None
    lists = rows.tolist()
    return [len(lists), *[column[0] if len(set(column)) == 1 else -1 for column in zip(*lists, strict=True)]]


def _amount(leaf: Tensor) -> tuple[int | None, int | None]:
    """Return the number of elements and the bytes that they take; of a sparse tensor those that it stores."""
    if isinstance(leaf, UNINITIALIZED):
        return None, None
    try:
        elements = leaf.numel()
        # Traced sizes are symbols.
        return (elements, stored_bytes(leaf)) if type(elements) is int else (None, None)
    except Exception:
        return None, None


def stored_bytes(leaf: Tensor) -> int:
    """Return the bytes that the elements take; of a sparse tensor those that it stores, its indices among them."""
    return sum([part.numel() * part.element_size() for part in _stored(leaf)])


def _stored(leaf: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor is made of; others are made of themselves."""
    if leaf.layout not in _SPARSE:
        return [leaf]
    names = ("_values", "_indices") if leaf.layout is torch.sparse_coo else ("values", "crow_indices", "col_indices")
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("values", "ccol_indices", "row_indices")
    return [getattr(leaf, name)() for name in names]


def _notes(leaf: Tensor) -> tuple[str, ...]:
    try:
        return tuple(_find_notes(leaf))
    except Exception:
        return ()


def _find_notes(leaf: Tensor) -> Iterator[str]:
    if _functorch.is_functorch_wrapped_tensor(leaf):
        yield "vmapped" if _functorch.is_batchedtensor(leaf) else "in a transform"
    layout = ask(leaf, "layout")
    if layout is not None and layout is not torch.strided:
        yield str(layout).removeprefix("torch.").removeprefix("_").replace("_", " ")
    elif ask(leaf, "is_nested"):
        yield "nested"
    placements = ask(leaf, "placements")
    if placements is not None:
        yield printable(str(placements), 60)
    floating = isinstance(leaf, Parameter) and ask(leaf, "is_floating_point")
    if floating and not leaf.requires_grad:
        yield "frozen"
    elif leaf.requires_grad and not isinstance(leaf, Parameter):
        yield "requires grad"
    strides: Any = ask(leaf, "stride") if layout is torch.strided else None
    if strides is not None and any(
        [type(n) is int and n > 1 and s == 0 for n, s in zip(leaf.shape, strides, strict=True)]
    ):
        yield "expanded"
    if ask(leaf, "is_shared") and ask(leaf, "device") == torch.device("cpu"):
        yield "shared"


# -- what is no tensor ------------------------------------------------------------------------------------------

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 6


def value_text(leaf: Any) -> str:
    """Return the value of non-tensor data, or any object, on one short line."""
    if isinstance(leaf, NonTensorData):
        return _repr(leaf.data)
    if isinstance(leaf, NonTensorStack):
        shown = list(islice(leaf._array.flat, 7))
        text = ", ".join(map(_repr, shown[:6])) + (", ..." if len(shown) > 6 else "")
        return f"{list(leaf.shape)} values: {text}"
    return _repr(ask(leaf, "value") if isinstance(leaf, NonTensorBase) else leaf)


def repr_of(value: Any, write: Callable[[Any], str] = repr) -> str:
    """Return `repr(value)`, or that it raises: an object's own may."""
    try:
        return write(value)
    except Exception as err:
        inner = value.data if isinstance(value, NonTensorData) else value
        return f"<{type(inner).__name__}: its repr raises {type(err).__name__}>"


def _repr(value: Any) -> str:
    # It may be of any length.
    return printable(repr_of(value, _short.repr), 200)


# -- trees ------------------------------------------------------------------------------------------------------


def walk(tree: TensorCollection) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf and empty sub-tree with its path, in insertion order; trees may be of any depth."""
    stack: list[tuple[Path, Iterator[str], TensorCollection]] = [((), iter(tree._keys()), tree)]
    while stack:
        at, keys, node = stack[-1]
        key = next(keys, None)
        if key is None:
            stack.pop()
            continue
        child, path = node._get(key), (*at, key)
        if isinstance(child, TensorCollection) and any(True for _ in child._keys()):
            stack.append((path, iter(child._keys()), child))
        else:
            yield path, child


def walk_limited(tree: TensorCollection, limit: int) -> list[Path]:
    """Return the first paths of a tree, sub-trees included, level by level."""
    paths: list[Path] = []
    level: list[tuple[Path, TensorCollection]] = [((), tree)]
    while level:
        deeper: list[tuple[Path, TensorCollection]] = []
        for at, node in level:
            for key in islice(node._keys(), limit - len(paths)):
                paths.append((*at, key))
                child = node._get(key)
                if isinstance(child, TensorCollection):
                    deeper.append(((*at, key), child))
        level = deeper if len(paths) < limit else []
    return paths


def totals(tree: TensorCollection, limit: int) -> Totals:
    """Add up the tensors of a tree, looking at no more than `limit` of its leaves."""
    seen: set[int] = set()
    leaves = elements = size_bytes = visited = 0
    nodes: list[Any] = [tree]
    while nodes:
        node = nodes.pop()
        # By storage, not by key: a lazy stack's trees one by one. Values beside tensors are no leaves.
        for child in node._data.values():
            if isinstance(child, TensorCollection):
                nodes.append(child)
            visited += 1
            if isinstance(child, Tensor) and id(child) not in seen:
                seen.add(id(child))
                more, size = _plain_amount(child)
                leaves, elements, size_bytes = leaves + 1, elements + (more or 0), size_bytes + (size or 0)
            if visited > limit:
                return Totals(leaves, elements, size_bytes, False)
    return Totals(leaves, elements, size_bytes, True)


def _plain_amount(leaf: Tensor) -> tuple[int | None, int | None]:
    # What nearly all leaves are, without the questions.
    if type(leaf) in _PLAIN and leaf.layout is torch.strided and not leaf.is_nested:
        elements = leaf.numel()
        return elements, elements * leaf.element_size()
    return _amount(leaf)


def aliases(tree: TensorCollection) -> dict[Path, list[Path]]:
    """Return for each path of a tied tensor the other paths, the first one first."""
    return {path: [other for other in group if other != path] for group in tree._ties for path in group}
