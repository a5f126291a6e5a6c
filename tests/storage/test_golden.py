"""Files written by earlier versions load as the trees that were saved."""

import shutil
from pathlib import Path

import pytest

import tdfunc
from tests.storage.golden.trees import TREES, module_tree
from tests.storage.trees import assert_same

VERSIONS = sorted((Path(__file__).parent / "golden").glob("version_*"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("form", ["one.safetensors", "shards", "memmap"])
@pytest.mark.parametrize("name", sorted(TREES))
def test_golden_files_load(version, form, name):
    """A file of an earlier version gives the tree that was saved."""
    assert_same(tdfunc.load(version / name / form), TREES[name]())


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("form", ["one.safetensors", "shards"])
def test_golden_files_open(version, form):
    """One leaf of a file of an earlier version can be read and verified alone."""
    with tdfunc.open(version / "module" / form) as file:
        assert file["embed", "weight"].equal(module_tree()["embed", "weight"])


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_golden_runs_resume(version, tmp_path):
    """A run of an earlier version is loaded with its metadata, and goes on."""
    shutil.copytree(version / "run", tmp_path / "run")
    manager = tdfunc.CheckpointManager(tmp_path / "run")

    tree = manager.load()

    assert manager.steps() == [7]
    assert manager.metadata(7) == {"loss": 0.5}
    assert_same(tree["params"], module_tree())
    manager.save(8, tree)
    assert manager.latest() == 8
