"""`Ensemble`: one pure function over all members of a stacked tree, by a loop, by vmap or by a replayed trace.

E is the number of members. All three ways give the numbers of the loop (but under autocast: `Ensemble`); `auto` chooses
among them by the rule that `plan()` prints.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count as counting
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Generator, Size, Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tdfunc._jit import Jitted, jit
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.ensemble._call import (
    Call,
    check_output,
    check_unwritten,
    flat_dims,
    join_chunks,
    members_of,
    seed_of,
    stack_outputs,
    versions,
)
from tdfunc.ensemble._draws import default_generators, foreign_states, run_seeded, watch
from tdfunc.ensemble._globals import Globals
from tdfunc.modules.extract import in_transform
from tdfunc.modules.functional import Apply
from tdfunc.modules.random import member_generators, member_seed, seeded

How = Literal["auto", "loop", "vmap", "traced"]
# Forward's output, and the buffers after it in plan order. Any: a forward returns what it likes.
Result: TypeAlias = tuple[Any, list[Any]]
_HOWS = ("auto", "loop", "vmap", "traced")
# A trace costs 0.1 to 3 seconds, once: it pays from this many calls with the same shapes on, for this many shapes.
_TRACE_AFTER, _MOST_TRACES = 2, 16
_MOST_COUNTS = 1024
# A trace with so many operations for each of many members is slower than the vmap.
_UNROLLED, _MANY = 16, 12
_REPLAYED = "the trace for these shapes is replayed."
# Those of all modules, which torch keeps in these tables.
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_RANDOM_IN_VMAP = "called random operation"

RULE = f"""The rule of how="auto", by the first line that applies:
  loop    autocast is on for a device of the call: torch's vmap of a linear layer does not keep it.
  loop    vmap cannot run the forward (LSTM, .item(), data-dependent control flow): found by trying.
  vmap    random numbers were asked for (rng=), so that each call draws anew.
  vmap    gradients or an outer transform go through the call. One member: loop.
  vmap    the members run in chunks, the modules have hooks, or a trace fails or is slow. One member: loop.
  vmap    forward may read what a replay would not see change (os.environ, other packages). One member: loop.
  traced  from the third call with the same shapes on, for at most {_MOST_TRACES} shapes.
  vmap    until then. One member: loop.
