"""Memmap folders that are damaged, hostile or half written: an error, never a wrong tree or a changed file."""

import json
import os
import re
import socket

import numpy as np
import pytest
import torch

import tdfunc
from tdfunc import (
    ConcurrencyError,
    CorruptCheckpointError,
    TensorClass,
    TensorDict,
    UnsupportedError,
    lazy_stack,
    load,
)
from tdfunc.core.memory import mapped_file
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.mapped import map_again
from tests.incumbent import Incumbent, IncumbentNonTensor, incumbent_class
from tests.storage.trees import assert_same

LAZY = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
TREE = "<class 'tensordict._td.TensorDict'>"
VALUES = "<class 'tensordict.tensorclass.NonTensorStack'>"
LEAF = {"device": "cpu", "shape": [2], "dtype": "torch.float32", "is_nested": False}


@incumbent_class
class Theirs:
    """A tensorclass of tensordict."""

    x: torch.Tensor
    s: str


def write(folder, meta, **files):
    """Write a folder by hand: meta.json (an object or text), and the bytes of files, `a__b` for a file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    for name, data in files.items():
        (folder / f"{name}.memmap").write_bytes(data)


def node(entries=(), size=(), own=None, **more):
    """The meta.json of a tree."""
    own = {} if own is None else {"": own}
    return {**dict(entries), "shape": list(size), "device": "cpu", "_type": TREE, **own, **more}


def document(*items, dtype="F32", shape=(2,), size=(), ties=(), **fields):
    """The meta.json of a tree with tdfunc's object: the items have the keys a, b, ..., and are leaves of one spec."""
    keys = list("abc"[: len(items)])
    fields = {"keys": keys, "items": list(items), **({"size": list(size)} if size else {}), **fields}
    own = {"tdfunc": 2, "specs": [[dtype, list(shape)]], "node": fields, **({"ties": ties} if ties else {})}
    leaf = {"device": "cpu", "shape": list(shape), "dtype": {"F32": "torch.float32", "I64": "torch.int64"}[dtype]}
    entries = {
        key: {**leaf, "is_nested": False} for key, item in zip(keys, items, strict=False) if type(item) is not dict
    }
    return {**entries, "shape": list(size), "device": "None", "_type": TREE, "": own}


def snapshot(folder):
    """The size and time of every file."""
    return {p: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


# -- leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["c", "r+"])
@pytest.mark.parametrize(
    ("size_bytes", "message"),
    [(4, "(?s)'n.w'.*cut short.*expected: 8 bytes.*got:      4 bytes"), (12, "(?s)'n.w'.*too long.*8 bytes.*12 bytes")],
)
def test_a_file_of_the_wrong_size(size_bytes, message, mode, tmp_path):
    """A file of another size is refused with both sizes, and is not changed."""
    TensorDict({"n": {"w": torch.ones(2)}}).memmap(tmp_path / "d")
    leaf = tmp_path / "d" / "n" / "w.memmap"
    os.truncate(leaf, size_bytes)

    with pytest.raises(CorruptCheckpointError, match=message):
        TensorDict.load_memmap(tmp_path / "d", mode=mode)
    assert leaf.stat().st_size == size_bytes


def test_missing_files(tmp_path):
    """A missing file or folder is named by its path in the tree."""
    TensorDict({"n": {"w": torch.ones(2)}, "v": "x"}).memmap(tmp_path / "d")
    os.remove(tmp_path / "d" / "n" / "w.memmap")
    with pytest.raises(CorruptCheckpointError, match="(?s)'n.w'.*missing.*n/w.memmap"):
        TensorDict.load_memmap(tmp_path / "d")
    os.remove(tmp_path / "d" / "n" / "meta.json")
    with pytest.raises(CorruptCheckpointError, match="(?s)meta.json of 'n' is missing.*n/meta.json"):
        TensorDict.load_memmap(tmp_path / "d")
    os.rmdir(tmp_path / "d" / "n")
    with pytest.raises(CorruptCheckpointError, match="(?s)folder of 'n' is missing.*expected: n"):
        TensorDict.load_memmap(tmp_path / "d")


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize("name", ["a.memmap", "meta.json"])
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: path.mkdir(), "is not a regular file"),
        (_fifo, "is not a regular file"),
        (_socket, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "out of the folder"),
        (lambda path: path.symlink_to("nothing"), "leads to no file"),
        (lambda path: path.symlink_to(path), "leads to no file"),
        (lambda path: path.symlink_to("../secret"), "out of the folder"),
    ],
)
def test_something_else_in_place_of_a_file(name, make, got, tmp_path, monkeypatch):
    """A folder, pipe, socket, device or link out of the folder is refused at once."""
    (tmp_path / "secret").write_bytes(bytes(8))
    write(tmp_path / "d", node({"a": LEAF}), a=bytes(8))
    os.remove(tmp_path / "d" / name)
    monkeypatch.chdir(tmp_path / "d")
    make(tmp_path / "d" / name)

    with pytest.raises(CorruptCheckpointError, match=got):
        TensorDict.load_memmap(tmp_path / "d")


