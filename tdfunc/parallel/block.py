"""The values of many leaves in one block of bytes: packed piece by piece, and cut apart without a copy.

Messages, collectives and the parcels of worker processes use it; the first two send a tree's description before it.
"""

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tdfunc.core.collection import PLAIN, Static, TensorCollection
from tdfunc.core.context import in_functorch
from tdfunc.core.errors import UnsupportedError
from tdfunc.storage.disk.raw import is_wrapped
from tdfunc.storage.safetensors.header import Layout, lay_out
from tdfunc.storage.safetensors.like import Found, found_in
from tdfunc.storage.safetensors.read import view_leaves
from tdfunc.storage.tree.build import Classes, build_tree, flag_leaf, move_leaf
from tdfunc.storage.tree.decode import Description, check_unique, parse_tree
from tdfunc.storage.tree.encode import IS_VALUE, Outline, outline
from tdfunc.storage.tree.specs import Spec

# A leaf of this size goes from its place in memory; smaller ones are packed.
_PIECE_BYTES = 1 << 18
_MAX_KNOWN = 32
_CPU = torch.device("cpu")
# All of a leaf that a description depends on.
_TRAITS = [attrgetter(name) for name in ("dtype", "shape", "requires_grad", "is_cpu")]
_STRIDED = frozenset([torch.strided])
_layout = attrgetter("layout")
_is_cpu = attrgetter("is_cpu")
# By all that they depend on, and by the digest of their description.
_packed: dict[tuple[Hashable, ...], "Structure"] = {}
_read: dict[bytes, "Structure"] = {}


class Run(NamedTuple):
    """Leaves of one dtype that are packed together."""

    # Places in the order of the file: of the first leaf, and after the last.
    begin: int
    end: int
    size_bytes: int


class Block(NamedTuple):
    """The places of leaves in a block of bytes: leaves of one dtype are neighbours, and all leaves are aligned."""

    specs: Sequence[Spec]
    layout: Layout
    runs: list[Run]

    @property
    def size_bytes(self) -> int:
        """The length of the block."""
        return self.layout.size_bytes

    def pieces(self, leaves: Sequence[Tensor], device: torch.device = _CPU) -> Iterator[Tensor]:
        """Yield the bytes of the block on a device, piece by piece; a large leaf on that device is not copied."""
        order = self.layout.order
        for run in self.runs:
            yield _join([leaves[i] for i in order[run.begin : run.end]], device)

    def fill(self, leaves: Sequence[Tensor], wire: Tensor) -> None:
        """Write all bytes to the beginning of a tensor of bytes."""
        begin = 0
        for piece in self.pieces(leaves, wire.device):
            wire[begin : begin + len(piece)] = piece
            begin += len(piece)

    def cut(self, wire: Tensor) -> list[Tensor]:
        """Return the leaves, which share the memory of the block; its bytes may come later."""
        begins = self.layout.begins
        if wire.is_cpu:
            # Any: numpy's arrays offer their bytes.
            data: Any = wire.numpy()
            return view_leaves(data, self.specs, begins)
        # .data: not views of one tensor to autograd, so that each may be written to.
        return [
            wire[begin : begin + spec.size_bytes].view(spec.dtype).view(spec.size).data
            for spec, begin in zip(self.specs, begins, strict=True)
        ]


@torch.no_grad()
def _join(part: list[Tensor], device: torch.device) -> Tensor:
    if device.type != "cpu" or not all(map(_is_cpu, part)):
        part = [leaf.to(device) for leaf in part]
    if len(part) == 1:
        flat = part[0].detach().resolve_conj().resolve_neg().contiguous()
    else:
        flat = _flatten_dense_tensors(part)
    # `view` to bytes refuses the stride that a dimension of one element may have.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def make_block(specs: Sequence[Spec]) -> Block:
    """Lay out leaves of these dtypes and shapes."""
    layout = lay_out([""] * len(specs), specs)
    order = layout.order
    runs: list[Run] = []
    begin = 0
    size_bytes = 0
    for place, number in enumerate(order):
        spec = specs[number]
        # A leaf without bytes neither begins a run nor ends one.
        is_full = size_bytes + spec.size_bytes > _PIECE_BYTES
        is_other = spec.dtype is not specs[order[begin]].dtype
        if size_bytes and (is_full or is_other):
            runs.append(Run(begin, place, size_bytes))
            size_bytes = 0
        if not size_bytes:
            begin = place
        size_bytes += spec.size_bytes
    if size_bytes:
        runs.append(Run(begin, len(order), size_bytes))
    return Block(specs, layout, runs)


