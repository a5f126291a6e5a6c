"""Processes of torch.distributed: bytes between two ranks, and rounds in which all ranks agree or all raise."""

import builtins
import json
import os
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tdfunc.core import errors
from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import is_fake, outside
from tdfunc.core.errors import ConcurrencyError, PeerError, UnsupportedError, error
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.system import platform
from tdfunc.storage.disk.raw import outside_transforms

# The first frame of a message, with its length and as much of it as fits.
_FRAME_BYTES = 4096
_ROUND_TAG = 1 << 30
_SHOWN = 10
# The root waits for less time than the others wait for it, so that it can name the rank that is missing.
_ROOT_PATIENCE = 0.8
_LEAST_PATIENCE_S = 0.001
_NO_END = timedelta(days=3650)
# Waits for one transfer, as long as the call does or as given.
Wait = Callable[..., None]


class Envelope(NamedTuple):
    """What one rank tells others in a round or at the begin of a message."""

    # The content is an error of this rank.
    is_failed: bool
    # Of the round in its group, or of the message in its lane.
    number: int
    # The call with all that the ranks must have in common.
    terms: str
    content: bytes

    def encode(self) -> bytes:
        """Return it as bytes."""
        terms = self.terms.encode(errors="replace")
        return _HEAD.pack(self.is_failed, self.number, len(terms)) + terms + self.content


_HEAD = struct.Struct("<?QI")


def read_envelope(raw: bytes) -> Envelope:
    """Return the envelope that was encoded."""
    is_failed, number, length = _HEAD.unpack_from(raw)
    end = _HEAD.size + length
    return Envelope(is_failed, number, raw[_HEAD.size : end].decode(), raw[end:])


@dataclass
class LaneCount:
    """The messages from one rank to another under one tag."""

    # The number of the next message that this rank starts.
    next: int = 0
    # By how much the sender's numbers are larger than the receiver's.
    shift: int = 0


@dataclass
class _Counts:
    """The number of the next round of a group, and its messages by direction, peer and tag."""

    rounds: int = 0
    # Calls that were refused here, because another thread was in a call: the other ranks may wait for them.
    refused: int = 0
    lanes: defaultdict[tuple[str, int, int], LaneCount] = field(default_factory=lambda: defaultdict(LaneCount))


# The calls in which threads are, with the threads, in the order of their begin. Only a signal handler makes another one
# in a thread's call.
_entered: list[tuple["Ranks", int]] = []
# By the group itself: a later group may have the name of one that was destroyed.
_counts: WeakKeyDictionary[Any, _Counts] = WeakKeyDictionary()


