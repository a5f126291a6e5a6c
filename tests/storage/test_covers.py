"""Parts of a leaf that several ranks write: covers without overlap, and boxes in a file by few system calls."""

import os
import sys
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tdfunc.storage.safetensors import blocks
from tdfunc.storage.safetensors.blocks import Block, cover_once, write_box

# -- covers -------------------------------------------------------------------------------------------------------


@st.composite
def covers(draw):
    """A size, and boxes that cover it once: a grid of cuts along each dimension, in any order."""
    size = draw(st.lists(st.integers(0, 5), max_size=3))
    sides = []
    for length in size:
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
        sides.append(list(zip(cuts, cuts[1:], strict=False)) or [(0, 0)])
    boxes = [Block(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*sides)]
    return tuple(size), draw(st.permutations(boxes))


@st.composite
def boxes_of(draw):
    """A size and any boxes, which may overlap, leave holes, and stand out."""
    size = draw(st.lists(st.integers(1, 3), max_size=3))
    sides = st.tuples(*[st.tuples(st.integers(0, length), st.integers(0, length)) for length in size])
    found = draw(st.lists(sides, max_size=5))
    return tuple(size), [Block(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in found]


def counts_of(size, boxes):
    """How many boxes each element is in, with room around the leaf."""
    counts = np.zeros([2 * length + 1 for length in size], dtype=int)
    for box in boxes:
        counts[box.box] += 1
    return counts


def covers_by_counting(size, boxes):
    """The oracle: each element of the leaf is in one box, and none outside is in any."""
    expected = np.zeros([2 * length + 1 for length in size], dtype=int)
    expected[tuple(slice(length) for length in size)] = 1
    return bool((counts_of(size, boxes) == expected).all())


@given(covers())
def test_a_grid_of_boxes_covers_a_leaf(case):
    """Boxes between cuts cover a leaf once, also leaves without elements or dimensions."""
    size, boxes = case

    assert cover_once(boxes, size)


@given(boxes_of() | covers())
def test_covers_are_found_as_by_counting(case):
    """Overlaps, holes, boxes outside and repeated boxes are found as by counting each element."""
    size, boxes = case

    assert cover_once(boxes, size) == covers_by_counting(size, boxes)


@given(covers(), st.data())
def test_a_box_too_few_or_too_many(case, data):
    """A cover without one of its boxes, or with one twice, does not cover the leaf once."""
    size, boxes = case
    filled = [box for box in boxes if prod(box.shape)]
    assume(filled)
    one = data.draw(st.sampled_from(filled))
    left = list(boxes)
    left.remove(one)

    assert [cover_once(left, size), cover_once([*boxes, one], size)] == [False, False]


def test_boxes_of_another_number_of_dimensions():
    """They do not cover a leaf, whatever their elements are."""
    assert not cover_once([Block((0,), (6,))], (2, 3))


def count_calls(fn):
    """The number of Python and C calls in a call."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("dims", [1, 2])
def test_the_work_of_a_plan_grows_with_the_ranks(dims):
    """Four times as many parts take at most 4.5 times the calls."""

    def calls(ranks):
        boxes = [Block((4 * rank, 0, 0), (4, 8, 2)) for rank in range(ranks)]
        if dims == 2:
            boxes = [Block((4 * rank, half, 0), (4, 4, 2)) for rank in range(ranks) for half in (0, 4)]
        return count_calls(lambda: cover_once(boxes, (4 * ranks, 8, 2)))

    assert calls(256) <= 4.5 * calls(64)


# -- boxes in a file ----------------------------------------------------------------------------------------------


@st.composite
def cuts(draw):
    """The shape of a leaf, and a box in it."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    sides = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in size]
    return tuple(size), Block(tuple(a for a, _ in sides), tuple(b - a for a, b in sides))


def new_file(path, size_bytes):
    """A file with space for all of its bytes, which are 7."""
    path.write_bytes(b"\7" * size_bytes)
    fd = os.open(path, os.O_RDWR)
    # A file system may put off the allocation of what was written.
    os.fsync(fd)
    return fd


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64, np.dtype("V3")])
@pytest.mark.parametrize("is_one_machine", [True, False])
@given(cut=cuts(), at=st.integers(0, 40))
def test_a_box_is_written_to_its_place(tmp_path_factory, dtype, is_one_machine, cut, at):
    """The bytes of a box get to their places in the leaf by both ways, and no other byte of the file changes."""
    size, block = cut
    itemsize = np.dtype(dtype).itemsize
    expected = np.full(at + prod(size) * itemsize + 5, 7, np.uint8)
    raw = np.arange(prod(block.shape) * itemsize, dtype=np.uint64).astype(np.uint8)
    leaf = expected[at : at + prod(size) * itemsize].reshape(*size, itemsize)
    leaf[block.box] = raw.reshape(*block.shape, itemsize)
    path = tmp_path_factory.mktemp("box") / "file"
    fd = new_file(path, len(expected))
    write_box(fd, raw.data, at, block, size, itemsize, is_one_machine)
    os.close(fd)

    assert path.read_bytes() == expected.tobytes()


def system_calls(tmp_path, monkeypatch, rows, columns, *, is_one_machine=True, has_space=True):
    """The number of writes and maps that half of the columns of a table take."""
    count = 0

    def counted(fn):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return fn(*args, **kwargs)

        return call

    path = tmp_path / f"{rows}-{columns}"
    fd = new_file(path, 4 * rows * columns)
    if not has_space:
        os.truncate(path, 0)
        os.truncate(path, 4 * rows * columns)
    half = Block((0, columns // 2), (rows, columns // 2))
    raw = np.full((rows, columns // 2), 3.0, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counted(os.pwrite))
        patch.setattr(blocks.mmap, "mmap", counted(blocks.mmap.mmap))
        write_box(fd, memoryview(raw).cast("B"), 0, half, (rows, columns), 4, is_one_machine)
    os.close(fd)
    found = np.frombuffer(path.read_bytes(), np.float32).reshape(rows, columns)
    assert (found[:, columns // 2 :] == 3).all()
    return count


def test_a_narrow_table_takes_as_many_system_calls_as_a_short_one(tmp_path, monkeypatch):
    """The columns of 100 and of 40,000 rows are one map of the file, not a system call for each row."""
    found = [system_calls(tmp_path, monkeypatch, rows, 16) for rows in (100, 40_000)]

    assert found == [1, 1]


def test_a_file_without_space_is_not_mapped(tmp_path, monkeypatch):
    """A full disk would end the process by a signal: each row is written by a system call that can fail."""
    assert system_calls(tmp_path, monkeypatch, 2000, 16, has_space=False) == 2000


def test_a_file_of_several_machines_is_not_mapped(tmp_path, monkeypatch):
    """A page of one machine would overwrite the bytes of another."""
    assert system_calls(tmp_path, monkeypatch, 100, 16, is_one_machine=False) == 100


def test_long_runs_are_not_mapped(tmp_path, monkeypatch):
    """Runs of 64 kB and more are written by one system call each."""
    assert system_calls(tmp_path, monkeypatch, 6, 1 << 15) == 6
