"""Typed trees whose class has other fields than when they were saved."""

import pytest
import torch

from tdfunc import TensorClass, TensorDict, TreeStructureError, lazy_stack
from tdfunc.storage.api import load, save
from tests.storage.trees import assert_same


def version(**fields):
    """Return a class of one name and these fields."""
    namespace = {"__annotations__": fields, "__module__": "written.elsewhere", "__qualname__": "Batch"}
    return type(TensorClass)("Batch", (TensorClass,), namespace)


Old = version(x=torch.Tensor, y=torch.Tensor)
Other = version(x=torch.Tensor, z=torch.Tensor)
Wider = version(x=torch.Tensor, y=torch.Tensor, z=torch.Tensor)


@pytest.mark.parametrize(("inside", "place"), [(False, "'the root'"), (True, "'deep.t'")])
def test_another_versions_fields_are_refused(tmp_path, inside, place):
    """A saved field that the class does not have is refused with both lists of fields; plain trees load."""
    tree = Old(torch.ones(2), torch.zeros(2), batch_size=[2])
    save(TensorDict({"deep": {"t": tree}}) if inside else tree, tmp_path / "t.safetensors")

    with pytest.raises(TreeStructureError) as err:
        load(tmp_path / "t.safetensors", classes=[Other])
    words = ["Batch", place, "['x', 'z']", "['x', 'y']", "unknown ['y']", "missing ['z']", "classes=TensorDict"]
    assert all(word in str(err.value) for word in words), str(err.value)
    plain = load(tmp_path / "t.safetensors", classes=TensorDict)
    plain = plain["deep", "t"] if inside else plain
    assert sorted(plain.keys()) == ["x", "y"]


def test_a_new_field_is_empty(tmp_path):
    """A field that was added since, or emptied before the save, is None."""
    tree = Old(torch.ones(2), torch.zeros(2), batch_size=[2])
    save(tree, tmp_path / "t.safetensors")
    save(tree.replace(y=None), tmp_path / "emptied.safetensors")

    assert load(tmp_path / "t.safetensors", classes=[Wider]).z is None
    assert_same(load(tmp_path / "emptied.safetensors", classes=[Old]), tree.replace(y=None))


def test_lazy_stacks_have_their_own_keys(tmp_path):
    """A lazy stack of typed trees loads, whose numbers are not fields of the class."""
    tree = lazy_stack([Old(torch.ones(n), torch.zeros(n), batch_size=[n]) for n in (1, 2)])
    save(tree, tmp_path / "t.safetensors")

    back = load(tmp_path / "t.safetensors", classes=[Old, type(tree)])

    assert [len(back[i].x) for i in range(2)] == [1, 2]
