"""Calls of ranks that differ in one thing: all ranks raise, the message names it, and the next equal call works.

The pairs are drawn from tables: for each thing in which calls can differ some values, each with words for the message.
A wrong value is refused on its rank, so the message has only the words for that value.
"""

import json
import os
import random
import re
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import tdfunc as tdf
from tdfunc import ConcurrencyError, NonTensorData, PeerError, TensorClass, TensorDict, UnsupportedError
from tdfunc import distributed as td_dist
from tests.distributed.ranks import run_ranks

TIMEOUT_S = 20


class Value(NamedTuple):
    """A value of an argument, and a pattern of the words for it."""

    value: object
    pattern: str
    # It is refused on its rank, whatever the other ranks have.
    is_wrong: bool = False


def wrong(value, pattern):
    """A value that is refused on its rank."""
    return Value(value, pattern, is_wrong=True)


# -- what trees can differ in -------------------------------------------------------------------------------------

TREES = {
    "key": [Value("a", "missing: +a"), Value("c", "unexpected: +c")],
    "length": [Value(3, r"expected \[3\]"), Value(4, r"got \[4\]")],
    "dtype": [Value("float32", "expected float32"), Value("float64", "got float64")],
    "extra": [Value(1, ""), wrong(len, "extra.* cannot be")],
}


def tree_of(rank, key="a", length=3, dtype="float32", extra=1):
    """A small tree of a rank."""
    leaf = torch.full((length,), float(rank + 1), dtype=getattr(torch, dtype))
    return TensorDict({key: leaf, "n": {"i": torch.tensor([rank])}, "extra": NonTensorData(extra)})


# -- collectives --------------------------------------------------------------------------------------------------

OPS = [
    *[Value(op, f"'{op}'") for op in ("sum", "max", "min", "product")],
    *[wrong(op, "is not a reduction") for op in ("mean", "unused", 3)],
]
ROOTS = [Value(0, "rank 0"), Value(1, "rank 1"), wrong(7, "=7 is not a rank"), wrong(None, "=None is not a rank")]
STRICT = [Value(True, "expected: +[a-z_]+( to rank 0)?, as on"), Value(False, "got: .*strict=False")]
TIMEOUTS = [Value(None, ""), wrong("soon", "timeout_s is not a number"), wrong(float("nan"), "timeout_s is not")]
ANY = {"timeout_s": TIMEOUTS}
COLLECTIVES = {
    "all_reduce": {"op": OPS, **TREES, **ANY},
    "reduce": {"op": OPS, "dst": ROOTS, **TREES, **ANY},
    "broadcast": {"src": ROOTS, **TREES, **ANY},
    "scatter": {"src": ROOTS, "extra": TREES["extra"], **ANY},
    "gather": {"dst": ROOTS, "strict": STRICT, **TREES, **ANY},
    "all_gather": {"strict": STRICT, **TREES, **ANY},
}


def call_collective(name, rank, size, op="sum", root=0, strict=True, timeout_s=None, **tree):
    """Make one collective; return what can be compared of its result."""
    td = tree_of(rank, **tree)
    if name == "all_reduce":
        return td.all_reduce(op, timeout_s=timeout_s)["a"].tolist()
    if name == "reduce":
        found = td.reduce(root, op, timeout_s=timeout_s)
        return None if found is None else found["a"].tolist()
    if name == "broadcast":
        return td.broadcast(root, timeout_s=timeout_s)["a"].tolist()
    if name == "scatter":
        trees = [tree_of(i, **tree) for i in range(size)] if rank == root else None
        return td.scatter(root, trees, timeout_s=timeout_s)["a"].tolist()
    options = {"strict": strict, "timeout_s": timeout_s}
    found = td.gather_to(root, **options) if name == "gather" else td.all_gather(**options)
    return None if found is None else [tree["a"].tolist() for tree in found]


def expect_collective(name, rank, size):
    """What the call returns for the first value of each argument."""
    rows = [[float(i + 1)] * 3 for i in range(size)]
    total = [sum(column) for column in zip(*rows, strict=True)]
    return {
        "all_reduce": total,
        "reduce": total if rank == 0 else None,
        "broadcast": rows[0],
        "scatter": rows[rank],
        "gather": rows if rank == 0 else None,
        "all_gather": rows,
    }[name]


# -- saves --------------------------------------------------------------------------------------------------------

