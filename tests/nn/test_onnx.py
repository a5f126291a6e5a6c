"""Exports to ONNX, where onnx and onnxscript are installed: they are not among the packages of CI."""

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.nn import EnsembleModule, TensorDictModule, TensorDictSequential

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
# Of torch and onnxscript themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(path, x):
    """The outputs of a file for one input."""
    session = onnxruntime.InferenceSession(path)
    return [torch.from_numpy(out) for out in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def test_an_ensemble(tmp_path):
    """A file of an ensemble computes all members, for any number of rows."""

    def make():
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    apply, _, _ = tdf.functional(make())
    ensemble = EnsembleModule(apply.eval(), tdf.init_ensemble(make, 4), how="loop").eval()
    rows = {0: torch.export.Dim("rows")}
    torch.onnx.export(ensemble, (torch.randn(5, 3),), tmp_path / "a.onnx", dynamic_shapes=((rows,),))
    x = torch.randn(9, 3)

    torch.testing.assert_close(run(tmp_path / "a.onnx", x)[0], ensemble(x))


def test_a_module_of_trees(tmp_path):
    """Each leaf of the result is an output."""
    module = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]), TensorDictModule(nn.ReLU(), ["h"], ["y"])
    ).eval()
    tree = TensorDict({"x": torch.randn(5, 3)}, [5])
    torch.onnx.export(module, (tree,), tmp_path / "a.onnx")
    found = run(tmp_path / "a.onnx", tree["x"])

    torch.testing.assert_close(found[-1], module(tree)["y"])