Measured on one CPU thread (docs/benchmarks.md has the last run): forward of two MLPs, a CNN on 4 and on 32 images and
a transformer, with 1, 4, 16 and 64 members. On a quiet machine what this rule chose took at most 1.06 of the fastest
way's time in all 20. The replay was the fastest in 18 or more; vmap was 1.2 times as fast for the transformer with 64
members, and took 0.8 to 5.4 times the replay's time; the loop took 1.05 to 1.6 times as long with 1 member and 1.5 to
15 times with 16."""


class _Choice(NamedTuple):
    """The way that a call ran, and why."""

    how: str
    reason: str
    members: int
    # The globals that a trace depends on.
    token: Hashable = ()


class _Ready(NamedTuple):
    """The trace that ran last, and what its choice rests on beside the key of the trace."""

    stamp: tuple[Any, ...]
    token: Hashable
    jitted: Jitted[Any, Any]
    choice: _Choice


class _Watched(TorchFunctionMode):
    """A mode that changes nothing; torch takes no fast path where one is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Ensemble:
    """All members of a stacked tree in one call.

    Args:
        apply: The pure function of one member, from `functional`.
        how: `loop`, `vmap`, `traced` (the first call's operations, replayed), or `auto` to choose by rule: `plan`.
            Under autocast `vmap` and `traced` may compute in the dtype of the weights: torch's vmap of a linear layer
            does not cast.
        chunk_size: At most this many members at a time under vmap, to bound memory.

    Raises:
        TypeError: `apply` is not what `functional` returns, or `chunk_size` is no integer.
        ValueError: `how` or `chunk_size` is out of range.

    Shapes:
        A forward that gives (B, *F) for one member gives (E, B, *F).

    Examples:
        >>> models = [nn.Linear(3, 2) for _ in range(4)]
        >>> apply, _, _ = tdf.functional(models[0])
        >>> ensemble = tdf.Ensemble(apply)
        >>> ensemble(tdf.stack_modules(models), torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
        >>> print(ensemble.plan().splitlines()[0])
        vmap, 4 members: call 1 with these shapes; traced from call 3 on.
    """

    def __init__(self, apply: Apply, how: How = "auto", *, chunk_size: int | None = None) -> None:
        if not isinstance(apply, Apply):
            raise error(
                TypeError,
                "Ensemble: not a pure function.",
                expected="Apply",
                got=type(apply).__name__,
                hint="apply, params, buffers = tdfunc.functional(model).",
            )
        if how not in _HOWS:
            raise error(ValueError, "Ensemble: no such way to run.", expected=" | ".join(_HOWS), got=repr(how))
        # Any: a caller may give a float.
        given: Any = chunk_size
        if given is not None and not isinstance(given, Integral):
            raise error(
                TypeError, "Ensemble: chunk_size is no integer.", expected="an int or None", got=repr(chunk_size)
            )
        if chunk_size is not None and chunk_size < 1:
            raise error(ValueError, "Ensemble: no members in a chunk.", expected="chunk_size >= 1", got=chunk_size)
        self.apply = apply
        self.how: How = how
        self.chunk_size = chunk_size
        self._last: _Choice | None = None
        self._calls: dict[Hashable, int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._numbers = counting()
        # Why vmap or a trace cannot run calls of a kind, found by trying; by (way, kind).
        self._refused: dict[Hashable, str] = {}
        # Ways that have run a kind of call, and were seen to draw nothing from Python's or numpy's generators.
        self._watched: set[Hashable] = set()
        self._jitted: dict[Hashable, Jitted[Any, Any]] = {}
        self._ready: _Ready | None = None
        self._has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in apply.module.modules())
        self._has_attention = any(isinstance(m, _ATTENTION) for m in apply.module.modules())
        self._globals = Globals(apply.module)

    def __call__(
        self,
        params: Any,
        /,
        *args: Any,
        buffers: Any = None,
        in_dims: Any = None,
        rng: int | Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the members' outputs, stacked along a new first dimension.

        Args:
            params: The stacked tree, whole (as `stack_modules` returns it) or its parameters.
            *args: What forward takes; shared by the members unless `in_dims` maps it.
            buffers: The stacked buffers, when `params` has none.
            in_dims: For each of `args` the dimension of the members, or None; or one for all, as in `torch.vmap`.
            rng: A seed or generator; member i draws from a generator seeded by (seed, i).
            **kwargs: What forward takes by keyword, shared by the members.

        Raises:
            BatchSizeError: The tree is not stacked.
            ValueError: `in_dims` does not fit.
            UnsupportedError: Forward drew random numbers and no `rng` was given, or past the member's generator; it
                returned what cannot be stacked; or members that run in turn share an argument that it writes to.
        """
        return self._run(params, buffers, args, in_dims, rng, kwargs, keep=False)[0]

    def with_buffers(
        self,
        params: Any,
        buffers: Any,
        /,
        *args: Any,
        in_dims: Any = None,
        rng: int | Generator | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return the stacked outputs and the stacked buffers after the call; the given ones are not written.

        Raises:
            UnsupportedError: Forward changed extra state; or as for a call.

        Examples:
            >>> models = [nn.BatchNorm1d(3) for _ in range(4)]
            >>> apply, _, _ = tdf.functional(models[0])
            >>> params, buffers = tdf.split(tdf.stack_modules(models))
            >>> _, buffers = tdf.Ensemble(apply).with_buffers(params, buffers, torch.ones(5, 3))
            >>> buffers["num_batches_tracked"]
            tensor([1, 1, 1, 1])
        """
        out, new = self._run(params, buffers, args, in_dims, rng, kwargs, keep=True)
        return out, self.apply.rebuild_buffers(params, buffers, new)

    def plan(self) -> str:
        """Return how the last call ran and why, and the rule behind `auto` with the measurement behind it."""
        if self._last is None:
            return f"{self.how}: not called yet.\n{RULE}"
        how, reason, members, _ = self._last
        return f"{how}, {members} member{'s' * (members > 1)}: {reason}\n{RULE}"

    def __repr__(self) -> str:
        return f"Ensemble({type(self.apply.module).__name__}, how={self.how!r}, chunk_size={self.chunk_size})"

    # -- choosing -----------------------------------------------------------------------------------------------

    def _run(
        self, params: Any, buffers: Any, args: tuple[Any, ...], in_dims: Any, rng: Any, kwargs: Any, *, keep: bool
    ) -> Result:
        members = members_of(params)
        leaves = self.apply.leaves(params, buffers, Size((members,)))
        call = Call(leaves, members, args, flat_dims(in_dims, args, members), kwargs, seed_of(rng), keep)
        if torch.compiler.is_compiling():
            # The compiler would record the choice, and compile again when it changes.
            looped = self.how == "loop" or (self.how == "auto" and (members == 1 or call.autocast()))
            return self._loop(call) if looped else self._vmap(call)
        found = self._replayed(call)
        if found is not None:
            return found
        if self.how == "auto":
            return self._auto(call)
        choice = self._last = _Choice(self.how, "as asked for.", members, self._globals.token())
        if self.how == "traced":
            return self._trace(call, choice)
        return self._loop(call) if self.how == "loop" else self._vmap(call)

    def _replayed(self, call: Call) -> Result | None:
        """Return the result of the trace that ran last, if the call would choose it again.

        That trace's own key has the shapes, dtypes, devices and flags of all tensors, the other arguments, and torch's
        modes; the rest is compared here.
        """
        # One look at the attribute: another thread may replace it.
        ready = self._ready
        if ready is None or call.seed is not None or self._stamp(call) != ready.stamp:
            return None
        if any(_GLOBAL_HOOKS) or forward_ad._current_level >= 0 or self._globals.token() is not ready.token:
            return None
        try:
            found = ready.jitted.replay_last(call.leaves, call.args, call.kwargs)
        # The choice knows what to do about it.
        except Exception:
            return None
        if found is not None:
            self._last = ready.choice
        return found

    def _stamp(self, call: Call) -> tuple[Any, ...]:
        return self.how, self.chunk_size, call.members, call.dims, call.keep

    def _auto(self, call: Call) -> Result:
        self._ready = None
        kind = self._number(call.kind())
        choice = self._choose(call, kind)
        self._last = choice
        if choice.how == "traced":
            fresh = ("traced", kind) not in self._watched
            result, refusal = self._attempt("traced", lambda call: self._trace(call, choice), call, kind)
            if refusal is None:
                if fresh and self._is_unrolled(call, choice.token):
                    self._ready = None
                    why = "torch has no batching rule for its operations, and a replay repeats them for each member."
                    self._refuse("traced", kind, why)
                return result
            choice = _Choice(
                "loop" if call.members == 1 else "vmap", f"the forward is not traced: {refusal}", call.members
            )
            result = self._without_trace(call, kind, choice.how)
            # Not before the other way has worked: the input may have been at fault.
            self._refuse("traced", kind, refusal)
            self._last = choice if self._last.how == "traced" else self._last
            return result
        return self._without_trace(call, kind, choice.how)

    def _number(self, kind: Hashable) -> int:
        """Return a number for a kind of call: hashing the kind at each look-up would cost more than the choice."""
        number = self._kinds.get(kind)
        if number is None:
            if len(self._kinds) >= _MOST_COUNTS:
                self._kinds.clear()
            number = self._kinds[kind] = next(self._numbers)
        return number

    def _without_trace(self, call: Call, kind: Hashable, how: str) -> Result:
        if how == "loop":
            return self._loop(call)
        result, refusal = self._attempt("vmap", self._vmap, call, kind)
        if refusal is None:
            return result
        # If the input is at fault the loop raises too, and its error is the clearer one.
        result = self._loop(call)
        self._refuse("vmap", kind, refusal)
        self._last = _Choice("loop", f"vmap cannot run the forward: {refusal}", call.members)
        return result

    def _attempt(self, name: str, way: Callable[[Call], Result], call: Call, kind: Hashable) -> tuple[Any, str | None]:
        """Run one way; return its result, or why it cannot run the call."""
        first = (name, kind) not in self._watched
        before = foreign_states() if first else None
        data = call.counted()
        written = None if data is None else versions(data)
        try:
            result = way(call.with_copies() if first and data is None else call)
        # A forward may raise anything when it is given batched or fake tensors; the loop decides who is at fault.
        except Exception as err:
            if data is not None and written is not None:
                check_unwritten(data, written, err)
            return None, str(err).strip().split("\n")[0] or type(err).__name__
        if first:
            if foreign_states() != before:
                return None, "it draws from Python's or numpy's generator, once for all members or all calls."
            if len(self._watched) >= _MOST_COUNTS:
                self._watched.clear()
            self._watched.add((name, kind))
        return result, None

    def _refuse(self, name: str, kind: Hashable, why: str) -> None:
        if len(self._refused) >= _MOST_COUNTS:
            self._refused.clear()
        self._refused[name, kind] = why

    def _choose(self, call: Call, kind: Hashable) -> _Choice:
        n = call.members
        untraced = "loop" if n == 1 else "vmap"
        if call.autocast():
            return _Choice("loop", "autocast is on, which torch's vmap does not keep.", n)
        if ("vmap", kind) in self._refused:
            return _Choice("loop", f"vmap cannot run the forward: {self._refused['vmap', kind]}", n)
        if call.seed is not None:
            return _Choice("vmap", "rng was given, each call draws anew.", n)
        if in_transform() or (torch.is_grad_enabled() and call.requires_grad()):
            return _Choice(untraced, "gradients or an outer transform go through the call.", n)
        if self.chunk_size is not None and self.chunk_size < n:
            return _Choice("vmap", f"the members run in chunks of {self.chunk_size}.", n)
        if self._has_hooks or any(_GLOBAL_HOOKS):
            return _Choice(untraced, "the modules have hooks, which a replay would not call.", n)
        if ("traced", kind) in self._refused:
            return _Choice(untraced, f"the forward is not traced: {self._refused['traced', kind]}", n)
        token = self._globals.token()
        if self._globals.unknown is not None:
            return _Choice(untraced, f"forward may read {self._globals.unknown}, which a replay would not.", n)
        count = self._count((n, kind, call.shapes(), token))
        if count is None:
            return _Choice(untraced, f"{_MOST_TRACES} other shapes have traces.", n)
        if count <= _TRACE_AFTER:
            return _Choice(untraced, f"call {count} with these shapes; traced from call {_TRACE_AFTER + 1} on.", n)
        return _Choice("traced", _REPLAYED, n, token)

    def _count(self, key: Hashable) -> int | None:
        """Count the calls of a key up to the trace; None when there are traces enough."""
        count = self._calls.get(key, 0) + 1
        if count <= _TRACE_AFTER + 1:
            if count > _TRACE_AFTER and sum([c > _TRACE_AFTER for c in self._calls.values()]) >= _MOST_TRACES:
                return None
            if len(self._calls) >= _MOST_COUNTS:
                self._calls = {k: c for k, c in self._calls.items() if c > _TRACE_AFTER}
        self._calls[key] = count
        return count

    # -- the three ways -----------------------------------------------------------------------------------------

    def _loop(self, call: Call) -> Result:
        columns = [leaf.unbind(0) for leaf in call.leaves]
        results = self._in_turn(
            call, range(call.members), lambda call, i: self._member(call, i, [column[i] for column in columns])
        )
        outputs, kept = zip(*results, strict=True)
        return stack_outputs(outputs), [torch.stack(parts) for parts in zip(*kept, strict=True)]

    def _in_turn(self, call: Call, starts: Sequence[int], run: Callable[[Call, int], Result]) -> list[Result]:
        """Run one part of the members after the other, each on the data as they were given."""
        shared = call.shared() if len(starts) > 1 else []
        if shared is None:
            return [run(call.with_copies(), start) for start in starts]
        before = versions(shared)
        results: list[Result] = []
        for start in starts:
            check_unwritten(shared, before)
            results.append(run(call, start))
        return results

    def _member(self, call: Call, i: int, leaves: list[Any]) -> Result:
        args, seed = call.args_of(i), call.seed

        def run() -> Result:
            rng = None if seed is None else member_generators(seed, i + 1, i)
            return self.apply.run_leaves(leaves, args, call.kwargs, rng, keep=call.keep)

        if torch.compiler.is_compiling() or _is_tracing():
            return run()
        generators = default_generators(leaves)
        if self.how == "loop" and seed is not None:
            return run_seeded(generators, member_seed(seed, i), run)
        result, drew = watch(generators, run)
        if drew:
            raise _no_seed() if seed is None else _past_seed()
        return result

    def _vmap(self, call: Call) -> Result:
        step = self.chunk_size or call.members
        if step >= call.members:
            return self._map(call, 0)
        starts = range(0, call.members, step)
        parts = self._in_turn(
            call, starts, lambda call, start: self._map(call.rows(start, min(start + step, call.members)), start)
        )
        outputs, kept = zip(*parts, strict=True)
        return join_chunks(outputs), [torch.cat(new) for new in zip(*kept, strict=True)]

    def _map(self, call: Call, first: int) -> Result:
        """One vmap over the members of the call, the first of which has this number."""
        flat, spec = tree_flatten(call.args)
        seen: list[Any] = []

        def member(leaves: list[Any], data: list[Any]) -> tuple[list[Tensor], list[Any]]:
            args = tree_unflatten(data, spec)
            if call.seed is None:
                out, new = self.apply.run_leaves(leaves, args, call.kwargs, keep=call.keep)
            else:
                level = _functorch.maybe_current_level()
                with seeded(member_generators(call.seed, first + call.members, first), level):
                    out, new = self.apply.run_leaves(leaves, args, call.kwargs, keep=call.keep)
            # Outputs may hold anything: only their tensors go through the vmap.
            seen.extend(tree_flatten(out))
            return [x for x in seen[0] if isinstance(x, Tensor)], new

        mapped_call = torch.vmap(member, in_dims=(0, list(call.dims)), randomness="error")
        try:
            with self._slow_attention(call):
                tensors, new = mapped_call(call.leaves, flat)
        except RuntimeError as err:
            if _RANDOM_IN_VMAP not in str(err):
                raise
            raise (_no_seed() if call.seed is None else _past_seed()) from err
        check_output(seen[0])
        mapped = iter(tensors)
        return tree_unflatten([next(mapped) if isinstance(x, Tensor) else x for x in seen[0]], seen[1]), new

    def _slow_attention(self, call: Call) -> AbstractContextManager[object]:
        """Keep torch's attention from its fast kernels, which have no derivatives, where gradients are wanted.

        It looks for them itself, but under vmap no tensor says that it requires any.
        """
        if not self._has_attention or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return nullcontext()
        return _Watched() if in_transform() or call.requires_grad() else nullcontext()

    def _trace(self, call: Call, choice: _Choice) -> Result:
        if call.seed is not None:
            raise UnsupportedError(
                "Ensemble: how='traced' replays fixed operations.",
                expected="rng=None",
                got=f"rng={call.seed}",
                hint="use how='vmap' or how='auto'.",
            )
        key = self._trace_key(call, choice.token)
        if key not in self._jitted:
            if len(self._jitted) >= _MOST_COUNTS:
                self._jitted.clear()
            self._jitted[key] = jit(self._recorded(call.dims, call.keep, call.members))
        jitted = self._jitted[key]
        result = jitted(call.leaves, call.args, call.kwargs)
        self._ready = _Ready(self._stamp(call), choice.token, jitted, choice)
        return result

    def _is_unrolled(self, call: Call, token: Hashable) -> bool:
        """Whether a trace holds the operations of each of many members (the fast path of torch's transformers)."""
        graph = self._jitted[self._trace_key(call, token)].graph(call.leaves, call.args, call.kwargs).graph
        return len(graph.nodes) > _UNROLLED * call.members > _UNROLLED * _MANY

    def _trace_key(self, call: Call, token: Hashable) -> Hashable:
        return call.dims, call.keep, call.members, token

    def _recorded(self, dims: tuple[int | None, ...], keep: bool, members: int) -> Callable[..., Result]:
        def run(leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
            call = Call(leaves, members, args, dims, kwargs, None, keep)
            # Of one member vmap's operations would be slower ones (grouped convolutions).
            return self._loop(call) if members == 1 else self._vmap(call)

        return run


def _is_tracing() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def _no_seed() -> UnsupportedError:
    return UnsupportedError(
        "Ensemble: forward drew random numbers and no rng was given.",
        expected="rng=seed: member i then draws from a generator seeded by (seed, i)",
        got="rng=None",
        hint="pass rng, or use apply.eval().",
    )


def _past_seed() -> UnsupportedError:
    return UnsupportedError(
        "Ensemble: forward drew random numbers past its member's generator (attention and LSTM dropout do).",
        expected="draws by torch's Python functions: F.dropout, torch.rand, ...",
        got="a draw from torch's default generator",
        hint='use how="loop", where each member runs under its own seed.',
    )
