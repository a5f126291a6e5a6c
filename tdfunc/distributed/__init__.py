"""Trees between processes of torch.distributed: messages from rank to rank, and collectives."""

from tdfunc.core.surface import surface as _surface
from tdfunc.distributed.collectives import all_gather as all_gather
from tdfunc.distributed.collectives import all_reduce as all_reduce
from tdfunc.distributed.collectives import broadcast as broadcast
from tdfunc.distributed.collectives import gather as gather
from tdfunc.distributed.collectives import reduce as reduce
from tdfunc.distributed.collectives import scatter as scatter
from tdfunc.distributed.members import from_local as from_local
from tdfunc.distributed.members import on_members as on_members
from tdfunc.distributed.members import shard as shard
from tdfunc.distributed.members import to_local as to_local
from tdfunc.distributed.messages import PendingMessage as PendingMessage
from tdfunc.distributed.messages import irecv as irecv
from tdfunc.distributed.messages import isend as isend
from tdfunc.distributed.messages import recv as recv
from tdfunc.distributed.messages import send as send

_surface(globals())
