"""Trees from one rank to another: one header that the receiver answers, and one block of bytes."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar, final

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError, PeerError
from tdfunc.core.keys import dotted
from tdfunc.ops.edits.storage_writes import check_writable, write_tree
from tdfunc.parallel.block import find_structure, key_of, pack, read_structure
from tdfunc.storage.disk.ranks import Ranks, Wait, read_error, write_error
from tdfunc.storage.safetensors.like import describe_found, mismatch, parse_found
from tdfunc.storage.tree.build import Classes

T = TypeVar("T", bound=TensorCollection)

# Of the leaves; the description follows, or its key if it does not fit into a frame.
_DIGEST_BYTES, _KEY_BYTES, _SHORT_BYTES = 8, 16, 4000
# The answers of a receiver.
_GO, _MISFIT, _DESCRIBE, _REFUSED = b"\0", b"\1", b"\2", b"\3"
# The last message on its way in each lane: group, direction, peer and tag. Messages of a lane go one after the other.
_last: dict[tuple[str, str, int, int], "Future[Any]"] = {}
_lock = threading.Lock()


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
    def key(self) -> tuple[str, str, int, int]:
        return self.ranks.pg.group_name, self.direction, self.peer, self.tag

    @property
    def tags(self) -> tuple[int, int, int]:
        """The tags of headers and values, of the receiver's answers, and of descriptions that it asks for."""
        return 3 * self.tag, 3 * self.tag + 1, 3 * self.tag + 2

    @property
    def is_eager(self) -> bool:
        """Whether the first piece is sent before the receiver's answer: nccl has no tags to tell descriptions apart."""
        return self.ranks.device.type == "cpu"

    def start(self, run: Callable[[], Any]) -> "Future[Any]":
        """Run in a thread, after the messages that started earlier."""
        future: Future[Any] = Future()
        with _lock:
            before, _last[self.key] = _last.get(self.key), future

        def work() -> None:
            if before is not None:
                before.exception()
            try:
                future.set_result(run())
            except BaseException as err:
                future.set_exception(err)
            with _lock:
                if _last.get(self.key) is future:
                    del _last[self.key]

        threading.Thread(target=work, name=f"tdfunc-{self.ranks.call}", daemon=True).start()
        return future

    def run(self, run: Callable[[], Any]) -> Any:
        """Run here, unless messages are under way that come first."""
        with _lock:
            is_idle = self.key not in _last
        return run() if is_idle else self.start(run).result()


def _sender(td: TensorCollection, lane: _Lane) -> Callable[[], None]:
    ranks, peer = lane.ranks, lane.peer
    packed = pack(td, ranks.call)
    structure, (tag, back, described) = packed.structure, lane.tags

    def run() -> None:
        text = structure.text
        ranks.send_bytes(structure.digest + (text if len(text) < _SHORT_BYTES else key_of(text)), peer, tag)
        expect = ranks.expect_bytes(peer, back)
        pieces, sent = structure.block.pieces(packed.leaves, ranks.device), deque[Wait]()
        piece = next(pieces, None)
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
            raise mismatch(
                ranks.call, f"rank {peer} (expected) and this rank", parse_found(answer[1:]), structure.found
            )

    return run


def _receiver(like: T | None, lane: _Lane, classes: Classes = (), refusal: Exception | None = None) -> Callable[[], T]:
    ranks, peer = lane.ranks, lane.peer
    structure = None if like is None else pack(like, ranks.call).structure
    known = classes if like is None else classes_of(like)
    tag, back, described = lane.tags

    def run() -> Any:
        raw = ranks.recv_bytes(peer, tag)
        digest, text = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        theirs = find_structure(text) if len(text) == _KEY_BYTES else read_structure(text)
        if theirs is None:
            ranks.send_bytes(_DESCRIBE, peer, back)
            theirs = read_structure(ranks.recv_bytes(peer, described))
        err, answer = refusal, _REFUSED + write_error(refusal, ranks.rank) if refusal is not None else _GO
        if err is None and structure is not None and digest != structure.digest:
            who = f"this rank (expected) and rank {peer}"
            err = mismatch(ranks.call, who, structure.found, theirs.found)
            answer = _MISFIT + describe_found(structure.found)
        waits = ranks.post_bytes(answer, peer, back)
        runs = theirs.block.runs if err is None else theirs.block.runs[: lane.is_eager]
        wire = ranks.empty(sum([size_bytes for _, _, size_bytes in runs]))
        waits += [ranks.post_into(part, peer, tag) for part in wire.split_with_sizes([run[2] for run in runs])]
        try:
            # While the bytes are on their way.
            leaves = theirs.block.cut(wire) if err is None else []
        finally:
            for wait in waits:
                wait()
        if err is not None:
            raise err
        return theirs.build(leaves, known)

    return run


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
    lane = _Lane(Ranks("send", group, timeout_s), "to", dst, tag)
    lane.run(_sender(td, lane))


def isend(
    td: TensorCollection, dst: int, *, group: Any = None, tag: int = 0, timeout_s: float | None = None
) -> PendingMessage:
    """Start to send a tree in a thread, like `send`. Its leaves must not be written to before `wait()` returns."""
    lane = _Lane(Ranks("isend", group, timeout_s), "to", dst, tag)
    return PendingMessage(lane.start(_sender(td, lane)))


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
    lane = _Lane(Ranks("recv", group, timeout_s), "from", src, tag)
    return lane.run(_receiver(like, lane, classes))


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
    lane = _Lane(Ranks("irecv", group, timeout_s), "from", src, tag)
    return PendingMessage(lane.start(_receiver(like, lane, classes)))


def recv_into(td: T, src: int, *, wait: bool, **options: Any) -> "T | PendingMessage":
    """Receive values into the leaves of a tree; return the tree, or a handle whose `wait()` returns it."""
    call, refusal = "recv_" if wait else "irecv_", None
    try:
        for path, leaf in iter_leaves(td):
            check_writable(leaf, f"{call} {dotted(path)!r}")
    except LeafMismatchError as err:
        # It is this rank's answer to the message, so that the sender raises it as well.
        refusal = err
    lane = _Lane(Ranks(call, options["group"], options["timeout_s"]), "from", src, options["tag"])
    receive = _receiver(td, lane, refusal=refusal)

    def run() -> T:
        try:
            write_tree(td, receive(), complete=True)
        except PeerError as err:
            raise err if refusal is None else refusal from err
        return td

    return lane.run(run) if wait else PendingMessage(lane.start(run))
