"""Trees on mapped files: what is kept, what is shared with the file, and tensordict's folders in both directions."""

import json
import multiprocessing
import os
import pickle
import re
import shutil
from contextlib import contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader

from tdfunc import (
    LeafMismatchError,
    MissingKeyError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnsupportedError,
    collate,
    lazy_stack,
)
from tdfunc.core.memory import mapped_file
from tdfunc.parallel.parcel import is_in_file
from tests.incumbent import Incumbent, tensordict
from tests.storage.trees import KEYS, assert_same, retie, same_bytes, trees, values_of
from tests.storage.trees import small_tree as flat

LAW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- what is kept -----------------------------------------------------------------------------------------------


@LAW
@given(
    keys=st.sets(KEYS | st.sampled_from(["meta.json", "a.memmap", "_type", "..", "a/b", "x" * 249, "é" * 200, "%41"]))
)
def test_any_key_is_a_name_in_the_folder(keys, tmp_path):
    """Every key has a file or folder of its own inside the folder, as a leaf, a tree and a value."""
    leaves = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
    tree = TensorDict({**leaves, "tree": {k: {"z": v} for k, v in leaves.items()}, "value": dict.fromkeys(leaves, 1)})
    tree = tree.set(
        "both", {**{k: v for k, v in leaves.items()}, **{f"{k}.memmap": {"z": v} for k, v in leaves.items()}}
    )

    tree.memmap(tmp_path / "in" / "d")

    assert_same(TensorDict.load_memmap(tmp_path / "in" / "d"), tree)
    assert os.listdir(tmp_path / "in") == ["d"]


def test_memmap_without_a_folder():
    """`td.memmap()` leaves no files, and the tree keeps its values."""
    tree = flat().memmap()

    assert_same(tree, flat())
    assert mapped_file(tree["a"]).path is None
    assert tree.is_memmap()
    assert not flat().is_memmap()
    assert not TensorDict({"e": torch.zeros(0)}).is_memmap()


# -- tensordict -------------------------------------------------------------------------------------------------


def incumbent_tree():
    """A tree of tensordict with all kinds of entries."""
    lazy = tensordict.LazyStackedTensorDict.lazy_stack(
        [Incumbent({"x": torch.zeros(i + 1), "s": str(i)}) for i in (0, 1)]
    )
    return Incumbent(
        {"a": torch.arange(6).view(2, 3), "n": {"b": torch.zeros(2, 0), "deep": {"q": torch.ones(2)}}, "s": "hello",
         "d": tensordict.NonTensorData({"lr": 0.1}, batch_size=[2]), "ns": tensordict.NonTensorStack("u", "v"),
         "lazy": lazy, "a/b": torch.ones(2), "..": torch.ones(2), "é x": torch.ones(2), "e": Incumbent({}, [2]),
         "bf": torch.ones(2, dtype=torch.bfloat16), "p": nn.Parameter(torch.ones(2))}, [2],
    )  # fmt: skip


@pytest.fixture
def reopened(tmp_path):
    """A tree of tensordict, and its folder as we open it."""
    theirs = incumbent_tree()
    theirs.memmap(tmp_path / "d")
    return theirs, TensorDict.load_memmap(tmp_path / "d")


def test_folders_of_tensordict_open(reopened):
    """All entries are there, and the leaves are bit for bit those that tensordict wrote."""
    theirs, back = reopened

    assert set(back.keys()) == set(theirs.keys())
    assert back.batch_size == (2,)
    keys = ("a", ("n", "b"), ("n", "deep", "q"), "a/b", "..", "é x", "bf", "p")
    assert [key for key in keys if not same_bytes(back[key], theirs[key].data)] == []


def test_values_in_folders_of_tensordict_open(reopened):
    """Texts, data and stacks of data; and an empty tree."""
    _, back = reopened

    assert {key: back[key] for key in ("s", "d", "ns")} == {"s": "hello", "d": {"lr": 0.1}, "ns": ["u", "v"]}
    assert back["e"].is_empty()


def test_lazy_stacks_in_folders_of_tensordict_open(reopened):
    """With leaves of different lengths."""
    _, back = reopened

    assert back["lazy"].batch_size == (2,)
    assert [x.tolist() for x in back["lazy"]["x"]] == [[0], [0, 0]]
    assert back["lazy"]["s"] == ["0", "1"]


