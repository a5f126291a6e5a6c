"""Checkpoints that are replaced by others while they are read, and files that another program wrote again.

`python -m benchmarks.reliability` runs the same checks many more times and writes docs/reliability.md.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tdfunc import CheckpointManager, CorruptCheckpointError, TensorDict, load, save
from tdfunc.core.system import platform
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.remote import LocalFiles
from tdfunc.storage.manager import manager as storage_manager
from tdfunc.storage.manager import steps
from tdfunc.storage.safetensors import folder as folder_file
from tests.storage.trees import assert_same, same_bytes


@pytest.mark.parametrize(
    ("before", "after", "place", "name"),
    [("shards", "one file", folder_file, "read_index"), ("one file", "shards", LocalFiles, "open")],
)
def test_a_checkpoint_takes_another_form_while_a_load_begins(before, after, place, name, tmp_path, monkeypatch):
    """A load finds the one file that replaces shards meanwhile, and the shards that replace one file."""
    tree, original = TensorDict({"w": torch.arange(6.0)}), getattr(place, name)
    saves = {"one file": (tmp_path / "model.safetensors", None), "shards": (tmp_path, 100)}

    def put(form):
        path, size = saves[form]
        save(tree, path, max_shard_size=size)

    def late(*args, **options):
        monkeypatch.setattr(place, name, original)
        put(after)
        return original(*args, **options)

    put(before)
    monkeypatch.setattr(place, name, late)

    assert_same(load(tmp_path), tree)


def test_a_checkpoint_that_is_always_just_gone(tmp_path, monkeypatch):
    """A load ends where an index is listed and cannot be opened."""
    save(TensorDict({"w": torch.arange(6.0)}), tmp_path, max_shard_size=100)
    looks = []

    def gone(path, where, **options):
        looks.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(folder_file, "read_index", gone)

    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)
    assert 1 < len(looks) < 100


def test_an_index_that_another_program_wrote_again(tmp_path):
    """Shards of tdfunc under an index of another program load in its order, and are verified."""
    tree = TensorDict({"b": {"x": torch.ones(2, 3)}, "a": torch.arange(6.0), "c": torch.zeros(2)})
    save(tree, tmp_path, max_shard_size=40)
    path = tmp_path / "model.safetensors.index.json"
    weights = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": dict(sorted(weights.items()))}, indent=2))
    loaded = load(tmp_path)

    assert list(loaded.keys()) == ["a", "b", "c"]
    assert same_bytes(loaded["b", "x"], tree["b", "x"])
    assert same_bytes(loaded["a"], tree["a"])
    for shard in tmp_path.glob("*.safetensors"):
        raw = shard.read_bytes()
        shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(CorruptCheckpointError, match=r"(?s)is damaged.*: +xxh3-64 .*: +xxh3-64 .*verify=False"):
            load(tmp_path)
        with pytest.raises(CorruptCheckpointError, match=r"(?s)leaf .* is damaged"):
            load(tmp_path, where="*")
        shard.write_bytes(raw)


def test_an_index_that_lost_its_metadata(tmp_path):
    """An index of ours that looks like another program's is refused, and loads unverified."""
    tree = TensorDict({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}, batch_size=[2])
    save(tree, tmp_path, max_shard_size=30)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"metadata"', '"netadata"'))

    with pytest.raises(CorruptCheckpointError, match=r"(?s)model-.*index is damaged.*metadata.*verify=False"):
        load(tmp_path)
    assert load(tmp_path, verify=False)["a"].tolist() == tree["a"].tolist()


@pytest.mark.parametrize(
    ("place", "name", "read", "expected"),
    [
        (steps, "check_tree", lambda m: m.load(3)["a"].tolist(), [1, 1]),
        (storage_manager, "read_about", lambda m: (m.metadata(3), m.best()), ({"loss": 1}, 3)),
    ],
    ids=["load", "metadata"],
)
def test_a_step_that_is_replaced_while_it_is_read(place, name, read, expected, tmp_path, monkeypatch):
    """A load of a step, or of its metadata, gives the new one if the step is replaced meanwhile."""
    manager, real = CheckpointManager(tmp_path / "run", metric="loss"), getattr(place, name)
    manager.save(3, TensorDict({"a": torch.zeros(2)}), metadata={"loss": 0})

    def replace_first(*args):
        monkeypatch.setattr(place, name, real)
        manager.save(3, TensorDict({"a": torch.ones(2)}), metadata={"loss": 1}, overwrite=True)
        raise CorruptCheckpointError("half of the one, half of the other")

    monkeypatch.setattr(place, name, replace_first)

    assert read(manager) == expected


@pytest.mark.parametrize("libc", [platform._libc, None], ids=["exchanged", "in two steps"])
def test_a_folder_that_goes_while_it_is_replaced(libc, tmp_path, monkeypatch):
    """A writer whose step another one removes meanwhile writes it all the same, and leaves nothing else."""
    place, original = tmp_path / "step", os.rename
    place.mkdir()
    (place / "old").touch()

    def late(source, target):
        try:
            original(source, target)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise

    monkeypatch.setattr(platform, "_libc", libc)
    monkeypatch.setattr(os, "rename", late)
    commit.replace_folder(str(place), lambda folder: Path(folder, "new").touch(), fsync=False)

    assert os.listdir(tmp_path) == ["step"]
    assert os.listdir(place) == ["new"]


def test_a_folder_that_comes_while_it_is_replaced(tmp_path, monkeypatch):
    """A folder that another writer puts between the two steps of a writer is replaced too, and nothing else is left."""
    place, original = tmp_path / "step", os.rename
    place.mkdir()
    (place / "old").touch()

    def late(source, target):
        original(source, target)
        monkeypatch.setattr(os, "rename", original)
        place.mkdir()
        (place / "other").touch()

    monkeypatch.setattr(platform, "_libc", None)
    monkeypatch.setattr(os, "rename", late)
    commit.replace_folder(str(place), lambda folder: Path(folder, "new").touch(), fsync=False)

    assert os.listdir(tmp_path) == ["step"]
    assert os.listdir(place) == ["new"]


def test_a_step_that_is_replaced_before_it_is_locked(tmp_path, monkeypatch):
    """A step that is replaced after it was opened and before it was locked is opened again, and not removed."""
    manager, real = CheckpointManager(tmp_path), commit.lock
    values = iter((2, 3))

    def late(fd, **how):
        monkeypatch.setattr(commit, "lock", real)
        manager.save(1, TensorDict({"w": torch.tensor(next(values))}), overwrite=True)
        real(fd, **how)

    manager.save(1, TensorDict({"w": torch.tensor(1)}))
    monkeypatch.setattr(commit, "lock", late)
    with steps.reading(str(tmp_path), 1):
        assert not steps.remove_step(str(tmp_path), 1)
    monkeypatch.setattr(commit, "lock", late)
    assert not steps.remove_step(str(tmp_path), 1)
    assert manager.load(1)["w"] == 3
