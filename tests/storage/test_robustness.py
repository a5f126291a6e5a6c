"""Storage against damage, crashes and hostile files: what is not tested beside each part of it.

`python -m benchmarks.reliability` runs the same checks many more times and writes docs/reliability.md.
"""

import json

import pytest
import torch

from tdfunc import CheckpointManager, CorruptCheckpointError, TensorDict, load, save
from tdfunc import open as open_file
from tdfunc.storage.disk.remote import LocalFiles
from tdfunc.storage.manager import manager as storage_manager
from tdfunc.storage.manager import steps
from tdfunc.storage.safetensors import contents
from tests.storage.trees import assert_same, entry, forge, same_bytes

WHOLE = entry("w", "I64", [1], 0, 8)
READS = {
    "load": load,
    "one leaf": lambda path: load(path, keys="w"),
    "compared": lambda path: load(path, like={"w": torch.zeros(1, dtype=torch.int64)}),
    "meta": lambda path: load(path, device="meta"),
    "spec": lambda path: _opened(path, lambda f: f.spec()),
    "leaf": lambda path: _opened(path, lambda f: f["w"]),
}


def _opened(path, read):
    with open_file(path) as f:
        return read(f)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("flags", ["g", "Pg", 5, ["P"], "?"])
def test_flags_that_do_not_fit_a_leaf(flags, read, tmp_path):
    """A header that marks an integer leaf as a trainable Parameter would raise torch's error, which names no file."""
    tree = {"specs": [["I64", [1]]], "nodes": [{"keys": ["w"], "items": [[0, flags]]}], "ties": []}
    path = tmp_path / "f.safetensors"
    path.write_bytes(forge(tree, [WHOLE], bytes(8)))

    with pytest.raises(CorruptCheckpointError, match=r"(?s)f\.safetensors.*(flags|grad)"):
        read(path)


def refused(path, read, says):
    """Check that a read raises our error, which names the file and says what is wrong."""
    with pytest.raises(CorruptCheckpointError, match=rf"(?s)f\.safetensors.*{says}"):
        read(path)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**62, 2**62], [2**62]])
def test_shapes_that_torch_cannot_count(shape, read, tmp_path):
    """A leaf without elements but with dimensions beyond 64 bits would raise torch's error, which names no file."""
    path = tmp_path / "f.safetensors"
    tree = {"specs": [["I64", shape]], "nodes": [{"keys": ["w"], "items": [0]}], "ties": []}
    path.write_bytes(forge(tree, [entry("w", "I64", shape, 0, 0)]))

    refused(path, read, "64 bits")


@pytest.mark.parametrize("name", ["load", "one leaf", "compared", "leaf"])
def test_a_device_without_values(name, tmp_path):
    """A file that claims to be of the meta device would load without values, and without a word."""
    tree = {"specs": [["I64", [1]]], "nodes": [{"keys": ["w"], "items": [0], "device": "meta"}], "ties": []}
    path = tmp_path / "f.safetensors"
    path.write_bytes(forge(tree, [WHOLE], bytes(8)))

    refused(path, READS[name], "meta")


@pytest.mark.parametrize("own", [0, "x", [0], {"a": 1}])
def test_what_only_a_class_records(own, tmp_path):
    """A plain tree would carry what a lazy stack records, of any type."""
    tree = {"specs": [["I64", [1]]], "nodes": [{"keys": ["w"], "items": [0], "own": own}], "ties": []}
    path = tmp_path / "f.safetensors"
    path.write_bytes(forge(tree, [WHOLE], bytes(8)))

    refused(path, load, "class")


@pytest.mark.parametrize("key", ["\ud800", "x" * 300, "é" * 200])
@pytest.mark.parametrize("what", [{"dtype": "torch.uint8", "shape": [3]}, {"type": "TensorDict"}])
def test_keys_that_no_file_can_have(key, what, tmp_path):
    """A meta.json with such a key would raise the system's error, as if the disk were at fault."""
    TensorDict({"w": torch.ones(3)}).memmap(tmp_path / "d")
    meta = {"shape": [], "device": "None", "_type": "<class 'tensordict._td.TensorDict'>", key: what}
    (tmp_path / "d" / "meta.json").write_text(json.dumps(meta))

    with pytest.raises(CorruptCheckpointError, match=r"(?s)load_memmap .*(missing|malformed)"):
        TensorDict.load_memmap(tmp_path / "d")