def test_links_inside_the_folder_open(tmp_path):
    """Links to files inside the folder open."""
    write(tmp_path / "d", node({"a": LEAF, "b": LEAF}), a=torch.ones(2).numpy().tobytes())
    (tmp_path / "d" / "b.memmap").symlink_to("a.memmap")
    (tmp_path / "link").symlink_to("d")

    assert TensorDict.load_memmap(tmp_path / "link")["b"].tolist() == [1, 1]


def test_a_linked_folder_is_refused(tmp_path):
    """A link to a folder is refused."""
    write(tmp_path / "d", node({"n": {"type": "TensorDict"}}))
    (tmp_path / "d" / "n").symlink_to(".")
    with pytest.raises(CorruptCheckpointError, match="(?s)'n' is a link to a folder"):
        TensorDict.load_memmap(tmp_path / "d")
    write(tmp_path / "l", {"_type": LAZY, "stack_dim": 0})
    (tmp_path / "l" / "0").symlink_to("../d")
    with pytest.raises(CorruptCheckpointError, match="is a link to a folder"):
        TensorDict.load_memmap(tmp_path / "l")


# -- meta.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "[1]",
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        # What a short text must not make long: a product, a search for each key, a set of numbers.
        pytest.param(json.dumps(dict.fromkeys(range(200_000)))[:-1] + ',"k":2,"k":2}', id="many"),
        node({"a": {**LEAF, "shape": [2] * 200_000}}),
        '{"a": ' + "9" * 5000 + "}",
        node({"a": {**LEAF, "shape": [2**62, 2**62]}}),
        node({"a": {**LEAF, "shape": [2**61]}}),
        node({"a": {**LEAF, "shape": [-2]}}),
        node({"a": {**LEAF, "shape": [True]}}),
        node({"a": {**LEAF, "shape": [2.0]}}),
        node({"a": {**LEAF, "shape": None}}),
        node({"a": {**LEAF, "dtype": 3}}),
        node({"a": {**LEAF, "dtype": "float32"}}),
        node({"a": LEAF}, size=[3]),
        node({}, size="x"),
        document(1),
        document(-1),
        document([0, "z"]),
        document([0, "pb"]),
        document([0, "g"], dtype="I64"),
        document(size=[2], names=[]),
        document(size=[2], names=[None, None]),
        document(names=["x"]),
        document(names="x"),
        document(size=[1, 1], names=["x", "x"]),
        *[node({key: LEAF}) for key in ("\ud800", "x" * 300, "é" * 200)],
        *[node({key: {"type": "TensorDict"}}) for key in ("\ud800", "x" * 300, "é" * 200)],
        document(0, {"value": 1, "values": [1]}),
        document({"values": [1]}, size=[2]),
        document(0, keys=["a", "a"], items=[0, 0]),
        document(0, **{"class": 3}),
        document(0, ties=3),
        document(0, ties=[[["a"]]]),
        document(0, ties=[[["a"], []]]),
        document(0, ties=[[["a"], ["a"]]]),
        document(0, ties=[[["a"], ["b"]]]),
        document(0, ties=[[["a"], ["a", "b"]]]),
        document(0, ties=[[["a"], ["x"] * 3000]]),
        {"_type": LAZY, "stack_dim": 0},
    ],
)
def test_meta_json_that_lies(meta, tmp_path):
    """A description that does not fit is refused by an error that names the folder, and nothing is written."""
    write(tmp_path / "d", meta, a=bytes(8))
    before = snapshot(tmp_path)

    with pytest.raises(CorruptCheckpointError, match="load_memmap .*d: "):
        TensorDict.load_memmap(tmp_path / "d")

    assert snapshot(tmp_path) == before