@tensordict.tensorclass
class TheirPoint:
    """A tensorclass of tensordict."""

    x: torch.Tensor
    note: str
    inner: "TheirPoint" = None


def test_tensorclass_folders_of_tensordict_open(tmp_path):
    """Tensorclasses of tensordict open as plain trees with all their fields."""
    inner = TheirPoint(x=torch.zeros(2), note="in", batch_size=[2])
    Incumbent({"p": TheirPoint(x=torch.ones(2), note="out", inner=inner, batch_size=[2])}, [2]).memmap(tmp_path / "d")

    back = TensorDict.load_memmap(tmp_path / "d")

    assert type(back["p"]) is TensorDict
    assert back["p", "note"] == "out"
    assert back["p", "inner", "note"] == "in"
    assert back["p", "x"].tolist() == [1, 1]
    assert ("p", "inner", "inner") not in back.keys(True, True)


def test_old_folders_with_raw_names_open(tmp_path):
    """Folders from before tensordict encoded names open."""
    Incumbent({"a b": torch.ones(2), "c d": {"x": torch.zeros(2)}}).memmap(tmp_path / "d", robust_key=False)
    assert (tmp_path / "d" / "a b.memmap").exists()

    back = TensorDict.load_memmap(tmp_path / "d")

    assert back["a b"].tolist() == [1, 1]
    assert back["c d", "x"].tolist() == [0, 0]


def test_a_longer_file_of_tensordict_opens(tmp_path):
    """Tensordict leaves a file longer than its leaf when a smaller tree is written over a larger one."""
    Incumbent({"a": torch.zeros(9)}).memmap(tmp_path / "d")
    Incumbent({"a": torch.ones(2)}).memmap(tmp_path / "d")
    with open(tmp_path / "d" / "a.memmap", "ab") as file:
        file.write(b"rest")

    assert TensorDict.load_memmap(tmp_path / "d")["a"].tolist() == [1, 1]


@LAW
@given(tree=trees())
def test_tensordict_opens_ours(tree, tmp_path):
    """Tensordict opens every folder of ours, and finds all that it can hold."""
    tree.memmap(tmp_path / "d")

    theirs = Incumbent.load_memmap(tmp_path / "d")

    _compare(theirs, tree)


def _compare(theirs, ours):
    for key, value in theirs.items():
        mine = ours._data[key]
        # A plain object that JSON cannot hold is a tree for the other library.
        if isinstance(value, tensordict.TensorDictBase) and isinstance(mine, TensorDict):
            _compare(value, mine)
        elif isinstance(value, torch.Tensor):
            assert same_bytes(torch.as_tensor(value), mine.detach())
        else:
            assert isinstance(mine, (NonTensorData, NonTensorStack)), key
    held = {
        k
        for k, v in ours._data.items()
        if isinstance(v, torch.Tensor) and k not in ("shape", "device") and "8_" not in str(v.dtype)
    }
    assert held <= set(theirs.keys())


# -- what is shared with the files ------------------------------------------------------------------------------


def test_copy_on_write_by_default(tmp_path):
    """A module trains on a loaded tree, and the folder does not change."""
    model = nn.Linear(3, 2)
    saved = TensorDict.from_module(model).memmap(tmp_path / "d").clone()

    TensorDict.load_memmap(tmp_path / "d").to_module(model)
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), 1.0).step()

    assert not torch.equal(model.weight, saved["weight"])
    assert (TensorDict.load_memmap(tmp_path / "d") == saved).all()


def test_r_plus_writes_reach_the_file(tmp_path):
    """Writes to leaves that are mapped with `r+` reach the file, and all who have its pages mapped."""
    flat().memmap(tmp_path / "d")
    private = TensorDict.load_memmap(tmp_path / "d")

    TensorDict.load_memmap(tmp_path / "d", mode="r+").at[1].set_(
        {"a": torch.full((2,), 9.0), "n": {"b": 7.0}, "s": "text"}
    )

    back = TensorDict.load_memmap(tmp_path / "d")
    assert back["a"].tolist() == private["a"].tolist() == [[0, 1], [9, 9], [4, 5]]
    assert back["n", "b"].tolist() == [1, 7, 1]


