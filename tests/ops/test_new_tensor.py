"""`new_tensor` against `Tensor.new_tensor` on every leaf."""

import pytest
import torch
from torch import Size

from tdfunc import TensorDict, TreeStructureError
from tests.helpers import assert_pure
from tests.incumbent import Incumbent

LIKE = {"a": torch.zeros(3, 2, dtype=torch.int32), "n": {"b": torch.ones(3, dtype=torch.bfloat16)}}
GIVEN = {"a": torch.tensor([[1.5, 2.5]]), "n": {"b": torch.tensor([3.0])}}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("cls", [TensorDict, Incumbent])
def test_of_a_tree(cls):
    """A value, dtype or batch size would be another than tensordict's."""
    made = cls(LIKE, [3]).new_tensor(cls(GIVEN, [1]))

    assert made.batch_size == Size([1])
    assert made["a"].tolist() == [[1, 2]]
    assert made["a"].dtype is torch.int32
    assert made["n", "b"].dtype is torch.bfloat16


def test_of_values():
    """A tensor or list would not become every leaf, or share memory with it."""
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    made = assert_pure(lambda tree: tree.new_tensor(values, dtype=torch.float64), TensorDict(LIKE, [3]))

    assert made.batch_size == made["n"].batch_size == Size([2])
    assert made["a"].tolist() == made["n", "b"].tolist() == [1.0, 2.0]
    assert made["a"].dtype is made["n", "b"].dtype is torch.float64
    assert not made["a"].requires_grad
    assert made["a"].data_ptr() != made["n", "b"].data_ptr()
    assert TensorDict(LIKE, [3]).new_tensor([[1]])["a"].tolist() == [[1]]


def test_device_and_history():
    """The tree would say that it is elsewhere, or gradients not reach the new leaves."""
    like = TensorDict({"w": torch.zeros(2), "s": "kept"}, [2], device="cpu")

    assert like.new_tensor([1.0], device="meta").device == like.new_tensor([1.0], device="meta")["w"].device
    assert like.new_tensor([1.0]).device == torch.device("cpu")
    assert like.new_tensor([1.0])["s"] == "kept"
    assert like.new_tensor([1.0], requires_grad=True)["w"].requires_grad


def test_errors():
    """Other keys would be taken in silence, or integers asked for gradients."""
    with pytest.raises(TreeStructureError, match=r"new_tensor: .*\n.*'a', 'n'.*\n.*\['a'\]"):
        TensorDict(LIKE, [3]).new_tensor(TensorDict({"a": torch.ones(2)}))
    with pytest.raises(RuntimeError, match="floating point"):
        TensorDict({"a": torch.zeros(1, dtype=torch.int64)}).new_tensor([1], requires_grad=True)
