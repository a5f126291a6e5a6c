"""Trees in several files: the layout of Hugging Face, committed as one."""

import json
import os
import re
import threading

import pytest
import safetensors.torch
import torch
import xxhash

import tdfunc
from tdfunc import CorruptCheckpointError, TensorDict, UnsupportedError
from tdfunc.storage.api import load, save
from tdfunc.storage.safetensors import folder as folder_file
from tests.storage.trees import assert_same

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-([0-9a-f]{8})-(\d{5})-of-(\d{5})\.safetensors")


def tree_of(value, count=10):
    """A tree of equal leaves of 4000 bytes."""
    return TensorDict({str(i): torch.full((1000,), float(value)) for i in range(count)})


def listed(folder):
    """The names in a folder: shards by their number, others as they are."""
    found = sorted(os.listdir(folder))
    return [name for name in found if not SHARD.fullmatch(name)], [n for n in found if SHARD.fullmatch(n)]


@pytest.fixture
def sharded(tmp_path):
    """A folder of three shards, its index and the names of its shards."""
    tree = TensorDict({"a": {"w": torch.ones(1000)}, "b": torch.ones(600), "big": torch.ones(5000), "c": torch.ones(1)})
    tree = tree.set("note", "text")
    save(tree, tmp_path / "m", max_shard_size=4004)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    return tmp_path / "m", index, listed(tmp_path / "m")[1]


def test_the_layout(sharded):
    """Each leaf is in the shard that the index names, and no shard is larger than it may be."""
    folder, index, names = sharded

    # A node's own leaves come before those of its sub-trees.
    assert index["weight_map"] == {"b": names[0], "big": names[1], "c": names[2], "a.w": names[2]}
    there = {key: name for name in names for key in safetensors.torch.load_file(folder / name)}
    assert there == index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * 6601


def test_the_names_of_shards(sharded):
    """Their number and their count, and the same letters of one save; beside them is the index alone."""
    folder, _, names = sharded

    assert listed(folder)[0] == [INDEX]
    assert len({SHARD.fullmatch(name)[1] for name in names}) == 1
    assert [SHARD.fullmatch(name).groups()[1:] for name in names] == [(f"0000{i}", "00003") for i in (1, 2, 3)]


def test_shards_are_in_the_format_of_torch(sharded):
    """As transformers asks for."""
    folder, _, names = sharded
    formats = {}
    for name in names:
        with safetensors.safe_open(folder / name, "pt") as f:
            formats[name] = f.metadata()["format"]

    assert formats == dict.fromkeys(names, "pt")


def test_an_index_of_another_algorithm(tmp_path, monkeypatch):
    """An index whose checksum is of another algorithm is refused by that name, and loads unverified if it is short."""
    save(tree_of(1), tmp_path / "m", max_shard_size=10_000)
    index = tmp_path / "m" / INDEX
    index.write_bytes(index.read_bytes().replace(b"xxh3-64:", b"blake-3:", 1))

    with pytest.raises(CorruptCheckpointError, match="'blake-3'"):
        load(tmp_path / "m")
    monkeypatch.setattr(folder_file, "MAX_HEADER_BYTES", index.stat().st_size)
    assert_same(load(tmp_path / "m", verify=False), tree_of(1))
    monkeypatch.setattr(folder_file, "MAX_HEADER_BYTES", index.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="the index is too long"):
        load(tmp_path / "m", verify=False)


def header_of(path):
    """The metadata in the header of a file."""
    head = path.read_bytes()
    length = int.from_bytes(head[:8], "little")
    return json.loads(head[8 : 8 + length])["__metadata__"]


