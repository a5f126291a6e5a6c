"""The checkpoints of a run: what is kept, and that a step is whole or not there, whatever else happens."""

import json
import os
import shutil
import tempfile
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tdfunc import (
    CheckpointManager,
    ConcurrencyError,
    CorruptCheckpointError,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
)
from tdfunc.storage.manager import steps as steps_module
from tests.storage.scripts import tree_of, value_of
from tests.storage.trees import VALUES, assert_same, tied_trees, trees

FAST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def manager(request, tmp_path):
    """A manager that saves at once, or in the background."""
    return CheckpointManager(tmp_path / "run", async_save=request.param, fsync=False)


# -- one step ---------------------------------------------------------------------------------------------------


@given(tree=trees() | tied_trees(), metadata=st.dictionaries(st.text("aé0", max_size=3), VALUES, max_size=3))
@FAST
def test_a_step_comes_back(tree, metadata, tmp_path):
    """A tree and its metadata come back as they were."""
    folder = tempfile.mkdtemp(dir=tmp_path)
    with CheckpointManager(folder, fsync=False, async_save=True) as manager:
        assert manager.save(3, tree, metadata=metadata).result() == manager.path(3)

    assert_same(manager.load(), tree)
    assert manager.metadata() == metadata
    assert repr(manager.metadata(3)) == repr(metadata)
    assert manager.verify() == 3


def test_without_steps(tmp_path):
    """A run that has not begun has no steps and no folder."""
    manager = CheckpointManager(tmp_path / "a" / "b", metric="loss")

    assert manager.steps() == []
    assert manager.latest() is None
    assert manager.best() is None
    assert os.listdir(tmp_path) == []
    manager.save(0, tree_of(1))
    assert value_of(manager.load()) == 1


@pytest.mark.parametrize("name", ["load", "metadata", "verify"])
def test_nothing_is_read_without_steps(name, tmp_path):
    """The message says that there are none, and no folder is made."""
    manager = CheckpointManager(tmp_path / "a" / "b", metric="loss")
    with pytest.raises(FileNotFoundError, match=r"a/b: the folder has no step(.|\n)*latest\(\) is None"):
        getattr(manager, name)()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("background", [False, True])
def test_a_step_in_several_files(background, tmp_path):
    """A step can have several files; a missing or foreign one is noticed."""
    tree = TensorDict({str(i): torch.randn(1000) for i in range(10)})
    manager = CheckpointManager(tmp_path, max_shard_size="8KB", async_save=background)
    path = manager.save(1, tree).result()
    manager.save(2, tree + 1).result()
    shards = [name for name in os.listdir(path) if name.endswith(".safetensors")]

    assert len(shards) == 5
    assert_same(manager.load(1), tree)
    assert (manager.load() == tree + 1).all()
    os.unlink(path / shards[0])
    with pytest.raises(CorruptCheckpointError, match=rf"step 1(.|\n)*{shards[0]}"):
        manager.load(1)
    shutil.copy(path / "model.safetensors.index.json", manager.path(2))
    with pytest.raises(CorruptCheckpointError, match=r"step 2(.|\n)*model\.safetensors\.index\.json is not the file"):
        manager.load()


def test_options_of_load(manager):
    """`load` takes the options of `tdfunc.load`."""
    tree = tree_of(1.5)
    manager.save(0, tree).result()

    assert_same(manager.load(where="n.*"), tree.select("n"))
    assert manager.load(dtype=torch.float64)["w"].dtype == torch.float64
    assert manager.load(device="meta")["w"].is_meta
    assert_same(manager.load(like=tree), tree)
    with pytest.raises(TreeStructureError, match="other"):
        manager.load(like=tree.set("other", torch.ones(1)))


@pytest.mark.parametrize("step", [0, 10**10, 10**150, np.int64(7), torch.tensor(7)], ids=str)
def test_steps_of_any_size(step, manager):
    """Any int of up to 200 digits is a step."""
    manager.save(step, tree_of(1)).result()

    assert manager.steps() == [int(step)]
    assert value_of(manager.load(step)) == 1


@pytest.mark.parametrize("name", ["load", "metadata", "verify", "delete"])
def test_missing_steps(name, manager):
    """A wrong number is told by the call, with the steps that there are."""
    for step in range(12):
        manager.save(step, tree_of(step)).result()
    with pytest.raises(FileNotFoundError, match=rf"^{name} .*step 77 does not exist(.|\n)*the last are 2, 3, .*, 11$"):
        getattr(manager, name)(77)