SAVED = {
    "key": [Value("w", "missing: +w"), Value("v", "unexpected: +v")],
    "columns": [Value(2, r"expected \[\d+, 2\]"), Value(3, r"got \[\d+, 3\]")],
    "dtype": [Value("float32", "expected float32"), Value("int64", "got int64")],
    "note": [Value("one", "note: .*one"), Value("two", "note: .*two"), wrong(len, "note.* cannot be stored")],
    "plain": [Value(1.0, "plain.*differ between ranks.*rank 0"), Value(2.0, "digest [0-9a-f]+ on rank")],
    "partial": [Value(False, ""), wrong(True, "is a partial sum")],
}
SAVES = {
    "save": {
        "name": [
            Value("x.safetensors", r"save x\.safetensors"),
            Value("y.safetensors", r"save y\.safetensors"),
            wrong("x.pt", r"does not end in \.safetensors"),
        ],
        "folder": [Value("one", "/one"), Value("two", "/two")],
        "fsync": [Value(False, "fsync=False"), Value(True, "fsync=True")],
        "max_shard_size": [Value(None, ""), wrong("1MB", "max_shard_size|folder"), wrong(-3, "max_shard_size|folder")],
        **SAVED,
    },
    "manager": {
        "step": [
            *[Value(n, f"save step {n}") for n in (5, 6, 7)],
            wrong("five", "whole number"),
            wrong(-1, "at least 0"),
        ],
        "folder": [Value("one", "/one"), Value("two", "/two")],
        "overwrite": [Value(True, "overwrite=True|exists"), Value(False, "overwrite=False|exists")],
        "fsync": [Value(False, "fsync=False"), Value(True, "fsync=True")],
        "keep_last": [Value(2, "keep_last=2"), Value(3, "keep_last=3")],
        "max_shard_size": [Value(None, ""), wrong("1MB", "max_shard_size=1000000")],
        "metadata": [
            Value({"loss": 0.5}, ""),
            wrong({"loss": float("nan")}, r"metadata\['loss'\] cannot be stored"),
            wrong({"loss": "low"}, "the metric 'loss' is not a number"),
        ],
        **SAVED,
    },
}


def sharded_tree(rank, mesh, key="w", columns=2, dtype="float32", note="one", plain=1.0, partial=False):
    """A tree of which each rank has rows, with a plain leaf and a value."""
    local = torch.full((2, columns), rank + 1, dtype=getattr(torch, dtype))
    leaf = DTensor.from_local(local, mesh, [Partial() if partial else Shard(0)])
    return TensorDict({key: leaf, "plain": torch.tensor(plain), "note": NonTensorData(note)})


def call_save(call, rank, size, home, mesh, folder="one", overwrite=True, metadata=None, **options):
    """Save a tree; return what is on the disk then."""
    (home / folder).mkdir(exist_ok=True)
    tree = sharded_tree(rank, mesh, **{key: value for key, value in options.items() if key in SAVED})
    given = {key: options[key] for key in ("max_shard_size",) if key in options}
    if call == "save":
        path = home / folder / options.get("name", "x.safetensors")
        tdf.save(tree, path, fsync=options.get("fsync", False), **given)
        return tdf.load(path)["w"].tolist()
    given |= {"keep_last": options.get("keep_last", 2), "fsync": options.get("fsync", False)}
    manager = tdf.CheckpointManager(home / folder / "run", metric="loss", **given)
    step = options.get("step", 5)
    manager.save(step, tree, overwrite=overwrite, metadata=metadata or {"loss": 0.5})
    return manager.load(step)["w"].tolist()


def expect_save(size):
    """The rows of all ranks."""
    return [[float(i + 1)] * 2 for i in range(size) for _ in range(2)]


# -- members ------------------------------------------------------------------------------------------------------

MEMBERS = {
    "from_local": {
        "placement": [Value(0, r"Shard\(dim=0\)"), Value(1, r"Shard\(dim=1\)"), wrong(2, "dimension of the members")],
        "key": [Value("a", r"missing .*\['a'\]"), Value("c", r"unexpected .*\['c'\]")],
        "dtype": [Value("float32", "torch.float32"), Value("int64", "torch.int64")],
        "rest": [Value(3, r"\[3\]"), Value(4, r"\[4\]")],
        "fails": [Value(False, ""), wrong(True, "only on this rank")],
    }
}


def call_members(rank, mesh, placement=0, key="a", dtype="float32", rest=3, fails=False):
    """Join the parts that a function returns; return the shape over all ranks."""

    def make():
        if fails:
            raise FloatingPointError("only on this rank")
        return TensorDict({key: torch.zeros((2, rest), dtype=getattr(torch, dtype))})

    return list(td_dist.on_members(make, mesh, [Shard(placement)])()["a"].shape)