class Structure(NamedTuple):
    """A tree without its values: its description for another process, and the block of its leaves."""

    text: bytes
    names: list[str]
    block: Block
    # Equal for trees of the same paths, shapes and dtypes; the one of a tree which was read is not needed.
    digest: bytes = b""
    # The description, if it was read.
    plan: Description | None = None

    @property
    def found(self) -> Found:
        """The shape and dtype of each leaf by its name."""
        return found_in(self.names, self.block.specs)

    def build(self, leaves: list[Tensor], classes: Classes = ()) -> TensorCollection:
        """Return the tree around leaves that `block.cut` returned, once their bytes have arrived."""
        plan = self.plan
        assert plan is not None
        home = leaves[0].device if leaves else _CPU
        if home.type != "cpu":
            # The sender's GPU is another one than this rank's.
            plan = copy(plan)
            plan.devices = [home if place is not None and place.type == home.type else place for place in plan.devices]
        if any(plan.flags) or any(plan.devices):
            for i, flags in enumerate(plan.flags):
                leaf = leaves[i]
                place = plan.place(i)
                if place is not None:
                    leaf = move_leaf(leaf, place)
                leaves[i] = flag_leaf(leaf, "" if IS_VALUE in flags else flags)
        return build_tree(plan, leaves, classes)


class Packed(NamedTuple):
    """A tree that is ready to send."""

    structure: Structure
    leaves: list[Tensor]


def pack(tree: TensorCollection, call: str) -> Packed:
    """Describe a tree and lay it out.

    Raises:
        UnsupportedError: JSON and bytes cannot hold a leaf or value; the message names it.
    """
    leaves: list[Tensor] = []
    parts: list[Hashable] = []
    key = None
    if _list(tree, leaves, parts):
        key = tuple(parts)
    structure = None
    if key is not None:
        structure = _packed.get(key)
    if structure is None:
        outlined = outline(tree, call=call)
        leaves = outlined.leaves
        structure = _make_structure(outlined)
        if key is not None:
            _keep(_packed, key, structure)
    if in_functorch() and any(map(is_wrapped, leaves)):
        raise UnsupportedError(
            f"{call}: the leaves have no values inside a torch.func transform.",
            hint=f"call {call} outside of vmap and grad.",
        )
    return Packed(structure, leaves)


def _make_structure(outlined: Outline) -> Structure:
    assert outlined.text is not None
    # In any order of keys: a description has its own.
    lines = sorted(map(add, outlined.names, [spec.middle for spec in outlined.specs]))
    digest = xxhash.xxh3_64_digest("\n".join(lines).encode())
    return Structure(outlined.text.encode(), outlined.names, make_block(outlined.specs), digest)


def _list(tree: TensorCollection, leaves: list[Tensor], key: list[Hashable]) -> bool:
    """Append the leaves in tree order, and all that a description depends on; False for more than plain leaves."""
    static = tree._static or Static()
    data = tree._data
    if tree._is_lazy or static.ties:
        return False
    nodes = list[TensorCollection]()
    own = list(data.values())
    types = tuple(map(type, own))
    if not PLAIN.issuperset(types):
        nodes = [node for node in own if isinstance(node, TensorCollection)]
        own = [node for node in own if not isinstance(node, TensorCollection)]
        types = tuple(map(type, own))
    # Subclasses of tensors, and other layouts, have further traits.
    is_plain = PLAIN.issuperset(types) and _STRIDED.issuperset(map(_layout, own))
    if not is_plain:
        return False
    kinds = tuple(static.kinds.items())
    # Which of the keys lead to trees.
    places = ()
    if nodes:
        places = tuple([isinstance(node, TensorCollection) for node in data.values()])
    key += [type(tree), tuple(data), places, tree._batch_size, tree._device, tree._names, kinds, static.own, types]
    key += [tuple(map(trait, own)) for trait in _TRAITS]
    leaves += own
    return all([_list(node, leaves, key) for node in nodes])


def key_of(text: bytes) -> bytes:
    """Return the key of a description."""
    return xxhash.xxh3_128_digest(text)


def find_structure(key: bytes) -> Structure | None:
    """Return the structure of an earlier description with this key."""
    return _read.get(key)


def read_structure(text: bytes) -> Structure:
    """Return the structure in a description."""
    key = key_of(text)
    structure = _read.get(key)
    if structure is None:
        described = text.decode()
        plan = Description(parse_tree(described))
        check_unique(described, plan)
        structure = Structure(text, plan.name_leaves(), make_block(plan.specs), plan=plan)
        _keep(_read, key, structure)
    return structure


def _keep(table: dict[Any, Structure], key: Hashable, structure: Structure) -> None:
    """Enter a structure (trees of a loop have one), and drop the oldest of many."""
    table[key] = structure
    # A list: another thread may enter one at the same time.
    for oldest in list(table)[:-_MAX_KNOWN]:
        table.pop(oldest, None)