def test_one_file_takes_the_place_of_shards_while_a_load_begins(tmp_path, monkeypatch):
    """A load that found an index, which is gone when it is opened, would raise though there is a checkpoint."""
    tree = TensorDict({"w": torch.arange(6.0)})
    save(tree, tmp_path, max_shard_size=100)
    original = contents.read_index

    def late(path, where, **options):
        monkeypatch.setattr(contents, "read_index", original)
        save(tree, tmp_path / "model.safetensors")
        return original(path, where, **options)

    monkeypatch.setattr(contents, "read_index", late)

    assert_same(load(tmp_path), tree)


def test_shards_take_the_place_of_one_file_while_a_load_begins(tmp_path, monkeypatch):
    """A load that found one file, which is gone when it is opened, would raise though there is a checkpoint."""
    tree = TensorDict({"w": torch.arange(6.0)})
    save(tree, tmp_path / "model.safetensors")
    original = LocalFiles.open

    def late(self, path):
        monkeypatch.setattr(LocalFiles, "open", original)
        save(tree, tmp_path, max_shard_size=100)
        return original(self, path)

    monkeypatch.setattr(LocalFiles, "open", late)

    assert_same(load(tmp_path), tree)


def test_a_checkpoint_that_is_always_just_gone(tmp_path, monkeypatch):
    """A load would look for ever where an index is listed and cannot be opened."""
    save(TensorDict({"w": torch.arange(6.0)}), tmp_path, max_shard_size=100)
    looks = []

    def gone(path, where, **options):
        looks.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(contents, "read_index", gone)

    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)
    assert 1 < len(looks) < 100


@pytest.mark.timeout(20)
def test_a_tied_leaf_in_a_tree_that_is_inside_itself(tmp_path):
    """The way up from a tied leaf would never end, and fill the memory."""
    nodes = [{"keys": ["x", "a"], "items": [{"tie": 0}, {"tree": 1}]}, {"keys": ["b", "w"], "items": [{"tree": 1}, 0]}]
    tree = {"specs": [["I64", [1]]], "nodes": nodes, "ties": [[[1, "w"], [0, "x"]]]}
    path = tmp_path / "f.safetensors"
    path.write_bytes(forge(tree, [entry("a.w", "I64", [1], 0, 8)], bytes(8)))

    refused(path, lambda path: _opened(path, lambda f: f["x"]), "after the node that it is in")


def test_an_index_that_another_program_wrote_again(tmp_path):
    """Shards of tdfunc under an index that is not would not load, or their checksums would count for nothing."""
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
        with pytest.raises(CorruptCheckpointError, match=r"(?s)leaf .* is damaged.*expected: +xxh3-64 .*got: +xxh3-64"):
            load(tmp_path)
        with pytest.raises(CorruptCheckpointError, match=r"(?s)leaf .* is damaged"):
            load(tmp_path, keys="*")
        shard.write_bytes(raw)


def test_an_index_that_lost_its_metadata(tmp_path):
    """One flipped bit in the word would make an index one of another program: classes, ties and checksums are lost."""
    tree = TensorDict({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}, batch_size=[2])
    save(tree, tmp_path, max_shard_size=30)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"metadata"', '"netadata"'))

    with pytest.raises(CorruptCheckpointError, match=r"(?s)model-.*index is damaged.*metadata.*verify=False"):
        load(tmp_path)
    assert load(tmp_path, verify=False)["a"].tolist() == tree["a"].tolist()


def test_a_step_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """A load would read the description of one save and the tree of the next, and call the step damaged."""
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
    """Where folders cannot be exchanged, metadata that are read while a step is replaced would be called damaged."""
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
