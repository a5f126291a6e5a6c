"""Trees between processes of torch.distributed: messages from rank to rank, and collectives."""

from tdfunc.distributed.collectives import all_gather, all_reduce, broadcast, gather, reduce, scatter
from tdfunc.distributed.members import from_local, on_members, shard, to_local
from tdfunc.distributed.messages import PendingMessage, irecv, isend, recv, send

__all__ = [
    "PendingMessage",
    "all_gather",
    "all_reduce",
    "broadcast",
    "from_local",
    "gather",
    "irecv",
    "isend",
    "on_members",
    "recv",
    "reduce",
    "scatter",
    "send",
    "shard",
    "to_local",
]


def __dir__() -> list[str]:
    return list(__all__)