@pytest.mark.parametrize(
    "write",
    [
        lambda td, folder: td.set_("a", torch.zeros(3, 2)),
        lambda td, folder: td.set("a", torch.zeros(3, 2), inplace=True),
        lambda td, folder: td.update_({"a": torch.zeros(3, 2)}),
        lambda td, folder: td.copy_(flat()),
        lambda td, folder: td.at[0].set_(flat()[0]),
        lambda td, folder: td.share_memory_(),
        lambda td, folder: td.load_memmap_(folder),
        lambda td, folder: td.load_(folder),
        lambda td, folder: TensorDict.load_memmap(folder, out=td),
    ],
)  # fmt: skip
def test_writes_to_copy_on_write_leaves_are_refused(write, tmp_path):
    """A write that cannot reach the file is refused, and the leaf keeps its values."""
    flat().memmap(tmp_path / "d")
    tree = TensorDict.load_memmap(tmp_path / "d")

    with pytest.raises(LeafMismatchError, match=r"(?s)'a'.*copy-on-write mapping of .*a\.memmap.*mode=\"r\+\""):
        write(tree, tmp_path / "d")

    assert torch.equal(tree["a"], flat()["a"])


def test_memmap_like_is_sparse_and_fills_by_rows(tmp_path):
    """Room for a data set takes no space before its rows are written, which reach the files."""
    row = TensorDict({"image": torch.zeros(8, 8, 3, dtype=torch.uint8), "label": torch.tensor(0), "tag": "x"})

    data = row.expand(1_000_000).memmap_like(tmp_path / "d")
    data.at[5].set_(row.replace(label=torch.tensor(3)))

    file = tmp_path / "d" / "image.memmap"
    assert file.stat().st_size == 192_000_000
    assert file.stat().st_blocks * 512 < 100_000
    assert TensorDict.load_memmap(tmp_path / "d")[torch.tensor([4, 5])]["label"].tolist() == [0, 3]
    assert TensorDict.load_memmap(tmp_path / "d")["tag"] == "x"


VALUES = TensorDict(
    {
        "a": torch.ones(2),
        "v": NonTensorData(torch.tensor([1.0, 2.0])),
        "n": {"v": NonTensorData(torch.tensor([1.0, 2.0]))},
        "k": "txt",
    },
    [2],
)


def reopen_like(tree, folder):
    """The folder of a tree like this one, opened."""
    tree.memmap_like(folder)
    return TensorDict.load_memmap(folder)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda folder: VALUES.memmap_like(folder), id="made"),
        pytest.param(lambda folder: reopen_like(VALUES, folder), id="opened"),
        pytest.param(lambda folder: VALUES.memmap_like(), id="no folder"),
    ],
)
def test_memmap_like_keeps_values_that_are_no_leaves(make, tmp_path):
    """Non-tensor data that are tensors keep their values."""
    made = make(tmp_path / "d")

    leaves = {"a": made["a"].tolist(), "v": made["v"].tolist(), "n": made["n", "v"].tolist()}
    assert leaves == {"a": [0, 0], "v": [1, 2], "n": [1, 2]}
    assert made["k"] == "txt"


def test_memmap_like_refuses_values_without_values(tmp_path):
    """Nothing is written."""
    missing = VALUES.set("v", NonTensorData(torch.zeros(2, device="meta")))
    with pytest.raises(UnsupportedError, match="(?s)memmap_like: .*'v' have no values.*expected: values.*got:.*meta"):
        missing.memmap_like(tmp_path / "e")
    assert os.listdir(tmp_path) == []


def test_memmap_like_takes_leaves_without_values(tmp_path):
    """The mapped tree is on the CPU."""
    made = TensorDict({"a": torch.zeros(3, device="meta")}, device="meta").memmap_like(tmp_path / "d")

    assert made["a"].tolist() == [0, 0, 0]
    assert made.device == torch.device("cpu")


def test_memmap_like_wants_space(tmp_path):
    """Files for which the disk has no room are refused with both numbers, unless they are asked for."""
    huge = TensorDict({"a": torch.zeros(()).expand(1 << 50)})

    with pytest.raises(OSError, match=rf"(?s)expected: {4 << 50} bytes.*got:.*sparse_ok=True"):
        huge.memmap_like(tmp_path / "d")
    assert os.listdir(tmp_path) == []
    try:
        made = huge.memmap_like(tmp_path / "d", sparse_ok=True)
    except OSError as err:  # a file system with smaller files, or one in memory
        assert re.search("large|cannot be mapped", str(err))  # noqa: PT017
    else:
        assert made["a"].shape == (1 << 50,)


