"""`RewardData`: its fields and files; other operations are those of any typed tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import RewardData
from tests.helpers import assert_trees_equal

ONES = torch.ones(2, 4)


@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4))
def test_files_keep_the_class_and_every_value(tmp_path_factory, sizes, width):
    """`load(save(data)) == data`, as safetensors, as a memmap folder and through a state_dict."""
    ids, rewards = torch.randint(9, (*sizes, width)), torch.randn(*sizes, width, dtype=torch.float64)
    data = RewardData(ids, ids > 4, rewards, rewards.sum(-1), batch_size=sizes)
    folder = tmp_path_factory.mktemp("rewards")

    tdf.save(data, folder / "data.safetensors")
    data.memmap(folder / "memmap")

    assert_trees_equal(tdf.load(folder / "data.safetensors", classes=[RewardData]), data)
    assert_trees_equal(RewardData.load_memmap(folder / "memmap").clone(), data)
    assert_trees_equal(RewardData.from_tensordict(data.to_tensordict()), data)


def test_rewards_are_optional_and_the_batch_size_defaults_to_none():
    """Lists are cast to tensors, positions are those of the fields; other fields are None."""
    data = RewardData([[1, 2]], [[True, False]])

    assert (data.batch_size, data.rewards, data.end_scores) == (torch.Size([]), None, None)
    assert data.input_ids.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("given", "size", "kind", "named"),
    [
        ({"attention_mask": ONES}, [2], TypeError, "input_ids"),
        ({"input_ids": ONES}, [2], TypeError, "attention_mask"),
        ({"input_ids": ONES, "attention_mask": ONES}, [3], BatchSizeError, "input_ids"),
    ],
)
def test_mistakes_name_the_field(given, size, kind, named):
    """One that is missing, and one of another batch size."""
    with pytest.raises(kind, match=named):
        RewardData(**given, batch_size=size)