INNER = {"n": {"type": "NonTensorStack"}}
# Below a root of batch size [2], or instead of it.
OTHERS = [
    ({"": node({"n": {"type": "TensorDict"}}, size=[2]), "n": node({}, size=[3])}, CorruptCheckpointError, "d: "),
    *[
        ({"": node(INNER, size=[2]), "n": meta}, CorruptCheckpointError, "d: ")
        for meta in ({"_type": VALUES, "data": [1]}, {"_type": VALUES, "data": 3}, {"_type": VALUES}, {"_type": "x"})
    ],
    ({"": node({"a": {**LEAF, "dtype": "torch.qint8"}})}, UnsupportedError, "'a'.*that torch has.*torch.qint8"),
    ({"": node({"a": {**LEAF, "is_nested": True}})}, UnsupportedError, "'a'.*got: .*a nested tensor"),
    ({"": node({"": LEAF})}, UnsupportedError, "empty key.*rename the key"),
    ({"": node({}, own={"tdfunc": 9})}, UnsupportedError, "this version of tdfunc cannot.*got:      9"),
    *[
        (metas, UnsupportedError, f"the root is of an unknown type.*expected: a TensorDict.*{got}")
        for metas, got in (
            ({"": {"_type": "<class 'os.system'>"}}, "os.system"),
            ({"": {}}, "None"),
            ({"": {"_type": VALUES, "data": [1]}}, "NonTensorStack"),
            ({"": {"_type": 3}, "_tensordict": node({})}, "3"),
            ({"": {"_type": "<class 'a.Ragged'>"}, "_tensordict": {"_type": VALUES, "data": [1]}}, "NonTensorStack"),
        )
    ],
]


@pytest.mark.parametrize(("metas", "kind", "message"), OTHERS)
def test_folders_of_other_kinds(metas, kind, message, tmp_path):
    """A part that does not fit the batch of its parent, or a folder of another kind, is refused by name."""
    for name, meta in metas.items():
        write(tmp_path / "d" / name, meta, a=bytes(8))

    with pytest.raises(kind, match=f"(?s)load_memmap .*{message}"):
        TensorDict.load_memmap(tmp_path / "d")


