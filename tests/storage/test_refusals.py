"""What cannot be saved is refused by name before the first byte is written."""

import enum

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tdfunc import BatchSizeError, NonTensorData, TensorDict, TieError, UnsupportedError
from tdfunc.storage.api import load, save
from tdfunc.storage.tree import encode
from tests.storage.trees import assert_same, retie


class Level(enum.IntEnum):
    """An int that JSON would make a plain one."""

    LOW = 1


class Sub(torch.Tensor):
    """A tensor of another class."""


def freed():
    """A tensor whose storage was taken away, as FSDP does."""
    leaf = torch.ones(4)
    leaf.untyped_storage().resize_(0)
    return leaf


LEAVES = {
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
    "float4 scalar": (lambda: torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0], "float4"),
    "meta": (lambda: torch.zeros(2, device="meta"), "meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), check_invariants=False), "sparse_csr"),
    "subclass": (lambda: torch.zeros(2).as_subclass(Sub), "Sub"),
    "uninitialised": (lambda: nn.LazyLinear(3).weight, "UninitializedParameter"),
    "freed": (freed, "0 bytes of storage"),
}


@pytest.fixture(autouse=True)
def _no_beta_warning(recwarn):
    yield
    assert [str(w.message) for w in recwarn if "beta state" not in str(w.message)] == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("case", LEAVES)
