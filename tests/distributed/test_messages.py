"""Messages between ranks and collectives of all ranks: laws, oracles, and what happens when ranks differ or die."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn

import tdfunc as tdf
from tdfunc import (
    LeafMismatchError,
    NonTensorData,
    PeerError,
    TensorClass,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
)
from tdfunc import distributed as td_dist
from tdfunc.llm import History
from tdfunc.parallel.block import find_structure, key_of, pack, read_structure
from tests.distributed.ranks import run_ranks
from tests.helpers import TiedLM, assert_pure
from tests.storage.trees import assert_same, of_dtype, tied_trees, trees


class Row(TensorClass):
    """A typed tree, whose class is known to the sender and the receiver."""

    x: torch.Tensor
    name: str = "row"


# -- the block ----------------------------------------------------------------------------------------------------


def through_bytes(tree):
    """A tree as another process would make it."""
    sent, leaves = pack(tree, "send")
    wire = torch.empty(sent.block.size_bytes, dtype=torch.uint8)
    sent.block.fill(leaves, wire)
    got = read_structure(sent.text)
    return got.build(got.block.cut(wire))


@given(trees() | tied_trees())
def test_a_block_keeps_everything(tree):
    """Packing and unpacking is the identity, at the first call and with the known structure."""
    for _ in range(2):
        assert_same(through_bytes(tree), tree)


def test_large_leaves_and_layouts_in_a_block():
    """Leaves over a piece, expanded and conjugate leaves, and all dtypes of a file have the bytes of `contiguous()`."""
    big = torch.randn(3, 1 << 20)
    tree = TensorDict(
        {"big": big, "turned": big.T, "row": big[0, :3].expand(2, 3), "i": torch.ones(3, dtype=torch.int8)}
    )
    tree = tree.set("c", torch.tensor([1 + 2j, 3j]).conj()).set("f8", of_dtype("float8_e4m3fn", (4,)))

    assert_same(through_bytes(tree), tree)
    assert torch.vmap(lambda x: x + (pack(tree, "send").leaves[0] is big))(torch.zeros(1)).tolist() == [1.0]
    texts = [pack(TensorDict({str(i): big}), "send").structure.text for i in range(33)]
    read = [read_structure(text) for text in texts]
    assert [find_structure(key_of(text)) for text in texts] == [None, *read[1:]]


def test_a_block_on_another_device():
    """Leaves are cut from a block where it is, and a recorded device of its kind is this rank's; here it is meta."""
    n, empty = (TensorDict(leaves, device="cpu") for leaves in ({"i": torch.arange(4)}, {}))
    tree = TensorDict({"a": torch.ones(2, 3), "n": n, "other": empty})
    sent, leaves = pack(tree, "send")
    wire = torch.empty(sent.block.size_bytes, dtype=torch.uint8, device="meta")
    sent.block.fill(leaves, wire)
    got = read_structure(sent.text)
    plan = copy(got.plan)
    plan.devices = [None, torch.device("meta:3"), torch.device("cpu")]
    got = got._replace(plan=plan)

    found = got.build(got.block.cut(wire))

    assert found.device is None
    assert found["n"].device == torch.device("meta")
    assert found["other"].device == torch.device("cpu")
    assert [(leaf.device.type, leaf.dtype, leaf.shape) for leaf in found.leaves()] == [
        ("meta", torch.float32, (2, 3)),
        ("meta", torch.int64, (4,)),
    ]


# -- ranks --------------------------------------------------------------------------------------------------------