def test_a_huge_meta_json_is_not_read(tmp_path):
    """A meta.json that is too large is refused before it is read."""
    write(tmp_path / "d", {})
    os.truncate(tmp_path / "d" / "meta.json", 1 << 40)

    with pytest.raises(CorruptCheckpointError, match="(?s)at most 100000000 bytes.*1099511627776 bytes"):
        TensorDict.load_memmap(tmp_path / "d")


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("a"),
        lambda meta: meta.update(shape=[1]),
        lambda meta: meta["a"].update(dtype="torch.int32"),
        lambda meta: meta.update(new=LEAF),
        lambda meta: meta[""]["node"].update(size=[2]),
        lambda meta: meta[""]["node"].update(keys=["a"]),
        lambda meta: meta[""]["node"].update(items=[1, {"tree": None}]),
        lambda meta: meta[""]["node"].update(items=[-1, {"tree": None}]),
        lambda meta: meta[""]["node"].update(items=[[0, "z"], {"tree": None}]),
        lambda meta: meta[""]["node"].update(items=[{"tie": 0}, {"tree": None}]),
        lambda meta: meta[""].update(ties=[[["a"], ["n", "b"], ["c"]]]),
        lambda meta: meta[""].update(ties=[[["a"], ["n"]]]),
        lambda meta: meta[""].update(ties=[[["a"], ["n", "b"]]]),
        lambda meta: meta[""].update(specs=[["F32", [2**62, 8]]]),
        lambda meta: meta[""].update(specs=[["F32", [3]]]),
        lambda meta: meta[""].pop("node"),
    ],
)
def test_a_document_that_lies(change, tmp_path):
    """A document that does not fit itself, tensordict's fields or the folder is refused."""
    TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}}).memmap(tmp_path / "d")
    path = tmp_path / "d" / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))

    with pytest.raises(CorruptCheckpointError, match="load_memmap .*d: "):
        TensorDict.load_memmap(tmp_path / "d")


class Ragged(TensorClass):
    """Two fields, as in the folders below."""

    x: torch.Tensor
    s: str


RAGGED = f"<class '{Ragged.__module__}.Ragged'>"


@pytest.mark.parametrize("given", [Ragged, {"elsewhere:Ragged": Ragged}], ids=["class", "mapping"])
@pytest.mark.parametrize("at", [(), ("l",), ("l", "0")])
def test_a_lazy_stack_of_typed_trees_of_tensordict(at, given, tmp_path):
    """The folder that tensordict writes for a lazy stack of typed trees opens, plain and as the given class."""
    folder = tmp_path / "d"
    for n, key in enumerate(at):
        write(tmp_path.joinpath("d", *at[:n]), node({key: {"type": "TensorDict"}}))
    place = tmp_path.joinpath("d", *at)
    write(place, {"_type": RAGGED, "s": "word"})
    write(place / "_tensordict", {"_type": LAZY, "stack_dim": 0})
    for n in (1, 2):
        write(place / "_tensordict" / str(n - 1), node({"x": {**LEAF, "shape": [n]}}), x=bytes(4 * n))

    plain, typed = [TensorDict.load_memmap(folder, classes=classes) for classes in ((), given)]

    plain, typed = (plain[at], typed[at]) if at else (plain, typed)
    assert [type(tree) for tree in typed.unbind(0)] == [Ragged, Ragged]
    assert [type(tree) for tree in plain.unbind(0)] == [TensorDict, TensorDict]
    parts = [*plain.unbind(0), *typed.unbind(0)]
    assert [part["x"].tolist() for part in parts] == [[0.0], [0.0, 0.0]] * 2
    assert [part["s"] for part in parts] == ["word"] * 4


def test_a_lazy_stack_of_tensordict_s_tensorclass(tmp_path):
    """A lazy stack of tensorclasses that tensordict wrote opens."""
    stack = Incumbent.lazy_stack([Theirs(x=torch.full((n,), float(n)), s=str(n), batch_size=[n]) for n in (1, 2)])
    stack.memmap(tmp_path / "d")

    back = TensorDict.load_memmap(tmp_path / "d")

    assert [part["x"].tolist() for part in back.unbind(0)] == [[1.0], [2.0, 2.0]]
    assert [part["s"] for part in back.unbind(0)] == ["1", "2"]


@pytest.mark.parametrize(("dim", "size"), [(0, []), (2, [2]), (-1, [2]), (True, [2])])
def test_lazy_stacks_that_lie(dim, size, tmp_path):
    """Folders of trees that cannot be stacked are refused."""
    write(tmp_path / "d" / "0", node({}, size=[2]))
    write(tmp_path / "d", {"_type": LAZY, "stack_dim": dim})
    write(tmp_path / "d" / "1", node({}, size=size))
    with pytest.raises(CorruptCheckpointError, match="load_memmap .*d: "):
        TensorDict.load_memmap(tmp_path / "d")