def test_memmap_moves_in_place(tmp_path):
    """`memmap_` keeps the tree and its tensors, and writes to them reach the files."""
    tree = flat().set("p", nn.Parameter(torch.ones(3)))
    leaf, parameter = tree["a"], tree["p"]

    assert tree.memmap_(tmp_path / "d") is tree
    leaf[0] = 5
    assert tree["a"] is leaf
    assert tree["p"] is parameter
    assert tree.is_memmap()
    assert TensorDict.load_memmap(tmp_path / "d")["a"][0].tolist() == [5, 5]


def test_memmap_in_place_refusals(tmp_path):
    """A leaf that cannot be moved onto a file is named, and no file is written."""
    with pytest.raises(UnsupportedError, match="(?s)'m'.*CPU.*got:      meta"):
        TensorDict({"m": torch.zeros(2, device="meta")}).memmap_(tmp_path / "d")
    with torch.inference_mode():
        made = TensorDict({"i": torch.zeros(2)})
    with pytest.raises(UnsupportedError, match="(?s)'i'.*inference tensor"):
        made.memmap_(tmp_path / "d")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def shared(tmp_path):
    """A tree with a tensor under three keys and in a value, and a copy of it, on mapped files."""
    x = torch.arange(3.0)
    td = TensorDict({"v": NonTensorData(x), "a": x, "b": x, "n": {"c": x}, "own": x.clone()})
    td.memmap_(tmp_path / "d").memmap_(tmp_path / "d")
    td.set_("a", torch.full((3,), 7.0))
    return td


def test_memmap_in_place_of_a_tensor_under_two_keys(shared, tmp_path):
    """It has one file with two names, so writes to it show under both, also after a refresh."""
    assert values_of(shared.select("a", "b", "n")) == {7}
    assert values_of(TensorDict.load_memmap(tmp_path / "d").select("a", "b", "n")) == {7}
    shared.memmap_refresh_()
    shared.set_("b", torch.full((3,), 8.0))
    assert values_of(TensorDict.load_memmap(tmp_path / "d").select("a", "b", "n")) == {8}


def test_values_that_are_the_same_tensor_follow(shared, tmp_path):
    """As they do in memory; a tensor of equal values does not."""
    assert shared["v"].tolist() == [7, 7, 7]
    back = TensorDict.load_memmap(tmp_path / "d")
    assert back["v"].tolist() == [7, 7, 7]
    assert back["own"].tolist() == [0, 1, 2]


def test_memmap_in_place_where_a_file_has_one_name(tmp_path, monkeypatch):
    """A tensor under two keys is refused, unless they are tied."""

    def no_link(*_):
        raise OSError

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(
        UnsupportedError, match=r"(?s)b\.memmap and a\.memmap are one tensor.*no file two names.*td\.tie"
    ):
        TensorDict({"a": (y := torch.ones(1)), "b": y}).memmap_(tmp_path / "e")
    assert os.listdir(tmp_path) == []
    retie(TensorDict({"a": y, "n": {"b": y}}), [[("a",), ("n", "b")]]).memmap(tmp_path / "e")
    assert TensorDict.load_memmap(tmp_path / "e" / "n")["b"].tolist() == [1]


def test_load_into_what_takes_no_values(tmp_path):
    """A load into leaves, or of leaves, without values is refused by the name of the leaf."""
    tree = flat().memmap(tmp_path / "d")
    zeros = torch.zeros_like(flat())
    for write in (
        lambda: zeros.load_memmap_(tmp_path / "d", device="meta"),
        lambda: TensorDict.load_memmap(tmp_path / "d", "meta", out=zeros),
        lambda: zeros.update_(tree.to("meta")),
        lambda: zeros.set_("a", torch.empty(3, 2, device="meta")),
        lambda: zeros.at[:2].set_(tree.to("meta")[:2]),
    ):
        with pytest.raises(LeafMismatchError, match="(?s)'a'.*does not have data; nothing.*got: .*meta device"):
            write()
    assert values_of(zeros) == {0}
    meta = zeros.to("meta")
    assert meta.load_memmap_(tmp_path / "d", device="meta") is meta