def example_trees():
    """Trees of every kind, the same in every process."""
    lazy = tdf.lazy_stack([TensorDict({"x": torch.arange(float(n)), "w": "word"}) for n in (1, 3)])
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}] for text in ("a", "bc")]
    module = tdf.from_module(TiedLM())
    return {
        "nested": TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.arange(2), "e": {}}}, [2], names=["row"]),
        "module": module.apply(lambda leaf: nn.Parameter(torch.full_like(leaf, 0.5))),
        "values": TensorDict({"s": "text", "d": NonTensorData({"k": (1, None)}), "l": [["a"], ["b"]]}, [2]),
        "row": Row(torch.arange(4.0), "sent", batch_size=[4]),
        "lazy": lazy,
        "rows": tdf.lazy_stack([Row(torch.zeros(n), batch_size=[n]) for n in (2, 3)]),
        "chats": History.from_chats(chats),
        "ragged": History.from_chats([chats[0], chats[1][:1]]),
        "dtypes": TensorDict({name: of_dtype(name, (3,)) for name in ("bool", "int16", "bfloat16", "float8_e5m2")}),
        # A description that does not fit into a frame.
        "many": TensorDict({f"leaf {i}": torch.full((2,), i) for i in range(200)}),
        "empty": TensorDict({}, [3]),
        "no values": TensorDict({"x": torch.empty(0, 3)}),
    }


def _talk(rank):
    sent = example_trees()
    zeros = {name: tree.apply(torch.zeros_like) for name, tree in sent.items()}
    for name, tree in sent.items():
        if rank == 1:
            assert_pure(lambda tree: tree.send(0, tag=3), tree)
            tree.isend(0).wait()
        elif rank == 0:
            assert_same(td_dist.recv(1, tag=3), tree)
            got = zeros[name].recv(1)
            assert_same(got, tree)
            assert type(got) is type(tree)
            assert all(not leaf.any() for leaf in zeros[name].leaves())
    _keep_order(rank)
    _write_into(rank, sent, zeros)
    dist.barrier()


def _keep_order(rank):
    """Messages of one tag keep their order, those of others do not wait, and a ring of handles ends."""
    one = TensorDict({"x": torch.full((2,), rank), "big": torch.full((3 << 20,), float(rank))})
    handles = [one.isend((rank + 1) % 3), one.irecv((rank - 1) % 3)]
    assert handles[0].wait() is None
    assert int(handles[1].wait()["x"][0]) == (rank - 1) % 3
    assert handles[0].is_completed() == 1
    if rank == 1:
        handles = [TensorDict({"i": i}).isend(0, tag=i % 2) for i in range(6)]
        TensorDict({"i": 6}).send(0, tag=0)
        [handle.wait() for handle in handles]
    elif rank == 0:
        odd = [td_dist.irecv(1, tag=1) for _ in range(3)]
        assert [int(td_dist.recv(1)["i"]) for _ in range(4)] == [0, 2, 4, 6]
        assert [int(handle.wait()["i"]) for handle in odd] == [1, 3, 5]


def _write_into(rank, sent, zeros):
    """`recv_` and `irecv_` fill the leaves that there are."""
    if rank == 1:
        sent["nested"].send(2)
        sent["lazy"].send(2)
    elif rank == 2:
        buffer = zeros["nested"]
        leaf = buffer["a"]
        assert buffer.recv_(1) is buffer
        assert leaf is buffer["a"]
        assert bool((buffer == sent["nested"]).all())
        assert (buffer := zeros["lazy"]).irecv_(1).wait() is buffer
        assert [x.tolist() for x in buffer["x"]] == [[0.0], [0.0, 1.0, 2.0]]


