"""Reading parts of a checkpoint: leaves, rows and sub-trees, without reading the rest."""

import os
import threading
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor

import tdfunc
from tdfunc import CorruptCheckpointError, MissingKeyError, NonTensorData, TensorClass, TensorDict, lazy_stack
from tdfunc.storage.api import load, save
from tdfunc.storage.disk.remote import LocalBytes
from tests.helpers import examples, run_in_threads
from tests.storage.trees import assert_same, same_bytes, tied_trees, trees


def saved(tree, folder, **options):
    """The name of a file (or folder of shards) that holds a tree."""
    path = os.path.join(folder, "shards" if options else "t.safetensors")
    save(tree, path, fsync=False, **options)
    return path


@pytest.fixture
def layers(tmp_path):
    """A file with 40 layers and the tree in it."""
    tree = TensorDict({"layers": {str(i): {"w": torch.full((10, 3), float(i))} for i in range(40)}, "note": "text"})
    return saved(tree, tmp_path), tree


def check_part(got, expected, where):
    """Assert that a part that was read alone is that of the whole tree."""
    if isinstance(got, tdfunc.SavedTree):
        assert_same(got.load(), expected)
        assert list(got.keys()) == list(expected.keys()), where
    elif isinstance(expected, torch.Tensor):
        assert same_bytes(got, expected), where
        assert type(got) is type(expected), where
        assert got.requires_grad == expected.requires_grad, where
    else:
        assert repr(got) == repr(expected), where


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 40}], ids=["file", "shards"])
@examples(0.4)
@given(tree=trees() | tied_trees())
def test_every_part_is_that_of_the_whole(options, tree, tmp_path_factory):
    """A leaf, value or sub-tree that is read alone is the one that `load` gives."""
    path = saved(tree, tmp_path_factory.getbasetemp(), **options)
    whole = load(path)
    keys = list(whole.keys(include_nested=True))

    with tdfunc.open(path) as f:
        assert [key for key in keys if key not in f] == []
        for key in keys:
            value = whole.get(key)
            check_part(f[key], value if isinstance(value, torch.Tensor | TensorDict) else whole[key], key)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 40}], ids=["file", "shards"])
@examples(0.4)
@given(tree=trees() | tied_trees())
def test_an_open_file_has_the_paths_and_the_shapes_of_the_whole(options, tree, tmp_path_factory):
    """And may be loaded whole."""
    path = saved(tree, tmp_path_factory.getbasetemp(), **options)
    whole = load(path)

    with tdfunc.open(path) as f:
        assert_same(f.load(), whole)
        assert f.paths() == whole.paths()
        spec = list(f.spec().leaves())
    assert [str(leaf.shape) for leaf in spec] == [str(leaf.shape) for leaf in whole.leaves()]
    assert [leaf for leaf in spec if not leaf.is_meta] == []


INDICES = st.one_of(
    st.integers(-8, 8),
    st.builds(slice, *[st.none() | st.integers(-8, 8)] * 2, st.none() | st.integers(1, 3)),
    st.lists(st.integers(-6, 6), max_size=4).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
    st.lists(st.integers(-6, 5), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=6, max_size=6).map(torch.tensor),
    st.sampled_from([..., None, True, torch.ones(6, 4, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.int64), 1.5]),
)


REFUSALS = IndexError, TypeError, ValueError, RuntimeError


def or_none(call, errors):
    """What a call returns, or None where it raises."""
    try:
        return call()
    except errors:
        return None


@example(index=np.array([1, -1]))
@example(index=np.int64(2))
@example(index=slice(0, 6, 2))
@example(index=torch.tensor([6]))
@example(index=())
@example(index=slice(None, None, -1))
@example(index=1.5)
@example(index="x")
@given(index=INDICES | st.tuples(INDICES, INDICES))
@pytest.mark.parametrize("leaf", [torch.arange(24.0).reshape(6, 4), torch.empty(0, 4)], ids=["rows", "no rows"])
def test_slice_is_index(leaf, index, tmp_path_factory):
    """Rows that are read alone are those of the same index of the leaf, which refuses the same indices."""
    path = saved(TensorDict({"x": torch.ones(3), "leaf": leaf, "after": torch.ones(2)}), tmp_path_factory.getbasetemp())
    expected = or_none(lambda: leaf[index], Exception)

    with tdfunc.open(path) as f:
        found = {v: or_none(lambda v=v: f.slice("leaf", index, verify=v), REFUSALS) for v in (False, True)}
    torch.testing.assert_close(found, {False: expected, True: expected}, rtol=0, atol=0)


