"""The checkpoints of a run: what is kept, and that a step is whole or not there, whatever else happens."""

import errno
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
from torch import nn

from tdfunc import (
    CheckpointManager,
    ConcurrencyError,
    CorruptCheckpointError,
    NonTensorData,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
    load,
)
from tdfunc.storage.manager import manager as manager_module
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
    """Something of a tree or its metadata would be lost."""
    folder = tempfile.mkdtemp(dir=tmp_path)
    with CheckpointManager(folder, fsync=False, async_save=True) as manager:
        assert manager.save(3, tree, metadata=metadata).result() == manager.path(3)

    assert_same(manager.load(), tree)
    assert manager.metadata() == metadata
    assert repr(manager.metadata(3)) == repr(metadata)
    assert manager.verify() == 3


def test_named_trees(manager):
    """Parameters and the state of an optimizer could not be saved as one step."""
    params = TensorDict.from_module(nn.Linear(2, 3))
    manager.save(0, {"params": params, "state": {"step": torch.tensor(3)}, "note": "text"}).result()
    back = manager.load()

    assert_same(back["params"], params)
    assert back["state", "step"] == 3
    assert back["note"] == "text"


def test_without_steps(tmp_path):
    """A run that has not begun would be an error, or make a folder."""
    manager = CheckpointManager(tmp_path / "a" / "b", metric="loss")

    assert (manager.steps(), manager.latest(), manager.best()) == ([], None, None)
    for call in (manager.load, manager.metadata, manager.verify):
        with pytest.raises(FileNotFoundError, match=r"a/b: there are no steps(.|\n)*latest\(\) is None"):
            call()
    assert os.listdir(tmp_path) == []
    manager.save(0, tree_of(1))
    assert value_of(manager.load()) == 1


def test_a_step_is_a_checkpoint_for_others(tmp_path):
    """The file of a step could not be opened by itself."""
    manager = CheckpointManager(tmp_path)
    manager.save(5, tree_of(5))

    assert sorted(os.listdir(tmp_path)) == ["step-0000000005"]
    assert sorted(os.listdir(tmp_path / "step-0000000005")) == ["checkpoint.json", "model.safetensors"]
    assert value_of(load(tmp_path / "step-0000000005" / "model.safetensors")) == 5
    assert value_of(load(manager.path(5))) == 5
    assert json.loads((tmp_path / "step-0000000005" / "checkpoint.json").read_text())["step"] == 5


@pytest.mark.parametrize("background", [False, True])
def test_a_step_in_several_files(background, tmp_path):
    """A step larger than a file may be could not be saved, or its shards be mixed up unnoticed."""
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
    with pytest.raises(CorruptCheckpointError, match=r"step 2(.|\n)*model\.safetensors\.index\.json is not the one"):
        manager.load()
    with pytest.raises(ValueError, match="max_shard_size"):
        CheckpointManager(tmp_path, max_shard_size=0)


def test_options_of_load(manager):
    """A part of a step, another dtype or a check of its structure could not be asked for."""
    tree = tree_of(1.5)
    manager.save(0, tree).result()

    assert_same(manager.load(keys="n.*"), tree.select("n"))
    assert manager.load(dtype=torch.float64)["w"].dtype == torch.float64
    assert manager.load(device="meta")["w"].is_meta
    assert_same(manager.load(like=tree), tree)
    with pytest.raises(TreeStructureError, match="other"):
        manager.load(like=tree.set("other", torch.ones(1)))


@pytest.mark.parametrize("step", [0, 10**10, 10**150, np.int64(7), torch.tensor(7)], ids=str)
def test_steps_of_any_size(step, manager):
    """A step would be refused, or come back as another."""
    manager.save(step, tree_of(1)).result()

    assert manager.steps() == [int(step)]
    assert value_of(manager.load(step)) == 1


@pytest.mark.parametrize(
    ("step", "error", "got"),
    [(-1, ValueError, "-1"), (True, ValueError, "True"), (10**200, ValueError, "665 bits"), (1.0, TypeError, "float"),
     ("1", TypeError, "str"), (None, TypeError, "NoneType")],
)  # fmt: skip
def test_what_is_no_step(step, error, got, manager):
    """A step would get a name that is not found again."""
    with pytest.raises(error, match=rf"save(.|\n)*0 or more(.|\n)*{got}"):
        manager.save(step, tree_of(1))
    if step is not None:
        with pytest.raises(error, match=rf"load(.|\n)*0 or more(.|\n)*{got}"):
            manager.load(step)
    assert manager.steps() == []