def _gather(rank):
    """Collectives equal what each process computes from the trees of all ranks, in any order of keys."""
    pair = dist.new_group([1, 2])

    def tree_of(rank):
        leaves = {"a": torch.arange(3.0) * (rank + 1), "n": {"i": torch.tensor([rank, -rank])}, "who": f"rank {rank}"}
        return TensorDict(dict(sorted(leaves.items(), reverse=rank == 1)), [])

    mine, all_ = tree_of(rank), [tree_of(i) for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", None)
        for got, tree in zip(mine.all_gather(), all_, strict=True):
            assert_same(got, tree)
        got = mine.gather_to(2)
        assert (got is None) == (rank != 2)
        [assert_same(*both) for both in zip(got or [], all_, strict=False)]
        own = type("Own", (TensorClass,), {"__annotations__": {"x": torch.Tensor}})
        inside = TensorDict({"n": {"own": own(mine["a"], batch_size=[])}})
        assert [type(got["n", "own"]) for got in inside.all_gather()] == [own] * 3
        assert_same(mine.broadcast(1), all_[1])
        assert_same(td_dist.broadcast(mine if rank == 2 else None, 2), all_[2])
        assert_same(mine.scatter(1, all_[::-1] if rank == 1 else None), all_[2 - rank])
        trees_of_all = list(example_trees().values())[:3]
        assert_same(td_dist.scatter(trees_of_all if rank == 0 else None, 0), trees_of_all[rank])
        for got, tree in zip(td_dist.all_gather(trees_of_all[rank], strict=False), trees_of_all, strict=True):
            assert_same(got, tree)
    for op, oracle in {"sum": torch.sum, "max": torch.amax}.items():
        stacked = torch.stack([tree.exclude("who") for tree in all_])
        expected = mine.update(stacked.apply(partial(oracle, dim=0), batch_size=[]))
        assert_same(assert_pure(methodcaller("all_reduce", op), mine), expected)
        got = mine.reduce(1, op)
        assert got is None if rank != 1 else bool((got == expected).all())
    assert mine.select("a").all_reduce("avg")["a"].tolist() == [0.0, 2.0, 4.0]
    tied = tdf.from_module(TiedLM()).detach().all_reduce()
    assert tied["out", "weight"] is tied["emb", "weight"]
    if rank:
        assert [int(tree["n", "i"][0]) for tree in mine.all_gather(group=pair)] == [1, 2]
        assert mine.all_reduce(group=pair)["a"].tolist() == [0.0, 5.0, 10.0]
        assert_same(mine.broadcast(2, group=pair), all_[2])
        assert_same(td_dist.scatter(all_[1:] if rank == 2 else None, 2, group=pair), all_[rank])
    dist.barrier()


A, B = TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(4)})
ODD = TensorDict({"n": {"i": torch.zeros(2, dtype=torch.int16)}})
# Call on each rank -> the error of every rank.
MISMATCHES = {
    "shape": (lambda r: [A, B, A][r].all_reduce(), LeafMismatchError, r"rank 1 .*shape: *a: expected \[3\], got \[4\]"),
    "dtype": (lambda r: [A, A, A.to(torch.int64)][r].all_gather(), LeafMismatchError, "rank 2 .*dtype: *a: .*int64"),
    "gather": (lambda r: [A, B, A][r].gather_to(0), LeafMismatchError, "rank 1 .*shape: *a:"),
    "gather, function": (lambda r: td_dist.gather([A, B, A][r], 0), LeafMismatchError, "rank 1 .*shape: *a:"),
    "all_gather, function": (lambda r: td_dist.all_gather([A, B, A][r]), LeafMismatchError, "rank 1 .*shape: *a:"),
    "keys": (lambda r: [A, A, ODD][r].broadcast(0), TreeStructureError, "missing: *a .*unexpected: *n.i"),
    "reduction": (lambda r: ODD.all_reduce(), UnsupportedError, "'n.i' cannot be reduced.*int16.*cast it"),
    "no tree": (lambda r: td_dist.broadcast(None, 1), TypeError, "gave no tree"),
    "a tree on two ranks": (lambda r: td_dist.broadcast([A, B, None][r], 0), LeafMismatchError, "rank 1 .*shape: *a:"),
    "trees": (lambda r: td_dist.scatter([A] if r == 0 else None, 0), ValueError, "3 trees.*1 trees"),
    "no trees": (lambda r: td_dist.scatter(None, 0), ValueError, "3 trees.*0 trees"),
    "like": (lambda r: (B if r == 2 else A).scatter(0, [A, A, A]), LeafMismatchError, "tree of rank 2"),
    "leaf": (lambda r: A.set("f", NonTensorData([len, 1][r != 1])).all_reduce(), UnsupportedError, "leaf .f.*len"),
    "mean": (lambda r: TensorDict({"i": 1}).all_reduce("avg"), UnsupportedError, "'i' cannot be reduced.*by 'avg'"),
    "op": (lambda r: A.all_reduce("mode"), AttributeError, "MODE"),
    "other op": (
        lambda r: A.all_reduce(["sum", "max", "sum"][r]),
        ValueError,
        "different calls.*expected: *all_reduce 'sum', as on rank 0.*got: *all_reduce 'max' on rank 1",
    ),
    "other call": (
        lambda r: A.all_reduce() if r else A.broadcast(0),
        ValueError,
        "different calls.*expected: *broadcast from rank 0.*got: *all_reduce 'sum' on rank 1",
    ),
    "other source": (lambda r: A.broadcast(r), ValueError, "different calls.*broadcast from rank 1 on rank 1"),
    "vmap": (lambda r: torch.vmap(lambda td: td.all_reduce())(A.unsqueeze(0)), UnsupportedError, "outside of vmap"),
}  # fmt: skip