def test_reads_only_what_is_asked_for(layers, monkeypatch):
    """Reads of leaves, rows and sub-trees read their bytes and no others."""
    path, _ = layers
    spans = []
    plain = LocalBytes.read_into

    def counted(self, view, offset):
        spans.append(len(view))
        return plain(self, view, offset)

    monkeypatch.setattr(LocalBytes, "read_into", counted)
    monkeypatch.setattr(torch, "from_file", None)
    with tdfunc.open(path) as f:
        spans.clear()
        f["layers", "7", "w"]
        assert spans == [10 * 3 * 4]
        spans.clear()
        f.slice(("layers", "7", "w"), [1, 2, 8])
        assert spans == [2 * 3 * 4, 3 * 4]
        spans.clear()
        f["layers", "9"].load()
        assert spans == [10 * 3 * 4]
        spans.clear()
        f.load(where="layers.1*.w")
        assert spans == [10 * 3 * 4] * 11


def test_a_handle_reads_as_a_mapping(layers):
    """It has keys, and values that are no leaves."""
    with tdfunc.open(layers[0]) as f:
        assert len(f) == 2
        assert list(f) == ["layers", "note"]
        assert f.keys() == ["layers", "note"]
        assert f["note"] == "text"


@pytest.mark.parametrize(
    ("key", "is_there"), [(("layers", "7"), True), (("layers", "77"), False), (("note", "x"), False)], ids=str
)
def test_a_handle_has_nested_keys(layers, key, is_there):
    """Those of sub-trees."""
    with tdfunc.open(layers[0]) as f:
        assert (key in f) is is_there


def test_views_of_the_tree(layers):
    """A part of a handle reads as the handle does."""
    path, tree = layers

    with tdfunc.open(path) as f:
        assert len(f["layers"]["7"]) == 1
        assert f["layers"]["7"].paths() == [("w",)]
        assert torch.equal(f["layers"]["7"]["w"], tree["layers", "7", "w"])
        assert torch.equal(f["layers"].slice(("7", "w"), 2), tree["layers", "7", "w"][2])


def test_a_handle_shows_what_it_is(layers):
    """The metadata of the file; the place and the keys of a part; that it is closed."""
    with tdfunc.open(layers[0]) as f:
        assert f.metadata == {"format": "pt"}
        assert "t.safetensors' at 'layers.7', keys=['w']" in repr(f["layers", "7"])
    assert "closed" in repr(f)


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        (("layers", "7", "x"), r"no key 'x' under 'layers\.7'[\s\S]*one of 'w'"),
        (("layers", "7", "w", "y"), r"no key 'y' under 'layers\.7\.w'"),
    ],
    ids=["in a tree", "in a leaf"],
)
def test_a_missing_key_is_named(layers, key, pattern):
    """With the part that lacks it."""
    with tdfunc.open(layers[0]) as f, pytest.raises(MissingKeyError, match=pattern):
        f[key]


@pytest.mark.parametrize(
    ("key", "pattern"),
    [(("layers", "7"), r"'layers.7'[\s\S]*path of a leaf"), ("note", "path of a leaf")],
    ids=["tree", "value"],
)
def test_only_leaves_have_slices(layers, key, pattern):
    """Trees and values have none."""
    with tdfunc.open(layers[0]) as f, pytest.raises(TypeError, match=pattern):
        f.slice(key, 0)


def test_lazy_stacks_are_read_as_themselves(tmp_path):
    """Their keys are those of their parts, which have no keys of their own."""
    stack = lazy_stack([TensorDict({"x": torch.full((i + 1,), float(i))}) for i in range(3)])

    with tdfunc.open(saved(TensorDict({"s": stack}), tmp_path)) as f:
        assert [x.tolist() for x in f["s", "x"]] == [x.tolist() for x in stack["x"]]
        assert f["s"].keys() == ["x"]
        assert ("s", "x") in f
        assert ("s", "0") not in f
        assert_same(f["s"].load(), stack)


def test_values_have_no_keys(tmp_path):
    """Tensors inside of them are no leaves."""
    with tdfunc.open(saved(TensorDict({"o": NonTensorData((torch.ones(1),))}), tmp_path)) as f:
        assert ("o", "0") not in f


