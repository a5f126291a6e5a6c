"""Trees from one rank to another: one header that the receiver answers, and one block of bytes."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import torch.distributed as dist
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import make_lock, outside
from tdfunc.core.errors import ConcurrencyError, LeafMismatchError, PeerError, error
from tdfunc.core.keys import dotted
from tdfunc.ops.edits.storage_writes import check_writable, write_tree
from tdfunc.parallel.block import Packed, Structure, find_structure, key_of, pack, read_structure
from tdfunc.storage.disk.ranks import Envelope, LaneCount, Ranks, Wait, read_envelope, read_error, write_error
from tdfunc.storage.safetensors.like import describe_found, mismatch, parse_found
from tdfunc.storage.tree.build import Classes, check_classes

T = TypeVar("T", bound=TensorCollection)

_DIGEST_BYTES = 8
_LENGTH_BYTES = 8
_KEY_BYTES = 16
# A longer description does not fit into a frame.
_SHORT_BYTES = 4000
# The terms of a header: where a backend has no tags, a rank tells it from the calls of all ranks.
_TERMS = "a message"
# The answers of a receiver.
_GO = b"\0"
_MISFIT = b"\1"
_DESCRIBE = b"\2"
_REFUSED = b"\3"
# A lane: group, direction, peer and tag.
_LaneKey: TypeAlias = tuple[str, str, int, int]
# The last message on its way in each lane. Messages of a lane go one after the other.
_last: dict[_LaneKey, "Future[Any]"] = {}
# The lanes in whose messages threads are, with the threads. Only a signal handler begins another one there.
_entered: set[tuple[_LaneKey, int]] = set()
_lock = make_lock()


class _Content(NamedTuple):
    """The content of a header."""

    # Of the leaves' paths, shapes and dtypes.
    digest: bytes
    # The length of the piece that is sent before the answer.
    eager_bytes: int
    # The description of the tree, or its key if it is long.
    description: bytes

    def encode(self) -> bytes:
        return self.digest + self.eager_bytes.to_bytes(_LENGTH_BYTES, "little") + self.description


def _read_content(raw: bytes) -> _Content:
    end = _DIGEST_BYTES + _LENGTH_BYTES
    eager_bytes = int.from_bytes(raw[_DIGEST_BYTES:end], "little")
    return _Content(raw[:_DIGEST_BYTES], eager_bytes, raw[end:])


def classes_of(tree: TensorCollection) -> dict[str, type[TensorCollection]]:
    """Return the classes of a tree's nodes by the names that descriptions use."""
    cls = type(tree)
    found = {f"{cls.__module__}:{cls.__qualname__}": cls}
    for node in tree._data.values():
        if isinstance(node, TensorCollection):
            found.update(classes_of(node))
    return found


