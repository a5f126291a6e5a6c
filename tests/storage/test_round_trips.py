"""`load(save(t)) == t` for every way to store a tree: random trees, and leaves that are hard to write."""

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tdfunc
from tdfunc import AsyncSaver, CheckpointManager, LazyStack, NonTensorStack, TensorClass, TensorDict, lazy_stack
from tdfunc.parallel.parcel import from_parcel, to_parcel
from tests.storage.test_raw import ONES
from tests.storage.trees import DTYPES, assert_same, of_dtype, same_bytes, tied_trees, trees

pytestmark = pytest.mark.sample(2)

LAW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Point(TensorClass):
    """A typed tree."""

    x: torch.Tensor
    note: str = "none"


def single(tree, folder):
    """Save one file and load it."""
    tdfunc.save(tree, folder / "x.safetensors", fsync=False)
    return tdfunc.load(folder / "x.safetensors")


def shards(tree, folder):
    """Save a folder of shards and load it."""
    tdfunc.save(tree, folder / "shards", max_shard_size=8, fsync=False)
    return tdfunc.load(folder / "shards")


def handle(tree, folder):
    """Save one file and read it through a handle."""
    tdfunc.save(tree, folder / "x.safetensors", fsync=False)
    with tdfunc.open(folder / "x.safetensors") as f:
        return f.load()


def background(tree, folder):
    """Save one file in the background and load it."""
    with AsyncSaver() as saver:
        saver.save(tree, folder / "x.safetensors", fsync=False)
    return tdfunc.load(folder / "x.safetensors")


def manager(tree, folder):
    """Save a step and load it."""
    steps = CheckpointManager(folder / "run")
    steps.save(1, tree, overwrite=True)
    return steps.load()


def memmap(tree, folder):
    """Write a memmap folder over the one that is there, and load it."""
    tree.memmap(folder / "mm")
    return tdfunc.load(folder / "mm")


def threads(tree, folder):
    """Write a memmap folder with threads, write the mapped tree over itself, and map it for writing."""
    mapped = tree.memmap(folder / "mm", num_threads=3)
    assert_same(mapped.memmap(folder / "mm"), tree)
    return TensorDict.load_memmap(folder / "mm", mode="r+", num_threads=3)


WAYS = [single, shards, handle, background, manager, memmap, threads]


@pytest.mark.parametrize("way", WAYS)
@LAW
@given(tree=trees() | tied_trees())
def test_load_of_save_is_the_tree(way, tree, tmp_path):
    """Values, key order, batch sizes, names, kinds, ties, Parameters and non-tensor data come back."""
    assert_same(way(tree, tmp_path), tree)


def ragged():
    """Lazy stacks of plain and typed trees, alone, nested and in a tree."""
    plain = lazy_stack([TensorDict({"x": torch.ones(n), "s": "v"}, [n], names=["t"]) for n in (1, 3)], dim=1)
    typed = lazy_stack([Point(torch.rand(n, 2), "é", batch_size=[n]) for n in (1, 3)], dim=1)
    point = Point(torch.ones(2), batch_size=[2])
    return TensorDict({"plain": plain, "typed": typed, "two": lazy_stack([typed, typed.detach()]), "point": point})


def wide(*sizes):
    """A leaf of a dtype that has many bits set, by its shape."""
    return TensorDict({name: of_dtype(name, sizes) for name in DTYPES} | {"last": torch.arange(3, dtype=torch.uint8)})


