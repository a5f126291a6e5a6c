"""Threads that call in one group: a tree of one thread is never joined with a tree of another."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tdfunc import ConcurrencyError, TensorDict
from tdfunc.storage.disk import ranks
from tests.distributed.ranks import run_ranks

TIMEOUT_S = 20
ONE = TensorDict({"x": torch.ones(2)})


def _wait_for(is_there):
    while not is_there():
        time.sleep(0.01)


def _call_beside(home, rank):
    """Call in a second thread, once the first is in a call; then let the other rank go on."""
    _wait_for(lambda: ranks._entered)
    with pytest.raises(ConcurrencyError, match=r"another thread is in a call of the group(?s:.)*new_group"):
        ONE.all_reduce()
    (home / f"refused {rank}").touch()


def _refused_on_one_rank(rank, home):
    if rank:
        _wait_for((home / "refused 0").exists)
        assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]
    else:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(_call_beside, home, rank)
            assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]
            beside.result()
    # Rank 1 makes the call that was refused on rank 0, and rank 0 its next one.
    with pytest.raises(ConcurrencyError, match="not in the same call"):
        ONE.all_reduce()
    assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]


def test_a_call_that_is_refused_on_one_rank_is_an_error_on_the_other(tmp_path):
    """The ranks do not pair the call with another one of the same form."""
    run_ranks(_refused_on_one_rank, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)


def _refused_on_all_ranks(rank, home):
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(_call_beside, home, rank)
        if rank == 1:
            # Rank 0 is in its call until this rank is: only then the second thread of this rank may call.
            _wait_for((home / "refused 0").exists)
        total = ONE.all_reduce(timeout_s=TIMEOUT_S) if rank == 0 else _slow_call()
        beside.result()
    assert total["x"].tolist() == [2.0, 2.0]
    assert ONE.all_reduce()["x"].tolist() == [2.0, 2.0]


def _slow_call():
    """Call with a round that begins late, so that the second thread comes during it."""
    begin = ranks.Ranks.send_bytes

    def late(self, raw, peer, tag):
        time.sleep(0.5)
        begin(self, raw, peer, tag)

    ranks.Ranks.send_bytes = late
    try:
        return ONE.all_reduce(timeout_s=TIMEOUT_S)
    finally:
        ranks.Ranks.send_bytes = begin


def test_a_call_that_is_refused_on_all_ranks_leaves_them_in_step(tmp_path):
    """The interrupted call ends, and the next one works."""
    run_ranks(_refused_on_all_ranks, 2, tmp_path, tmp_path, timeout_s=TIMEOUT_S)


def _own_groups(rank):
    groups = [dist.new_group() for _ in range(2)]
    found = [[], []]

    def work(number):
        for step in range(20):
            tree = TensorDict({"x": torch.tensor(float(10**number * (rank + 1) + step))})
            total = tree.all_reduce(group=groups[number])["x"].item()
            found[number].append(total == 3 * 10**number + 2 * step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 20] * 2


def test_threads_with_groups_of_their_own(tmp_path):
    """Their calls are summed apart."""
    run_ranks(_own_groups, 2, tmp_path, timeout_s=TIMEOUT_S)