def test_lazy_stacks_that_lie_about_their_size(tmp_path):
    """They do not fit the tree that they are in, or lack a part."""
    write(tmp_path / "o", node({"l": {"type": "LazyStackedTensorDict"}}, size=[5]))
    write(tmp_path / "o" / "l", {"_type": LAZY, "stack_dim": 0})
    for name in "01":
        write(tmp_path / "o" / "l" / name, node({}, size=[2]))
    with pytest.raises(CorruptCheckpointError, match=r"(?s)starts with \[5\].*\[2, 2\]"):
        TensorDict.load_memmap(tmp_path / "o")
    os.rename(tmp_path / "o" / "l" / "1", tmp_path / "o" / "l" / "2")
    with pytest.raises(CorruptCheckpointError, match="the folders 0, 1"):
        TensorDict.load_memmap(tmp_path / "o" / "l")


def test_ties_that_a_part_does_not_know(tmp_path):
    """A part whose ties differ from those of the whole is refused."""
    shared = torch.ones(2)
    tree = TensorDict({"n": {"a": shared, "b": shared}})
    inner = tree["n"]._replace(tree["n"]._data, ties=((("a",), ("b",)),))
    tree = tree._replace({"n": inner}, ties=((("n", "a"), ("n", "b")),))
    tree.memmap(tmp_path / "d")
    write(tmp_path / "d" / "n", document(0, 0))

    with pytest.raises(CorruptCheckpointError, match="'n' and the folder around it have different ties"):
        TensorDict.load_memmap(tmp_path / "d")


@pytest.mark.parametrize("path", [("v",), ("n", "v")], ids=".".join)
def test_the_hint_for_pickles_writes_the_rest(path, tmp_path):
    """The line of the hint makes a folder with everything else."""
    tree = Incumbent({"a": torch.ones(2), "n": {"b": torch.zeros(1)}})
    tree[path] = IncumbentNonTensor[0](np.arange(3))
    tree.memmap(tmp_path / "d")
    with pytest.raises(UnsupportedError) as caught:
        load(tmp_path / "d")

    line = re.search(r"TensorDict(\.load_memmap.*\.memmap\(other, .*\))", str(caught.value))[1]
    eval(f"Incumbent{line}", {"Incumbent": Incumbent, "folder": tmp_path / "d", "other": tmp_path / "o"})

    assert load(tmp_path / "o").paths() == [("a",), ("n", "b")]


@pytest.mark.parametrize("place", ["n/s", "."])
@pytest.mark.parametrize("name", ["other.pickle", "pickle.pkl"])
def test_pickles_are_never_read(name, place, tmp_path):
    """A folder with a pickle is refused, and its code does not run."""
    marker = tmp_path / "ran"
    TensorDict({"n": {"s": "x"}}).memmap(tmp_path / "d")
    (tmp_path / "d" / place / name).write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())

    with pytest.raises(UnsupportedError, match=f"(?s)pickled.*JSON.*{name}"):
        TensorDict.load_memmap(tmp_path / "d")
    assert not marker.exists()


# -- a folder is replaced as a whole ----------------------------------------------------------------------------


def test_writing_again_leaves_loaded_trees_as_they_are(tmp_path):
    """A tree keeps its values when its folder is written again."""
    TensorDict({"a": torch.zeros(1000), "old": torch.zeros(1)}).memmap(tmp_path / "d")
    tree = TensorDict.load_memmap(tmp_path / "d")

    TensorDict({"a": torch.ones(1000)}).memmap(tmp_path / "d")

    assert tree["a"].sum() == 0
    assert os.listdir(tmp_path) == ["d"]
    assert sorted(os.listdir(tmp_path / "d")) == ["a.memmap", "meta.json"]


