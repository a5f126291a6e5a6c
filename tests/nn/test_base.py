"""Keys, selected outputs and `dispatch`, of modules that tdfunc knows nothing else about."""

import torch
from torch import nn

from tdfunc import TensorDict, from_module
from tdfunc.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, dispatch
from tests.helpers import assert_trees_equal


class Split(TensorDictModuleBase):
    """Writes two outputs, and changes an entry that it reads."""

    in_keys = ["a"]
    out_keys = [("b",), ("n", "c"), "a"]

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    @dispatch
    def forward(self, tensordict):
        a = tensordict["a"] * self.scale
        return tensordict.update({"b": a, ("n", "c"): a + 1, "a": -a})


def tree():
    """A tree with an entry that modules do not read."""
    return TensorDict({"a": torch.randn(3), "other": torch.randn(3)}, [3])


def test_a_selection_of_a_selection():
    """Selections narrow; reset_out_keys writes everything again."""
    module, td = Split(), tree()
    twice = module.select_out_keys("b", "a").select_out_keys("a")

    assert twice(td).paths() == [("a",), ("other",)]
    assert twice.reset_out_keys().out_keys == module.out_keys
    assert_trees_equal(twice.reset_out_keys()(td), module(td))
    assert_trees_equal(module.reset_out_keys()(td), module(td))


def test_a_selected_tree_replaces_a_tree():
    """A selected output is the module's, not merged with the entry that it replaces; ties get it, too."""
    td = TensorDict({"n": {"old": torch.ones(2)}})
    module = TensorDictModule(lambda: ({"new": torch.zeros(2)}, 1.0), [], ["n", "b"])
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    tied, double = from_module(model), TensorDictModule(lambda w: (w * 2, w), ("a", "weight"), [("a", "weight"), "c"])

    assert module.select_out_keys("n")(td).paths() == [("n", "new")]
    out = double.select_out_keys(("a", "weight"))(tied)
    assert torch.equal(out["b", "weight"], 2 * tied["a", "weight"])
    assert "c" not in out


def test_a_selection_shares_submodules_and_nothing_else():
    """The new shell has the same submodules and parameters; hooks and slots that one is given later are its own."""
    module = TensorDictModule(nn.Linear(3, 3), ["a"], ["b"])
    calls = []
    module.register_forward_hook(lambda *_: calls.append("both"))
    shell, own = module.select_out_keys("b"), Split()
    module.register_forward_hook(lambda *_: calls.append("module"))
    shell.register_forward_hook(lambda *_: calls.append("shell"))
    shell.extra = nn.Linear(1, 1)
    shell(tree())

    assert calls == ["both", "shell"]
    assert shell.module is module.module
    assert own.select_out_keys("b").scale is own.scale
    assert list(module.state_dict()) == ["module.weight", "module.bias"]
    assert module.out_keys == ["b"]
    assert module._forward_hooks.keys() < shell._forward_hooks.keys() | module._forward_hooks.keys()


def test_a_compiled_module_is_not_called_by_its_selection():
    """`module.compile()` compiles one shell."""
    module = TensorDictModule(torch.exp, ["a"], ["b"])
    module.compile(backend="eager")

    assert module.select_out_keys()._compiled_call_impl is None


def test_hooks_see_all_outputs():
    """A selection is made after the hooks, which may change what is selected from."""
    module, seen = Split().select_out_keys("b"), []
    module.register_forward_hook(lambda _, __, out: seen.append(len(out.paths())))
    module.register_forward_hook(lambda _, __, out: out.set("b", out["b"] * 0))

    assert module(tree()).paths() == [("a",), ("other",), ("b",)]
    assert module(tree())["b"].sum() == 0
    assert seen == [4, 4]


def test_dispatch_passes_other_arguments_on():
    """What is no in key reaches forward."""

    class Shift(TensorDictModuleBase):
        in_keys, out_keys = [("n", "a")], ["b"]

        @dispatch(separator=".")
        def forward(self, tensordict, shift, *, scale=1.0):
            return tensordict.set("b", tensordict["n", "a"] * scale + shift)

    assert Shift()(torch.ones(2), 3, scale=2.0).tolist() == [5.0, 5.0]
    assert Shift()(**{"n.a": torch.ones(2)}, shift=1).tolist() == [2.0, 2.0]
    assert Shift()(TensorDict({"n": {"a": torch.ones(2)}}), 1)["b"].tolist() == [2.0, 2.0]


def test_dispatch_on_other_attributes():
    """The keys may have other names on the module, or be given."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.reads, self.writes = ["a"], ["b", "_"]

        @dispatch(source="reads", dest="writes")
        def forward(self, tensordict):
            return tensordict.set("b", tensordict["a"] + 1)

    assert Other()(torch.zeros(())) == 1
    others = (Other(), type("Reads", (), {"in_keys": []}), type("Writes", (), {"out_keys": []}))
    assert not any(TensorDictModuleBase.is_tdmodule_compatible(m) for m in others)
    assert all(TensorDictModuleBase.is_tdmodule_compatible(m) for m in (Split(), TensorDictSequential()))