@final
class PendingMessage:
    """A message on its way; `isend` and `irecv` return it."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def wait(self) -> Any:
        """Return when the message is through: the tree of `irecv`, None for `isend`.

        Raises:
            PeerError: The other rank did not answer in time, or died.
            LeafMismatchError: The trees of the two ranks differ in shapes or dtypes.
            TreeStructureError: They differ in keys.
        """
        return self._future.result()

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._future.done()


class _Lane(NamedTuple):
    """One direction between two ranks under one tag."""

    ranks: Ranks
    direction: str
    peer: int
    tag: int

    @property
    def key(self) -> _LaneKey:
        return self.ranks.pg.group_name, self.direction, self.peer, self.tag

    @property
    def tags(self) -> tuple[int, int, int]:
        """The tags of headers and values, of the receiver's answers, and of descriptions that it asks for."""
        first = 3 * self.tag
        return first, first + 1, first + 2

    @property
    def is_eager(self) -> bool:
        """Whether the first piece is sent before the receiver's answer: nccl has no tags to tell descriptions apart."""
        return self.ranks.device.type == "cpu"

    @property
    def counter(self) -> LaneCount:
        """The count of the messages of this lane, which both ranks keep."""
        return self.ranks.counts.lanes[self.direction, self.peer, self.tag]

    def _take_turn(self, own: "Future[Any]") -> "tuple[int, Future[Any] | None]":
        """Return the number of the next message, and the message that is on its way before it.

        Both are taken together: another thread may send at the same time.
        """
        count = self.counter
        with _lock:
            before = _last.get(self.key)
            _last[self.key] = own
            number = count.next
            count.next = number + 1
        return number, before

    def _leave(self, own: "Future[Any]", _: Any = None) -> None:
        """Let the next message begin."""
        with _lock:
            if _last.get(self.key) is own:
                del _last[self.key]
        if not own.done():
            own.set_result(None)

    def _give_up(self, own: "Future[Any]", before: "Future[Any] | None") -> None:
        """Leave the place of a message that was not begun; the next one still waits for those before it."""
        if before is None:
            self._leave(own)
        else:
            before.add_done_callback(partial(self._leave, own))

    def start(self, prepare: "Callable[[], _Work]") -> "Future[Any]":
        """Run in a thread, after the messages that started earlier.

        The number is taken first: a message that an interrupt leaves counts, so that the other rank hears of it.
        """
        future: Future[Any] = Future()
        before: Future[Any] | None = None
        is_handed = False
        try:
            number, before = self._take_turn(future)
            work = prepare()
            self._start(work.run, future, number, before)
            is_handed = True
        finally:
            if not is_handed:
                self._give_up(future, before)
        if work.error is not None:
            raise work.error
        return future

    def _start(self, run: Callable[[int], Any], own: "Future[Any]", number: int, before: "Future[Any] | None") -> None:
        def work() -> None:
            if before is not None:
                before.exception()
            try:
                own.set_result(run(number))
            except BaseException as err:
                own.set_exception(err)
            self._leave(own)

        threading.Thread(target=work, name=f"tdfunc-{self.ranks.call}", daemon=True).start()

    def run(self, prepare: "Callable[[], _Work]") -> Any:
        """Run here, unless messages are under way that come first."""
        entry = self.key, threading.get_ident()
        if entry in _entered:
            raise ConcurrencyError(
                f"{self.ranks.call}: this thread is in another message {self.direction} rank {self.peer}; "
                "nothing was sent.",
                got="a call from a signal handler, in the middle of that message",
                hint="note the signal in the handler, and make the call after that one has returned; or another tag.",
            )
        future: Future[Any] = Future()
        before: Future[Any] | None = None
        is_handed = False
        # In the block from the first line on: Ctrl-C must not leave the lane taken.
        try:
            _entered.add(entry)
            number, before = self._take_turn(future)
            work = prepare()
            if before is None and work.error is None:
                # As in a thread: the tensors of a message are none of a transform's.
                with outside():
                    return work.run(number)
            self._start(work.run, future, number, before)
            is_handed = True
        finally:
            _entered.discard(entry)
            if not is_handed:
                self._give_up(future, before)
        if work.error is not None:
            raise work.error
        return future.result()


class _Work(NamedTuple):
    """A message that is ready to go."""

    # A function of the number of the message.
    run: Callable[[int], Any]
    # An error of this rank alone, of which `run` tells the other one.
    error: Exception | None = None


def _lane(call: str, group: Any, timeout_s: float | None, direction: str, peer: int, tag: int) -> _Lane:
    """Return the lane of a message; raise if the peer is not in the group."""
    ranks = Ranks(call, group, timeout_s)
    ranks.check_member("dst" if direction == "to" else "src", peer)
    if peer == dist.get_rank():
        raise error(
            ValueError,
            f"{call}: rank {peer} cannot exchange messages with itself.",
            expected="another rank of the group",
        )
    return _Lane(ranks, direction, peer, tag)


def _sender(td: TensorCollection, lane: _Lane) -> _Work:
    """Return the work that sends a tree; if it cannot be sent, the receiver hears of it in its place."""
    try:
        lane.ranks.check()
        lane.ranks.refuse_recording()
        return _Work(partial(_send, pack(td, lane.ranks.call), lane))
    except Exception as err:
        content = write_error(err, dist.get_rank())
        lane.ranks.wait_on()

        def refuse(number: int) -> None:
            lane.ranks.send_bytes(Envelope(True, number, _TERMS, content).encode(), lane.peer, lane.tags[0])

        return _Work(refuse, err)


def _send(packed: Packed, lane: _Lane, number: int) -> None:
    """Send a message: header, first piece, and once the receiver has agreed the other pieces."""
    ranks = lane.ranks
    peer = lane.peer
    structure = packed.structure
    tag, back, described = lane.tags
    runs = structure.block.runs if lane.is_eager else []
    eager_bytes = runs[0].size_bytes if runs else 0
    text = structure.text
    description = text if len(text) < _SHORT_BYTES else key_of(text)
    content = _Content(structure.digest, eager_bytes, description)
    ranks.send_bytes(Envelope(False, number, _TERMS, content.encode()).encode(), peer, tag)
    expect = ranks.expect_bytes(peer, back)
    pieces = structure.block.pieces(packed.leaves, ranks.device)
    piece = next(pieces, None)
    sent = deque[Wait]()
    if piece is not None and lane.is_eager:
        sent.append(ranks.post(piece, peer, tag))
        piece = next(pieces, None)
    answer = expect()
    if answer == _DESCRIBE:
        ranks.send_bytes(text, peer, described)
        answer = ranks.recv_bytes(peer, back)
    while piece is not None and answer == _GO:
        sent.append(ranks.post(piece, peer, tag))
        # One piece is packed while the one before it is on its way.
        if len(sent) > 1:
            sent.popleft()()
        piece = next(pieces, None)
    for wait in sent:
        wait()
    if answer[:1] == _REFUSED:
        raise read_error(answer[1:])
    if answer[:1] == _MISFIT:
        raise mismatch(ranks.call, f"rank {peer} (expected) and this rank", parse_found(answer[1:]), structure.found)