# -- the law ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A call, one of its arguments, its values on most ranks and on an odd one, and the words for them."""

    call: str
    argument: str
    usual: object
    other: object
    odd: int
    patterns: list


def draw_pairs(table, seed, size):
    """One pair for each way in which calls of a table can differ: all wrong values, and two good ones."""
    chance = random.Random(seed)
    for call, arguments in table.items():
        for argument, values in arguments.items():
            good = [value for value in values if not value.is_wrong]
            for bad in [value for value in values if value.is_wrong]:
                yield Pair(call, argument, good[0].value, bad.value, chance.randrange(size), [bad.pattern])
            if len(good) > 1:
                odd = chance.randrange(size)
                pair = chance.sample(good, 2) if argument in UNORDERED else good[:2]
                # The first rank has the first value, which the message names as the expected one.
                usual, other = pair if odd else pair[::-1]
                yield Pair(call, argument, usual.value, other.value, odd, [value.pattern for value in pair])


# Whose patterns do not depend on the rank that has the value.
UNORDERED = {"op", "step", "name", "dst", "src"}


def problem_of(call, pair, rank):
    """What is wrong with a call of ranks that differ, or None; the call returns or raises."""
    value = pair.other if rank == pair.odd else pair.usual
    try:
        found = call(**{pair.argument: value})
    except Exception as err:
        lacking = [pattern for pattern in pair.patterns if not re.search(f"(?s){pattern}", str(err))]
        return f"{type(err).__name__} without {lacking}: {err}" if lacking else None
    return f"returned {found}"


def check_pairs(rank, size, seed, home, group):
    """Make the calls of all pairs of a group, and write down what is wrong."""
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for pair in draw_pairs(GROUPS[group], seed, size):
        call, expected = CALLERS[group](pair.call, rank, size, home, mesh)
        problem = problem_of(call, pair, rank)
        dist.barrier()
        try:
            again = call()
        except Exception as err:
            again = f"{type(err).__name__}: {err}"
        if problem is not None or again != expected:
            found[str(pair[:5])] = [problem, again]
        dist.barrier()
    (home / f"{rank}.json").write_text(json.dumps(found))


def collective(name, rank, size, home, mesh):
    """A collective, and what it returns without a difference."""

    def call(**given):
        for argument in ("dst", "src"):
            if argument in given:
                given["root"] = given.pop(argument)
        return call_collective(name, rank, size, **given)

    return call, expect_collective(name, rank, size)


def saving(name, rank, size, home, mesh):
    """A save, and what is on the disk without a difference."""
    return lambda **given: call_save(name, rank, size, home, mesh, **given), expect_save(size)


def joining(name, rank, size, home, mesh):
    """A join of members, and its shape without a difference."""
    return lambda **given: call_members(rank, mesh, **given), [2 * size, 3]


GROUPS = {"collectives": COLLECTIVES, "saves": SAVES, "members": MEMBERS}
CALLERS = {"collectives": collective, "saves": saving, "members": joining}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_calls_that_differ_in_one_thing(tmp_path, seed, group, size):
    """All ranks raise with the words for the difference, and the next equal call returns what it should."""
    run_ranks(check_pairs, size, tmp_path, size, seed, tmp_path, group, timeout_s=TIMEOUT_S)

    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert found == [{}] * size


# -- messages -----------------------------------------------------------------------------------------------------


def local_class():
    """A class of the same name in each process, which no module has."""
    return type("Local", (TensorClass,), {"__annotations__": {"x": torch.Tensor}})


# Call of the sender, call of the receiver, words on both ranks.
MESSAGES = {
    "a leaf that cannot be sent": (
        lambda: tree_of(0, extra=len).send(1),
        lambda: td_dist.recv(0),
        "extra.* cannot be",
    ),
    "a leaf that cannot be sent, later": (
        lambda: tree_of(0, extra=len).isend(1),
        lambda: td_dist.irecv(0).wait(),
        "extra.* cannot be",
    ),
    "an expected tree that cannot be described": (
        lambda: tree_of(0).send(1),
        lambda: tree_of(0, extra=len).recv(0),
        "extra.* cannot be",
    ),
    "a class that the receiver does not have": (
        lambda: local_class()(torch.ones(2), batch_size=[]).send(1),
        lambda: td_dist.recv(0),
        "the class .*Local.* is not imported or given",
    ),
    "other keys": (lambda: tree_of(0, key="c").send(1), lambda: tree_of(0).recv(0), "missing: +a"),
    "other lengths": (lambda: tree_of(0).send(1), lambda: tree_of(0, length=4).recv(0), r"expected \[4\], got \[3\]"),
    "another dtype": (lambda: tree_of(0).isend(1).wait(), lambda: tree_of(0, dtype="int64").irecv(0).wait(), "int64"),
    "a bad time of the sender": (
        lambda: tree_of(0).send(1, timeout_s="soon"),
        lambda: td_dist.recv(0),
        "timeout_s is not a number",
    ),
    "a bad time of the receiver": (
        lambda: tree_of(0).send(1),
        lambda: td_dist.recv(0, timeout_s=float("inf")),
        "timeout_s is not a number",
    ),
    "a leaf that cannot be written to": (
        lambda: TensorDict({"a": torch.zeros(3)}).send(1),
        lambda: TensorDict({"a": torch.zeros(1).expand(3)}).recv_(0),
        "the leaf is expanded",
    ),
}


