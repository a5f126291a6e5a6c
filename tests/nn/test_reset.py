"""`reset_parameters_recursive`: new values in a module, or in a tree of its parameters."""

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc.nn import TensorDictModule, TensorDictSequential
from tests.helpers import assert_pure, assert_trees_equal
from tests.models import WithState


def make():
    """Layers with parameters, buffers, and none."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Embedding(3, 2), nn.MultiheadAttention(4, 2))
    return TensorDictSequential(TensorDictModule(net, ["x"], ["y"]), TensorDictModule(nn.LSTM(2, 3), ["y"], ["z"]))


def test_the_module_is_written_in_place():
    """Without a tree all parameters get new values, in the tensors that they have."""
    module = make()
    old, names = tdf.from_module(module).clone(), dict(module.named_parameters())
    with torch.no_grad():
        module.module[0].module[2].running_mean.fill_(9)
    assert module.reset_parameters_recursive() is None
    new = tdf.from_module(module)

    random = [name for name, value in names.items() if old[tuple(name.split("."))].unique().numel() > 1]
    assert all((new[tuple(name.split("."))] != old[tuple(name.split("."))]).all() for name in random)
    assert len(random) == 9
    assert new["module", "0", "module", "2", "running_mean"].sum() == 0
    assert all(value is names[name] for name, value in module.named_parameters())


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_gets_what_the_module_would(seed):
    """The values are those of the module's own reset; module and tree stay as they are."""
    module = make()
    tree = tdf.from_module(module).clone()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    torch.manual_seed(seed)
    new = assert_pure(module.reset_parameters_recursive, tree)

    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert new.paths() == tree.paths()
    torch.manual_seed(seed)
    module.reset_parameters_recursive()
    assert_trees_equal(new, tdf.from_module(module).apply(lambda leaf: leaf.detach()))


def test_a_part_of_the_parameters():
    """Leaves that the tree does not have are not drawn for it."""
    module = make()
    part, _ = tdf.partition(tdf.from_module(module).clone(), "module.1.*")
    torch.manual_seed(0)
    new = module.reset_parameters_recursive(part)
    torch.manual_seed(0)
    module.module[1].reset_parameters_recursive()

    assert (new != part).all()
    assert_trees_equal(new["module", "1"], tdf.from_module(module.module[1]).apply(lambda leaf: leaf.detach()))


def test_dtypes_kinds_gradients_and_ties_stay():
    """The new tree has the structure of the given one."""
    layers = [nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), WithState()]
    module = TensorDictModule(nn.ModuleList(layers).double(), [], [])
    module.module[1].weight = module.module[0].weight
    tree = tdf.from_module(module)
    new = module.reset_parameters_recursive(tree)

    assert new.ties() == tree.ties() != []
    assert new["module", "0", "weight"] is new["module", "1", "weight"]
    assert (weight := new["module", "0", "weight"]).dtype == torch.float64
    assert weight.requires_grad is True
    assert not module.reset_parameters_recursive(tree.detach())["module", "0", "weight"].requires_grad
    assert new.kind(("module", "0", "weight")) is tdf.Kind.PARAMETER


def test_a_shared_module_is_reset_once():
    """Values of a submodule under two paths are drawn once."""
    counts = []

    class Counted(nn.Linear):
        def reset_parameters(self):
            counts.append(1)

    layer = Counted(2, 2)
    module = TensorDictSequential(TensorDictModule(layer, ["x"], ["y"]), TensorDictModule(layer, ["y"], ["z"]))
    counts.clear()
    module.reset_parameters_recursive()

    assert len(counts) == 1


class Scale(nn.Module):
    """A parameter that no method resets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def test_parameters_that_keep_their_values_are_named():
    """A warning has the names of parameters without a reset, in both forms."""
    module = TensorDictModule(nn.Sequential(nn.Linear(2, 2), Scale()), ["x"], ["y"])
    tree = tdf.from_module(module).clone()

    with pytest.warns(UserWarning, match="'module.1.scale' keep their values") as caught:
        module.reset_parameters_recursive()
    with pytest.warns(UserWarning, match="'module.1.scale' keep their values") as later:
        new = module.reset_parameters_recursive(tree)
    assert {warning.filename for warning in (*caught, *later)} == {__file__}
    assert torch.equal(new["module", "1", "scale"], tree["module", "1", "scale"])
    module.reset_parameters_recursive(tree.delete(("module", "1")))


def test_a_reset_that_makes_new_parameters_is_read():
    """The values come from the slots of the module, however its method fills them."""

    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def reset_parameters(self):
            self.w = nn.Parameter(torch.full((2,), 7.0))

    module = TensorDictModule(Fresh(), ["x"], ["y"])

    assert module.reset_parameters_recursive(tdf.from_module(module))["module", "w"].tolist() == [7.0, 7.0]
    assert module.module.w.tolist() == [0.0, 0.0]
