"""The checksums of leaves that several ranks wrote, taken in pieces."""

import tracemalloc

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import CorruptCheckpointError
from tdfunc.storage.safetensors.blocks import Block, BlockDigests, Blocks, boxes_between, table_text
from tdfunc.storage.tree.specs import spec_of
from tests.helpers import examples


def grid(size, parts):
    """The blocks of a leaf that is cut along each dimension."""
    blocks = [((), ())]
    for length, count in zip(size, parts, strict=True):
        cuts = sorted({length * i // count for i in range(count + 1)})
        sides = [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        blocks = [((*start, a), (*shape, n)) for start, shape in blocks for a, n in sides]
    return [Block(start, shape) for start, shape in blocks]


def recorded(values, blocks):
    """The digests of blocks, as ranks record them."""
    digests = [xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values[block.box]).data) for block in blocks]
    text = table_text(blocks, digests)
    rows = [[list(b.start), list(b.shape), d] for b, d in zip(blocks, digests, strict=True)]
    return Blocks(xxhash.xxh3_64_hexdigest(text.encode()), rows, spec_of("F32", values.shape))


@st.composite
def leaves(draw):
    """A leaf, its blocks, and the sizes of the pieces in which it comes."""
    size = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    parts = tuple(draw(st.integers(1, length)) for length in size)
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(size=size).astype(np.float32)
    return values, grid(size, parts), draw(st.integers(1, max(1, values.size)))


def feed(values, digests, count):
    """Give a leaf in pieces."""
    flat = values.reshape(-1)
    for at in range(0, flat.size, count):
        digests.update(flat[at : at + count].view(np.uint8).data)


@examples(1)
@given(leaves())
def test_pieces_have_the_digests_of_the_blocks(made):
    """Blocks of any grid, in pieces of any size, have their recorded digests."""
    values, blocks, count = made
    digests = BlockDigests("w", recorded(values, blocks))

    feed(values, digests, count)

    digests.check()


@examples(1)
@given(leaves(), st.integers(0, 10**6))
def test_an_altered_element_is_found(made, where):
    """An element that differs from the written one is an error that names a block."""
    values, blocks, count = made
    digests = BlockDigests("w", recorded(values, blocks))
    altered = values.copy()
    altered.reshape(-1)[where % values.size] += 1

    feed(altered, digests, count)

    with pytest.raises(CorruptCheckpointError, match="leaf w, from"):
        digests.check()


@examples(1)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_in_order(size, data):
    """The boxes between two elements have exactly the elements between them, in order."""
    index = np.arange(int(np.prod(size))).reshape(size)
    begin = data.draw(st.integers(0, index.size))
    end = data.draw(st.integers(begin, index.size))

    found = [index[box.box].ravel() for box in boxes_between(begin, end, tuple(size))]

    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(begin, end))


def test_pieces_take_the_memory_of_a_piece():
    """The check of a leaf in pieces does not hold the leaf."""
    values = torch.zeros(1024, 1024).numpy()
    digests = BlockDigests("w", recorded(values, grid(values.shape, (2, 2))))
    tracemalloc.start()

    feed(values, digests, 1 << 14)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes / 8