class _Verdict(NamedTuple):
    """What a receiver makes of a header."""

    answer: bytes
    # The error that this rank raises after its answer.
    error: Exception | None
    # The sender's tree, if it is taken.
    theirs: Structure | None = None


@final
class _Inbox:
    """What a receiver expects of one message."""

    def __init__(
        self, like: TensorCollection | None, lane: _Lane, classes: Classes = (), refusal: Exception | None = None
    ) -> None:
        self.lane = lane
        # The answer to any message: this rank cannot take it.
        self.refusal = refusal
        self._error: Exception | None = None
        self.structure: Structure | None = None
        self.classes: Classes = classes
        try:
            lane.ranks.check()
            lane.ranks.refuse_recording()
            if like is not None:
                self.structure = pack(like, lane.ranks.call).structure
                self.classes = classes_of(like)
        except Exception as err:
            self.refusal = self._error = err
            lane.ranks.wait_on()

    def work(self, run: Callable[[int], Any] | None = None) -> _Work:
        """Return the work that receives the message: `receive`, or a function around it."""
        # Where the tree could not be described, nothing is received, but the sender hears of it.
        if run is None or self._error is not None:
            run = self.receive
        return _Work(run, self._error)

    # Any: the tree of the sender, of any class.
    def receive(self, number: int) -> Any:
        """Receive the message of this number, and return its tree."""
        ranks = self.lane.ranks
        peer = self.lane.peer
        tag, back, _ = self.lane.tags
        header = read_envelope(ranks.recv_bytes(peer, tag))
        expected = self._follow(number, header.number)
        if header.is_failed:
            # The sender does not wait for an answer.
            raise self.refusal or read_error(header.content)
        content = _read_content(header.content)
        verdict = self._judge(header, content, expected)
        theirs = verdict.theirs
        waits = ranks.post_bytes(verdict.answer, peer, back)
        if theirs is not None:
            sizes = [run.size_bytes for run in theirs.block.runs]
        elif content.eager_bytes:
            # It is on its way, and must not be taken for a part of the next message.
            sizes = [content.eager_bytes]
        else:
            sizes = []
        wire = ranks.empty(sum(sizes))
        waits += [ranks.post_into(part, peer, tag) for part in wire.split_with_sizes(sizes)]
        leaves: list[Tensor] = []
        try:
            # While the bytes are on their way.
            if theirs is not None:
                leaves = theirs.block.cut(wire)
        finally:
            for wait in waits:
                wait()
        if verdict.error is not None:
            raise verdict.error
        assert theirs is not None
        return theirs.build(leaves, self.classes)

    def _judge(self, header: Envelope, content: _Content, expected: int) -> _Verdict:
        """Decide if this rank takes a message; for that it may ask for the description."""
        try:
            self._check(header, expected)
            theirs = self._describe(content.description)
            misfit = self._misfit(content.digest, theirs)
            if misfit is None:
                return _Verdict(_GO, None, theirs)
            assert self.structure is not None
            return _Verdict(_MISFIT + describe_found(self.structure.found), misfit)
        except PeerError:
            raise
        except Exception as refusal:
            return _Verdict(_REFUSED + write_error(refusal, dist.get_rank()), refusal)

    def _follow(self, own: int, theirs: int) -> int:
        """Return the expected number, and continue from the sender's, which differs if a rank left a message."""
        count = self.lane.counter
        with _lock:
            expected = own + count.shift
            count.shift += theirs - expected
        return expected

    def _check(self, header: Envelope, expected: int) -> None:
        """Raise if this rank cannot take the message."""
        if self.refusal is not None:
            raise self.refusal
        call = self.lane.ranks.call
        peer = self.lane.peer
        if header.terms != _TERMS:
            raise error(
                ValueError,
                f"{call}: rank {peer} makes another call.",
                expected=f"a message to rank {dist.get_rank()}",
                got=header.terms,
            )
        if header.number != expected:
            raise ConcurrencyError(
                f"{call}: rank {peer} and this rank are not at the same message of tag {self.lane.tag}.",
                expected=f"message {expected}, as on rank {dist.get_rank()}",
                got=f"message {header.number} of rank {peer}",
                hint="one rank left an earlier message before its end; the next message works.",
            )

    def _describe(self, text: bytes) -> Structure:
        """Return the structure that a header describes; ask for it if it is long and unknown."""
        ranks = self.lane.ranks
        peer = self.lane.peer
        if len(text) == _KEY_BYTES:
            theirs = find_structure(text)
        else:
            theirs = read_structure(text)
        if theirs is None:
            _, back, described = self.lane.tags
            ranks.send_bytes(_DESCRIBE, peer, back)
            theirs = read_structure(ranks.recv_bytes(peer, described))
        assert theirs.plan is not None
        check_classes(theirs.plan, self.classes)
        return theirs

    def _misfit(self, digest: bytes, theirs: Structure) -> Exception | None:
        """Return the error for a tree that is not like the expected one, or None."""
        own = self.structure
        if own is None or digest == own.digest:
            return None
        who = f"this rank (expected) and rank {self.lane.peer}"
        return mismatch(self.lane.ranks.call, who, own.found, theirs.found)


