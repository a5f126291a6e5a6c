"""Errors of modules on trees: each call, its class, and the parts of its message."""

import re

import pytest
import torch
from torch import distributions as D
from torch import nn

import tdfunc as tdf
from tdfunc.nn import (
    BatchEnsembleConv2d,
    BatchEnsembleLinear,
    EnsembleLinear,
    EnsembleModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorClassModuleBase,
    TensorDictModule,
    TensorDictSequential,
    batch_ensemble,
    dispatch,
)


class Field(tdf.TensorClass):
    """One field."""

    x: torch.Tensor


TD = tdf.TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
LINEAR = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"])
NORMAL = ProbabilisticTensorDictModule(["loc", "scale"], ["v"], distribution_class=D.Normal, return_log_prob=True)
APPLY, TREE = tdf.functional(nn.Linear(3, 2))[0], tdf.init_ensemble(lambda: nn.Linear(3, 2), 4)
PARAMS = {"loc": torch.zeros(2), "scale": torch.ones(2)}


def returns(*values):
    """A module with the out keys y and z whose function returns these values."""
    return TensorDictModule(lambda a: values if len(values) != 1 else values[0], ["a"], ["y", "z"])


def define(**names):
    """A typed module that does not name its classes."""
    return type("Bare", (TensorClassModuleBase,), names)