def test_missing_steps(manager):
    """A wrong number would not say which steps there are."""
    for step in range(12):
        manager.save(step, tree_of(step)).result()
    for call in (manager.load, manager.metadata, manager.verify, manager.delete):
        with pytest.raises(FileNotFoundError, match=r"step 77(.|\n)*step-0000000077(.|\n)*\.\.\. 2, 3, .*10, 11"):
            call(77)


def test_what_is_there_is_not_overwritten(manager):
    """A second run in the same folder would destroy the checkpoints of the first."""
    manager.save(1, tree_of(1)).result()
    with pytest.raises(FileExistsError, match=r"step 1 exists(.|\n)*overwrite=True"):
        manager.save(1, tree_of(2))
    assert value_of(manager.load()) == 1

    manager.save(1, tree_of(2), overwrite=True, metadata={"new": True}).result()
    assert value_of(manager.load()) == 2
    assert manager.metadata() == {"new": True}
    assert len(os.listdir(manager._folder)) == 1


def test_overwriting_without_the_system_call(tmp_path, monkeypatch):
    """A file system that cannot exchange two folders could not replace a step."""
    monkeypatch.setattr(steps_module, "_renameat2", None)
    manager = CheckpointManager(tmp_path)
    for value in range(3):
        manager.save(1, tree_of(value), overwrite=True)

    assert value_of(manager.load()) == 2
    assert os.listdir(tmp_path) == ["step-0000000001"]


def test_other_files_do_not_count(tmp_path):
    """Something else in the folder would be taken for a step, or removed."""
    for name in ("step-1", "step-00000000001", "step-000000000x", "notes", "step-0000000003.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-0000000009").write_text("a file")
    (tmp_path / "step-0000000008").symlink_to(tmp_path / "notes")
    before = set(os.listdir(tmp_path))
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        manager.save(step, tree_of(step))

    assert manager.steps() == [2]
    assert set(os.listdir(tmp_path)) == before | {"step-0000000002"}


@pytest.mark.parametrize(
    ("tree", "got"), [([1], "list"), (torch.ones(1), "Tensor"), (None, "NoneType")], ids=["list", "tensor", "none"]
)
def test_what_is_no_tree(tree, got, manager):
    """A value that is no tree would fail somewhere inside."""
    with pytest.raises(TypeError, match=rf"save: this is no tree(.|\n)*{got}(.|\n)*params"):
        manager.save(0, tree)


def test_a_leaf_that_cannot_be_stored(manager):
    """A step would be left half written."""
    with pytest.raises(UnsupportedError, match='leaf "bad" cannot be stored'):
        manager.save(0, tree_of(1).set("bad", NonTensorData(object())))
    assert manager.steps() == []


CYCLE = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("metadata", "where", "got"),
    [
        ({"a": [0, {"b": float("nan")}]}, r"metadata\['a'\]\[1\]\['b'\]", r"nan \(float\)"),
        ({"a": float("inf")}, r"metadata\['a'\]", r"inf \(float\)"),
        ({"a": (1, 2)}, r"metadata\['a'\]", r"\(1, 2\) \(tuple\)"),
        ({"a": {1: 2}}, r"metadata\['a'\]", r"the key 1 \(int\)"),
        ({None: 2}, r"metadata", r"the key None \(NoneType\)"),
        ({"a": torch.ones(())}, r"metadata\['a'\]", r"tensor\(1\.\) \(Tensor\)"),
        ({"a": np.float64(1)}, r"metadata\['a'\]", r"1\.0.* \(float64\)"),
        ({"a": 1 << 5000}, r"metadata\['a'\]", r"an int of 5001 bits"),
        ({"a": {"b": {1, 2}}}, r"metadata\['a'\]\['b'\]", r"\{1, 2\} \(set\)"),
        ({"a": "\ud800"}, r"metadata", r"'\\ud800'"),
        (CYCLE, r"metadata", r"nested over 200 deep"),
    ],
    ids=["nan", "inf", "tuple", "int key", "none key", "tensor", "numpy", "huge", "set", "surrogate", "cycle"],
)
def test_metadata_that_json_would_alter(metadata, where, got, manager):
    """Metadata would come back as something else, or the step not at all."""
    with pytest.raises(UnsupportedError, match=rf"save: {where} cannot be stored(.|\n)*expected: str(.|\n)*{got}"):
        manager.save(0, tree_of(1), metadata=metadata)
    assert manager.steps() == []


def test_metadata_that_are_no_mapping(manager):
    """A list would be saved as metadata without names."""
    with pytest.raises(TypeError, match=r"no mapping(.|\n)*a dict(.|\n)*list"):
        manager.save(0, tree_of(1), metadata=[1])


