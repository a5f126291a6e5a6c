"""Random trees with everything a file must keep, and the comparison that misses none of it."""

import json
import struct

import numpy as np
import torch
import xxhash
from hypothesis import strategies as st
from torch import nn

from tdfunc import Kind, NonTensorData, NonTensorStack, TensorDict
from tdfunc.core.collection import TensorCollection

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


def same_bytes(a, b):
    """Return whether two tensors have equal dtype, shape and bits (NaNs by their bits; 0.0 is not -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # A copy into new memory: torch counts one element as contiguous whatever its stride is.
    a, b = (torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()).reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def assert_same(actual, expected, path=()):
    """Check that two trees agree in all that a file keeps; iterative, since a tree may be deep."""
    stack = [(actual, expected, path)]
    while stack:
        a, b, path = stack.pop()
        assert type(a) is type(b), path
        if isinstance(b, TensorCollection):
            for slot in ("_batch_size", "_device", "_names", "_static"):
                assert getattr(a, slot) == getattr(b, slot), (slot, path)
            assert list(a._data) == list(b._data), path
            stack += [(a._data[key], b._data[key], (*path, key)) for key in b._data]
        elif isinstance(b, torch.Tensor):
            assert same_bytes(a, b), path
            assert a.requires_grad == b.requires_grad, path
        else:
            assert type(a) is type(b), path
            assert (a.shape, repr(plain(a))) == (b.shape, repr(plain(b))), path
    for group in expected._ties:
        leaves = [_leaf(actual, path) for path in group]
        assert all(leaf is leaves[0] for leaf in leaves)


def plain(value):
    """Non-tensor data as JSON holds it: one value for a whole batch, which may be of any size, once."""
    return value.data if isinstance(value, NonTensorData) else value.tolist()


def _leaf(tree, path):
    for key in path:
        tree = tree._data[key]
    return tree


def of_dtype(name, shape):
    """A tensor of any dtype with varied bits."""
    dtype = getattr(torch, name)
    if name == "bool":
        return (torch.arange(max(torch.Size(shape).numel(), 1)) % 3 == 0)[: torch.Size(shape).numel()].reshape(shape)
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    return (torch.arange(size_bytes) * 37 % 251).to(torch.uint8).view(dtype).reshape(shape)


KEYS = st.one_of(
    st.sampled_from(["a", "b", "a.b", "__metadata__", "shape", "device", 'q"uo\\te', "ключ", "\x00", "~1", "a~1"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"é', max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip

# Of one row; JSON cannot hold them.
ROWS = st.tuples(VALUES) | st.sampled_from([np.float32(0.5), np.datetime64("2020-01-01"), float("inf")])


@st.composite
def leaves(draw, batch):
    """A tensor of any dtype and layout, maybe a Parameter, or non-tensor data."""
    what = draw(st.integers(0, 9))
    if what == 0:
        return NonTensorData(draw(VALUES), batch)
    if what == 1:
        return NonTensorData(of_dtype("float32", (2,)), batch)
    if what == 2 and batch:
        count = torch.Size(batch).numel()
        stack = NonTensorStack(*draw(st.lists(VALUES | ROWS, min_size=count, max_size=count)))
        return stack.reshape(tuple(batch))
    shape = (*batch, *draw(st.lists(st.integers(0, 3), max_size=2)))
    leaf = of_dtype(draw(st.sampled_from(DTYPES[:-1])), shape)
    if what == 3 and leaf.dim() > 1:
        leaf = leaf.transpose(0, 1).contiguous().transpose(0, 1)
    if what in (4, 5) and leaf.dtype in (torch.float32, torch.bfloat16, torch.complex64):
        leaf = nn.Parameter(leaf, draw(st.booleans())) if what == 4 else leaf.requires_grad_()
    return leaf


@st.composite
def trees(draw, batch=None, depth=3):
    """A tree with nested and empty sub-trees, names, kinds and ties."""
    size = tuple(draw(st.lists(st.integers(0, 3), max_size=2))) if batch is None else batch
    size = (*size, *draw(st.lists(st.integers(1, 2), max_size=1))) if batch is not None else size
    names = draw(st.sampled_from([None, [f"dim{i}" for i in range(len(size))]]))
    device = draw(st.sampled_from([None, "cpu"]))
    children = leaves(size) | trees(size, depth - 1) if depth else leaves(size)
    data = draw(st.dictionaries(KEYS, children, max_size=4))
    tree = TensorDict(data, size, device=device, names=names)
    tensors = [key for key, node in tree._data.items() if isinstance(node, torch.Tensor)]
    kinds = {key: draw(st.sampled_from(list(Kind))) for key in tensors if draw(st.booleans())}
    return tree._replace(tree._data, kinds=kinds) if kinds else tree


@st.composite
def tied_trees(draw):
    """A tree in which some paths hold one tensor."""
    tree = draw(trees(batch=()))
    shared = of_dtype("float32", (2,))
    paths = [("tied", "one"), ("tied", "two"), ("other", "deep", "three"), ("last",)]
    count = draw(st.integers(2, 4))
    plain = TensorDict({**tree._data, "tied": {}, "other": {"deep": {}}})
    for path in draw(st.permutations(paths))[:count]:
        plain = plain.set(path, shared)
    return retie(plain, [draw(st.permutations([p for p in paths if _holds(plain, p, shared)]))])


def retie(tree, groups):
    """The same tree with groups recorded in every node that holds two paths of one."""
    inner = {}
    for key, node in tree._data.items():
        below = [[path[1:] for path in group if path[0] == key and len(path) > 1] for group in groups]
        kept = [group for group in below if len(group) > 1]
        inner[key] = retie(node, kept) if isinstance(node, TensorCollection) and kept else node
    return tree._replace(inner, ties=tuple(tuple(map(tuple, group)) for group in groups))


def _holds(tree, path, leaf):
    for key in path:
        tree = tree._data.get(key) if isinstance(tree, TensorCollection) else None
    return tree is leaf


def forge(tree, entries, data=b"", *, leaves=None, version="1", algorithm="xxh3-64", extra=""):
    """The bytes of a file made by another program: valid checksums around any contents.

    It shares no code with tdfunc, so it also shows that docs/formats.md is enough to write a file.
    """
    text = tree if isinstance(tree, str) else json.dumps(tree)
    if leaves is None:
        spans = [json.loads("{" + entry + "}") for entry in entries]
        offsets = [next(iter(span.values()))["data_offsets"] for span in spans]
        leaves = "".join(xxhash.xxh3_64_hexdigest(data[begin:end]) for begin, end in offsets)
    start = '{"__metadata__":{"tdfunc.header":"' + algorithm + ":"
    rest = f'","format":"pt","tdfunc.version":"{version}","tdfunc.leaves":"{leaves}"{extra},'
    rest += f'"tdfunc.tree":{json.dumps(text)}}}'
    header = start + "0" * 16 + rest + "".join("," + entry for entry in entries) + "}"
    header += " " * (-(8 + len(header.encode())) % 64)
    raw = struct.pack("<Q", len(header.encode())) + header.encode()
    at = 8 + len(start)
    return raw[:at] + xxhash.xxh3_64_hexdigest(raw).encode() + raw[at + 16 :] + data


def entry(name, dtype, shape, begin, end):
    """One leaf as it stands in a safetensors header."""
    sizes = ",".join(map(str, shape))
    return (
        f'{json.dumps(name, ensure_ascii=False)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'
    )


def small_tree():
    """A small tree with everything that is easy to lose."""
    return TensorDict(
        {"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.ones(3)}, "s": "text"}, [3], names=["row"]
    )


def values_of(tree):
    """All values of the leaves of a tree."""
    return {float(value) for leaf in tree.leaves() for value in (leaf.min(), leaf.max())}