def test_the_index_is_as_documented(tmp_path):
    """The digests of an index and its shards are those that docs/formats.md describes."""
    save(tree_of(1), tmp_path / "m", max_shard_size=10_000)

    raw = (tmp_path / "m" / INDEX).read_bytes()
    index = json.loads(raw)
    algorithm, digest = index["metadata"]["tdfunc.index"].split(":")
    at = raw.index(digest.encode())
    assert algorithm == "xxh3-64"
    assert xxhash.xxh3_64_hexdigest(raw[:at] + b"0" * 16 + raw[at + 16 :]) == digest
    recorded = index["metadata"]["tdfunc.shards"]
    headers = {name: header_of(tmp_path / "m" / name) for name in recorded}
    digests = {name: f"xxh3-64:{each}" for name, each in recorded.items()}
    assert {name: header["tdfunc.header"] for name, header in headers.items()} == digests
    assert [name for name, header in headers.items() if "tdfunc.tree" in header] == []


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (10_000, 5),
        ("10KB", 5),
        ("10 kb", 5),
        ("10000", 5),
        ("10k", 5),
        ("8KiB", 5),
        ("7.8KiB", 10),
        ("1GB", 1),
        (1, 10),
        ("1B", 10),
        ("4000B", 10),
    ],
    ids=str,
)
def test_sizes(size, count, tmp_path):
    """A size is read with its unit."""
    save(tree_of(1), tmp_path / "m", max_shard_size=size)

    assert len(listed(tmp_path / "m")[1]) == count
    assert_same(load(tmp_path / "m"), tree_of(1))


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "", "0", "-5", "5 0", "1e9", "GB", "5XB", "-1GB", "0.1B"], ids=str)
def test_what_is_no_size(size, tmp_path):
    """A text or number that is not a size is refused, and nothing is written."""
    with pytest.raises(ValueError, match=r"max_shard_size is not a size[\s\S]*5GB[\s\S]*got:"):
        save(tree_of(1), tmp_path / "m", max_shard_size=size)
    assert not (tmp_path / "m").exists()


def test_nothing_of_the_old_checkpoint_stays(tmp_path):
    """A save replaces the checkpoint of the folder, one file or shards, and no other file."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "other-00001-of-00002.safetensors").touch()
    save(tree_of(1), folder / "model.safetensors")
    save(tree_of(2), folder, max_shard_size=10_000)
    assert listed(folder)[0] == ["config.json", INDEX, "other-00001-of-00002.safetensors"]
    save(tree_of(3), folder, max_shard_size=20_000)
    assert len(listed(folder)[1]) == 2
    assert_same(load(folder), tree_of(3))

    save(tree_of(4), folder / "model.safetensors")

    assert listed(folder) == (["config.json", "model.safetensors", "other-00001-of-00002.safetensors"], [])
    assert_same(load(folder), tree_of(4))


def test_one_file_is_read_before_an_index(tmp_path):
    """A model.safetensors that another program wrote over shards is read, and shards replace it."""
    save(tree_of(1), tmp_path, max_shard_size=10_000)
    safetensors.torch.save_file({"a.b": torch.ones(2)}, tmp_path / "model.safetensors")

    assert_same(load(tmp_path), TensorDict({"a": {"b": torch.ones(2)}}))
    save(tree_of(2), tmp_path, max_shard_size=10_000)
    assert_same(load(tmp_path), tree_of(2))
    assert listed(tmp_path)[0] == [INDEX]


# -- damage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder of five shards."""
    save(tree_of(1), tmp_path / "m", max_shard_size=10_000)
    return tmp_path / "m"


def test_a_missing_shard(folder):
    """A missing shard is named."""
    name = listed(folder)[1][2]
    (folder / name).unlink()

    with pytest.raises(CorruptCheckpointError, match=rf"a shard that the index names is missing[\s\S]*{name}"):
        load(folder)


def test_shards_of_two_saves(folder, tmp_path):
    """A shard of another save of the same tree is refused."""
    save(tree_of(2), tmp_path / "n", max_shard_size=10_000)
    mine, other = listed(folder)[1], listed(tmp_path / "n")[1]
    (folder / mine[1]).write_bytes((tmp_path / "n" / other[1]).read_bytes())

    with pytest.raises(CorruptCheckpointError, match="this shard is of another save than the index"):
        load(folder)
    with pytest.raises(CorruptCheckpointError, match="this shard is of another save than the index"):
        tdfunc.open(folder)