def test_metadata_are_as_they_were(tmp_path):
    """A list that the program goes on appending to would be saved later than its tree."""
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
    """A step that should be kept would be removed, or one that should go stay."""
    manager = CheckpointManager(
        tempfile.mkdtemp(dir=tmp_path), keep_last=keep_last, keep_best=keep_best, metric="m", mode=mode, fsync=False
    )
    tree = TensorDict({"w": torch.ones(1)})
    there = {}
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

        assert manager.steps() == sorted(there)
        assert manager.best() == (best[0] if best else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, r"keep_last(.|\n)*1 or more, or None(.|\n)*0(.|\n)*always kept"),
        ({"keep_last": True}, r"keep_last(.|\n)*True"),
        ({"keep_best": -1, "metric": "m"}, r"keep_best(.|\n)*-1"),
        ({"keep_best": 1}, r"keep_best needs a metric(.|\n)*metric="),
        ({"mode": "low"}, r"'min' or 'max'(.|\n)*'low'"),
        ({"max_pending": 0}, r"max_pending(.|\n)*0"),
    ],
    ids=["last", "bool", "best", "metric", "mode", "pending"],
)
def test_rules_that_make_no_sense(options, message, tmp_path):
    """A typing error in the rules would remove checkpoints."""
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize("value", ["low", True, [1.0]])
def test_a_metric_that_is_no_number(value, tmp_path):
    """A step would silently never be the best."""
    manager = CheckpointManager(tmp_path, metric="loss")
    with pytest.raises(TypeError, match=r"metric 'loss' is no number(.|\n)*int or float(.|\n)*(low|True|1\.0)"):
        manager.save(0, tree_of(1), metadata={"loss": value})


def test_best_without_a_metric(tmp_path):
    """The best step would be any step."""
    with pytest.raises(ValueError, match=r"best: the manager has no metric(.|\n)*metric="):
        CheckpointManager(tmp_path).best()


def test_a_step_that_cannot_be_removed(tmp_path, monkeypatch):
    """A save that succeeded would fail because of an older step."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(0, tree_of(0))

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manager_module, "remove_step", refuse)
    with pytest.warns(RuntimeWarning, match=r"step 0 could not be removed(.|\n)*Permission denied"):
        manager.save(1, tree_of(1))
    assert manager.steps() == [0, 1]


def test_delete(manager):
    """A step could not be given up, such as those after the one to go back to."""
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
    """A damaged step would be loaded as if it was whole."""
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
    """A tree beside the metadata of another step would be loaded with them."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, tree_of(step))
    shutil.copy(manager.path(1) / "model.safetensors", manager.path(2) / "model.safetensors")
    with pytest.raises(
        CorruptCheckpointError, match=r"step 2(.|\n)*not the one(.|\n)*xxh3-64:\w{16}\n.*xxh3-64:\w{16}"
    ):
        manager.load()

    os.rename(manager.path(1), manager.path(3))
    with pytest.raises(CorruptCheckpointError, match=r"name of another step(.|\n)*step 3(.|\n)*step 1"):
        manager.load()


ABOUT = {"version": 1, "step": 1, "file": "model.safetensors", "tree": "", "metadata": {}}


