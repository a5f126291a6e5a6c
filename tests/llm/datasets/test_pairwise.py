"""`RewardData`: its fields, batch sizes, and files."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import RewardData
from tests.helpers import assert_trees_equal


def make_rewards(sizes, width, seed=0, **options):
    """Random rows with all fields."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*sizes, width)
    return RewardData(
        input_ids=torch.randint(9, shape, generator=generator),
        attention_mask=torch.rand(shape, generator=generator) < 0.5,
        rewards=torch.randn(shape, generator=generator, dtype=torch.float64),
        end_scores=torch.randn(sizes, generator=generator, dtype=torch.float64),
        batch_size=sizes,
        **options,
    )


@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4), st.integers(0, 99))
def test_files_keep_the_class_and_every_value(tmp_path_factory, sizes, width, seed):
    """`load(save(data)) == data`, as safetensors, as a memmap folder and through a state_dict."""
    data = make_rewards(sizes, width, seed)
    folder = tmp_path_factory.mktemp("rewards")

    tdf.save(data, folder / "data.safetensors")
    data.memmap(folder / "memmap")

    assert_trees_equal(tdf.load(folder / "data.safetensors", classes=[RewardData]), data)
    assert_trees_equal(RewardData.load_memmap(folder / "memmap").clone(), data)
    assert_trees_equal(RewardData.from_tensordict(data.to_tensordict()), data)


def test_rows_are_those_of_plain_tensors():
    """Oracle: indexing and unbinding each field by itself."""
    data = make_rewards([3], 4)

    for i, row in enumerate(data.unbind(0)):
        assert isinstance(row, RewardData)
        for name in ("input_ids", "attention_mask", "rewards", "end_scores"):
            assert torch.equal(row.get(name), data.get(name)[i])


def test_rewards_are_optional_and_the_batch_size_defaults_to_none():
    """Lists are cast to tensors, positions are those of the fields; other fields are None."""
    data = RewardData([[1, 2]], [[True, False]])

    assert data.batch_size == torch.Size([])
    assert data.rewards is None
    assert data.end_scores is None
    assert data.input_ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("missing", ["input_ids", "attention_mask"])
def test_required_fields_are_required(missing):
    """As of any dataclass: a TypeError that names the field."""
    given = {"input_ids": torch.ones(2, 4), "attention_mask": torch.ones(2, 4)}
    del given[missing]

    with pytest.raises(TypeError, match=missing):
        RewardData(**given, batch_size=[2])


def test_a_field_of_another_batch_size_raises():
    """The error names the field."""
    with pytest.raises(BatchSizeError, match="input_ids"):
        RewardData(torch.ones(2, 4), torch.ones(2, 4), batch_size=[3])


def test_vmap_maps_over_rows():
    """Oracle: a loop over the rows."""
    data = make_rewards([3], 4)

    def total(row):
        return torch.where(row.attention_mask, row.rewards, 0).sum() + row.end_scores

    assert torch.equal(torch.vmap(total)(data), torch.stack([total(row) for row in data.unbind(0)]))