def layouts():
    """Leaves that are not one run of memory; the large ones take two pieces of 4 MiB."""
    torch.manual_seed(0)
    complex_ = torch.randn(800, 800, dtype=torch.complex64)
    return {
        "0-d, one byte": torch.tensor(True),
        "strided": torch.randn(40, 50).t(),
        "sliced": torch.randn(100, 7)[::3, 1:5],
        "expanded": torch.randn(1, 3).expand(1000, 3),
        "expanded, large": torch.randn(1, 1, 700).expand(1, 1600, 700),
        "one long row": torch.randn(2, 1_300_000).t()[:1_200_000].t(),
        "large": torch.randn(1_300_001),
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "conj, large": complex_.conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
        "negative, large": torch.randn(1_300_000, dtype=torch.complex64).conj().imag,
        **{f"one element: {name}": make() for name, make in ONES.items()},
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "40 dimensions": torch.randn([2, 3] + [1] * 38),
        "requires grad, computed": torch.randn(5, requires_grad=True) * 2,
    }


EXAMPLES = {
    "ragged": ragged,
    "dtypes": lambda: wide(2, 6),
    "dtypes without elements": lambda: wide(0, 4),
    "dtypes, large": lambda: wide(70_000),
    "layouts": lambda: TensorDict(layouts()),
    "many of 64 kB": lambda: TensorDict({str(i): torch.full((16384,), float(i)) for i in range(18)}),
    "empty": TensorDict,
    "no leaves": lambda: TensorDict({"a": {"b": {}}}, [3]),
    "only text": lambda: TensorDict({"s": "only text"}),
    "a stack of no values": lambda: TensorDict({"s": NonTensorStack._wrap(np.empty((0, 3), dtype=object))}, [0]),
}


def in_place(tree, folder):
    """Move the leaves of a copy onto the files of a memmap folder."""
    return tree.clone().memmap_(folder / "mm")


def worker(tree, _):
    """Pack a tree for another process and unpack it."""
    return from_parcel(to_parcel(tree))


@pytest.mark.parametrize("way", [single, shards, handle, background, manager, memmap])
@pytest.mark.parametrize("case", EXAMPLES)
def test_examples_come_back(case, way, tmp_path):
    """Dtypes, layouts of memory, lazy stacks and empty trees come back."""
    tree = EXAMPLES[case]()

    assert_same(way(tree, tmp_path), tree)


@pytest.mark.parametrize("way", [in_place, worker])
def test_layouts_come_back(way, tmp_path):
    """Leaves of every layout keep their values on the way to a file that they are moved onto, and to a worker."""
    tree = TensorDict(layouts()).detach()

    back = way(tree, tmp_path)

    assert all(same_bytes(back[key], leaf) for key, leaf in tree.items())


@pytest.mark.parametrize("case", ["dtypes", "layouts", "empty", "only text"])
def test_safetensors_reads_the_same_bytes(case, tmp_path):
    """The reader of the safetensors package finds each leaf with its dtype and bytes."""
    tree = EXAMPLES[case]()
    tdfunc.save(tree, tmp_path / "t.safetensors")

    plain = safetensors.torch.load_file(tmp_path / "t.safetensors")

    assert plain.keys() == {key for key, _ in tree.items() if isinstance(tree[key], torch.Tensor)}
    assert all(same_bytes(value, tree[key].detach()) for key, value in plain.items())


def test_stacks_without_their_class(tmp_path):
    """With `classes=TensorDict` a stack of typed trees is a stack of plain ones."""
    back = single(ragged(), tmp_path)
    plain = tdfunc.load(tmp_path / "x.safetensors", classes=TensorDict)

    assert type(plain["typed"]) is LazyStack
    assert [type(part) for part in plain["typed"].trees] == [TensorDict, TensorDict]
    assert plain["two"].batch_size == back["two"].batch_size


@LAW
@given(tree=trees() | tied_trees(), size=st.integers(1, 100))
def test_shards_of_any_size(tree, size, tmp_path):
    """Whatever the size of a shard, the folder and its index load as the tree."""
    tdfunc.save(tree, tmp_path / "m", max_shard_size=size, fsync=False)

    assert_same(tdfunc.load(tmp_path / "m"), tree)
    assert_same(tdfunc.load(tmp_path / "m" / "model.safetensors.index.json"), tree)