def test_what_is_there_is_not_overwritten(manager):
    """A step is replaced only with `overwrite=True`, with its metadata."""
    manager.save(1, tree_of(1)).result()
    with pytest.raises(FileExistsError, match=r"step 1 exists(.|\n)*overwrite=True"):
        manager.save(1, tree_of(2))
    assert value_of(manager.load()) == 1

    manager.save(1, tree_of(2), overwrite=True, metadata={"new": True}).result()
    assert value_of(manager.load()) == 2
    assert manager.metadata() == {"new": True}
    assert len(os.listdir(manager._folder)) == 1


def test_other_files_do_not_count(tmp_path):
    """Other files in the folder are no steps, and stay."""
    for name in ("step-1", "step-00000000001", "step-000000000x", "notes", "step-0000000003.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-0000000009").write_text("a file")
    (tmp_path / "step-0000000008").symlink_to(tmp_path / "notes")
    before = set(os.listdir(tmp_path))
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        manager.save(step, tree_of(step))
    for step in (8, 9):
        with pytest.raises(NotADirectoryError, match="the step was not saved"):
            manager.save(step, tree_of(step), overwrite=True)

    assert manager.steps() == [2]
    assert set(os.listdir(tmp_path)) == before | {"step-0000000002"}


CYCLE = {}
CYCLE["self"] = CYCLE
ALTERED = {
    "nan": float("nan"), "inf": float("inf"), "tuple": (1, 2), "int key": {1: 2}, "None key": {None: 1},
    "tensor": torch.ones(()), "numpy": np.ones(1), "numpy nan": np.float32("nan"), "set": {1}, "surrogate": "\ud800",
    "cycle": CYCLE, "complex": np.complex64(1), "bool key": {True: 1}, "deep": [0, {"b": (1,)}], "text": np.str_("x"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERED)
def test_metadata_that_json_would_alter_are_refused(name, manager):
    """Metadata that JSON alters are refused by their name, and nothing is written."""
    with pytest.raises(UnsupportedError, match=r"save: metadata\['a'\] cannot be stored"):
        manager.save(0, tree_of(1), metadata={"fine": 1, "a": ALTERED[name]})
    assert manager.steps() == []


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.float16(2), np.int64(3), np.bool_(True)])
def test_numbers_of_numpy_are_metadata(value, manager):
    """They are stored as the equal numbers of Python, also inside lists and dicts."""
    manager.save(0, tree_of(1), metadata={"a": value, "b": [{"c": value}]}).result()

    assert manager.metadata(0) == {"a": value, "b": [{"c": value}]}
    assert type(manager.metadata(0)["a"]) in (float, int, bool)


def test_a_number_of_numpy_is_a_metric(tmp_path):
    """`np.mean` of a metric chooses the best step."""
    manager = CheckpointManager(tmp_path, metric="loss")
    for step, losses in enumerate(([3.0, 5.0], [1.0, 2.0], [2.0, 4.0])):
        manager.save(step, tree_of(1), metadata={"loss": np.mean(losses)})

    assert manager.best() == 1


def test_the_reason_is_named(manager):
    """The message for a value that JSON has no form for has JSON's reason."""
    with pytest.raises(UnsupportedError, match=r"Tensor: Object of type Tensor is not JSON serializable"):
        manager.save(0, tree_of(1), metadata={"a": torch.ones(())})


def test_metadata_are_as_they_were(tmp_path):
    """Metadata are saved as they were when `save` was called."""
    history = [1]
    manager = CheckpointManager(tmp_path, async_save=True)
    handle = manager.save(0, tree_of(1), metadata={"history": history})
    history.append(2)
    handle.result()

    assert manager.metadata() == {"history": [1]}


# -- which steps are kept ---------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 12), st.none() | st.sampled_from([0, 1, 1.5, -2.0, 10**20])), max_size=10,
    unique_by=lambda pair: pair[0],
)  # fmt: skip


