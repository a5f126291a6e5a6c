"""The values of many leaves in one block of bytes: packed piece by piece, and cut apart without a copy."""

from collections.abc import Hashable, Iterator
from functools import lru_cache
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tdfunc.core.collection import PLAIN, Static, TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError
from tdfunc.storage.disk.raw import is_wrapped
from tdfunc.storage.safetensors.header import Layout, lay_out
from tdfunc.storage.safetensors.like import Found, found_in
from tdfunc.storage.safetensors.plan import is_plain
from tdfunc.storage.safetensors.read import view_leaves
from tdfunc.storage.tree.build import Classes, build_tree, flag_leaf, move_leaf
from tdfunc.storage.tree.decode import Description, check_unique, parse_tree
from tdfunc.storage.tree.encode import IS_VALUE, outline
from tdfunc.storage.tree.specs import Spec

# A leaf of this size goes from where it lies in memory; smaller ones are packed.
_PIECE_BYTES = 4 << 20
_MAX_KNOWN = 32
# All of a leaf that a description depends on.
_traits = attrgetter("dtype", "shape", "requires_grad", "layout", "device")
_known: dict[tuple[Hashable, ...], "Structure"] = {}


class Structure(NamedTuple):
    """A tree without its values: its description for another process, and the places of its leaves in a block."""

    text: bytes
    names: list[str]
    specs: list[Spec]
    layout: Layout
    # Equal for trees of the same paths, shapes and dtypes.
    digest: bytes

    @property
    def found(self) -> Found:
        """The shape and dtype of each leaf by its name."""
        return found_in(self.names, self.specs)


class Packed(NamedTuple):
    """A tree that is ready to be sent."""

    structure: Structure
    leaves: list[Tensor]

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes of the block, piece by piece; a large leaf is not copied."""
        order = self.structure.layout.order
        for begin, end, _ in pieces_of(self.structure):
            part = [self.leaves[i] for i in order[begin:end]]
            yield _join(part).view(torch.uint8)

    def fill(self, block: Tensor) -> None:
        """Write all bytes to the beginning of a tensor of bytes."""
        begin = 0
        for piece in self.pieces():
            block[begin : begin + len(piece)] = piece
            begin += len(piece)


@torch.no_grad()
def _join(part: list[Tensor]) -> Tensor:
    if len(part) == 1 and is_plain(part[0]):
        return part[0].detach().view(-1)
    return _flatten_dense_tensors([leaf.resolve_conj().resolve_neg() if leaf.is_complex() else leaf for leaf in part])


def pieces_of(structure: Structure) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of a block: the first leaf in file order, the one after the last, the bytes (of one dtype)."""
    order, specs = structure.layout.order, structure.specs
    begin, size_bytes = 0, 0
    for k, i in enumerate(order):
        spec = specs[i]
        if size_bytes and (size_bytes + spec.size_bytes > _PIECE_BYTES or spec.dtype is not specs[order[begin]].dtype):
            yield begin, k, size_bytes
            begin, size_bytes = k, 0
        if not size_bytes:
            begin = k
        size_bytes += spec.size_bytes
    if size_bytes:
        yield begin, len(order), size_bytes


def pack(tree: TensorCollection, call: str) -> Packed:
    """Describe a tree and lay it out.

    Raises:
        UnsupportedError: A leaf or value that JSON and bytes cannot hold; the message names it.
    """
    leaves: list[Tensor] = []
    parts: list[Hashable] = []
    key = tuple(parts) if _list(tree, leaves, parts) else None
    if key is None or key not in _known:
        out = outline(tree, call=call)
        assert out.text is not None
        # In any order of keys: a description has its own.
        lines = sorted(map(add, out.names, [spec.middle for spec in out.specs]))
        digest = xxhash.xxh3_64_digest("\n".join(lines).encode())
        layout = lay_out(out.names, out.specs)
        structure, leaves = Structure(out.text.encode(), out.names, out.specs, layout, digest), out.leaves
        if key is not None:
            # Trees of a loop have one structure.
            _known[key] = structure
            if len(_known) > _MAX_KNOWN:
                del _known[next(iter(_known))]
    else:
        structure = _known[key]
    if any(map(is_wrapped, leaves)):
        raise UnsupportedError(
            f"{call}: the leaves must have values of their own.", hint=f"call {call} outside of vmap and grad."
        )
    return Packed(structure, leaves)


def _list(tree: TensorCollection, leaves: list[Tensor], key: list[Hashable]) -> bool:
    """Append the leaves in tree order, and all that a description depends on; False for more than plain leaves."""
    static, data = tree._static or Static(), tree._data
    if tree._is_lazy or static.ties:
        return False
    nodes = [node for node in data.values() if isinstance(node, TensorCollection)]
    own = [node for node in data.values() if not isinstance(node, TensorCollection)] if nodes else list(data.values())
    if not PLAIN.issuperset(map(type, own)):
        return False
    kinds = tuple(static.kinds.items())
    places = tuple([isinstance(node, TensorCollection) for node in data.values()]) if nodes else ()
    key += [type(tree), tuple(data), places, tree._batch_size, tree._device, tree._names, kinds, static.own]
    key += [tuple(map(type, own)), tuple(map(_traits, own))]
    leaves += own
    return all([_list(node, leaves, key) for node in nodes])


@lru_cache(_MAX_KNOWN)
def _read(text: bytes) -> tuple[Description, Structure]:
    described = text.decode()
    plan = Description(parse_tree(described))
    check_unique(described, plan)
    names = plan.name_leaves()
    return plan, Structure(text, names, plan.specs, lay_out(names, plan.specs), b"")


def read_structure(text: bytes) -> Structure:
    """Return the structure that a description describes, without its digest."""
    return _read(text)[1]


def unpack(text: bytes, block: Tensor, classes: Classes = ()) -> TensorCollection:
    """Return the tree of a description around the bytes of a block, which its leaves share."""
    plan, structure = _read(text)
    size_bytes = structure.layout.size_bytes
    if block.numel() != size_bytes:
        raise CorruptCheckpointError(
            "a message must have the bytes of its leaves.", expected=f"{size_bytes}", got=f"{block.numel()}"
        )
    # Any: numpy's arrays offer their bytes.
    data: Any = block.numpy()
    leaves = view_leaves(data, plan.specs, structure.layout.begins)
    for i, flags in enumerate(plan.flags) if any(plan.flags) or any(plan.devices) else ():
        place = plan.place(i)
        leaf = leaves[i] if place is None else move_leaf(leaves[i], place)
        leaves[i] = flag_leaf(leaf, "" if IS_VALUE in flags else flags)
    return build_tree(plan, leaves, classes)