def test_load_into_a_tree(tmp_path):
    """A load into a tree writes into the storage that it has."""
    flat().memmap(tmp_path / "d")
    zeros = torch.zeros_like(flat())
    a = zeros["a"]

    assert zeros.load_memmap_(tmp_path / "d") is zeros
    assert torch.equal(a, flat()["a"])
    out = torch.zeros_like(flat())
    assert TensorDict.load_memmap(tmp_path / "d", out=out) is out
    assert torch.equal(out["a"], a)
    assert torch.zeros_like(flat()).load_(tmp_path / "d")["n", "b"].tolist() == [1, 1, 1]
    assert_same(TensorDict.load(tmp_path / "d"), flat())
    with pytest.raises(MissingKeyError, match="(?s)expected.*'z'.*got.*'a'"):
        TensorDict({"z": torch.ones(1)}).load_memmap_(tmp_path / "d")


def test_without_values(tmp_path):
    """A folder opens on the meta device, and under FakeTensorMode, without its leaves."""
    tree = flat().set("l", lazy_stack([TensorDict({"x": torch.ones(i)}) for i in (1, 2, 3)]))
    tree.memmap(tmp_path / "d")
    os.remove(tmp_path / "d" / "a.memmap")

    meta = TensorDict.load_memmap(tmp_path / "d", device="meta")
    with FakeTensorMode():
        fake = TensorDict.load_memmap(tmp_path / "d")

    assert meta["a"].is_meta
    assert meta["a"].shape == (3, 2)
    assert meta.device == torch.device("meta")
    assert "FakeTensor" in repr(fake)
    assert fake["a"].device == torch.device("cpu")


# -- gather and processes ---------------------------------------------------------------------------------------


def test_gather_of_a_large_leaf(tmp_path):
    """A gather out of a cold file gives the rows, and refuses wrong ones."""
    data = TensorDict({"x": torch.arange(1 << 19).reshape(-1, 8)}, [1 << 16])
    on_disk = data.apply(lambda x: x.repeat(1, 8)).memmap(tmp_path / "d")
    assert on_disk["x"].nbytes > 1 << 24
    os.sync()
    with open(tmp_path / "d" / "x.memmap", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold = TensorDict.load_memmap(tmp_path / "d")
    rows = torch.randint(0, 1 << 16, (3000,))

    assert torch.equal(cold[rows]["x"], on_disk["x"][rows])
    assert torch.equal(cold[-rows - 1]["x"], on_disk["x"][-rows - 1])
    assert cold[rows[:0]]["x"].shape == (0, 64)
    with pytest.raises(IndexError):
        cold[torch.tensor([1 << 16])]


def test_written_to_its_own_place_a_leaf_keeps_its_file(tmp_path):
    """Leaves that are written to their own place keep their files, with all who have these mapped."""
    tree = flat().memmap(tmp_path / "d")

    more = tree.set("new", torch.zeros(3)).memmap(tmp_path / "d")
    tree["a"][0] = 7

    assert more["a"][0].tolist() == [7, 7]
    assert mapped_file(more["a"]).file_id == mapped_file(tree["a"]).file_id
    private = TensorDict.load_memmap(tmp_path / "d")
    private["a"].zero_()
    private.memmap(tmp_path / "d")
    assert TensorDict.load_memmap(tmp_path / "d")["a"].sum() == 0
    assert tree["a"][0].tolist() == [7, 7]
    # The leaf keeps neither the file that another writer put there nor, for some rows, the whole file.
    tree.memmap(tmp_path / "d")[:1].memmap(tmp_path / "d")
    assert TensorDict.load_memmap(tmp_path / "d")["a"].tolist() == [[7, 7]]


def test_the_format_is_tensordict_s(tmp_path):
    """meta.json is as docs/formats.md describes it, also of the longest key that tensordict can hold."""
    key = "x" * 248
    tree = TensorDict({key: torch.zeros(2, 3), "shape": torch.ones(2)}, [2], names=["row"])

    tree.memmap(tmp_path / "d")

    assert json.loads((tmp_path / "d" / "meta.json").read_text()) == {
        key: {"device": "cpu", "shape": [2, 3], "dtype": "torch.float32", "is_nested": False},
        "shape": [2], "device": "None", "_type": "<class 'tensordict._td.TensorDict'>",
        "": {"tdfunc": 2, "specs": [["F32", [2, 3]], ["F32", [2]]],
             "node": {"size": [2], "names": ["row"], "keys": [key, "shape"], "items": [0, 1]}},
    }  # fmt: skip


def _write_in_worker(tree, queue):
    tree["a"][0] = 7
    queue.put((tree["p"].requires_grad, tree["a"] is tree["n", "tied"], mapped_file(tree["a"]) is not None))


@pytest.mark.slow
def test_a_started_worker_maps_the_same_file(tmp_path):
    """A worker that is started maps the files that the parent has, ties and Parameters included."""
    shared = torch.zeros(3)
    tree = TensorDict({"a": shared, "n": {"tied": shared}, "p": nn.Parameter(torch.ones(3))})
    tree = retie(tree, [[("a",), ("n", "tied")]]).memmap(tmp_path / "d")
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=_write_in_worker, args=(tree, queue))
    worker.start()

    assert queue.get() == (True, True, True)
    worker.join()
    assert tree["a"].tolist() == [7, 0, 0]


