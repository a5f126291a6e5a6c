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
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.remote import LocalFiles
from tdfunc.storage.manager import manager as storage_manager
from tdfunc.storage.manager import steps
from tdfunc.storage.safetensors import contents
from tests.storage.trees import assert_same, same_bytes


@pytest.mark.parametrize(
    ("before", "after", "place", "name"),
    [("shards", "one file", contents, "read_index"), ("one file", "shards", LocalFiles, "open")],
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

    monkeypatch.setattr(contents, "read_index", gone)

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


def test_a_step_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """A load of a step that is replaced meanwhile gives the new one."""
    manager = CheckpointManager(tmp_path / "run")
    manager.save(3, TensorDict({"a": torch.zeros(4)}))
    check, replaced = steps.check_tree, []

    def replace_and_check(folder, about):
        if not replaced:
            replaced.append(manager.save(3, TensorDict({"a": torch.ones(4)}), overwrite=True))
        check(folder, about)

    monkeypatch.setattr(steps, "check_tree", replace_and_check)

    assert (manager.load(3)["a"] == 1).all()
    assert replaced


def test_metadata_of_a_step_that_is_replaced_meanwhile(tmp_path, monkeypatch):
    """Metadata of a step that is replaced meanwhile are those of the new one."""
    manager = CheckpointManager(tmp_path, metric="loss")
    manager.save(3, TensorDict({"a": torch.zeros(4)}), metadata={"loss": 1.0})
    read_about, replaced = storage_manager.read_about, []

    def replace_first(folder, step):
        if not replaced:
            replaced.append(manager.save(3, TensorDict({"a": torch.ones(4)}), metadata={"loss": 2.0}, overwrite=True))
            raise CorruptCheckpointError("half of the one, half of the other")
        return read_about(folder, step)

    monkeypatch.setattr(storage_manager, "read_about", replace_first)

    assert manager.metadata(3) == {"loss": 2.0}
    assert manager.best() == 3


def test_a_folder_that_goes_while_it_is_replaced(tmp_path, monkeypatch):
    """A writer whose step another one removes meanwhile writes it all the same, and leaves nothing else."""
    place, original = tmp_path / "step", os.rename
    place.mkdir()
    (place / "old").touch()

    def late(source, target):
        try:
            original(source, target)
        except OSError:
            shutil.rmtree(place)
            raise

    monkeypatch.setattr(os, "rename", late)
    commit.replace_folder(str(place), lambda folder: Path(folder, "new").touch(), fsync=False)

    assert os.listdir(place) == ["new"]
    assert os.listdir(tmp_path) == ["step"]
