"""What a saved tree keeps, and how a loaded one behaves."""

import os
import pickle
import sys
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor

from tdfunc import TensorDict
from tdfunc import open as open_file
from tdfunc.core.errors import UnsupportedError
from tdfunc.storage.api import load, save
from tdfunc.storage.safetensors import header
from tdfunc.storage.safetensors import plan as plans
from tdfunc.storage.tree import encode
from tests.storage.trees import assert_same


def round_trip(tree, folder, **options):
    """Save and load a tree."""
    path = os.path.join(folder, "t.safetensors")
    save(tree, path, fsync=False)
    return load(path, **options)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(TensorDict({"a": -torch.zeros(2), "s": "x"}, [2]), id="sign"),
        pytest.param(TensorDict({"s": "x", "a": torch.zeros(2)}, [2]), id="order"),
        pytest.param(TensorDict({"a": torch.zeros(2), "s": "x"}, []), id="batch size"),
        pytest.param(TensorDict({"a": torch.zeros(2), "s": "y"}, [2]), id="value"),
        pytest.param(TensorDict({"a": nn.Parameter(torch.zeros(2)), "s": "x"}, [2]), id="class"),
    ],
)
def test_the_comparison_can_fail(other):
    """The comparison of the laws above finds a difference in a sign, order, batch size, value or class."""
    with pytest.raises(AssertionError):
        assert_same(TensorDict({"a": torch.zeros(2), "s": "x"}, [2]), other)


def test_names_are_dotted_paths(tmp_path):
    """Names in the file are dotted paths, with a suffix where two leaves would have one."""
    leaves = {"a.b": torch.full((1,), 1.0), "__metadata__": torch.full((1,), 2.0), "c": torch.full((1,), 3.0)}
    tree = TensorDict({**leaves, "a": {"b": torch.full((1,), 4.0)}})

    assert_same(round_trip(tree, tmp_path), tree)
    plain = safetensors.torch.load_file(tmp_path / "t.safetensors")
    expected = {"a.b": 1.0, "__metadata__~1": 2.0, "c": 3.0, "a.b~1": 4.0}
    assert {name: leaf.item() for name, leaf in plain.items()} == expected


def test_depth_meets_no_recursion_limit(tmp_path):
    """A tree of any depth comes back, and is compared."""
    tree = TensorDict({"leaf": torch.ones(2)})
    for _ in range(sys.getrecursionlimit() + 100):
        tree = TensorDict._make({"k": tree, "x": torch.zeros(1)}, torch.Size(()))

    assert_same(round_trip(tree, tmp_path, like=tree), tree)


# -- what a loaded tree is --------------------------------------------------------------------------------------


def test_leaves_are_independent(tmp_path):
    """Each loaded leaf has a version and a storage of its own, and pickles alone."""
    back = round_trip(
        TensorDict({"a": torch.zeros(1000), "b": torch.zeros(1000), "h": torch.zeros(9).bfloat16()}), tmp_path
    )
    version = back["b"]._version

    back["a"].add_(1)

    assert back["b"]._version == version
    leaves = {name: back[name] for name in ("a", "b", "h")}
    assert [name for name, leaf in leaves.items() if leaf._is_view()] == []
    assert [name for name, leaf in leaves.items() if leaf.is_shared()] == []
    sizes = {name: leaf.nbytes for name, leaf in leaves.items()}
    assert {name: leaf.untyped_storage().nbytes() for name, leaf in leaves.items()} == sizes
    assert len(pickle.dumps(back["a"])) < 6000


def test_saving_over_the_file_that_a_tree_is_mapped_from(tmp_path):
    """A save over the file that a tree is mapped from changes the file and not the tree."""
    path = tmp_path / "t.safetensors"
    save(TensorDict({"a": torch.arange(100_000.0)}), path)
    back = load(path)

    save(back.apply(lambda x: x + 1), path)
    save(load(path), path)

    assert torch.equal(back["a"], torch.arange(100_000.0))
    assert torch.equal(load(path)["a"], torch.arange(100_000.0) + 1)


def test_fake_mode_reads_the_header_only(tmp_path):
    """Under FakeTensorMode a load makes fake tensors from the header alone."""
    tree = TensorDict({"a": nn.Parameter(torch.ones(2, 3)), "b": {"c": torch.ones(2).bfloat16()}}, [2])
    save(tree, tmp_path / "t.safetensors")

    with FakeTensorMode(), mock.patch("torch.from_file", side_effect=AssertionError):
        back = load(tmp_path / "t.safetensors")

    assert isinstance(back["a"], FakeTensor)
    assert isinstance(back["a"], nn.Parameter)
    assert isinstance(back["b", "c"], FakeTensor)
    assert back["b", "c"].dtype == torch.bfloat16
    assert back.batch_size == tree.batch_size