@final
class Ranks:
    """The ranks of a process group, in one call.

    Args:
        call: The name of the call, for messages.
        group: A process group; None is the default group.
        timeout_s: The time that the call waits for another rank; without it the group's timeout.

    Raises:
        ValueError: The default group does not exist, or this process is not in the group.
    """

    # Any: torch.distributed may be built without process groups.
    def __init__(self, call: str, group: Any = None, timeout_s: float | None = None) -> None:
        self.call: str = call
        # The call with all that the ranks must have in common; each round compares it.
        self.terms: str = call
        self.group: Any = group
        self.pg: Any = _find_group(call, group)
        self.counts: _Counts = _counts.setdefault(self.pg, _Counts())
        types = [device.type for device in self.pg._device_types]
        # Where tensors must be to be sent: the CPU, if the group has a backend for it.
        self.device: torch.device = torch.device("cpu")
        if "cpu" not in types:
            self.device = torch.device(types[0], torch.accelerator.current_device_index())
        self.patience_s: float = self.pg._get_backend(self.device).options._timeout.total_seconds()
        self._refusal: Exception | None = None
        # It was in a round.
        self._has_begun = False
        if timeout_s is not None:
            self._take_timeout(timeout_s)
        self._patience = timedelta(seconds=self.patience_s)

    def _take_timeout(self, timeout_s: float) -> None:
        """Take the time of a call; one that is not a time is refused in the round, where all ranks hear of it."""
        try:
            seconds = max(float(timeout_s), _LEAST_PATIENCE_S)
            timedelta(seconds=seconds)
        except (TypeError, ValueError, OverflowError, RuntimeError) as err:
            self._refusal = error(
                ValueError,
                f"{self.call}: timeout_s is not a number of seconds.",
                expected="a finite number, or None for the group's timeout",
                got=repr(timeout_s)[:100],
            )
            self._refusal.__cause__ = err
        else:
            self.patience_s = seconds

    def wait_on(self) -> None:
        """Wait without an end: what nobody waits for here must not close the connections by a timeout of gloo's."""
        self._patience = _NO_END

    def check(self) -> None:
        """Raise if an argument of the call was wrong."""
        if self._refusal is not None:
            raise self._refusal

    def check_member(self, name: str, rank: int | None) -> int:
        """Return the rank in the group of a global rank; raise if it is not in the group.

        Args:
            name: The name of the argument, for the message.
            rank: A global rank.
        """
        members = dist.get_process_group_ranks(self.pg)
        if rank is not None and rank in members:
            return members.index(rank)
        shown = ", ".join(map(str, members[:_SHOWN]))
        if len(members) > _SHOWN:
            shown += ", ..."
        raise error(
            ValueError,
            f"{self.call}: {name}={rank} is not a rank of the group.",
            expected=f"one of the global ranks {shown}",
            got=repr(rank)[:100],
            hint="ranks are global: torch.distributed.get_global_rank(group, rank).",
        )

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
        if self.group is None:
            return rank
        return dist.get_global_rank(self.group, rank)

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
        # The errors of the backends have no separate class before torch 2.1, and gloo raises the base.
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
            f"{self.call}: {who} did not answer rank {dist.get_rank()}.",
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

        Everything that can fail on one rank must run in `make`: a rank that raises before a round leaves the others in
        it, and takes part in another one with its next call.

        Raises:
            ValueError: The calls of the ranks differ; every rank raises, and the next round works.
            ConcurrencyError: A rank left an earlier call before its end; every rank raises, and the next round works.
                Or a signal handler or another thread calls in the middle of another call; only this rank raises.
            PeerError: A rank did not take part in time; the message names it on every rank.
            Exception: The error of `decide`, or of `make` on any rank.
        """
        self._refuse_handler()
        self._refuse_thread()
        number = self.counts.rounds
        if not self._has_begun:
            # Where other ranks made the calls that were refused here, their number differs, and all raise.
            number += self.counts.refused
            self.counts.refused = 0
            self._has_begun = True
        # A rank that is interrupted here is in the next round.
        self.counts.rounds = number + 1
        own: Exception | None = None
        try:
            self.check()
            self.refuse_recording()
            content = make()
            mine = Envelope(False, number, self.terms, content)
        except Exception as err:
            own = err
            mine = Envelope(True, number, self.terms, write_error(err, dist.get_rank()))
        # The tensors of a round are none of the transform's or recording's that this rank may be in.
        with self.entered(), outside():
            if self.rank:
                answer = self._ask(mine)
            else:
                answer, own = self._decide(mine, decide, own)
        # All are in step again, whatever their numbers were.
        self.counts.rounds = answer.number + 1
        if own is not None:
            raise own
        if answer.is_failed:
            raise read_error(answer.content)
        return answer.content

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Refuse other calls in the group: a handler's would wait for what it interrupted, another thread's would mix.

        Raises:
            ConcurrencyError: Another thread is in a call.
        """
        entry = (self, threading.get_ident())
        _entered.append(entry)
        try:
            self._refuse_thread()
            yield
        finally:
            _entered.remove(entry)

    def refuse_recording(self) -> None:
        """Raise inside of a recording: a replay makes no call, so a rank that replays leaves the others waiting."""
        # A rank alone has nobody to wait for.
        if self.size == 1:
            return
        # Inside of a transform a new tensor does not show the mode.
        with outside_transforms():
            is_recording = is_fake(None)
        if is_recording:
            raise UnsupportedError(
                f"{self.call}: the ranks cannot talk to each other in a recording, whose tensors have no values.",
                got="a call inside of tdfunc.jit or a FakeTensorMode",
                hint=f"{self.call} between two jitted functions.",
            )

    def _refuse_handler(self) -> None:
        """Raise if this thread is in the middle of another call of the group."""
        thread = threading.get_ident()
        found = next((other for other, at in list(_entered) if at == thread and other.counts is self.counts), self)
        if found is not self:
            raise ConcurrencyError(
                f"{self.call}: this thread is in another call of the group; nothing was sent.",
                got=f"a call from a signal handler, in the middle of {found.call}",
                hint="note the signal in the handler, and make the call after that one has returned.",
            )

    def _refuse_thread(self) -> None:
        """Raise if another thread is in a call of the group: on another rank, the two calls may come in another order.

        The trees of the two calls may be alike, and would be summed or joined with each other.
        """
        thread = threading.get_ident()
        # A copy, since other threads change the list meanwhile.
        entries = [entry for entry in list(_entered) if entry[0].counts is self.counts]
        first, at = next(iter(entries), (self, thread))
        # A rank alone cannot be out of step.
        if at != thread and self.size > 1:
            self.counts.refused += 1
            raise ConcurrencyError(
                f"{self.call}: another thread is in a call of the group; nothing was sent.",
                got=f"a call of a second thread, during {first.call}",
                hint="give each thread its own group, torch.distributed.new_group(), or make the calls in one thread.",
            )

    def _ask(self, mine: Envelope) -> Envelope:
        """Send the root what this rank has, and return the answer."""
        root = self.world_rank(0)
        self.send_bytes(mine.encode(), root, _ROUND_TAG)
        while True:
            answer = read_envelope(self.recv_bytes(root, _ROUND_TAG))
            # An earlier one is of a round that this rank was interrupted in.
            if answer.number >= mine.number:
                return answer

    def _decide(
        self, mine: Envelope, decide: Callable[[list[bytes]], bytes], own: Exception | None
    ) -> tuple[Envelope, Exception | None]:
        """Hear all ranks and answer them; return the answer, or this rank's own error."""
        heard, silent = self._hear(mine)
        number = max([envelope.number for envelope in heard])
        failed = next((envelope for envelope in heard if envelope.is_failed), None)
        if failed is not None:
            answer = failed._replace(number=number)
        else:
            try:
                self._compare(heard)
                content = decide([envelope.content for envelope in heard])
                answer = Envelope(False, number, self.terms, content)
            except Exception as err:
                own = err
                answer = Envelope(True, number, self.terms, write_error(err))
        raw = answer.encode()
        for rank in set(range(1, self.size)) - silent:
            try:
                self.send_bytes(raw, self.world_rank(rank), _ROUND_TAG)
            except PeerError as err:
                # Any earlier error goes first.
                if own is None and failed is None:
                    own = err
        return answer, own

    def _hear(self, mine: Envelope) -> tuple[list[Envelope], set[int]]:
        """Return what the ranks say, in their order up to the first that is late, and the ranks that are silent."""
        heard: list[Envelope] = [mine]
        silent: set[int] = set()
        is_done = threading.Event()
        # A send of gloo ends when its receiver is ready: all are, so that the ranks can continue and hear the answer.
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
                    heard.append(read_envelope(self._finish(frame, peer, _ROUND_TAG)))
                except PeerError as err:
                    silent.add(rank)
                    heard.append(self._failed(err))
            is_done.set()

        # In a thread: a timeout of gloo's own closes the connections to all ranks, which then could not be told.
        threading.Thread(target=listen, name="tdfunc-round", daemon=True).start()
        is_done.wait(self.patience_s * _ROOT_PATIENCE)
        # Not what `wait` returns: a signal handler may have taken all of its time.
        if is_done.is_set():
            return heard, silent
        late = len(heard)
        error_of_late = self.lost(f"rank {self.world_rank(late)}", TimeoutError("nothing"))
        return [*heard[:late], self._failed(error_of_late)], silent | {late}

    def _failed(self, err: PeerError) -> Envelope:
        """Return what stands for a rank that said nothing."""
        return Envelope(True, 0, self.terms, write_error(err))

    def _compare(self, heard: Sequence[Envelope]) -> None:
        """Raise unless all ranks make the same call in the same round."""
        first = heard[0]
        root = self.world_rank(0)
        for rank, other in enumerate(heard):
            if other.terms != first.terms:
                raise error(
                    ValueError,
                    f"{self.call}: the ranks of the group make different calls.",
                    expected=f"{first.terms}, as on rank {root}",
                    got=f"{other.terms} on rank {self.world_rank(rank)}",
                    hint="this call had no effect on any rank; the next one that is equal on all ranks works.",
                )
            if other.number != first.number:
                raise ConcurrencyError(
                    f"{self.call}: the ranks of the group are not in the same call.",
                    expected=f"round {first.number} of the group, as on rank {root}",
                    got=f"round {other.number} on rank {self.world_rank(rank)}",
                    hint="one rank left an earlier call before its end, or made one alone; the next call works.",
                )