def test_other_files_are_not_deleted(tmp_path):
    """A folder with other files is not replaced."""
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "inner" / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match="(?s)not part of a memmapped tree.*thesis.tex"):
        TensorDict({"a": torch.zeros(1)}).memmap(tmp_path / "d")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "x.memmap").write_text("data")
    with pytest.raises(FileExistsError, match="(?s)not part of a memmapped tree.*that its meta.json names.*x.memmap"):
        TensorDict({"a": torch.zeros(1)}).memmap_like(tmp_path / "e")
    # A folder whose meta.json cannot be read may hold anything.
    write(tmp_path / "f", '{"x": {}', x=b"0000")
    with pytest.raises(FileExistsError, match=r"(?s)not part of a memmapped tree.*got:      .*f/(meta.json|x.memmap)"):
        TensorDict({"x": torch.zeros(1)}).memmap(tmp_path / "f")
    assert (tmp_path / "f" / "x.memmap").read_bytes() == b"0000"

    assert (tmp_path / "d" / "inner" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize(
    "put",
    [
        lambda d: TensorDict({"y": torch.ones(2)}).memmap(d / "val"),
        lambda d: TensorDict({"y": torch.ones(2)}).memmap(d / "n" / "val"),
        lambda d: np.memmap(d / "index.memmap", mode="w+", dtype="i4", shape=4),
        lambda d: (d / ".tdfunc-notes").mkdir() or (d / ".tdfunc-notes" / "a.txt").write_text("years"),
        lambda d: (d / "other.pickle").write_text("years"),
        lambda d: (d / "n" / "pickle.pkl").write_text("years"),
        lambda d: (d / "l" / "0" / "0").mkdir() or (d / "l" / "0" / "0" / "meta.json").write_text("{}"),
        lambda d: (d / "0").mkdir() or (d / "0" / "a.memmap").write_text("years"),
        lambda d: os.symlink("x.memmap", d / "y.memmap"),
    ],
)
@pytest.mark.parametrize("call", ["memmap", "memmap_like", "memmap_"])
def test_other_data_in_the_folder_of_a_tree(put, call, tmp_path):
    """A data set or array inside the folder of another one is not deleted with it."""
    stack = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
    td = TensorDict({"x": torch.zeros(3), "n": {"a b": torch.zeros(2)}, "l": stack, "s": "word"})
    td.memmap(tmp_path / "d")
    td.memmap(tmp_path / "d")
    put(tmp_path / "d")
    before = snapshot(tmp_path / "d")

    with pytest.raises(
        FileExistsError,
        match=rf"{call} (.|\n)*not part of a memmapped tree(.|\n)*expected: a new(.|\n)*got:      {tmp_path}",
    ):
        getattr(td.clone(), call)(tmp_path / "d")

    assert snapshot(tmp_path / "d") == before


def test_what_killed_writes_left_inside_goes(tmp_path):
    """The rest of a killed write inside a folder goes with the folder."""
    td = TensorDict({"n": {"x": torch.zeros(3)}})
    td.memmap(tmp_path / "d")
    (tmp_path / "d" / "empty").mkdir()
    left = tmp_path / "d" / (commit._start("n") + "0" * 16 + ".tmp")
    left.mkdir()
    (left / "x.memmap").write_text("half")

    td.memmap(tmp_path / "d")

    assert sorted(os.listdir(tmp_path / "d")) == ["meta.json", "n"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensordict_s_folder_is_replaced(tmp_path):
    """A folder that tensordict wrote is replaced, pickles included."""
    theirs = Incumbent({"a": torch.zeros(1), "n": {"b": torch.zeros(2)}, "s": "x", "a b": torch.zeros(2)})
    theirs.set("nested", torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]))
    theirs.set("lazy", Incumbent.lazy_stack([Theirs(x=torch.zeros(n), s="x", batch_size=[n]) for n in (1, 2)]))
    theirs.set("object", IncumbentNonTensor[0](complex(1, 2)))
    theirs.set("objects", IncumbentNonTensor[1](IncumbentNonTensor[0](1j), IncumbentNonTensor[0]("x")))
    theirs.memmap(tmp_path / "d")
    assert list((tmp_path / "d").rglob("*.pickle"))

    TensorDict({"c": torch.zeros(1)}).memmap(tmp_path / "d", sync=True)

    assert list(TensorDict.load_memmap(tmp_path / "d").keys()) == ["c"]