def check_messages(rank, home):
    """Make the calls of all messages, each followed by one that arrives."""
    found = {}
    for name, (*calls, pattern) in MESSAGES.items():
        try:
            problem = f"returned {calls[rank]()}"
        except Exception as err:
            problem = None if re.search(f"(?s){pattern}", str(err)) else f"{type(err).__name__}: {err}"
        following = TensorDict({"name": name})
        got = following.send(1) if rank == 0 else td_dist.recv(0)["name"]
        if problem is not None or got != [None, name][rank]:
            found[name] = [problem, got]
    (home / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_messages_that_one_rank_refuses(tmp_path):
    """Both ranks raise what is wrong on one of them, and the next message arrives."""
    run_ranks(check_messages, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)

    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{}, {}]


# -- calls and rounds ---------------------------------------------------------------------------------------------

ONE = TensorDict({"x": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)})
CALLS = {
    "all_reduce 'sum'": lambda mesh, home: ONE.all_reduce(),
    "reduce 'sum' to rank 1": lambda mesh, home: ONE.reduce(1),
    "broadcast from rank 0": lambda mesh, home: ONE.broadcast(0),
    "scatter from rank 0": lambda mesh, home: ONE.scatter(0, [ONE] * mesh.size()),
    "gather to rank 1": lambda mesh, home: ONE.gather_to(1),
    "all_gather": lambda mesh, home: ONE.all_gather(),
    r"save x\.safetensors": lambda mesh, home: tdf.save(sharded_tree(0, mesh), home / "x.safetensors"),
    "save step 3": lambda mesh, home: tdf.CheckpointManager(home / "run").save(
        3, sharded_tree(0, mesh), overwrite=True
    ),
}


