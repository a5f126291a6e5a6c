"""Errors of modules on trees: each call, its class, and the parts of its message."""

import re

import pytest
import torch
from torch import distributions as D
from torch import nn

from tdfunc import (
    BatchSizeError,
    LeafMismatchError,
    MissingKeyError,
    TensorClass,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
    from_module,
    functional,
    init_ensemble,
    lazy_stack,
)
from tdfunc.nn import (
    BatchEnsembleLinear,
    EnsembleModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorClassModuleBase,
    TensorDictModule,
    TensorDictSequential,
    batch_ensemble,
    dispatch,
)


class Field(TensorClass):
    """One field."""

    x: torch.Tensor


TD = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
LINEAR = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"])
NORMAL = ProbabilisticTensorDictModule(["loc", "scale"], ["v"], distribution_class=D.Normal, return_log_prob=True)
APPLY, TREE = functional(nn.Linear(3, 2))[0], init_ensemble(lambda: nn.Linear(3, 2), 4)
PARAMS = {"loc": torch.zeros(2), "scale": torch.ones(2)}


def returns(*values):
    """A module with the out keys y and z whose function returns these values."""
    return TensorDictModule(lambda a: values if len(values) != 1 else values[0], ["a"], ["y", "z"])


def define(**names):
    """A typed module that does not name its classes."""
    return type("Bare", (TensorClassModuleBase,), names)


