"""Processes of torch.distributed: bytes between two ranks, and rounds in which all ranks agree or all raise."""

import builtins
import json
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from tdfunc.core import errors
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import PeerError

# The first frame of a message, with its length and as much of it as fits.
_FRAME_BYTES = 4096
_ROUND_TAG = 1 << 30
# The root waits for less time than the others wait for it, so that it can name the rank that is missing.
_ROOT_PATIENCE = 0.8
_OK, _FAILED = b"\0", b"\1"
# Waits for one transfer, as long as the call does or as given.
Wait = Callable[..., None]


@final
class Ranks:
    """The ranks of a process group, in one call.

    Args:
        call: The name of the call, for messages.
        group: A process group; None is the default group.
        timeout_s: The time that the call waits for another rank; without it the group's timeout.
    """

    # Any: torch.distributed may be built without process groups.
    def __init__(self, call: str, group: Any = None, timeout_s: float | None = None) -> None:
        self.call: str = call
        self.group: Any = group
        self.pg: Any = dist.group.WORLD if group is None else group
        types = [device.type for device in self.pg._device_types]
        # Where tensors must be to be sent: the CPU, if the group has a backend for it.
        self.device: torch.device = (
            torch.device("cpu") if "cpu" in types else torch.device(types[0], torch.accelerator.current_device_index())
        )
        self.patience_s: float = (
            self.pg._get_backend(self.device).options._timeout.total_seconds() if timeout_s is None else timeout_s
        )
        self._patience = timedelta(seconds=max(self.patience_s, 0.001))

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    def world_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    # -- two ranks ------------------------------------------------------------------------------------------------

    def post(self, data: Tensor, peer: int, tag: int) -> Wait:
        """Start to send bytes to a (global) rank; the returned function waits until they are sent."""
        return self._start(lambda: dist.isend(data.to(self.device), peer, self.group, tag), peer)

    def post_into(self, data: Tensor, peer: int, tag: int) -> Wait:
        """Start to fill a tensor with bytes from a (global) rank; the returned function waits until it is full."""
        return self._start(lambda: dist.irecv(data, peer, self.group, tag), peer)

    def empty(self, size_bytes: int) -> Tensor:
        """Return new bytes on the device for messages."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def _start(self, begin: Callable[[], Any], peer: int) -> Wait:
        # The errors of the backends have no class of their own before torch 2.1, and gloo raises the base.
        try:
            work = begin()
        except RuntimeError as err:
            raise self.lost(f"rank {peer}", err) from err

        def wait(patience: timedelta = self._patience) -> None:
            try:
                work.wait(patience)
            except RuntimeError as err:
                raise self.lost(f"rank {peer}", err) from err

        return wait

    def lost(self, who: str, err: Exception) -> PeerError:
        """Return the error for a rank that does not answer."""
        return PeerError(
            f"{self.call}: {who} must answer rank {dist.get_rank()}.",
            expected=f"its message within {self.patience_s:g} s",
            got=str(err).partition("\n")[0].rpartition("] ")[2][:200],
            hint="look for the first error of that rank; after a timeout the group must be made anew.",
        )

    def send_bytes(self, raw: bytes, peer: int, tag: int) -> None:
        """Send bytes of any number."""
        for wait in self.post_bytes(raw, peer, tag):
            wait()

    def post_bytes(self, raw: bytes, peer: int, tag: int) -> list[Wait]:
        """Start to send bytes of any number."""
        first = len(raw).to_bytes(8, "little") + raw[: _FRAME_BYTES - 8]
        waits = [self.post(as_tensor(first.ljust(_FRAME_BYTES, b"\0")), peer, tag)]
        if len(raw) > _FRAME_BYTES - 8:
            waits.append(self.post(as_tensor(raw[_FRAME_BYTES - 8 :]), peer, tag))
        return waits

    def recv_bytes(self, peer: int, tag: int) -> bytes:
        """Return the bytes that `send_bytes` sent."""
        return self.expect_bytes(peer, tag)()

    def expect_bytes(self, peer: int, tag: int) -> Callable[[], bytes]:
        """Be ready for bytes, before which a send of gloo does not end; the call that is returned returns them."""
        frame = self.empty(_FRAME_BYTES)
        wait = self.post_into(frame, peer, tag)

        def finish() -> bytes:
            wait()
            return self._finish(frame, peer, tag)

        return finish

    def _finish(self, frame: Tensor, peer: int, tag: int) -> bytes:
        """Return the bytes of a message whose first frame has come."""
        first = as_bytes(frame)
        size = int.from_bytes(first[:8], "little")
        if size <= _FRAME_BYTES - 8:
            return first[8 : 8 + size]
        rest = self.empty(size - (_FRAME_BYTES - 8))
        self.post_into(rest, peer, tag)()
        return first[8:] + as_bytes(rest)

    # -- all ranks ------------------------------------------------------------------------------------------------

    def agree(self, make: Callable[[], bytes], decide: Callable[[list[bytes]], bytes] = lambda _: b"") -> bytes:
        """Return the decision of the first rank about the bytes that each rank makes; an error of one is raised on all.

        Raises:
            PeerError: A rank did not take part in time; the message names it on every rank.
            Exception: The error of `decide`, or of `make` on any rank.
        """
        own: Exception | None = None
        try:
            mine = _OK + make()
        except Exception as err:
            own, mine = err, _FAILED + write_error(err, self.rank)
        root = self.world_rank(0)
        if self.rank:
            self.send_bytes(mine, root, _ROUND_TAG)
            answer = self.recv_bytes(root, _ROUND_TAG)
        else:
            answer, own = self._decide(mine, decide, own)
        if own is not None:
            raise own
        if answer[:1] == _FAILED:
            raise read_error(answer[1:])
        return answer[1:]

    def _decide(
        self, mine: bytes, decide: Callable[[list[bytes]], bytes], own: Exception | None
    ) -> tuple[bytes, Exception | None]:
        """Hear all ranks and answer them; return the answer, or this rank's own error."""
        heard, silent, is_done = [mine], list[int](), threading.Event()

        # A send of gloo ends when its receiver is ready: all are, so that the ranks can go on to hear the answer.
        peers = [self.world_rank(rank) for rank in range(1, self.size)]
        frames = [self.empty(_FRAME_BYTES) for _ in peers]
        waits: list[Wait | PeerError] = []
        for peer, frame in zip(peers, frames, strict=True):
            try:
                waits.append(self.post_into(frame, peer, _ROUND_TAG))
            except PeerError as err:
                waits.append(err)

        def listen() -> None:
            for rank, (peer, frame, wait) in enumerate(zip(peers, frames, waits, strict=True), 1):
                try:
                    if isinstance(wait, PeerError):
                        raise wait
                    wait(2 * self._patience)
                    heard.append(self._finish(frame, peer, _ROUND_TAG))
                except PeerError as err:
                    silent.append(rank)
                    heard.append(_FAILED + write_error(err))
            is_done.set()

        # In a thread: a timeout of gloo's own closes the connections to all ranks, which then could not be told.
        threading.Thread(target=listen, name="tdfunc-round", daemon=True).start()
        if not is_done.wait(self.patience_s * _ROOT_PATIENCE):
            silent.append(len(heard))
            late = self.lost(f"rank {self.world_rank(len(heard))}", TimeoutError("nothing"))
            heard = [*heard, _FAILED + write_error(late)]
        failed = next((answer for answer in heard if answer[:1] == _FAILED), None)
        if failed is None:
            try:
                answer = _OK + decide([answer[1:] for answer in heard])
            except Exception as err:
                own, answer = err, _FAILED + write_error(err)
        else:
            answer = failed
        for rank in set(range(1, self.size)) - {*silent}:
            try:
                self.send_bytes(answer, self.world_rank(rank), _ROUND_TAG)
            except PeerError as err:
                own = own or (err if failed is None else None)
        return answer, own


