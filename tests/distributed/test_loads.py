"""Loads of a manager's step by all ranks: they join parts of one save, whatever one rank alone sees or cannot read."""

import errno
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.storage.manager import manager as manager_module
from tests.distributed.ranks import run_ranks

TIMEOUT_S = 20
LIKE = TensorDict({"w": torch.ones(8)})


def _save(home, step, value, **options):
    tdf.CheckpointManager(home).save(step, TensorDict({"w": torch.full((8,), float(value))}), **options)


def _shard():
    return tdf.distributed.shard(LIKE, init_device_mesh("cpu", (2,)))


def _load_late(rank, home, step):
    """Rank 1 calls after another job has saved a step."""
    like = _shard()
    manager = tdf.CheckpointManager(home / "run")
    if rank:
        time.sleep(1)
        _save(home / "run", step, 2, overwrite=True)
    assert manager.load(like=like)["w"].full_tensor().unique().numel() == 1


def _load_like_sums(rank, home):
    mesh = init_device_mesh("cpu", (2,))
    tdf.save(_shard(), home / "model.safetensors")
    like = TensorDict({"w": DTensor.from_local(torch.ones(8), mesh, [Partial()])})

    found = tdf.load(home / "model.safetensors", like=like)

    assert found["w"].placements == (Replicate(),)
    assert torch.equal(found["w"].full_tensor(), LIKE["w"])


@pytest.mark.slow
def test_values_are_not_parts_of_a_sum(tmp_path):
    """Each rank reads a leaf that it has a part of a sum of: the values are not added up."""
    run_ranks(_load_like_sums, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_save_between_the_calls_of_the_ranks(tmp_path, step):
    """A new step, or the same one replaced: no rank has the part of another save."""
    _save(tmp_path / "run", 1, 1)
    run_ranks(_load_late, 2, tmp_path, tmp_path, step, timeout_s=TIMEOUT_S)


def _replace_between(rank, home):
    """Another job replaces the step when rank 0 has read its part, and rank 1 has not."""
    like, read = _shard(), manager_module.load_step
    is_first = [True]

    def load_step(path, number, **options):
        if is_first.pop() if is_first else False:
            flag = home / "replaced"
            if rank == 0:
                found = read(path, number, **options)
                _save(home / "run", 1, 2, overwrite=True)
                flag.touch()
                return found
            while not flag.exists():
                time.sleep(0.01)
        return read(path, number, **options)

    manager_module.load_step = load_step
    found = tdf.CheckpointManager(home / "run").load(like=like)
    assert found["w"].full_tensor().tolist() == [2.0] * 8


@pytest.mark.slow
def test_a_step_that_is_replaced_between_two_reads(tmp_path):
    """The digests of the trees differ, and all ranks read again."""
    _save(tmp_path / "run", 1, 1)
    run_ranks(_replace_between, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)


def _fall_back(rank, home):
    """The disk of rank 1 cannot read the newest step."""
    like, read = _shard(), manager_module.load_step

    def load_step(path, number, **options):
        if rank and number == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, number, **options)

    manager_module.load_step = load_step
    with pytest.warns(RuntimeWarning, match="an older step is loaded instead"):
        found = tdf.CheckpointManager(home).load(like=like, fallback=True)
    assert found["w"].full_tensor().tolist() == [1.0] * 8


@pytest.mark.slow
def test_ranks_fall_back_together(tmp_path):
    """An error of one rank's disk sends all ranks to the older step."""
    _save(tmp_path, 1, 1)
    _save(tmp_path, 2, 2)
    run_ranks(_fall_back, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)


def _differ(rank, home, wrong, match):
    like, manager = _shard(), tdf.CheckpointManager(home)
    with pytest.raises((ValueError, TypeError, OSError), match=match):
        manager.load(like=like, **({} if rank == 0 else wrong))
    assert manager.load(like=like)["w"].full_tensor().tolist() == [1.0] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"step": 1}, "load step 1, fallback=False(?s:.*)|the newest step"),
        ({"fallback": True}, "fallback=True"),
        ({"step": -1}, "at least 0"),
        ({"step": 1, "fallback": True}, "excludes a step"),
        ({"where": "missing"}, "missing"),
    ],
)
def test_arguments_of_one_rank_alone(tmp_path, wrong, match):
    """All ranks raise, and the next load works."""
    _save(tmp_path, 1, 1)
    run_ranks(_differ, 2, tmp_path, tmp_path, wrong, match, timeout_s=TIMEOUT_S)


def _load_like_a_mapping(rank, home, form):
    tree = _shard()
    found = tdf.CheckpointManager(home / "run").load(like=FORMS[form](tree))
    torch.testing.assert_close(found["model", "w"].to_local(), torch.full((4,), 3.0))


# What a mapping as `like` may have in the place of the sub-tree.
FORMS = {
    "tree": lambda tree: {"model": tree},
    "mapping": lambda tree: {"model": dict(tree.items())},
    "path": lambda tree: {("model", "w"): tree["w"]},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_a_mapping_says_which_leaves_are_sharded(tmp_path, form):
    """Each rank reads its part, as with a tree in the place of the mapping."""
    tdf.CheckpointManager(tmp_path / "run").save(1, {"model": TensorDict({"w": torch.full((8,), 3.0)})})
    run_ranks(_load_like_a_mapping, 2, tmp_path, tmp_path, form, timeout_s=TIMEOUT_S)
