"""Sharded trees as one file: written by all ranks, whole or not at all, and read by slices onto other meshes."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tdfunc as tdf
from benchmarks.reliability.ranks import kill_ranks
from tdfunc import CorruptCheckpointError, LeafMismatchError, TensorDict, UnsupportedError
from tdfunc.storage.safetensors import blocks, ranks
from tests.distributed.ranks import run_ranks
from tests.storage.other_reader import read_arrays
from tests.storage.trees import assert_same, of_dtype

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# name -> a tensor, its placements on a mesh of 2 x 2, and those on one of 3 and on one of 4.
LEAVES = {
    "rows": (torch.arange(30.0).reshape(10, 3), [S0, R], [S0], [S0]),
    "columns": (torch.arange(42.0).reshape(6, 7), [S1, R], [S0], [S1]),
    "grid": (torch.arange(35, dtype=torch.int64).reshape(5, 7), [S0, S1], [S1], [S0]),
    "deep": (torch.arange(120, dtype=torch.int16).reshape(2, 3, 4, 5), [Shard(2), S1], [Shard(3)], [R]),
    "twice": (torch.arange(9.0), [S0, S0], [S0], [S0]),
    "few": (torch.arange(1.0), [S0, S0], [S0], [S0]),
    "copies": (of_dtype("bfloat16", (4, 2)), [R, R], [S0], [R]),
    "f8": (of_dtype("float8_e4m3fn", (6,)), [R, S0], [S0], [S0]),
    "number": (torch.tensor(3.0), [R, R], [R], [R]),
    "none": (torch.empty(0, 3), [S0, R], [S0], [S0]),
}


def spread(mesh, which):
    """The tree of the table on a mesh; some leaves are Parameters, one is tied, one is plain."""
    leaves = {name: distribute_tensor(row[0], mesh, row[which], src_data_rank=None) for name, row in LEAVES.items()}
    leaves["rows"] = nn.Parameter(leaves["rows"])
    tree = TensorDict({**leaves, "n": {"tied": leaves["grid"], "plain": torch.arange(3)}, "note": "text"})
    return tree._replace(tree._data, ties=((("grid",), ("n", "tied")),))


def whole():
    """The same tree of plain tensors."""
    leaves = {name: row[0] for name, row in LEAVES.items()}
    leaves["rows"] = nn.Parameter(leaves["rows"])
    tree = TensorDict({**leaves, "n": {"tied": leaves["grid"], "plain": torch.arange(3)}, "note": "text"})
    return tree._replace(tree._data, ties=((("grid",), ("n", "tied")),))


def assert_same_parts(actual, expected):
    """Check that two trees are the same, and lie on their meshes alike."""
    for path in expected.paths():
        a, b = actual[path], expected[path]
        assert (type(a), isinstance(a, nn.Parameter)) == (type(b), isinstance(b, nn.Parameter)), path
        assert getattr(a, "placements", None) == getattr(b, "placements", None), path
    local = [tree.apply(lambda x: x.to_local() if isinstance(x, DTensor) else x) for tree in (actual, expected)]
    assert_same(*local)


def _save(rank, folder):
    blocks.BLOCK_BYTES = 24
    grid, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    three = DeviceMesh("cpu", [0, 1, 2])
    tree, file = spread(grid, 1), folder / "tree.safetensors"
    tdf.save(tree, file)
    assert_same(tdf.load(file), whole())
    for mesh, which in ((grid, 1), (line, 3), *([(three, 2)] if rank < 3 else [])):
        like = spread(mesh, which)
        for options in ({}, {"verify": False}):
            assert_same_parts(tdf.load(file, like=like, **options), like)
        rows = tdf.load(file, like=like.select("rows"), where="rows")
        assert_same_parts(rows, like.select("rows"))
    half = tdf.load(file, like=like.select("columns").to(torch.float16), where="columns", dtype=torch.float16)[
        "columns"
    ]
    assert half.dtype == torch.float16
    assert half.shape == (6, 7)
    dist.barrier()
    _damage(rank, file, grid)
    _fail(rank, folder, tree, grid)
    if rank == 0:
        assert_same(tdf.load(folder / "kept.safetensors"), TensorDict({"old": torch.ones(2)}))
    pair = DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        some = TensorDict({"x": distribute_tensor(torch.arange(5.0), pair, [S0], src_data_rank=None)})
        tdf.save(some, folder / "pair.safetensors")
        assert tdf.load(folder / "pair.safetensors")["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    manager = tdf.CheckpointManager(folder / "steps", keep_last=2)
    for step in range(3):
        path = manager.save(step, {"model": tree, "step": step}, metadata={"loss": 0.5}).result()
        assert path == manager.path(step)
        dist.barrier()
    assert manager.steps() == [1, 2]
    assert manager.metadata()["loss"] == 0.5
    assert_same(manager.load()["model"], whole())
    assert_same_parts(manager.load(like=TensorDict({"model": tree}))["model"], tree)
    with pytest.raises(FileExistsError, match="step 2 exists"):
        manager.save(2, tree)
    dist.barrier()


def _damage(rank, file, mesh):
    """Ranks whose part of a leaf lies in a damaged block refuse it, and others do not read it."""
    bad = file.with_name("bad.safetensors")
    if rank == 0:
        raw = bytearray(file.read_bytes())
        at = raw.find(torch.tensor([27.0, 28.0, 29.0]).numpy().tobytes())
        raw[at] ^= 1
        bad.write_bytes(raw)
    dist.barrier()
    like = spread(mesh, 1)
    if mesh.get_coordinate()[0] == 1:
        with pytest.raises(CorruptCheckpointError, match=r'leaf "rows", from \[9, 0\] to \[10, 3\] is damaged'):
            tdf.load(bad, like=like)
    else:
        assert_same_parts(tdf.load(bad, like=like), like)
    with pytest.raises(CorruptCheckpointError, match='leaf "rows"'), tdf.open(bad) as f:
        f["rows"]
    assert tdf.load(bad, where="grid")["grid"].equal(LEAVES["grid"][0])
    dist.barrier()


def _fail(rank, folder, tree, mesh):
    """Every rank raises, and the old file stays."""
    kept = folder / "kept.safetensors"
    if rank == 0:
        tdf.save(TensorDict({"old": torch.ones(2)}), kept)
    w = tree.select("columns")
    calls = {
        "rank 1 .*columns|missing": (lambda: w if rank != 1 else tree.select("grid"), tdf.TreeStructureError),
        r"(?s)leaf \"n.plain\".*differ between ranks.*rank 2": (
            lambda: tree.set(("n", "plain"), torch.tensor([0, 1, rank // 2])), LeafMismatchError
        ),
        "(?s)leaf \"p\" is a partial sum.*redistribute": (
            lambda: w.set("p", DTensor.from_local(torch.ones(2), mesh, [R, Partial()])), UnsupportedError
        ),
        "(?s)the parts of leaf \"p\" leave a hole or overlap": (
            lambda: w.set("p", DTensor.from_local(torch.ones(2 + rank), mesh, [S0, S0], shape=(8,), stride=(1,))),
            UnsupportedError,
        ),
        "differ in values, batch sizes": (lambda: w.set("s", f"{rank}"), tdf.TreeStructureError),
        "leaf \"f\" cannot be stored": (lambda: w.set("f", tdf.NonTensorData([len, 1][rank != 3])), UnsupportedError),
    }  # fmt: skip
    for pattern, (make, kind) in calls.items():
        with pytest.raises(kind, match=pattern):
            tdf.save(make(), kept)
    with pytest.raises(OSError, match="the folder must exist"):
        tdf.save(w, folder / "absent" / "x.safetensors")
    with pytest.raises(UnsupportedError, match="a DTensor"):
        tdf.save(w, folder / "shards", max_shard_size=100)
    with pytest.raises(UnsupportedError, match="a DTensor"):
        w.memmap(folder / "memmap")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(os, "pwrite", lambda *_: os.write(-1, b""))
        with pytest.raises(OSError, match="Bad file descriptor"):
            tdf.save(tree, kept)
    dist.barrier()
    assert not [entry for entry in os.listdir(folder) if entry.endswith(".tmp")]
    dist.barrier()


def _on_two_meshes(grid, row, *, is_last):
    """A tree with a leaf on a mesh of all ranks, and before or behind it leaves on a row of that mesh."""
    wide = DTensor.from_local(torch.ones(2, 1), grid, [S0, S1])
    narrow = TensorDict(
        {
            "split": DTensor.from_local(row, grid["a"], [S0]),
            "copied": DTensor.from_local(torch.arange(3.0), grid["a"], [R]),
        }
    )
    if is_last:
        return TensorDict({"wide": wide, "narrow": narrow})
    return TensorDict({"narrow": narrow, "wide": wide})


def _save_two_meshes(rank, folder, is_last):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    own = torch.arange(2.0) + 2 * grid.get_coordinate()[0]
    tree = _on_two_meshes(grid, own, is_last=is_last)
    tdf.save(tree, folder / "tree.safetensors")
    assert_same_parts(tdf.load(folder / "tree.safetensors", like=tree), tree)
    manager = tdf.CheckpointManager(folder / "steps")
    manager.save(1, tree)
    assert_same_parts(manager.load(like=tree), tree)


@pytest.mark.slow
@pytest.mark.parametrize("is_last", [True, False])
def test_leaves_on_a_row_of_the_mesh_are_written_once(is_last, tmp_path):
    """FSDP2 makes such trees of a model of which tensor parallelism leaves out layers."""
    run_ranks(_save_two_meshes, 4, tmp_path, tmp_path, is_last)

    narrow = tdf.load(tmp_path / "tree.safetensors")["narrow"]

    assert_same(narrow, TensorDict({"split": torch.arange(4.0), "copied": torch.arange(3.0)}))


def _save_rows_that_differ(rank, folder):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tree = _on_two_meshes(grid, torch.full((2,), float(rank)), is_last=True)
    with pytest.raises(LeafMismatchError, match='ranks 0 and 1 have the same part of leaf "narrow.split"'):
        tdf.save(tree, folder / "tree.safetensors")


@pytest.mark.slow
def test_rows_of_a_mesh_with_other_values_are_refused(tmp_path):
    """No row is written in place of the other."""
    run_ranks(_save_rows_that_differ, 4, tmp_path, tmp_path)

    assert not (tmp_path / "tree.safetensors").exists()


@pytest.mark.slow
def test_one_file_of_many_ranks(tmp_path):
    """Four ranks write one file, which every reader reads, and ranks by slices onto meshes of 2 x 2, 3 and 4."""
    run_ranks(_save, 4, tmp_path, tmp_path)

    file = tmp_path / "tree.safetensors"
    assert_same(tdf.load(file), whole())
    expected = {name: LEAVES[name][0].tolist() for name in ("grid", "deep")}
    theirs, arrays = load_file(file), read_arrays(file)[1]
    assert [{*theirs}, {*arrays}] == [{*LEAVES, "n.plain"}] * 2
    assert {name: theirs[name].tolist() for name in expected} == expected
    assert {name: arrays[name].tolist() for name in expected} == expected
    with tdf.open(file) as f:
        assert f["columns"].equal(LEAVES["columns"][0])
        assert f.slice("deep", 1).equal(LEAVES["deep"][0][1])


@pytest.mark.slow
@pytest.mark.parametrize("is_manager", [False, True])
def test_ranks_that_are_killed_at_any_moment(tmp_path, is_manager):
    """The old tree or the new one is there, files of others stay, and the other ranks raise `PeerError`."""
    counts = kill_ranks(12, tmp_path, is_manager=is_manager)

    assert {key: counts[key] for key in ("lost", "foreign files lost", "not cleaned", "other ends")} == {
        "lost": 0, "foreign files lost": 0, "not cleaned": 0, "other ends": 0,
    }  # fmt: skip
    assert counts["raised"] == counts["survivors"] >= 12


def _save_columns(rank, folder, rows):
    mesh = init_device_mesh("cpu", (2,))
    table = torch.arange(rows * 6.0).reshape(rows, 6)
    tree = TensorDict({"table": distribute_tensor(table, mesh, [S1], src_data_rank=None)})
    count = 0
    real = os.pwrite

    def counted(*args):
        nonlocal count
        count += 1
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 4096)
        patch.setattr(os, "pwrite", counted)
        tdf.save(tree, folder / "map.safetensors", fsync=False)
        (folder / f"map-{rank}").write_text(str(count))
        # As on machines that share a file system.
        patch.setattr(ranks, "machine_of", lambda folder: [rank])
        tdf.save(tree, folder / "rows.safetensors", fsync=False)
        (folder / f"rows-{rank}").write_text(str(count))


@pytest.mark.slow
def test_leaves_that_are_sharded_on_an_inner_dimension(tmp_path):
    """On one machine no row takes a system call; the file has the same bytes as if each row had taken one."""
    run_ranks(_save_columns, 2, tmp_path, tmp_path, 1000)

    counts = [[int((tmp_path / f"{how}-{rank}").read_text()) for rank in range(2)] for how in ("map", "rows")]
    assert counts == [[0, 0], [1000, 1000]]
    assert (tmp_path / "map.safetensors").read_bytes() == (tmp_path / "rows.safetensors").read_bytes()
    assert tdf.load(tmp_path / "map.safetensors")["table"].equal(torch.arange(6000.0).reshape(1000, 6))


def _build(mesh):
    """A small network under FSDP2, and its optimizer."""
    torch.manual_seed(0)
    net = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def _train(net, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()


def _save_optimizer(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    net, optimizer = _build(mesh)
    _train(net, optimizer)
    saved = {
        "params": tdf.from_module(net),
        "optim": get_optimizer_state_dict(net, optimizer),
        "raw": optimizer.state_dict(),
    }
    tdf.CheckpointManager(folder / "run").save(1, saved)
    dist.barrier()

    other, own = _build(mesh)
    back = tdf.CheckpointManager(folder / "run").load()
    for name, leaf in optimizer.state_dict()["state"][0].items():
        whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        assert torch.equal(back["raw"]["state"][0][name], whole), name
    assert back["raw"]["param_groups"] == optimizer.state_dict()["param_groups"]
    other.load_state_dict(net.state_dict())
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(other, own, back["optim"], options=options)
    _train(net, optimizer)
    _train(other, own)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


@pytest.mark.slow
def test_the_state_of_an_optimizer_under_fsdp(tmp_path):
    """It is saved nested as torch gives it, with DTensors in plain dicts, and the run continues bit for bit."""
    run_ranks(_save_optimizer, 2, tmp_path, tmp_path)