# Any: DTensor, whose module takes long to import.
def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is a DTensor, of which each rank has a part."""
    # Before that module is imported by another, there is none.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def find_sharded(tree: TensorCollection) -> Any:
    """Return a DTensor of a tree, or None if it has none."""
    # Not by recursion: a tree may be deep.
    stack = [tree] if "torch.distributed.tensor" in sys.modules else []
    while stack:
        for node in stack.pop()._data.values():
            if isinstance(node, TensorCollection):
                stack.append(node)
            elif is_sharded(node):
                return node
    return None


def group_of(tree: TensorCollection) -> Any:
    """Return the group of the ranks that have a tree: of its mesh, if that has one dimension and not all ranks."""
    mesh = find_sharded(tree).device_mesh
    return mesh.get_group() if mesh.ndim == 1 and mesh.size() < dist.get_world_size() else None


def own_part(leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return the start and shape of this rank's part of a DTensor, and True if no earlier rank has the same part."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]
    mesh, placements = leaf.device_mesh, leaf.placements
    shape, start = utils.compute_local_shape_and_global_offset(leaf.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    copies = [at for at, place in zip(coordinate or (), placements, strict=False) if place.is_replicate()]
    return tuple(start), tuple(shape), coordinate is not None and not any(copies)


def place_like(part: Tensor, like: Any) -> Tensor:
    """Return a DTensor like another one, around this rank's part."""
    stride = torch.empty(like.shape, device="meta").stride()
    part = part.to(like.device_mesh.device_type)
    return type(like).from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=stride)


def as_tensor(raw: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return data.cpu().numpy().tobytes()


def write_error(err: Exception, rank: int | None = None) -> bytes:
    """Return an error, and the rank that raised it, as bytes for other ranks."""
    code, text = None, str(err)
    if isinstance(err, OSError) and err.errno is not None:
        code, text = err.errno, f"{err.strerror}: {err.filename}" if err.filename else str(err.strerror)
    text = text if rank is None else f"{text} (raised by rank {rank})"
    return json.dumps([type(err).__name__, text, code]).encode()


def read_error(raw: bytes) -> Exception:
    """Return the error that `write_error` wrote."""
    name, text, code = json.loads(raw)
    if code is not None:
        return OSError(code, text)
    kind = getattr(errors, name, getattr(builtins, name, None))
    return kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(f"{name}: {text}")