def send(td: TensorCollection, dst: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None) -> None:
    """Send a tree to a rank, and return when that rank has received it.

    The message contains everything that `tdfunc.save` keeps: classes, batch sizes, non-tensor data, kinds and ties.
    Nothing is pickled.

    Args:
        td: The tree.
        dst: The global rank that calls `recv` or `irecv`.
        group: The process group. By default the default group.
        tag: The tag of the message. Messages of one tag arrive in the order in which they were sent. Messages of
            different tags do not wait for each other (except under nccl, which has no tags).
        timeout_s: The number of seconds to wait for the other rank. By default the group's timeout. After a timeout,
            make a new group.

    Raises:
        UnsupportedError: A leaf or value cannot be sent; the message names it.
        LeafMismatchError: The other rank expects other shapes or dtypes; both ranks raise, before any values are sent.
        TreeStructureError: The other rank expects other keys; both ranks raise.
        PeerError: The other rank did not answer in time, or died.
    """
    lane = _lane("send", group, timeout_s, "to", dst, tag)
    lane.run(partial(_sender, td, lane))


def isend(
    td: TensorCollection, dst: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None
) -> PendingMessage:
    """Start to send a tree in a thread, like `send`. Its leaves must not be written to before `wait()` returns."""
    lane = _lane("isend", group, timeout_s, "to", dst, tag)
    return PendingMessage(lane.start(partial(_sender, td, lane)))


def recv(
    src: int,
    like: TensorCollection | None = None,
    *,
    group: Any = None,
    tag: int = 0,
    timeout_s: float | None = None,
    classes: Classes = (),
) -> Any:
    """Return the tree that a rank sends.

    Args:
        src: The global rank that calls `send` or `isend`.
        like: A tree with the expected paths, shapes and dtypes; without it any tree is accepted.
        group: The process group, as for `send`.
        tag: The tag, as for `send`.
        timeout_s: The number of seconds to wait, as for `send`.
        classes: The classes of nodes that are not in imported modules, as for `tdfunc.load`. The classes of `like` are
            known.

    Raises:
        LeafMismatchError: Shapes or dtypes differ from the leaves of `like`; both ranks raise.
        TreeStructureError: Keys differ from the keys of `like`; both ranks raise.
        PeerError: The other rank did not answer in time, or died.
    """
    lane = _lane("recv", group, timeout_s, "from", src, tag)
    return lane.run(lambda: _Inbox(like, lane, classes).work())


def irecv(
    src: int,
    like: TensorCollection | None = None,
    *,
    group: Any = None,
    tag: int = 0,
    timeout_s: float | None = None,
    classes: Classes = (),
) -> PendingMessage:
    """Start to receive a tree, which `wait()` returns; the arguments are the same as for `recv`."""
    lane = _lane("irecv", group, timeout_s, "from", src, tag)
    return PendingMessage(lane.start(lambda: _Inbox(like, lane, classes).work()))


def recv_into(td: T, src: int, *, wait: bool, **options: Any) -> "T | PendingMessage":
    """Receive values into the leaves of a tree; return the tree, or a handle whose `wait()` returns it."""
    call = "recv_" if wait else "irecv_"
    refusal = None
    try:
        for path, leaf in iter_leaves(td):
            check_writable(leaf, f"{call} {dotted(path)!r}")
    except LeafMismatchError as err:
        # It is this rank's answer to the message, so that the sender raises it as well.
        refusal = err
    lane = _lane(call, options["group"], options["timeout_s"], "from", src, options["tag"])

    def prepare() -> _Work:
        inbox = _Inbox(td, lane, refusal=refusal)

        def run(number: int) -> T:
            try:
                write_tree(td, inbox.receive(number), complete=True)
            except PeerError as err:
                if refusal is not None:
                    raise refusal from err
                raise
            return td

        return inbox.work(run)

    if wait:
        return lane.run(prepare)
    return PendingMessage(lane.start(prepare))
