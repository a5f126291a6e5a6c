"""Damaged, hostile and mutated inputs: an error of ours or the saved values, and nothing else happens."""

import os
import signal
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reliability import damage, hostile, loads
from benchmarks.reliability.fuzz import mutate
from benchmarks.reliability.targets import CHECKS, SEEDS
from tdfunc import TensorDict, save
from tests.storage.trees import same_bytes

HARMLESS = {"refused", "equal"}
# A memmap folder has no checksums: damage may leave other values, in files that they fit.
UNCHECKED = {*HARMLESS, "wrong"}


# -- damage -----------------------------------------------------------------------------------------------------


def some_flips(raw):
    """A bit of every byte."""
    for place in range(len(raw)):
        yield raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]


def load_badly(path):
    """A reader with every fault that the judge must see."""
    text = path.read_bytes()
    if text == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == b"write":
        path.write_bytes(b"other")
    if text == b"raise":
        raise KeyError("w")
    return {"w": torch.zeros(1)}


def test_the_judge_sees_every_fault(tmp_path):
    """The tests below would pass for a reader that crashes, writes, or gives other values."""
    path = tmp_path / "f"
    library = damage.Library(lambda path: None, load_badly, (ValueError,))

    def attempt(raw):
        path.write_bytes(raw)
        return damage.judge(library, path)

    assert damage.survey([b"fine", b"kill", b"write", b"raise", b"fine"], attempt) == {
        "wrong": 2, "crashed": 1, "wrote": 1, damage.OTHER: 1,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("how", [damage.cuts, damage.extensions, some_flips])
def test_damaged_shards(how, suffix, tmp_path):
    """A shard or index that is cut, longer or altered would load."""
    every = 1 if how is damage.extensions else 17
    counts = damage.damaged_folder(damage.SHARDS, suffix, how, tmp_path, every=every)

    assert set(counts) <= HARMLESS
    assert counts["refused"] > 3


@pytest.mark.parametrize("suffix", [".memmap", ".json"])
@pytest.mark.parametrize("how", [damage.cuts, damage.extensions, some_flips])
def test_damaged_memmap_folders(how, suffix, tmp_path):
    """Damage of a folder would end the process, raise an error that is not ours, or make a file longer."""
    every = 1 if how is damage.extensions else 11
    counts = damage.damaged_folder(damage.FOLDERS["TensorDict.load_memmap"], suffix, how, tmp_path, every=every)

    assert set(counts) <= UNCHECKED


@pytest.mark.parametrize("how", [damage.cuts, damage.extensions])
def test_memmap_leaves_of_another_length(how, tmp_path):
    """A leaf whose file is cut or longer would load, or its file would be made to fit."""
    counts = damage.damaged_folder(damage.FOLDERS["TensorDict.load_memmap"], ".memmap", how, tmp_path)

    assert set(counts) == {"refused"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [damage.flips, damage.bytes_changed])
def test_every_change_of_an_index(how, tmp_path):
    """Some bit of an index or shard would give another tree."""
    for suffix in (".json", ".safetensors"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        assert set(damage.damaged_folder(damage.SHARDS, suffix, how, folder)) <= HARMLESS


@pytest.mark.slow
@pytest.mark.parametrize("how", [damage.flips, damage.bytes_changed])
def test_every_change_of_a_meta_json(how, tmp_path):
    """Some byte of a meta.json would raise an error that is not ours, or give leaves that do not fit their files."""
    counts = damage.damaged_folder(damage.FOLDERS["TensorDict.load_memmap"], ".json", how, tmp_path)

    assert set(counts) <= UNCHECKED


def test_renamed_files(tmp_path):
    """The files of one checkpoint under each other's names would load as each other."""
    tree = TensorDict({"a": torch.zeros(8), "b": torch.ones(8)})
    save(tree, tmp_path / "m", max_shard_size=32)
    tree.memmap(tmp_path / "d")
    a, b = sorted((tmp_path / "m").glob("*.safetensors"))
    a.rename(tmp_path / "x")
    b.rename(a)
    (tmp_path / "x").rename(b)
    (tmp_path / "d" / "a.memmap").rename(tmp_path / "d" / "c.memmap")

    assert isinstance(loads.outcome(loads.load, tmp_path / "m"), str)
    assert "its file is missing" in loads.outcome(TensorDict.load_memmap, tmp_path / "d")


def test_an_index_of_another_save(tmp_path):
    """The index of one save beside the shards of another would load a mixture."""
    for name, value in (("one", 1.0), ("two", 2.0)):
        save(
            TensorDict({"a": torch.full((8,), value), "b": torch.full((8,), value)}), tmp_path / name, max_shard_size=32
        )
    index = (tmp_path / "one" / loads.INDEX).read_text()
    names = [sorted(path.name for path in (tmp_path / name).glob("*.safetensors")) for name in ("one", "two")]
    for old, new in zip(*names, strict=True):
        index = index.replace(old, new)
    (tmp_path / "two" / loads.INDEX).write_bytes(loads.reseal_index(index.encode()))

    assert "another save" in loads.outcome(loads.load, tmp_path / "two")


# -- hostile inputs ---------------------------------------------------------------------------------------------


# The fast way to read is the one that checks least.
@pytest.mark.parametrize(
    "way",
    [way if way == "load, verify=False" else pytest.param(way, marks=pytest.mark.slow) for way in hostile.READERS],
)
def test_hostile_files(way, tmp_path):
    """A file that was made to do harm would raise an error that is not ours, or write."""
    path = tmp_path / "f.safetensors"
    for name, raw in hostile.file_cases().items():
        path.write_bytes(raw)
        result = loads.outcome(hostile.READERS[way], path)

        assert not isinstance(result, str) or str(path) in result, name
    assert os.listdir(tmp_path) == ["f.safetensors"]


def test_hostile_folders(tmp_path):
    """A folder that was made to do harm would raise an error that is not ours, or be changed."""
    for number, (name, change) in enumerate(hostile.folder_cases().items()):
        made = hostile.make_folder(tmp_path / str(number))
        change(made)
        before = loads.snapshot(made)
        try:
            result = loads.outcome(TensorDict.load_memmap, made)
        except FileNotFoundError:
            result = "no meta.json"

        assert isinstance(result, str | TensorDict), name
        assert loads.snapshot(made) == before, name


def _touch(path):
    (path / "new").write_text("")
    return {}


FAULTS = {
    "code": (lambda path: subprocess.run(["true"]) and {}, "ran code"),
    "elsewhere": (lambda path: open("/etc/hostname").close() or {}, "left the folder"),
    "writes": (_touch, "wrote"),
}


@pytest.mark.parametrize(("call", "says"), FAULTS.values(), ids=FAULTS)
def test_the_watch_sees_what_a_load_does(call, says, tmp_path):
    """The tests below would pass for a reader that runs code."""
    report = hostile.watch(lambda: call(tmp_path), (ValueError,), tmp_path)

    assert says in " ".join(report.tried)


def test_the_watch_sees_how_a_load_ends(tmp_path):
    """The tests below would pass for a reader that crashes, hangs, or gives more than there is."""
    calls = [lambda: os.kill(os.getpid(), 9), lambda: {}["w"], lambda: {"w": torch.zeros(10_000)}, signal.pause]

    found = [hostile.watch(call, (ValueError,), tmp_path, timeout_s=1).result for call in calls]

    assert found[0] == "crashed"
    assert found[1].startswith("another error: KeyError")
    assert found[2:] == ["larger than the files", "hung"]


PICKLES = [name for name in hostile.folder_cases() if "pickle" in name or "class" in name or "links" in name]


def test_hostile_folders_are_watched(tmp_path):
    """A pickle, a class name or a link would run code, or read outside of the folder."""
    cases = {name: hostile.folder_cases()[name] for name in PICKLES}

    for name, _, report in hostile.check_folders(cases, tmp_path):
        assert report.result in ("refused", "loaded"), name
        assert report.tried == [], name
    assert len(cases) > 15


@pytest.mark.slow
def test_all_hostile_inputs_are_watched(tmp_path):
    """Some input would run code, leave its folder, or take memory out of proportion to its size."""
    for part in ("files", "folders"):
        (tmp_path / part).mkdir()
    reports = [(name, size, r) for name, _, size, r in hostile.check_files(hostile.file_cases(), tmp_path / "files")]
    reports += hostile.check_folders(hostile.folder_cases(), tmp_path / "folders")

    for name, size, report in reports:
        assert report.result in ("refused", "loaded"), name
        assert report.tried == [], name
        # What Python takes for the JSON of a header; and what a forked process copies.
        assert report.extra_bytes < 30_000_000 + 60 * min(size, 10**7), name


# -- mutations --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The folder in which inputs are loaded, and the good files that they are made of."""
    root = tmp_path_factory.mktemp("good")
    loads.prepare(root)
    return root, {target: make(root) for target, make in SEEDS.items()}


@pytest.mark.parametrize("target", CHECKS)
def test_good_inputs_load(target, good):
    """The mutations below would all be of inputs that do not load, and test nothing."""
    root, seeds = good
    results = [CHECKS[target](root, raw) for raw in seeds[target]]

    # Another program's index of our shards only without verifying.
    assert all("loaded" in result for result in results)


@pytest.mark.parametrize("target", CHECKS)
@settings(max_examples=40)
@given(data=st.data())
def test_mutations(target, good, data):
    """Some change of an input would raise an error that is not ours, give other values, or write."""
    root, seeds = good
    raw = data.draw(st.sampled_from(seeds[target]))
    for seed in data.draw(st.lists(st.integers(0, 2**32), max_size=3)):
        raw = mutate(target, raw, seed) or raw
    for place, new in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.binary(max_size=3)), max_size=2)):
        raw = raw[:place] + new + raw[place + data.draw(st.integers(0, 2)) :]

    result = CHECKS[target](root, raw)

    assert set(result.split()) <= {"loaded", "raised"}


def test_the_checks_see_other_values(good):
    """A check of mutations would accept a tree with values that are in no file."""
    path = good[0] / "input.safetensors"
    save(TensorDict({"w": torch.ones(3)}), path)

    with pytest.raises(AssertionError, match="safetensors does not see"):
        loads._compare_with_safetensors(path, TensorDict({"w": torch.zeros(3)}))
    assert same_bytes(loads.load(path)["w"], torch.ones(3))