@given(
    saves=STEPS,
    keep_last=st.none() | st.integers(1, 3),
    keep_best=st.none() | st.integers(1, 3),
    mode=st.sampled_from(["min", "max"]),
)
@FAST
def test_the_last_and_the_best_are_kept(saves, keep_last, keep_best, mode, tmp_path):
    """The saved step, the last and the best are kept, and no others; held against sorting anew."""
    manager = CheckpointManager(
        tempfile.mkdtemp(dir=tmp_path), keep_last=keep_last, keep_best=keep_best, metric="m", mode=mode, fsync=False
    )
    tree, there = TensorDict({"w": torch.ones(1)}), {}
    steps, bests, expected_steps, expected_bests = [], [], [], []
    for step, metric in saves:
        manager.save(step, tree, metadata={} if metric is None else {"m": metric})
        there[step] = metric
        # The oracle: sort everything anew, the newest of equal ones first.
        sign = 1 if mode == "min" else -1
        ranked = sorted((sign * m, -s) for s, m in there.items() if m is not None)
        best = [-s for _, s in ranked]
        if keep_last is not None or keep_best is not None:
            kept = {step, *sorted(there)[-(keep_last or 1) :], *best[: keep_best or 0]}
            there = {s: m for s, m in there.items() if s in kept}
            best = [s for s in best if s in kept]
        expected_steps.append(sorted(there))
        expected_bests.append(best[0] if best else None)
        steps.append(manager.steps())
        bests.append(manager.best())

    assert steps == expected_steps
    assert bests == expected_bests


def test_only_steps_are_removed(tmp_path):
    """A damaged step never fails a later save and stays, as does a folder of another program under a step's name."""
    foreign = [tmp_path / f"step-{step:010d}" / "weights.npz" for step in (5, 900)]
    for path in foreign:
        path.parent.mkdir()
        path.write_text("mine")
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=1, metric="loss")
    for step in range(3):
        manager.save(step, tree_of(step), metadata={"loss": step})
    about = manager.path(0) / "checkpoint.json"
    raw = about.read_bytes()
    about.write_bytes(raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:])

    for step in (3, 4):
        with pytest.warns(RuntimeWarning, match=r"step 0 could not be removed(.|\n)*is damaged"):
            manager.save(step, tree_of(step), metadata={"loss": step})
    assert manager.steps() == [0, 1, 3, 4]
    with pytest.raises(CorruptCheckpointError, match="step 0"):
        manager.best()
    with pytest.raises(FileExistsError, match=r"(?s)only folders of a CheckpointManager.*checkpoint\.json.*weights"):
        manager.save(900, tree_of(1), overwrite=True)
    with pytest.raises(FileExistsError, match=r"only folders of a CheckpointManager"):
        manager.delete(5)
    manager.delete(0)
    assert manager.steps() == [1, 3, 4]
    assert [path.read_text() for path in foreign] == ["mine", "mine"]


def test_delete(manager):
    """`delete` removes a step, unless it is being loaded."""
    for step in range(3):
        manager.save(step, tree_of(step)).result()
    manager.delete(2)

    assert manager.steps() == [0, 1]
    with steps_module.reading(manager._folder, 1), pytest.raises(BlockingIOError, match="step 1 is being loaded"):
        manager.delete(1)
    manager.delete(1)
    assert os.listdir(manager._folder) == ["step-0000000000"]


# -- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
def test_every_changed_byte_is_noticed(name, tmp_path):
    """Every changed, cut or missing byte of a step is noticed, and the error names the step."""
    manager = CheckpointManager(tmp_path)
    path = manager.save(4, TensorDict({"w": torch.ones(2)}), metadata={"loss": 0.5}).result() / name
    raw = path.read_bytes()
    for i in range(len(raw)):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])
        with pytest.raises(CorruptCheckpointError, match=rf"^step 4 in {tmp_path} is damaged: "):
            manager.load()
        if name == "checkpoint.json":
            with pytest.raises(CorruptCheckpointError, match=rf"^step 4 in {tmp_path} is damaged: "):
                manager.metadata()
    for cut in (b"", raw[:7], raw[:-1], raw + b" "):
        path.write_bytes(cut)
        with pytest.raises(CorruptCheckpointError, match=rf"^step 4 in {tmp_path} is damaged: "):
            manager.verify(4)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"damaged: a file is missing(.|\n)*{name}"):
        manager.load()