@contextmanager
def starting_a_process():
    """What is pickled in this block is an argument of a process that starts."""
    set_spawning_popen(object())
    try:
        yield
    finally:
        set_spawning_popen(None)


ROWS = {
    "all": lambda tree: tree,
    "the first": lambda tree: tree[:100],
    "in steps": lambda tree: tree[50:400:7],
    "one": lambda tree: tree[9],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_process_that_starts_gets_the_name_of_a_file(rows, tmp_path):
    """A copy-on-write leaf without writes is not copied: the process maps the file."""
    TensorDict({"a": torch.arange(40_000.0).view(1000, 40)}, [1000]).memmap(tmp_path)
    tree = rows(TensorDict.load_memmap(tmp_path))
    with starting_a_process():
        sent = bytes(ForkingPickler.dumps(tree))
    found = pickle.loads(sent)

    assert len(sent) < 3000
    assert mapped_file(found["a"]).path == mapped_file(tree["a"]).path
    assert torch.equal(found["a"], tree["a"])


def _report_value(tree, queue):
    queue.put((tree["a"][500].item(), mapped_file(tree["a"]) is None))


@pytest.mark.slow
def test_a_process_that_starts_gets_the_values_that_were_written(tmp_path):
    """They are in the memory of this process, and not in the file."""
    TensorDict({"a": torch.zeros(1000)}, [1000]).memmap(tmp_path)
    tree = TensorDict.load_memmap(tmp_path)
    tree["a"][500] = 7
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=_report_value, args=(tree, queue))
    worker.start()

    assert queue.get() == (7.0, True)
    worker.join()


def test_a_pickle_outlives_the_file_of_a_copy_on_write_leaf(tmp_path):
    """Only a process that starts reads a pickle at once; any other pickle has the values."""
    TensorDict({"a": torch.arange(1000.0)}, [1000]).memmap(tmp_path / "d")
    sent = pickle.dumps(TensorDict.load_memmap(tmp_path / "d"))
    shutil.rmtree(tmp_path / "d")

    assert torch.equal(pickle.loads(sent)["a"], torch.arange(1000.0))


def _rows_of(used):
    loader = DataLoader(used, batch_size=64, num_workers=2, collate_fn=collate, multiprocessing_context="spawn")
    return torch.cat([batch["a"] for batch in loader])


@pytest.mark.slow
def test_workers_of_a_data_loader_map_the_file(tmp_path):
    """Started workers read the rows of the map, in order."""
    TensorDict({"a": torch.arange(4000.0).view(1000, 4)}, [1000]).memmap(tmp_path)
    used = TensorDict.load_memmap(tmp_path)[:200]

    assert torch.equal(_rows_of(used), used["a"])
    # A leaf whose values were copied is not on its file any more.
    assert mapped_file(used["a"]) is not None


@pytest.mark.parametrize("move", [torch.Tensor.share_memory_, ForkingPickler.dumps])
def test_a_leaf_that_left_its_file(move, tmp_path):
    """A leaf that torch moved to shared memory is not a leaf on a file any more."""
    TensorDict({"a": torch.zeros(4096)}, [4096]).memmap(tmp_path)
    tree = TensorDict.load_memmap(tmp_path)
    tree["a"].add_(1)
    move(tree["a"])

    assert mapped_file(tree["a"]) is None
    assert not is_in_file(tree["a"])
    assert tree.at[0].set_(TensorDict({"a": torch.tensor(5.0)}))["a"][:2].tolist() == [5, 1]