def forge(manager, step, fields):
    """Write a `checkpoint.json` whose digest is right."""
    text = json.dumps(fields)[1:]
    raw = f'{{"digest":"xxh3-64:{"0" * 16}",{text}'.encode()
    digest = manager_module.xxhash.xxh3_64_hexdigest(raw).encode()
    (manager.path(step) / "checkpoint.json").write_bytes(raw.replace(b"0" * 16, digest, 1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"version": 2}, UnsupportedError, r"checkpoint\.json: the format(.|\n)*version 1(.|\n)*2(.|\n)*later"),
        ({"step": 1}, CorruptCheckpointError, r"malformed(.|\n)*KeyError"),
        ({**ABOUT, "metadata": 3}, CorruptCheckpointError, r"malformed(.|\n)*TypeError"),
        ({**ABOUT, "metadata": {"a": float("nan")}}, CorruptCheckpointError, r"NaN"),
        ({**ABOUT, "file": "../x.safetensors"}, CorruptCheckpointError, r"malformed(.|\n)*\.\./x"),
        ({**ABOUT, "tree": 3}, CorruptCheckpointError, r"digest 3"),
    ],
    ids=["version", "missing", "type", "nan", "file", "digest"],
)
def test_hostile_metadata(fields, error, message, tmp_path):
    """A file made by another program would crash the loader."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree_of(1))
    forge(manager, 1, fields)

    with pytest.raises(error, match=message):
        manager.load()


def test_falling_back_to_a_whole_step(tmp_path):
    """One damaged step would make all others useless, or be passed over without a word."""
    manager = CheckpointManager(tmp_path)
    for step in range(4):
        manager.save(step, tree_of(step))
    for step in (3, 2):
        path = manager.path(step) / "model.safetensors"
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r'step 3(.|\n)*leaf "'):
        manager.load()
    with pytest.warns(RuntimeWarning, match=r"step \d in (.|\n)* is damaged(.|\n)*an older step") as caught:
        back = manager.load(fallback=True)

    assert value_of(back) == 1
    assert [str(warning.message)[:6] for warning in caught] == ["step 3", "step 2"]
    for options in ({"step": 1}, {"verify": False}):
        with pytest.raises(ValueError, match=r"fallback(.|\n)*(step 1|verify=False)"):
            manager.load(fallback=True, **options)


@pytest.mark.filterwarnings("ignore:step 0")
def test_nothing_to_fall_back_to(tmp_path):
    """A run of damaged steps would look like a run without steps."""
    manager = CheckpointManager(tmp_path)
    path = manager.save(0, tree_of(0)).result() / "model.safetensors"
    path.write_bytes(b"")

    with pytest.raises(CorruptCheckpointError, match=r"no step is whole(.|\n)*damaged: 0"):
        manager.load(fallback=True)


# -- in the background ------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """An event that saves wait for before they write."""
    event, real = threading.Event(), manager_module._write_tree

    def write(*args, **kwargs):
        assert event.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(manager_module, "_write_tree", write)
    yield event
    event.set()


def test_a_pending_step(gate, tmp_path):
    """A step that is still being written would be offered for loading, or be saved twice."""
    manager = CheckpointManager(tmp_path, async_save=True, max_pending=2)
    handle = manager.save(0, tree_of(0))

    assert manager.latest() is None
    assert repr(manager) == f"CheckpointManager('{tmp_path}', 0 steps, 1 pending)"
    with pytest.raises(FileExistsError, match="step 0 exists"):
        manager.save(0, tree_of(0))
    with pytest.raises(TimeoutError, match=r"0\.01 s(.|\n)*step-0000000000"):
        manager.wait(timeout_s=0.01)
    gate.set()
    manager.wait()
    assert handle.done()
    assert manager.latest() == 0


def test_a_leaf_that_changes_fails_the_step_by_name(gate, tmp_path):
    """A step would hold values of two moments."""
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


def test_errors_come_with_the_next_save_or_at_the_end_of_the_block(tmp_path, monkeypatch):
    """A run would go on for days without noticing that no checkpoint is written."""

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    manager = CheckpointManager(tmp_path, async_save=True)
    monkeypatch.setattr(manager_module, "_write_tree", fail)
    manager.save(0, tree_of(0))
    with pytest.raises(OSError, match="No space left on device; the step was not saved: .*step-0000000000"):
        manager.save(1, tree_of(1))
    with pytest.raises(OSError, match="the step was not saved: .*step-0000000002"), manager:
        manager.save(2, tree_of(2))


def test_errors_name_the_call(tmp_path):
    """Whoever deletes or verifies a step that is not there was told of a load."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, TensorDict({"x": torch.ones(1)}))
    calls = {"delete": manager.delete, "verify": manager.verify, "metadata": manager.metadata, "load": manager.load}

    for name, call in calls.items():
        with pytest.raises(
            FileNotFoundError, match=rf"^{name} {tmp_path}: step 99 is not there(?s:.)*step-0+99.*\n.* 1$"
        ):
            call(99)


def test_numbers_of_numpy(tmp_path):
    """A number that was computed would be refused, or be kept as what JSON cannot hold."""
    manager = CheckpointManager(
        tmp_path, keep_last=np.int64(2), keep_best=np.uint8(1), metric="m", max_pending=np.int32(3), async_save=True
    )

    for step in range(4):
        manager.save(np.int64(step), TensorDict({"x": torch.ones(1)}), metadata={"m": step})
    manager.wait()

    assert manager.steps() == [0, 2, 3]
    assert manager.verify(np.int64(2)) == 2
    for bad in (np.int64(0), np.float64(1), np.bool_(True), "2"):
        with pytest.raises(ValueError, match=r"keep_last is no number of steps(?s:.)*1 or more"):
            CheckpointManager(tmp_path, keep_last=bad)
        with pytest.raises(ValueError, match=r"max_pending is no number of saves(?s:.)*1 or more"):
            CheckpointManager(tmp_path, max_pending=bad)
