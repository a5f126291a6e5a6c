"""A step that the ranks of a mesh load together: all of them read one save of one step, or all raise."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from tdfunc.core.errors import ConcurrencyError, CorruptCheckpointError, damaged
from tdfunc.storage.disk.ranks import Ranks, group_of
from tdfunc.storage.manager.steps import (
    StepRemovedError,
    StepReplacedError,
    is_damage,
    list_steps,
    no_step,
    read_about,
    reading,
)

T = TypeVar("T")
# How often ranks begin anew because another process saves or removes steps meanwhile.
_ATTEMPTS = 20
_PAUSE_S = 0.05


# Any: a DTensor.
def has_one_group(leaf: Any) -> bool:
    """Return whether the ranks of a DTensor have a group: of a mesh of several dimensions only all ranks have one."""
    mesh = leaf.device_mesh
    return mesh.ndim == 1 or mesh.size() == dist.get_world_size()


class _Outcome(NamedTuple):
    """What one rank has found, or all ranks together."""

    state: Literal["read", "changed", "damaged"]
    # The digest of the tree, or the damage.
    text: str


class Request(NamedTuple, Generic[T]):
    """The checked arguments of one rank."""

    # None is the newest step that all ranks see.
    step: int | None
    # A function of a step's folder and number, which loads this rank's part.
    read: Callable[[str, int], T]
    # Load an older step in place of a damaged one.
    fallback: bool


class Together(Generic[T]):
    """A load by the ranks of a DTensor.

    Args:
        leaf: The DTensor.
        folder: The folder of the steps.
        check: Checks the arguments of this rank's call. It runs in a round, so that its errors are raised on all ranks.
    """

    # Any: a DTensor.
    def __init__(self, leaf: Any, folder: str, check: Callable[[], Request[T]]) -> None:
        self._folder = folder
        self._check = check
        self._request: Request[T] | None = None
        self._ranks = Ranks(f"load {folder}", group_of(leaf))
        # Steps that one of the ranks cannot read, with the reason.
        self.broken: dict[int, str] = {}

    @property
    def request(self) -> Request[T]:
        """The arguments, after the first round."""
        assert self._request is not None
        return self._request

    def load(self) -> tuple[int, T]:
        """Return the number of the step and what `read` has returned."""
        for _ in range(_ATTEMPTS):
            number = self._choose()
            if number is not None:
                found: list[T] = []
                outcome = self._read_all(number, found)
                if outcome.state == "read":
                    return number, found[0]
                if outcome.state == "damaged":
                    self.broken[number] = outcome.text
                    continue
            # Another process saves, or a file system shows its names to one rank later.
            time.sleep(_PAUSE_S)
        raise ConcurrencyError(
            f"load {self._folder}: the ranks do not see the same save of a step.",
            expected="one folder that all ranks share, or equal copies of it",
            got=f"another step or tree on some ranks at {_ATTEMPTS} attempts",
            hint="load(step) on all ranks, while no other process replaces that step.",
        )

    def _choose(self) -> int | None:
        """Return the newest step that all ranks see; None if each of them sees another."""

        def list_own() -> bytes:
            if self._request is None:
                self._request = self._check()
                self._ranks.terms = _terms_of(self._request)
            step = self._request.step
            seen = list_steps(self._folder) if step is None else [step]
            if not seen:
                raise no_step(self._folder, "load")
            return json.dumps(seen).encode()

        def decide(listed: list[bytes]) -> bytes:
            common = set[int].intersection(*[set(json.loads(raw)) for raw in listed])
            left = common - self.broken.keys()
            if common and not left:
                got = f"damaged: {sorted(self.broken)}"
                raise damaged(f"load {self._folder}: all steps are damaged.", got=got)
            return json.dumps(max(left, default=None)).encode()

        return json.loads(self._ranks.agree(list_own, decide))

    def _read_all(self, number: int, found: list[T]) -> _Outcome:
        """Read a step on all ranks, and return what they have found together."""

        def read_own() -> bytes:
            return _encode(self._read_own(number, found))

        def decide(made: list[bytes]) -> bytes:
            return _encode(_sum_up([_decode(raw) for raw in made]))

        return _decode(self._ranks.agree(read_own, decide))

    def _read_own(self, number: int, found: list[T]) -> _Outcome:
        try:
            with reading(self._folder, number, "load") as path:
                before = read_about(path, number).tree
                found.append(self.request.read(path, number))
                # The step may have been replaced before or after the read.
                is_same = read_about(path, number).tree == before
                return _Outcome("read" if is_same else "changed", before)
        except StepReplacedError:
            return _Outcome("changed", "")
        except StepRemovedError:
            if self.request.step is not None:
                raise
            return _Outcome("changed", "")
        except (CorruptCheckpointError, OSError) as err:
            if not self.request.fallback or not is_damage(err):
                raise
            return _Outcome("damaged", str(err))


def _terms_of(request: Request[Any]) -> str:
    """Return what the ranks must have in common."""
    what = "the newest step" if request.step is None else f"step {request.step}"
    return f"load {what}, fallback={request.fallback}"


def _encode(outcome: _Outcome) -> bytes:
    return json.dumps(outcome).encode()


def _decode(raw: bytes) -> _Outcome:
    return _Outcome(*json.loads(raw))


def _sum_up(outcomes: Sequence[_Outcome]) -> _Outcome:
    """Return the outcome of all ranks together: the worst of them."""
    for state in ("damaged", "changed"):
        for one in outcomes:
            if one.state == state:
                return one
    # Another process may have replaced the step between two reads.
    if len({one.text for one in outcomes}) == 1:
        return outcomes[0]
    return _Outcome("changed", "")