def check_calls(rank, size, seed, home):
    """Each pair of calls, of which one is the call of an odd rank."""
    mesh = init_device_mesh("cpu", (size,))
    chance, found = random.Random(seed), {}
    for usual in CALLS:
        other = chance.choice([name for name in CALLS if name != usual])
        own = other if chance.randrange(size) == rank else usual
        # At least one rank makes each call.
        own = {0: usual, 1: other}.get(rank, own)
        try:
            problem = f"returned {CALLS[own](mesh, home)}"
        except ValueError as err:
            lacking = [name for name in (usual, other) if not re.search(f"(expected|got): +{name}", str(err))]
            problem = f"{lacking} not in {err}" if lacking else None
        total = float(ONE.all_reduce()["x"][0])
        if problem is not None or total != size:
            found[f"{usual}, {other}"] = [problem, total]
    (home / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_different_calls(tmp_path, seed, size):
    """All ranks raise, the message names both calls, and the next equal call works."""
    run_ranks(check_calls, size, tmp_path, size, seed, tmp_path, timeout_s=TIMEOUT_S)

    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert found == [{}] * size


def interrupt(*_):
    """Leave a call as a signal does."""
    raise KeyboardInterrupt


def check_rounds(rank):
    """Rank 1 is interrupted before a round, and its next call is an equal one."""
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(td_dist.collectives, "pack", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ONE.all_reduce()
    with pytest.raises(ConcurrencyError, match=r"(?s)round 0 of the group, as on rank 0.*round 1 on rank 1"):
        ONE.all_reduce()
    for _ in range(2):
        assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_rank_that_left_a_call(tmp_path):
    """All ranks raise at the next call, though it is the same one, and are in step again."""
    run_ranks(check_rounds, 2, tmp_path, timeout_s=TIMEOUT_S)


def check_message_numbers(rank):
    """Rank 0 is interrupted before it sends one of its messages."""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(td_dist.messages, "pack", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ONE.send(1)
        with pytest.raises(ConcurrencyError, match="message 0, as on rank 1"):
            ONE.send(1)
        ONE.isend(1).wait()
    else:
        pending = [td_dist.irecv(0), td_dist.irecv(0)]
        with pytest.raises(ConcurrencyError, match="message 1 of rank 0"):
            pending[0].wait()
        assert pending[1].wait()["x"].tolist() == [1.0, 1.0]
    dist.barrier()


@pytest.mark.slow
def test_a_message_that_was_left(tmp_path):
    """Both ranks raise at the next message, and those after it arrive, also where they were awaited before."""
    run_ranks(check_message_numbers, 2, tmp_path, timeout_s=TIMEOUT_S)


# -- refusals of torch, groups and ranks --------------------------------------------------------------------------

REDUCTIONS = {
    "max of complex": ("max", torch.complex64, "complex"),
    "band of floats": ("band", torch.float32, "integral"),
    "sum of int16": ("sum", torch.int16, "int16"),
    "mean of integers": ("avg", torch.int64, "int64"),
}


def check_reductions(rank):
    """A reduction that torch refuses is not a lost rank."""
    for op, dtype, pattern in REDUCTIONS.values():
        tree = TensorDict({"n": {"leaf": torch.ones(2, dtype=dtype)}})
        with pytest.raises(UnsupportedError, match=f"(?s)leaf 'n.leaf' cannot be reduced.*{pattern}"):
            tree.all_reduce(op)
        with pytest.raises(UnsupportedError, match=f"(?s)leaf 'n.leaf' cannot be reduced.*{pattern}"):
            tree.reduce(1, op)
        assert ONE.all_reduce()["x"].tolist() == [3.0, 3.0]


def test_reductions_that_torch_refuses(tmp_path):
    """Each rank raises `UnsupportedError` with the leaf and torch's reason, and the next call works."""
    run_ranks(check_reductions, 3, tmp_path, timeout_s=TIMEOUT_S)


OUTSIDE = {
    "send": lambda group: ONE.send(1, group=group),
    "isend": lambda group: ONE.isend(1, group=group),
    "recv": lambda group: td_dist.recv(1, group=group),
    "irecv": lambda group: td_dist.irecv(1, group=group),
    "recv_": lambda group: ONE.recv_(1, group=group),
    "broadcast": lambda group: ONE.broadcast(1, group=group),
    "scatter": lambda group: ONE.scatter(1, group=group),
    "gather": lambda group: ONE.gather_to(1, group=group),
    "all_gather": lambda group: ONE.all_gather(group=group),
    "reduce": lambda group: ONE.reduce(1, group=group),
    "all_reduce": lambda group: ONE.all_reduce(group=group),
}


def check_groups(rank):
    """Rank 0 is not in the group; the others name ranks that are not in it."""
    group = dist.new_group([1, 2])
    if rank == 0:
        for call in OUTSIDE.values():
            with pytest.raises(ValueError, match="this process is not in the group"):
                call(group)
    else:
        for call in (ONE.broadcast, ONE.reduce, ONE.gather_to, ONE.scatter):
            with pytest.raises(ValueError, match="=0 is not a rank of the group"):
                call(0, group=group)
        for call in (ONE.send, ONE.isend, ONE.recv, ONE.irecv_):
            with pytest.raises(ValueError, match="=0 is not a rank of the group"):
                call(0, group=group)
        assert ONE.all_reduce(group=group)["x"].tolist() == [2.0, 2.0]
    for call in (ONE.send, ONE.isend, ONE.recv, ONE.irecv, ONE.recv_):
        with pytest.raises(ValueError, match="=3 is not a rank of the group"):
            call(3)
        with pytest.raises(ValueError, match="cannot exchange messages with itself"):
            call(rank)
    dist.barrier()


def test_ranks_outside_of_a_group(tmp_path):
    """Each call names the process or rank that is not in the group, at once."""
    run_ranks(check_groups, 3, tmp_path, timeout_s=TIMEOUT_S)


def check_lost(rank, home):
    """Rank 1 makes no call: rank 0 says so after the time of the call."""
    if rank == 0:
        with pytest.raises(PeerError, match="all_reduce: rank 1 did not answer rank 0(?s:.)*within 0.5 s"):
            ONE.all_reduce(timeout_s=0.5)
        (home / "done").touch()
    while not (home / "done").exists():
        time.sleep(0.05)
    # A thread of rank 0 still listens to rank 1, so the group cannot be taken apart.
    os._exit(0)


def test_a_call_that_one_rank_does_not_make(tmp_path):
    """It is a `PeerError` after `timeout_s`."""
    assert run_ranks(check_lost, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S, join=False) == [0, 0]