def test_files_of_two_steps(tmp_path):
    """A tree beside the metadata of another step is damage."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, tree_of(step))
    shutil.copy(manager.path(1) / "model.safetensors", manager.path(2) / "model.safetensors")
    with pytest.raises(
        CorruptCheckpointError, match=r"step 2(.|\n)*is not the file that(.|\n)*xxh3-64:\w{16}\n.*xxh3-64:\w{16}"
    ):
        manager.load()

    os.rename(manager.path(1), manager.path(3))
    with pytest.raises(CorruptCheckpointError, match=r"name of its step(.|\n)*step 3(.|\n)*step 1"):
        manager.load()


ABOUT = {"version": 1, "step": 1, "file": "model.safetensors", "tree": "", "metadata": {}}


def forge(manager, step, fields):
    """Write a `checkpoint.json` whose digest is right."""
    text = json.dumps(fields)[1:]
    raw = f'{{"digest":"xxh3-64:{"0" * 16}",{text}'.encode()
    digest = steps_module.xxhash.xxh3_64_hexdigest(raw).encode()
    (manager.path(step) / "checkpoint.json").write_bytes(raw.replace(b"0" * 16, digest, 1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"version": 2}, UnsupportedError, r"checkpoint\.json: this version(.|\n)*version 1(.|\n)*2(.|\n)*later"),
        ({"version": 1, "step": 1}, CorruptCheckpointError, r"malformed(.|\n)*KeyError"),
        ({**ABOUT, "metadata": 3}, CorruptCheckpointError, r"malformed(.|\n)*TypeError"),
        ({**ABOUT, "metadata": {"a": float("nan")}}, CorruptCheckpointError, r"NaN"),
        ({**ABOUT, "file": "../x.safetensors"}, CorruptCheckpointError, r"damaged(.|\n)*\.\./x"),
        ({**ABOUT, "tree": 3}, CorruptCheckpointError, r"digest 3"),
    ],
    ids=["version", "missing", "type", "nan", "file", "digest"],
)
def test_hostile_metadata(fields, error, message, tmp_path):
    """A `checkpoint.json` of any contents gives one of our errors."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree_of(1))
    forge(manager, 1, fields)

    with pytest.raises(error, match=message):
        manager.load()


@pytest.fixture
def damaged(tmp_path):
    """A manager of four steps, the last two of which are damaged."""
    manager = CheckpointManager(tmp_path)
    for step in range(4):
        manager.save(step, tree_of(step))
    for step in (3, 2):
        path = manager.path(step) / "model.safetensors"
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    return manager


def test_falling_back_to_a_whole_step(damaged):
    """With `fallback=True` the newest whole step is loaded, with a warning for each damaged one; else it raises."""
    with pytest.raises(CorruptCheckpointError, match=r'step 3(.|\n)*leaf "'):
        damaged.load()
    with pytest.warns(RuntimeWarning, match=r"step \d in (.|\n)* is damaged(.|\n)*an older step") as caught:
        back = damaged.load(fallback=True)

    assert value_of(back) == 1
    assert [str(warning.message)[:6] for warning in caught] == ["step 3", "step 2"]


@pytest.mark.parametrize("options", [{"step": 1}, {"verify": False}], ids=str)
def test_what_falling_back_does_not_go_with(damaged, options):
    """A step that is named, and no checks."""
    with pytest.raises(ValueError, match=r"fallback(.|\n)*(step 1|verify=False)"):
        damaged.load(fallback=True, **options)


def test_falling_back_where_all_steps_are_damaged(damaged):
    """All are named."""
    for step in (0, 1):
        (damaged.path(step) / "model.safetensors").write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="an older step"),
        pytest.raises(CorruptCheckpointError, match=r"all steps are damaged(.|\n)*damaged: .0, 1, 2, 3"),
    ):
        damaged.load(fallback=True)


# -- in the background ------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """An event that saves wait for before they write."""
    event, real = threading.Event(), steps_module.write_into

    def write(*args, **kwargs):
        assert event.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(steps_module, "write_into", write)
    yield event
    event.set()


def test_a_pending_step(gate, tmp_path):
    """A step that is still being written is not there, and cannot be saved twice."""
    manager = CheckpointManager(tmp_path, async_save=True, max_pending=2)
    handle = manager.save(0, tree_of(0))

    assert manager.latest() is None
    assert repr(manager) == f"CheckpointManager('{tmp_path}', 0 steps, 1 pending)"
    with pytest.raises(FileExistsError, match="step 0 exists"):
        manager.save(0, tree_of(0))
    gate.set()
    manager.wait()
    assert handle.done()
    assert manager.latest() == 0


def test_a_leaf_that_changes_fails_the_step_by_name(gate, tmp_path):
    """A leaf that changes during a save fails it by name and leaves nothing; `copy=True` saves it as it was."""
    manager = CheckpointManager(tmp_path, async_save=True)
    tree = tree_of(0)
    handle = manager.save(7, tree)
    tree["n", "b"][1, 2] = 1
    gate.set()
    with pytest.raises(ConcurrencyError, match=r'step-0000000007: .*leaf "n\.b" changed(.|\n)*copy=True'):
        handle.result()
    assert os.listdir(tmp_path) == []

    gate.clear()
    manager.save(8, tree, copy=True)
    tree["n", "b"].zero_()
    gate.set()
    manager.wait()
    assert manager.load()["n", "b"][1, 2] == 1