MESSAGES = [
    (
        lambda: LINEAR(TD), tdf.MissingKeyError,
        r"TensorDictModule\(Linear\): the tree has no 'x'.*expected: \['x'\].*got: +\['a', \('n', 'b'\)\]",
    ),
    (lambda: LINEAR(tdf.TensorDict()), tdf.MissingKeyError, r"no 'x'.*\(no keys\)"),
    (lambda: LINEAR(tdf.TensorDict(dict.fromkeys(map(str, range(50)), 1))), tdf.MissingKeyError, r"'9', \.\.\.\]$"),
    (lambda: TensorDictModule(torch.exp, ("n", "c"), "y")(TD), tdf.MissingKeyError, r"\(exp\).*no \('n', 'c'\)"),
    (lambda: TensorDictModule(torch.exp, ("a", "c"), "y")(TD), tdf.MissingKeyError, r"no \('a', 'c'\)"),
    (lambda: LINEAR(torch.zeros(3), x=torch.zeros(3)), TypeError, "'x' is given by position and by keyword"),
    (lambda: LINEAR(torch.zeros(3), z=torch.zeros(3)), TypeError, "unexpected keyword argument 'z'"),
    (lambda: LINEAR(), tdf.MissingKeyError, "no 'x'"),
    (lambda: LINEAR(tdf.lazy_stack([TD, TD])), tdf.MissingKeyError, "no 'x'"),
    (lambda: returns(TD["a"])(TD), tdf.TreeStructureError,
     r"returned 1 values for 2 out keys.*2: \['y', 'z'\].*1: \['Tensor'\].*_"),
    (lambda: returns(1, 2, 3)(TD), tdf.TreeStructureError, r"got: +3"),
    (lambda: returns()(TD), tdf.TreeStructureError, r"got: +0"),
    (lambda: returns({"y": 1})(TD), tdf.TreeStructureError, r"got: +1: \['dict'\]"),
    (lambda: returns(tdf.TensorDict({"y": 1}))(TD), tdf.TreeStructureError, r"got: +1: \['TensorDict'\]"),
    (lambda: returns(TD["a"], None)(TD), TypeError, "'z': None cannot be a value"),
    (lambda: returns(TD["a"], torch.zeros(2))(TD), tdf.BatchSizeError, r"'z'.*\[3\].*\[2\]"),
    (lambda: TensorDictModule(torch.exp, ["x"], ["y"])(Field(torch.ones(3))), tdf.MissingKeyError, "no field 'y'"),
    (lambda: TensorDictModule(torch.exp, [0], ["y"]), TypeError, "key must be a str.*0"),
    (lambda: TensorDictModule(torch.exp, ["x"], [""]), TypeError, "key must be a str"),
    (lambda: LINEAR.select_out_keys("x"), tdf.MissingKeyError, r"'x' is not an out key of TensorDictModule.*\['y'\]"),
    (lambda: LINEAR.select_out_keys().select_out_keys("y"), tdf.MissingKeyError, r"reset_out_keys\(\) first"),
    (lambda: LINEAR.select_out_keys(["y"]), TypeError, "key must be a str"),
    (lambda: TensorDictSequential(LINEAR, nn.Linear(2, 2)), tdf.UnsupportedError, "module 1 has no in_keys.*Linear"),
    (lambda: TensorDictSequential([torch.exp]), tdf.UnsupportedError, "module 0.*TensorDictModule\\(function"),
    (lambda: TensorDictSequential(LINEAR, selected_out_keys=["z"]), tdf.MissingKeyError, "'z' is not an out key"),
    (lambda: TensorDictSequential(LINEAR).select_subsequence(["a"], ["z"]), tdf.TreeStructureError,
     r"\['a'\].*\['z'\]"),
    (lambda: TensorDictSequential(LINEAR)(TD, other=1), TypeError, "unexpected keyword argument 'other'"),
    (lambda: TensorDictSequential(LINEAR)[1], IndexError, "range"),
    (
        lambda: ProbabilisticTensorDictSequential(LINEAR), tdf.UnsupportedError,
        "last module is not probabilistic.*TensorDictModule.*TensorDictSequential takes any",
    ),
    (lambda: ProbabilisticTensorDictSequential(), tdf.UnsupportedError, "no modules"),
    (
        lambda: ProbabilisticTensorDictModule(["loc"], ["a", "b"], distribution_class=D.Normal), tdf.TreeStructureError,
        r"2 out keys for one value.*\['a', 'b'\]",
    ),
    (lambda: NORMAL(TD), tdf.MissingKeyError, "ProbabilisticTensorDictModule: the tree has no 'loc'"),
    (lambda: NORMAL.log_prob(tdf.TensorDict(PARAMS)), tdf.MissingKeyError, "no 'v'"),
    (lambda: NORMAL(tdf.TensorDict(PARAMS), interaction_type="best"), ValueError,
     "'best' is not a valid InteractionType"),
    (lambda: NORMAL(tdf.TensorDict(PARAMS), interaction_type="median"), tdf.UnsupportedError,
     "Normal has no median.*'median'"),
    (lambda: type("Odd", (TensorClassModuleBase,), {"input_type": None}, wrong=1), TypeError, "keyword arg"),
    (lambda: define(), TypeError, r"Bare does not name the classes.*TensorClassModuleBase\[In, Out\]"),
    (
        lambda: TensorDictModule(lambda x: x, "x", "y")({"x": torch.ones(1)}),
        TypeError,
        r"(?s)a dict is not a tree; it would be the value of 'x'.*TensorDict\(values\)",
    ),
    (lambda: dispatch(lambda self, td: td), TypeError, r"called 'tensordict'.*\(self, td\)"),
    (
        lambda: LINEAR.reset_parameters_recursive(tdf.TensorDict({"module": {"w": torch.zeros(3)}})),
        tdf.TreeStructureError, "module.w",
    ),
    (
        lambda: LINEAR.reset_parameters_recursive(torch.stack([tdf.from_module(LINEAR)] * 2)), tdf.LeafMismatchError,
        "module.weight.*the tree is stacked",
    ),
    # Ensembles, whose trees must have members.
    (lambda: EnsembleModule(APPLY, TREE, shared="*"), tdf.BatchSizeError, "leaves no leaf to the members"),
    (lambda: EnsembleModule(APPLY, TREE[0]), tdf.BatchSizeError, r"params is not a stacked tree.*\[\]"),
    (lambda: EnsembleModule(APPLY, TREE.set(("n", "s"), "text")), tdf.UnsupportedError,
     "leaf 'n.s' is not a tensor.*NonTensorData"),
    (lambda: BatchEnsembleLinear(3, 2, 4)(torch.zeros(5, 3)), tdf.LeafMismatchError,
     r"BatchEnsembleLinear.*4 or 1 entries.*\[5, 3\]"),
    (lambda: BatchEnsembleConv2d(3, 2, 3, 4)(torch.zeros(4, 3, 5, 5)), tdf.LeafMismatchError, "Conv2d.*5 or more dim"),
    (lambda: EnsembleLinear(3, 2, 4)(torch.zeros(5, 3)), tdf.LeafMismatchError, "EnsembleLinear.*4 or 1 entries"),
    (lambda: BatchEnsembleLinear(3, 2, 0), ValueError, "members must be at least 1.*0"),
    (lambda: BatchEnsembleLinear(3, 2, 4, init=("x", "ones")), ValueError, "a way in which scales begin.*'signs'.*'x'"),
    (lambda: batch_ensemble(nn.ReLU(), 4, 0), tdf.UnsupportedError, "nn.Linear or nn.Conv2d.*ReLU"),
    (lambda: batch_ensemble(nn.TransformerEncoderLayer(8, 2), 4, 0), tdf.UnsupportedError,
     "does not call the forward of its parts.*fast"),
    (lambda: batch_ensemble(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), 2, 0), tdf.UnsupportedError,
     "pad with zeros.*reflect"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each error has its class, and its parts in order."""
    with pytest.raises(error) as caught:
        call()

    assert re.search(pattern, str(caught.value), flags=re.DOTALL), str(caught.value)