@pytest.fixture
def elsewhere(tmp_path):
    """A file of a tree on a device that is not here."""
    path = tmp_path / "t.safetensors"
    plan = encode.outline(TensorDict({"a": torch.ones(2)}))
    text = plan.text.replace('"keys"', '"device":"cuda:7","keys"')
    with mock.patch("tdfunc.storage.api.outline", return_value=plan._replace(text=text)):
        save(TensorDict({"a": torch.ones(2)}), path)
    return path


@pytest.mark.parametrize(
    "read", [lambda f: f.load(), lambda f: f["a"], lambda f: f.slice("a", 0)], ids=["load", "leaf", "rows"]
)
def test_parts_of_another_device_that_is_not_here(elsewhere, read):
    """They are refused with the line that loads them on the CPU."""
    with open_file(elsewhere) as f, pytest.raises(UnsupportedError, match=r"cuda:7[\s\S]*device=\"cpu\""):
        read(f)


def test_another_device_that_is_not_here(elsewhere):
    """A tree that was saved on it is refused with the line that loads it on the CPU."""
    with pytest.raises(UnsupportedError, match=r"cuda:7[\s\S]*device=\"cpu\""):
        load(elsewhere)
    assert load(elsewhere, device="cpu")["a"].tolist() == [1.0, 1.0]
    meta = load(elsewhere, device="meta")
    assert meta["a"].device == torch.device("meta")
    assert meta.device == torch.device("meta")


# -- files of other programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["a", "a.b"], ["a..b"], ["a.b", ".c"], [".".join("k" * 65)]], ids=str)
def test_ambiguous_names_stay_flat(names, tmp_path):
    """Names that do not nest load as keys with dots."""
    safetensors.torch.save_file({name: torch.ones(1) for name in names}, tmp_path / "t.safetensors")

    assert set(load(tmp_path / "t.safetensors").keys()) == set(names)


def test_misaligned_leaves_are_copied(tmp_path):
    """Leaves that do not lie on multiples of their element size load as aligned copies."""
    raw = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},'
    raw += b'"c":{"dtype":"BF16","shape":[2],"data_offsets":[11,15]}}'
    data = torch.tensor([1.5, -2.0])
    values = b"abc" + data.numpy().tobytes() + data.bfloat16().view(torch.uint8).numpy().tobytes()
    (tmp_path / "t.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + values)

    back = load(tmp_path / "t.safetensors")

    assert bytes(back["a"].tolist()) == b"abc"
    assert torch.equal(back["b"], data)
    assert torch.equal(back["c"], data.bfloat16())
    assert back["b"].data_ptr() % 4 == back["c"].data_ptr() % 2 == 0


def test_a_file_written_again_by_another_program(tmp_path):
    """A file with old metadata around new values is refused, and read without verifying."""
    path = tmp_path / "t.safetensors"
    save(TensorDict({"b": {"w": torch.ones(3)}, "s": "text", "a": torch.zeros(2)}, names=None), path)
    with safetensors.safe_open(path, "pt") as f:
        metadata = f.metadata()
    safetensors.torch.save_file({"b.w": torch.full((3,), 5.0), "a": torch.ones(2)}, path, metadata)

    with pytest.raises(ValueError, match=r"another program[\s\S]*verify=False"):
        load(path)
    back = load(path, verify=False)
    assert back["b", "w"].tolist() == [5.0] * 3
    assert back["s"] == "text"


# -- how it is written ------------------------------------------------------------------------------------------


def test_other_headers_are_the_limit_of_safetensors(tmp_path, monkeypatch):
    """A header that is too long for safetensors is refused before anything is written."""
    tree = TensorDict({str(i): torch.ones(1) for i in range(20)})
    save(tree, tmp_path / "t.safetensors")
    length = (tmp_path / "t.safetensors").stat().st_size - 80 - 8
    monkeypatch.setattr(plans, "MAX_HEADER_BYTES", length)
    assert_same(round_trip(tree, tmp_path), tree)
    monkeypatch.setattr(plans, "MAX_HEADER_BYTES", length - 1)

    with pytest.raises(UnsupportedError, match=rf"at most {length - 1} bytes[\s\S]*{length} bytes"):
        save(tree, tmp_path / "u.safetensors")
    with pytest.raises(UnsupportedError, match="the index would be too long"):
        save(tree, tmp_path / "m", max_shard_size=4)
    assert os.listdir(tmp_path) == ["t.safetensors"]
    assert header.MAX_HEADER_BYTES == 100_000_000


def test_a_value_seen_with_a_huge_batch_takes_no_memory(tmp_path):
    """A value for a whole batch is written and loaded once, whatever the batch size."""
    td = TensorDict({"n": TensorDict({"s": "x"}, [2**40])})
    save(td, tmp_path / "f.safetensors")

    back = load(tmp_path / "f.safetensors")
    assert back["n"].batch_size == torch.Size([2**40])
    assert back["n", "s"] == "x"
    assert (tmp_path / "f.safetensors").stat().st_size < 10_000