MESSAGES = [
    (
        lambda: LINEAR(TD), MissingKeyError,
        r"TensorDictModule\(Linear\): the tree has no 'x'.*expected: \['x'\].*got: +'a', \('n', 'b'\)",
    ),
    (lambda: LINEAR(TensorDict()), MissingKeyError, r"no 'x'.*\(no keys\)"),
    (lambda: LINEAR(TensorDict(dict.fromkeys(map(str, range(50)), 1))), MissingKeyError, r"'19', \.\.\.$"),
    (lambda: TensorDictModule(torch.exp, ("n", "c"), "y")(TD), MissingKeyError, r"\(exp\).*no \('n', 'c'\)"),
    (lambda: TensorDictModule(torch.exp, ("a", "c"), "y")(TD), MissingKeyError, r"no \('a', 'c'\)"),
    (lambda: LINEAR(torch.zeros(3), x=torch.zeros(3)), TypeError, "'x' is given by position and by keyword"),
    (lambda: LINEAR(torch.zeros(3), z=torch.zeros(3)), TypeError, "unexpected keyword argument 'z'"),
    (lambda: LINEAR(), MissingKeyError, "no 'x'"),
    (lambda: LINEAR(lazy_stack([TD, TD])), MissingKeyError, "no 'x'"),
    (lambda: returns(TD["a"])(TD), TreeStructureError, r"value for each out key.*2: \['y', 'z'\].*1: \['Tensor'\].*_"),
    (lambda: returns(1, 2, 3)(TD), TreeStructureError, r"got: +3"),
    (lambda: returns()(TD), TreeStructureError, r"got: +0"),
    (lambda: returns({"y": 1})(TD), TreeStructureError, r"got: +1: \['dict'\]"),
    (lambda: returns(TD["a"], None)(TD), TypeError, "'z': None cannot be a value"),
    (lambda: returns(TD["a"], torch.zeros(2))(TD), BatchSizeError, r"'z'.*\[3\].*\[2\]"),
    (lambda: TensorDictModule(torch.exp, ["x"], ["y"])(Field(torch.ones(3))), MissingKeyError, "no field 'y'"),
    (lambda: TensorDictModule(torch.exp, [0], ["y"]), TypeError, "key must be a str.*0"),
    (lambda: TensorDictModule(torch.exp, ["x"], [""]), TypeError, "key must be a str"),
    (lambda: LINEAR.select_out_keys("x"), MissingKeyError, r"'x' is not an out key of TensorDictModule.*\['y'\]"),
    (lambda: LINEAR.select_out_keys().select_out_keys("y"), MissingKeyError, r"reset_out_keys\(\) first"),
    (lambda: LINEAR.select_out_keys(["y"]), TypeError, "key must be a str"),
    (lambda: TensorDictSequential(LINEAR, nn.Linear(2, 2)), UnsupportedError, "module 1 must .* in_keys.*Linear"),
    (lambda: TensorDictSequential([torch.exp]), UnsupportedError, "module 0.*TensorDictModule\\(function"),
    (lambda: TensorDictSequential(LINEAR, selected_out_keys=["z"]), MissingKeyError, "'z' is not an out key"),
    (lambda: TensorDictSequential(LINEAR).select_subsequence(["a"], ["z"]), TreeStructureError, r"\['a'\].*\['z'\]"),
    (lambda: TensorDictSequential(LINEAR)(TD, other=1), TypeError, "unexpected keyword argument 'other'"),
    (lambda: TensorDictSequential(LINEAR)[1], IndexError, "range"),
    (
        lambda: ProbabilisticTensorDictSequential(LINEAR), UnsupportedError,
        "last module must be probabilistic.*TensorDictModule.*TensorDictSequential takes any",
    ),
    (lambda: ProbabilisticTensorDictSequential(), UnsupportedError, "no modules"),
    (
        lambda: ProbabilisticTensorDictModule(["loc"], ["a", "b"], distribution_class=D.Normal), TreeStructureError,
        r"out_keys must be the key of the value.*\['a', 'b'\]",
    ),
    (lambda: NORMAL(TD), MissingKeyError, "ProbabilisticTensorDictModule: the tree has no 'loc'"),
    (lambda: NORMAL.log_prob(TensorDict(PARAMS)), MissingKeyError, "no 'v'"),
    (lambda: NORMAL(TensorDict(PARAMS), interaction_type="best"), ValueError, "'best' is not a valid InteractionType"),
    (lambda: NORMAL(TensorDict(PARAMS), interaction_type="median"), UnsupportedError, "Normal has no median.*'median'"),
    (lambda: define(), TypeError, r"Bare must name the classes.*TensorClassModuleBase\[In, Out\]"),
    (lambda: dispatch(lambda self, td: td), TypeError, r"called 'tensordict'.*\(self, td\)"),
    (
        lambda: LINEAR.reset_parameters_recursive(TensorDict({"module": {"w": torch.zeros(3)}})), TreeStructureError,
        "module.w",
    ),
    (
        lambda: LINEAR.reset_parameters_recursive(torch.stack([from_module(LINEAR)] * 2)), LeafMismatchError,
        "module.weight.*the tree is stacked",
    ),
    # Ensembles, whose trees must have members.
    (lambda: EnsembleModule(APPLY, TREE, shared="*"), BatchSizeError, "leaves no leaf to the members"),
    (lambda: EnsembleModule(APPLY, TREE[0]), BatchSizeError, r"params must be a stacked tree.*\[\]"),
    (lambda: EnsembleModule(APPLY, TREE.set("s", "text")), UnsupportedError,
     "leaf 's' must be a tensor.*NonTensorData"),
    (lambda: BatchEnsembleLinear(3, 2, 4)(torch.zeros(5, 3)), LeafMismatchError,
     r"BatchEnsembleLinear.*4 or 1 entries.*\[5, 3\]"),
    (lambda: BatchEnsembleLinear(3, 2, 0), ValueError, "members must be at least 1.*0"),
    (lambda: BatchEnsembleLinear(3, 2, 4, init="x"), ValueError, "how scales begin.*'signs'.*'x'"),
    (lambda: batch_ensemble(nn.ReLU(), 4, 0), UnsupportedError, "nn.Linear or nn.Conv2d.*ReLU"),
    (lambda: batch_ensemble(nn.TransformerEncoderLayer(8, 2), 4, 0), UnsupportedError, "run by their forward.*fast"),
    (lambda: batch_ensemble(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), 2, 0), UnsupportedError,
     "pad with zeros.*reflect"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each error has its class, and its parts in order."""
    with pytest.raises(error) as caught:
        call()

    assert re.search(pattern, str(caught.value), flags=re.DOTALL), str(caught.value)