def _differ(rank):
    for call, kind, pattern in MISMATCHES.values():
        with pytest.raises(kind, match=f"(?s){pattern}"):
            call(rank)
        # Nothing is left over that a later call would take.
        assert int(TensorDict({"x": 1}).all_reduce()["x"]) == 3
    calls = [lambda: A.irecv(1).wait(), lambda: B.isend(0).wait()]
    if rank < 2:
        with pytest.raises(LeafMismatchError, match=r"rank 0|this rank(?s:.)*shape: *a: expected \[3\], got \[4\]"):
            calls[rank]()
    expanded = TensorDict({"a": torch.zeros(1).expand(3)})
    calls = [lambda: td_dist.send(A, 1), lambda: expanded.recv_(0)]
    if rank < 2:
        # Both ranks raise, and the next message arrives.
        with pytest.raises(LeafMismatchError, match="recv_ 'a': the leaf is expanded"):
            calls[rank]()
        one = TensorDict({"x": 1})
        assert int(td_dist.isend(one, 1).wait() is None if rank == 0 else td_dist.irecv(0).wait()["x"]) == 1
    dist.barrier()


def _all(rank):
    _talk(rank)
    _gather(rank)
    _differ(rank)


def test_messages_collectives_and_mismatches(tmp_path):
    """Three processes exchange trees of every kind; where they differ all raise, and can go on."""
    run_ranks(_all, 3, tmp_path)


def _lose(rank, name):
    """Rank 2 dies when the ranks have agreed, then rank 1 is silent: the others say which, and soon."""
    A.all_reduce()
    if rank == 2:
        setattr(dist, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(PeerError, match=f"{name}: a rank of the group did not answer rank {rank}"):
        getattr(A, name)()
    with pytest.raises(PeerError, match="all_reduce: rank 2 did not answer rank 0"):
        A.all_reduce(timeout_s=10)
    if rank == 0:
        with pytest.raises(PeerError, match="recv: rank 1 did not answer rank 0(?s:.)*within 0.5 s"):
            td_dist.recv(1, timeout_s=0.5)
        with pytest.raises(LeafMismatchError, match="recv_ 'a': the leaf is expanded"):
            TensorDict({"a": torch.zeros(1).expand(3)}).recv_(1, timeout_s=0.5)
    assert time.monotonic() - started < 10
    time.sleep(3)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_lost_ranks_are_named(tmp_path, name):
    """A rank that was killed, or that does not answer in time, is named by all others; nothing hangs."""
    assert run_ranks(_lose, 3, tmp_path, name, join=False) == [0, 0, -signal.SIGKILL]


def _send_in_threads(rank, count):
    def one(i):
        tree = TensorDict({"x": torch.full((2000,), float(i))})
        return tree.send(1) if rank == 0 else tree.recv(0)["x"].unique().tolist()

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(one, range(count)))
    assert rank == 0 or sorted(got) == [[float(i)] for i in range(count)]


def test_threads_send_to_one_rank_under_one_tag(tmp_path):
    """Each message arrives whole: number and place in the queue are taken together."""
    run_ranks(_send_in_threads, 2, tmp_path, 60, timeout_s=20)