@pytest.mark.parametrize("read", [TensorDict.load_memmap, load], ids=["load_memmap", "load"])
def test_killed_between_the_two_steps(read, tmp_path):
    """The old folder of a writer that was killed between its two renames is found and loaded."""
    tree = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}})
    tree.memmap(tmp_path / "d")
    # What `_take_place` leaves when it is killed after its first rename, and when it is after the second.
    new = tmp_path / os.path.basename(commit._temporary("d"))
    (tree + 1).memmap(new)
    os.rename(tmp_path / "d", new.with_suffix(".old"))
    (tree + 2).memmap((tmp_path / os.path.basename(commit._temporary("d"))).with_suffix(".old"))

    assert_same(read(tmp_path / "d"), tree)
    assert_same(read(tmp_path / "d" / "n"), tree["n"])
    tree.memmap(tmp_path / "d")
    assert os.listdir(tmp_path) == ["d"]


def test_names_of_other_files(tmp_path):
    """A sub-tree may have the name of a checkpoint's file; a `meta.json` of another program names no file of ours."""
    tree = TensorDict({"model.safetensors": {"w": torch.ones(2)}, "model.safetensors.index.json": {"w": torch.ones(2)}})
    tree.memmap(tmp_path / "d")
    assert_same(load(tmp_path / "d"), tree)
    with pytest.raises(FileNotFoundError, match="this is a memmap folder"):
        tdfunc.open(tmp_path / "d")

    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "meta.json").write_text('{"a": {"shape": [2]}, "b": {"type": "float"}}')
    (tmp_path / "e" / "a.memmap").write_text("mine")
    with pytest.raises(FileExistsError, match="not part of a memmapped tree"):
        tree.memmap(tmp_path / "e")
    assert (tmp_path / "e" / "a.memmap").read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    """A failed write leaves the old folder and nothing else."""
    tree = TensorDict({"a": torch.ones(2)})
    tree.memmap(tmp_path / "d")
    monkeypatch.setattr("tdfunc.storage.memmap.write.write_all", _disk_full)

    with pytest.raises(OSError, match="No space left"):
        TensorDict({"a": torch.zeros(2)}).memmap(tmp_path / "d")

    assert_same(TensorDict.load_memmap(tmp_path / "d"), tree)
    assert os.listdir(tmp_path) == ["d"]


def _disk_full(fd, data):
    raise OSError(28, "No space left on device")


# -- the same file in another process ---------------------------------------------------------------------------


def test_map_again(tmp_path):
    """A described leaf is mapped again with its geometry, unless its file was replaced, cut or has no name."""
    tree = TensorDict({"a": torch.arange(12).reshape(3, 4)}).memmap(tmp_path / "d")
    view = tree["a"][1:, ::2]
    file = mapped_file(view)

    again = map_again(file, view.dtype, view.shape, view.stride())
    again[0, 0] = 100

    assert torch.equal(again, view)
    assert tree["a"][1, 0] == 100
    with pytest.raises(CorruptCheckpointError, match="(?s)cut short.*expected: 9999 bytes.*got:      96 bytes"):
        map_again(file._replace(size_bytes=9999), view.dtype, view.shape, view.stride())
    TensorDict({"a": torch.zeros(12)}).memmap(tmp_path / "d")
    with pytest.raises(ConcurrencyError, match="another file by now"):
        map_again(file, view.dtype, view.shape, view.stride())
    with pytest.raises(FileNotFoundError, match="has no folder"):
        map_again(file._replace(path=None), view.dtype, view.shape, view.stride())