def test_typed_trees_are_read_as_themselves(tmp_path):
    """Or as the class that is given, when the part or the file is read."""
    point = Point(x=torch.ones(2), batch_size=[])
    path = saved(TensorDict({"p": point}), tmp_path)

    with tdfunc.open(path) as f:
        assert [type(f["p"].load(classes=classes)) for classes in (None, TensorDict)] == [Point, TensorDict]
        assert torch.equal(f["p", "x"], point.x)
    with tdfunc.open(path, classes=TensorDict) as f:
        assert type(f["p"].load()) is TensorDict


class Point(TensorClass):
    x: torch.Tensor


NAMES = ["a.b", '"x', 'n]},"', "]},", 'q":{"dtype":"', "\\", "__metadata__", "a.b~1"]


@pytest.mark.parametrize("keys", [NAMES, ["a.b", "a.b~1"]])
def test_names_that_are_not_paths(keys, tmp_path):
    """Leaves whose names look like other paths, or like a header, are found."""
    tree = TensorDict({key: torch.tensor(float(i)) for i, key in enumerate(keys)} | {"a": {"b": torch.tensor(99.0)}})

    with tdfunc.open(saved(tree, tmp_path)) as f:
        assert [f[key].item() for key in keys] == list(range(len(keys)))
        assert f["a", "b"] == 99


def test_files_of_other_programs(tmp_path):
    """Files of other programs have sub-trees by dots, or keys with dots."""
    nested = {"a.w": torch.ones(2), "a.b": torch.zeros(3), ".".join("k" * 64): torch.ones(1)}
    safetensors.torch.save_file(nested, tmp_path / "n.safetensors", metadata={"by": "me"})
    safetensors.torch.save_file({"a": torch.ones(2), "a.b": torch.zeros(3)}, tmp_path / "f.safetensors")

    with tdfunc.open(tmp_path / "n.safetensors") as f:
        assert sorted(f["a"].keys()) == ["b", "w"]
        assert torch.equal(f["a", "w"], torch.ones(2))
        assert f.slice(("a", "b"), 0) == 0
        assert f.metadata == {"by": "me"}
        like = {"a": {"w": nested["a.w"]}, ("a", "b"): nested["a.b"], tuple("k" * 64): torch.ones(1)}
        assert_same(f.load(like=like), f.load())
    with tdfunc.open(tmp_path / "f.safetensors") as f:
        assert torch.equal(f["a.b"], torch.zeros(3))
        with pytest.raises(MissingKeyError, match="no key 'b' under 'a'"):
            f["a", "b"]


def test_damage_is_found_where_it_is_read(layers):
    """Damage of one leaf is found when that leaf is read, and keeps no other from being read."""
    path, _ = layers
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")

    with tdfunc.open(path) as f:
        assert torch.equal(f["layers", "0", "w"], torch.zeros(10, 3))
        with pytest.raises(CorruptCheckpointError, match=r'leaf "layers\.39\.w" is damaged'):
            f["layers", "39", "w"]
        with pytest.raises(CorruptCheckpointError, match=r'leaf "layers\.39\.w" is damaged'):
            f["layers", "39"].load()
        with pytest.raises(CorruptCheckpointError, match=r'leaf "layers\.39\.w" is damaged'):
            f.slice(("layers", "39", "w"), 0, verify=True)
        assert torch.equal(f.slice(("layers", "39", "w"), 0), torch.full((3,), 39.0))
    with tdfunc.open(path, verify=False) as f:
        assert not torch.equal(f["layers", "39", "w"], torch.full((10, 3), 39.0))


def test_a_short_file(layers):
    """A leaf past the end of the file is an error that names both lengths."""
    path, _ = layers
    os.truncate(path, os.path.getsize(path) - 120)

    with tdfunc.open(path) as f, pytest.raises(CorruptCheckpointError, match=r"cut short[\s\S]*bytes"):
        f["layers", "39", "w"]


def test_closed(layers):
    """Every read after `close` is an error."""
    path, _ = layers
    f = tdfunc.open(path)
    inner = f["layers", "7"]
    assert not f.closed
    f.close()
    f.close()

    assert f.closed
    assert inner.closed
    reads = (lambda: f["layers"], lambda: inner["w"], lambda: f.slice(("layers", "7", "w"), 0), lambda: "note" in f)
    for use in (*reads, f.load, f.spec, f.keys, f.__enter__):
        with pytest.raises(ValueError, match=r"t\.safetensors: the checkpoint is closed"):
            use()


