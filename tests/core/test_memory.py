"""Where tensors lie, and which overlap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc.core.memory import Places, extent_of, find_overlaps, repeats_itself


@pytest.mark.parametrize(
    ("sizes", "strides"), [((4, 3), (1, 1)), ((4, 3), (0, 1)), ((4, 2), (2, 4)), ((2, 2), (2, 0)), ((3, 2), (2, 3))]
)
def test_elements_that_may_share_memory(sizes, strides):
    """Steps that stay inside the memory of smaller steps count as sharing it, whether or not two elements do."""
    assert repeats_itself(torch.arange(40).as_strided(sizes, strides))


@given(st.permutations([2, 3, 1, 4]), st.integers(1, 3), st.integers(0, 1))
def test_views_of_distinct_elements_do_not_repeat(order, step, start):
    """Transposed, sliced and narrowed tensors hold each element once."""
    view = torch.arange(24).reshape(2, 3, 1, 4).permute([[2, 3, 1, 4].index(size) for size in order])[..., start::step]

    assert not repeats_itself(view)


def test_memory_that_cannot_be_known():
    """Empty and meta tensors lie nowhere; sparse ones, and objects that are not tensors, may lie anywhere."""
    places = Places([torch.zeros(0), torch.zeros(3, device="meta")])

    assert not places.holds(torch.ones(2))
    assert extent_of(torch.eye(2).to_sparse()) is extent_of(None) is None
    assert places.holds(torch.eye(2).to_sparse())
    assert Places([torch.eye(2).to_sparse()]).holds(torch.ones(2))


@given(st.data())
def test_overlaps_are_those_of_ranges_of_bytes(data):
    """`Places` and `find_overlaps` answer as the sets of bytes from each tensor's first to its last."""
    memory = torch.zeros(24)

    def view(_):
        start, step = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
        count = data.draw(st.integers(0, (23 - start) // step + 1))
        return memory.as_strided((count,), (step,), start)

    tensors = [view(i) for i in range(data.draw(st.integers(1, 5)))]
    spans = [set(range(*extent_of(tensor)[1:])) for tensor in tensors]
    met = {i for i, a in enumerate(spans) for j, b in enumerate(spans) if i != j and a & b}

    assert Places(tensors[1:]).holds(tensors[0]) == (0 in met)
    assert {i for pair in find_overlaps(tensors) for i in pair} == met


@given(st.permutations([(0, 20), (1, 2), (4, 6), (18, 24)]), st.integers(0, 23))
def test_nested_extents_are_one_run(extents, at):
    """Memory inside other memory hides none of it."""
    memory = torch.zeros(30)
    places = Places([memory[begin:end] for begin, end in extents])

    assert places.holds(memory[at : at + 1])
    assert not places.holds(memory[24:])
    assert places.find(extent_of(memory[at : at + 1])) == extent_of(memory[:24])[1:]
