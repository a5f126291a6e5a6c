"""A program that was written from the documentation, without tdfunc, reads what tdfunc writes."""

import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import tdfunc as tdf
from tdfunc import LazyStack, NonTensorData, NonTensorStack, TensorClass, TensorDict
from tdfunc.core.collection import TensorCollection
from tests.helpers import examples
from tests.storage import other_reader, trees


class Named(TensorClass):
    x: torch.Tensor
    note: str = "note"
    absent: torch.Tensor | None = None


def bits(tensor):
    """A tensor as the reader gives it."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16 or str(tensor.dtype).startswith("torch.float8"):
        tensor = tensor.contiguous().view(torch.uint16 if tensor.dtype is torch.bfloat16 else torch.uint8)
    return tensor.numpy()


def expected(tree):
    """A tree as the reader gives it."""
    if isinstance(tree, LazyStack):
        return {str(i): expected(part) for i, part in enumerate(tree.trees)}
    result = {}
    for key, value in tree._data.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            value = value.data if isinstance(value, NonTensorData) else value._array.tolist()
        result[key] = of_object(value)
    return result


def of_object(value):
    """A leaf, tree or plain object as the reader gives it."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, TensorCollection):
        return expected(value)
    if isinstance(value, dict):
        return {key: of_object(item) for key, item in value.items()}
    return type(value)(map(of_object, value)) if isinstance(value, list | tuple) else value


def assert_same(read, want, path=()):
    """The reader's nested dicts are those that are expected, in the same order."""
    assert type(read) is type(want), path
    if isinstance(want, dict):
        assert list(read) == list(want), path
        for key in want:
            assert_same(read[key], want[key], (*path, key))
    elif isinstance(want, list | tuple):
        for i, (one, other) in enumerate(zip(read, want, strict=True)):
            assert_same(one, other, (*path, i))
    elif isinstance(want, np.ndarray):
        assert (read.dtype, read.shape, read.tobytes()) == (want.dtype, want.shape, want.tobytes()), path
    else:
        assert read == want, path


def everything():
    """A tree with all that the formats have a place for."""
    shared = nn.Linear(2, 3)
    module = nn.ModuleDict({"one": shared, "two": shared, "norm": nn.BatchNorm1d(3)})
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.bool,
              torch.complex64]  # fmt: skip
    return TensorDict(
        {
            "module": TensorDict.from_module(module),
            "dtypes": {str(dtype): torch.randn(2, 3).to(dtype) for dtype in dtypes},
            "shapes": {"none": torch.tensor(1.5), "empty": torch.zeros(0, 3), "turned": torch.randn(2, 3).T},
            "n": {"w": torch.ones(2)},
            "n.w": torch.zeros(2),
            "lazy": tdf.lazy_stack([TensorDict({"x": torch.arange(i + 1)}) for i in range(3)]),
            "named": Named(torch.ones(2), batch_size=[2]),
            "rows": TensorDict({"word": ["a", "b"], "x": torch.ones(2, 3)}, [2], names=["row"]),
            "object": NonTensorData({"state": {0: {"m": torch.ones(2)}}, "betas": (0.9, float("inf"))}),
            "objects": TensorDict({"box": [(np.ones(2), torch.ones(3)), np.float32(2)]}, [2]),
            "tree in an object": NonTensorData([TensorDict({"x": torch.ones(1)}), None]),
            "data": {"text": "t", "none": NonTensorData(None), "dict": NonTensorData({"a": [1, 2.5]})},
            "shape": torch.ones(1), "device": {"_type": torch.zeros(2)}, "..": torch.ones(1), "a/b %": torch.ones(2),
            "x" * 300: torch.ones(3), "meta.json": {"y": torch.ones(1)}, "ключ": torch.ones(1), "void": {},
        }
    )  # fmt: skip


def through_file(tree, folder):
    """A tree, saved by tdfunc as one file and read by the other program."""
    tdf.save(tree, folder / "tree.safetensors")
    metadata, arrays = other_reader.read_arrays(folder / "tree.safetensors")
    return other_reader.read_tree(metadata["tdfunc.tree"], arrays)


def through_shards(tree, folder):
    """A tree, saved by tdfunc as shards and read by the other program."""
    tdf.save(tree, folder / "shards", max_shard_size=100, fsync=False)
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    return other_reader.read_shards(folder / "shards")


def through_folder(tree, folder):
    """A tree, written by tdfunc to a memmap folder and read by the other program."""
    tree.memmap(folder / "folder")
    return other_reader.read_folder(folder / "folder")


@pytest.mark.parametrize("through", [through_file, through_shards, through_folder], ids=lambda f: f.__name__)
def test_a_tree_with_everything(through, tmp_path):
    """A reader written from the documentation reads a tree with all that the formats have a place for."""
    tree = everything()

    assert_same(through(tree, tmp_path), expected(tree))


@pytest.mark.parametrize("through", [through_file, through_folder], ids=lambda f: f.__name__)
@examples(0.6)
@given(tree=trees.trees() | trees.tied_trees())
def test_any_tree(through, tree):
    """A reader written from the documentation reads random trees."""
    with tempfile.TemporaryDirectory() as folder:
        assert_same(through(tree, Path(folder)), expected(tree))


@pytest.mark.parametrize("max_shard_size", [None, 100])
def test_a_step_of_a_run(max_shard_size, tmp_path):
    """A reader written from the documentation reads a step of a run."""
    tree = TensorDict({"params": {"w": torch.randn(40), "b": torch.randn(40)}, "rng": tdf.get_rng_state()})
    manager = tdf.CheckpointManager(tmp_path / "run", max_shard_size=max_shard_size, fsync=False)
    manager.save(7, tree, metadata={"loss": 0.5})

    about, read = other_reader.read_step(tmp_path / "run" / "step-0000000007")

    assert about["step"] == 7
    assert about["metadata"] == {"loss": 0.5}
    assert_same(read, expected(tree))


def test_the_reader_knows_nothing_of_us():
    """The reader does not import tdfunc."""
    imported = {name for name, value in vars(other_reader).items() if isinstance(value, types.ModuleType)}

    assert imported == {"hashlib", "json", "math", "struct", "np"}


def test_the_comparison_can_fail():
    """The comparison finds a difference in a value, dtype, key or order."""
    want = {"a": np.zeros(2), "b": "x"}

    for wrong in ({"a": np.ones(2), "b": "x"}, {"a": np.zeros(2, int), "b": "x"}, {"b": "x", "a": np.zeros(2)}):
        with pytest.raises(AssertionError):
            assert_same(wrong, want)