def test_leaves_that_a_file_cannot_hold(case, tmp_path):
    """A leaf would be lost, cast or crash the process."""
    make, got = LEAVES[case]
    tree = TensorDict({"ok": torch.ones(2)})._put({"n": TensorDict({})._put({"bad": make()})})

    with pytest.raises(UnsupportedError, match=rf"leaf \"n\.bad\"[\s\S]*got: .*{got}"):
        save(tree, tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


VALUES = {
    "object": object(),
    "tuple": (1, 2),
    "nan": float("nan"),
    "inf": [float("inf")],
    "int key": {1: "a"},
    "bytes": b"x",
    "set": {1},
    "enum": Level.LOW,
    "numpy": np.float32(1),
    "long int": 10**5000,
    "dtype": torch.float32,
    "tensor inside": {"a": torch.ones(2)},
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_json_would_alter(case, tmp_path):
    """A non-tensor value would come back as another one."""
    tree = TensorDict({"n": {"bad": NonTensorData({"deep": [VALUES[case]]})}})

    with pytest.raises(TypeError, match=r'leaf "n\.bad"[\s\S]*expected: .*JSON[\s\S]*got: '):
        save(tree, tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_values_nested_too_deep(tmp_path):
    """A value would be saved that the JSON reader cannot load, or a cycle would hang the save."""
    value = cycle = []
    cycle.append(cycle)

    with pytest.raises(UnsupportedError, match=r'leaf "bad"[\s\S]*200 deep'):
        save(TensorDict({"bad": NonTensorData(value)}), tmp_path / "t.safetensors")
    deep = "x"
    for _ in range(199):
        deep = [deep]
    save(TensorDict({"ok": NonTensorData(deep)}), tmp_path / "t.safetensors")
    assert load(tmp_path / "t.safetensors")["ok"] == deep


@pytest.mark.parametrize(
    "tree",
    [TensorDict({"a\ud800": torch.ones(1)}), TensorDict({"a": "b\ud800"}), TensorDict({"s": {"\udfff": {}}})],
    ids=["key", "value", "empty tree"],
)
def test_half_characters(tree, tmp_path):
    """A key that UTF-8 cannot encode would be replaced by another one."""
    with pytest.raises(UnsupportedError, match=r"UTF-8[\s\S]*\\ud"):
        save(tree, tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_leaves_inside_a_transformation(tmp_path):
    """A save inside vmap would write the memory of something else."""

    def fn(x):
        save(TensorDict({"x": x}), tmp_path / "t.safetensors")
        return x

    with pytest.raises(UnsupportedError, match=r'"x" has no memory[\s\S]*torch\.func'):
        torch.vmap(fn)(torch.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_other_nodes(tmp_path):
    """What `tree_map` left in a tree would be dropped."""
    with pytest.raises(UnsupportedError, match=r'"n" cannot be stored[\s\S]*got: .*int[\s\S]*NonTensorData'):
        save(TensorDict({})._put({"n": 3}), tmp_path / "t.safetensors")


def test_batch_sizes_that_do_not_fit(tmp_path):
    """A file would be written that load refuses."""
    tree = TensorDict._make({"a": torch.ones(3, 2)}, torch.Size([2]))

    with pytest.raises(BatchSizeError, match=r'"a"[\s\S]*\[2\][\s\S]*\[3, 2\]'):
        save(tree, tmp_path / "t.safetensors")
    stack = TensorDict._make({"s": NonTensorData("x", [3])}, torch.Size([2]))
    with pytest.raises(BatchSizeError, match=r'"s"[\s\S]*\[2\][\s\S]*\[3\]'):
        save(stack, tmp_path / "t.safetensors")


def test_fake_mode(tmp_path):
    """Fake tensors would be saved as whatever their memory holds."""
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="FakeTensorMode"):
        save(TensorDict({"a": torch.ones(1)}), tmp_path / "t.safetensors")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", "", ".npz", ".safetensors.tmp"])
def test_suffixes(suffix, tmp_path):
    """A file would have a name that says it is of another format."""
    with pytest.raises(ValueError, match=rf"expected: \.safetensors[\s\S]*got: .*{suffix[-4:] or 'none'}"):
        save(TensorDict({"a": torch.ones(1)}), tmp_path / f"t{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_torch_suffixes_name_the_right_call(tmp_path):
    """Somebody who wants a `.pt` file would not learn how to write it."""
    with pytest.raises(ValueError, match=r"torch\.save\(td\.state_dict\(\)"):
        save(TensorDict({"a": torch.ones(1)}), tmp_path / "t.pt")


def test_arguments_that_are_no_tree(tmp_path):
    """A dict would fail deep inside, or be half saved."""
    with pytest.raises(TypeError, match=r"got: .*dict[\s\S]*TensorDict\(mapping\)"):
        save({"a": torch.ones(1)}, tmp_path / "t.safetensors")


def test_folders(tmp_path):
    """A folder of this name, or a missing one, would give an error that does not say which."""
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match=r"d\.safetensors"):
        save(TensorDict({"a": torch.ones(1)}), tmp_path / "d.safetensors")
    (tmp_path / "d.safetensors" / "other.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"d\.safetensors[\s\S]*index\.json[\s\S]*other\.txt"):
        load(tmp_path / "d.safetensors")
    with pytest.raises(FileNotFoundError, match="missing"):
        save(TensorDict({"a": torch.ones(1)}), tmp_path / "missing" / "t.safetensors")
    with pytest.raises(FileNotFoundError, match=r"t\.safetensors"):
        load(tmp_path / "t.safetensors")


# -- ties -------------------------------------------------------------------------------------------------------


def test_ties_that_hold_two_tensors(tmp_path):
    """The second tensor of a broken tie would be lost."""
    tree = TensorDict({"a": torch.ones(1), "b": torch.zeros(1)})
    tree = tree._replace(tree._data, ties=((("a",), ("b",)),))

    with pytest.raises(TieError, match=r'"b" is tied to "a"[\s\S]*untie'):
        save(tree, tmp_path / "t.safetensors")


def test_ties_without_a_leaf(tmp_path):
    """A group that names a path which is not there would make a file that load refuses."""
    tree = TensorDict({"a": torch.ones(1)})
    tree = tree._replace(tree._data, ties=((("a",), ("b", "c")),))

    with pytest.raises(TieError, match=r"a, b\.c[\s\S]*untie"):
        save(tree, tmp_path / "t.safetensors")


def test_ties_that_only_a_sub_tree_knows(tmp_path):
    """A tie would be lost, since the tree that is saved does not list it."""
    leaf = torch.ones(1)
    inner = retie(TensorDict({"a": leaf, "b": leaf}), [[("a",), ("b",)]])
    tree = TensorDict({})._put({"s": inner})
    tree = tree._replace(tree._data, ties=())

    with pytest.raises(TieError, match=r"a, b are tied[\s\S]*s\."):
        save(tree, tmp_path / "t.safetensors")


def test_ties_so_deep_that_they_fill_the_memory(tmp_path, monkeypatch):
    """A small file could make load allocate a path for every pair of levels."""
    leaf = torch.ones(1)
    tree = retie(TensorDict({"s": {"s": {"a": leaf, "b": leaf}}}), [[("s", "s", "a"), ("s", "s", "b")]])
    save(tree, tmp_path / "t.safetensors")
    monkeypatch.setattr(encode, "MAX_TIE_KEYS", 17)

    with pytest.raises(UnsupportedError, match=r"at most 17[\s\S]*18"):
        save(tree, tmp_path / "u.safetensors")
    with pytest.raises(ValueError, match=r"at most 17[\s\S]*18"):
        load(tmp_path / "t.safetensors")
    monkeypatch.undo()
    assert_same(load(tmp_path / "t.safetensors"), tree)


def test_arguments_in_the_other_order():
    """The message would be about file system paths."""
    with pytest.raises(TypeError, match=r"not a path(.|\n)*save\(tree, path\)"):
        save("x.safetensors", TensorDict({"a": torch.zeros(1)}))  # pyright: ignore