# Any: torch.distributed may be built without process groups.
def _find_group(call: str, group: Any) -> Any:
    """Return a process group, or the default one; raise if this process is not in it."""
    # Torch's own error, if there is no default group.
    rank = dist.get_rank()
    if group is None:
        return dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise error(
            ValueError,
            f"{call}: this process is not in the group.",
            expected=f"a group that contains rank {rank}",
            got="GroupMember.NON_GROUP_MEMBER, which torch.distributed.new_group returns on other ranks",
            hint="only the ranks of a group make its calls.",
        )
    return group


# Any: DTensor, whose module takes long to import.
def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is a DTensor, of which each rank has a part."""
    # Before that module is imported by another, there is none.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


# Any: a tree, or a mapping, list or tuple of anything.
def find_sharded(tree: Any) -> Any:
    """Return the DTensor of the most ranks in a tree or in a plain object, or None if there is none.

    The leaves of one tree may be on several meshes: on all ranks, and on a row of them.
    """
    # Any: a DTensor.
    widest: Any = None
    # Not by recursion: a tree may be deep.
    stack = []
    if "torch.distributed.tensor" in sys.modules:
        stack = [tree]
    # A plain object may contain itself.
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if is_sharded(node):
            if widest is None or node.device_mesh.size() > widest.device_mesh.size():
                widest = node
            continue
        parts = _parts_of(node)
        if parts and id(node) not in seen:
            seen.add(id(node))
            stack.extend(parts)
    return widest


# Any: a node of a tree, or a plain object.
def _parts_of(node: Any) -> Collection[Any]:
    """Return the parts of a tree or of a container; nothing of any other object."""
    if isinstance(node, TensorCollection):
        return node._data.values()
    if isinstance(node, NonTensorData):
        return (node.data,)
    if isinstance(node, Mapping):
        return node.values()
    if isinstance(node, (list, tuple)):
        return node
    return ()


# Any: a DTensor, and a process group.
def group_of(leaf: Any) -> Any:
    """Return the group of the ranks that have a DTensor: of its mesh, if that has one dimension and not all ranks."""
    mesh = leaf.device_mesh
    if mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        return mesh.get_group()
    return None


def machine_of(folder: str) -> list[Any] | None:
    """Return what tells the kernel and the file system of a folder from others, or None if the system has no name.

    Processes with equal results have one copy of each page of a file in that folder.
    """
    # The first save of a run makes the folder.
    while not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        if parent == folder:
            break
        folder = parent
    kernel = platform.kernel_id()
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None
    return None if kernel is None else [kernel, device]


class OwnPart(NamedTuple):
    """This rank's part of a DTensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    # True if no earlier rank has the same part.
    is_first: bool