HOSTILE = {
    "no object": "[]",
    "no json": "{",
    "no map": "{}",
    "numbers": '{"weight_map": {"a": 3}}',
    "twice": '{"weight_map": {"a": "a.safetensors", "a": "a.safetensors"}}',
    "outside": '{"weight_map": {"a": "../a.safetensors"}}',
    "absolute": '{"weight_map": {"a": "/etc/a.safetensors"}}',
    "no shard": '{"weight_map": {"a": "passwd"}}',
    "nul": '{"weight_map": {"a": "\\u0000.safetensors"}}',
    "half a character": '{"weight_map": {"a": "\\ud800.safetensors"}}',
    "a long name": json.dumps({"weight_map": {"a": "x" * 244 + ".safetensors"}}),
    "deep": "[" * 100_000,
    "nan": '{"weight_map": {}, "metadata": {"x": NaN}}',
    "ours without digest": '{"metadata": {"tdfunc.version": "1"}, "weight_map": {}}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_indices(name, tmp_path):
    """An index that lies is refused by an error that names it."""
    (tmp_path / INDEX).write_text(HOSTILE[name])

    with pytest.raises((CorruptCheckpointError, UnsupportedError), match=f"load .*{INDEX}"):
        load(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path):
    """An index that lacks a leaf, or has another one, is refused with both names; the name of a file may be long."""
    name = "x" * 243 + ".safetensors"
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name, "c": name}}))

    with pytest.raises(CorruptCheckpointError, match=r'does not fit its files[\s\S]*missing \[\'"c"\'\][\s\S]*"b"'):
        load(tmp_path)


def test_an_index_that_names_a_leaf_of_no_file(tmp_path):
    """The error names the leaf, and nothing that is not so."""
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "c": "x.safetensors"}}))

    with pytest.raises(CorruptCheckpointError, match=r"1 leaves; missing \['\"c\"'\]\n"):
        load(tmp_path)


def test_a_leaf_in_two_files(tmp_path):
    """A leaf that two files have is named."""
    for name in "xy":
        safetensors.torch.save_file({name: torch.ones(2), "both": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    homes = {"x": "x.safetensors", "y": "y.safetensors", "both": "y.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes}))

    with pytest.raises(CorruptCheckpointError, match=r'have leaves twice[\s\S]*"both"'):
        load(tmp_path)


def test_one_shard_alone(folder):
    """One shard alone is refused with the hint to load the folder."""
    with pytest.raises(UnsupportedError, match=r"one shard of a larger save[\s\S]*load the folder"):
        load(folder / listed(folder)[1][0])


# -- at the same time -------------------------------------------------------------------------------------------


def test_a_reader_between_index_and_shards(folder, monkeypatch):
    """A load whose shards are replaced meanwhile gives the new checkpoint."""
    plain = folder_file.read_index
    saves = [2, 3]

    def slow(path, where, **options):
        result = plain(path, where, **options)
        if saves and options["verify"]:
            value = saves.pop(0)
            monkeypatch.setattr(folder_file, "read_index", plain)
            save(tree_of(value), folder, max_shard_size=10_000, fsync=False)
            monkeypatch.setattr(folder_file, "read_index", slow)
        return result

    monkeypatch.setattr(folder_file, "read_index", slow)

    assert_same(load(folder), tree_of(3))


@pytest.mark.parametrize(("is_late", "value"), [(False, 1), (True, 2)])
def test_an_error_in_the_last_step(is_late, value, folder, monkeypatch):
    """An interrupt before the index has its place leaves only the old checkpoint; after that, the new one is there."""
    before, real, last = set(os.listdir(folder)), os.replace, str(folder / INDEX)

    def interrupted(source, target):
        if target != last or is_late:
            real(source, target)
        if target == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tree_of(2), folder, max_shard_size=10_000)

    assert_same(load(folder), tree_of(value))
    assert (set(os.listdir(folder)) == before) != is_late


def _save_often(folder, value):
    for _ in range(15):
        save(tree_of(value), folder, max_shard_size=10_000, fsync=False)
        save(tree_of(value), os.path.join(folder, "model.safetensors"), fsync=False)


def test_two_writers(folder):
    """Two savers at once leave one whole checkpoint and nothing else."""
    workers = [threading.Thread(target=_save_often, args=(folder, value)) for value in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert len({float(leaf[0]) for leaf in load(folder).values()}) == 1
    assert listed(folder) == (["model.safetensors"], [])