def test_close_waits_for_readers(layers, monkeypatch):
    """`close` waits for a thread that reads."""
    path, tree = layers
    f = tdfunc.open(path)
    begun, go = threading.Event(), threading.Event()
    plain = LocalBytes.read_into
    results = []

    def slow(self, view, offset):
        begun.set()
        assert go.wait(10)
        return plain(self, view, offset)

    monkeypatch.setattr(LocalBytes, "read_into", slow)
    reader = threading.Thread(target=lambda: results.append(f["layers", "7", "w"]))
    closer = threading.Thread(target=f.close)
    reader.start()
    assert begun.wait(10)
    closer.start()
    closer.join(0.05)

    assert closer.is_alive()
    go.set()
    reader.join(10)
    closer.join(10)
    assert torch.equal(results[0], tree["layers", "7", "w"])
    assert not closer.is_alive()


def test_close_does_not_wait_for_the_read_it_interrupts(layers, monkeypatch):
    """A signal handler that closes the file lets the read of its thread end, which then closes the file."""
    path, tree = layers
    f = tdfunc.open(path)
    plain = LocalBytes.read_into

    def interrupted(self, view, offset):
        f.close()
        return plain(self, view, offset)

    monkeypatch.setattr(LocalBytes, "read_into", interrupted)
    found = f["layers", "7", "w"]

    assert torch.equal(found, tree["layers", "7", "w"])
    assert f.closed
    with pytest.raises(ValueError, match="the checkpoint is closed"):
        f["layers", "8", "w"]


def test_many_threads_read(layers):
    """Threads share a handle."""
    path, _ = layers
    wrong = []

    def work(f, n):
        wrong.extend(i for i in range(n, 40, 8) if not (f["layers", str(i), "w"] == i).all())

    with tdfunc.open(path) as f:
        run_in_threads(partial(work, f), range(8))

    assert wrong == []


def test_a_handle_keeps_its_file(layers):
    """A handle reads its own file, also after a save over it."""
    path, tree = layers
    with tdfunc.open(path) as f:
        save(TensorDict({"layers": {"7": {"w": torch.zeros(10, 3)}}}), path)

        assert torch.equal(f["layers", "7", "w"], tree["layers", "7", "w"])
        assert f["note"] == "text"


def test_devices(tmp_path):
    """Leaves are put where they are asked for."""
    path = saved(TensorDict({"a": {"b": torch.ones(2)}}, device="cpu"), tmp_path)

    with tdfunc.open(path, device="meta") as f:
        assert f["a", "b"].is_meta
        assert f["a"].load()["b"].is_meta
        assert f["a"].load(device="cpu")["b"].device == torch.device("cpu")
    with tdfunc.open(path) as f:
        assert f["a"].load().device == torch.device("cpu")


def test_tensors_without_values(tmp_path):
    """Under FakeTensorMode leaves are fake; under a default device they are on the CPU."""
    path = saved(TensorDict({"a": nn.Parameter(torch.ones(4, 3))}), tmp_path)

    with tdfunc.open(path) as f:
        with FakeTensorMode():
            assert isinstance(f["a"], FakeTensor)
            assert f.slice("a", [0, 1]).shape == (2, 3)
        with torch.device("meta"):
            assert torch.equal(f["a"], torch.ones(4, 3, device="cpu"))
            assert torch.equal(f.slice("a", [0, 3]), torch.ones(2, 3, device="cpu"))
            assert f.load()["a"].device == torch.device("cpu")


def test_a_handle_that_nobody_closed(layers):
    """A handle that is lost warns of its open file."""
    path, _ = layers

    with pytest.warns(ResourceWarning, match=r"unclosed checkpoint .*t\.safetensors"):
        tdfunc.open(path)


LISTS = {
    "rows": ([2, 0], (torch.tensor([2, 0]),)),
    "rows of rows": ([[0, 1], [5, 0]], (torch.tensor([[0, 1], [5, 0]]),)),
    "none": ([], (torch.tensor([], dtype=torch.int64),)),
    "mask": ([True, False, True, True, False, False], (torch.tensor([0, 2, 3]),)),
    "in a tuple": (([0, 3], [1, 2]), (torch.tensor([0, 3]), torch.tensor([1, 2]))),
    "after a slice": ((slice(1, 4), [[3, 0]]), (slice(1, 4), torch.tensor([[3, 0]]))),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_an_index_tensor(name, verify, tmp_path):
    """A list in an index means its tensor, whatever torch's meaning of lists, and without a warning."""
    index, meaning = LISTS[name]
    leaf = torch.arange(24.0).reshape(6, 4)

    with tdfunc.open(saved(TensorDict({"leaf": leaf}), tmp_path)) as f:
        got = f.slice("leaf", index, verify=verify)

    assert torch.equal(got, leaf[meaning])