# Any: a DTensor.
def own_part(leaf: Any) -> OwnPart:
    """Return this rank's part of a DTensor."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]
    mesh = leaf.device_mesh
    placements = leaf.placements
    shape, start = utils.compute_local_shape_and_global_offset(leaf.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    # A rank outside of the mesh has no place in it.
    is_first = coordinate is not None
    for at, placement in zip(coordinate or (), placements, strict=False):
        if placement.is_replicate() and at:
            is_first = False
    return OwnPart(tuple(start), tuple(shape), is_first)


def place_like(part: Tensor, like: Any) -> Tensor:
    """Return a DTensor like another one, around this rank's part."""
    stride = torch.empty(like.shape, device="meta").stride()
    part = part.to(like.device_mesh.device_type)
    # Each rank has read the values themselves: as parts of a sum they would be added up.
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    placements = [replicate if place.is_partial() else place for place in like.placements]
    return type(like).from_local(part, like.device_mesh, placements, shape=like.shape, stride=stride)


def as_tensor(raw: bytes) -> Tensor:
    """Return bytes as a tensor."""
    if raw:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return data.cpu().numpy().tobytes()


def write_error(err: Exception, rank: int | None = None) -> bytes:
    """Return an error, and the rank that raised it, as bytes for other ranks."""
    code = None
    text = str(err)
    if isinstance(err, OSError) and err.errno is not None:
        code = err.errno
        if err.filename:
            text = f"{err.strerror}: {err.filename}"
        else:
            text = str(err.strerror)
    if rank is not None and "(raised by rank " not in text:
        text = f"{text} (raised by rank {rank})"
    return json.dumps([type(err).__name__, text, code]).encode()


def read_error(raw: bytes) -> Exception:
    """Return the error that `write_error` wrote."""
    name, text, code = json.loads(raw)
    if code is not None:
        return OSError(code, text)
    kind = getattr(errors, name, getattr(builtins, name, None))
    if isinstance(kind, type) and issubclass(kind, Exception):
        # Some have more arguments than a text.
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{name}: {text}")
