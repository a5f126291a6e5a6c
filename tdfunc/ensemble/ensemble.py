"""`Ensemble`: one pure function over all members of a stacked tree, by a loop, by vmap or by a replayed trace.

E is the number of members. All three ways give the numbers of the loop, except under autocast (see `Ensemble`). `auto`
is vmap, and the loop where vmap cannot run the forward; a trace is made on request.
"""

import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tdfunc import random
from tdfunc._jit import Jitted
from tdfunc._jit.chunked import ChunkSize, choose_chunk_size
from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_transform, is_compiling, is_known, is_tracing
from tdfunc.core.errors import UnsupportedError, as_count, brief, check_choice, error, explain, forward_line
from tdfunc.core.generators import default_generators, foreign_states, refuse_draws
from tdfunc.core.keys import Filter, FilterLike, dotted
from tdfunc.core.types import Path
from tdfunc.ensemble.call import (
    Call,
    check_output,
    check_unwritten,
    find_shared,
    flat_dims,
    join_chunks,
    member_keys,
    members_of,
    stack_outputs,
    versions,
)
from tdfunc.ensemble.draws import run_seeded, watch
from tdfunc.modules.functional import Apply
from tdfunc.modules.random import seeded
from tdfunc.random.draws import KeyLike

How = Literal["auto", "loop", "vmap", "traced"]
# Forward's output, and the buffers after it in plan order. Any: a forward returns any object.
Result: TypeAlias = tuple[Any, list[Any]]
_HOWS = ("auto", "loop", "vmap", "traced")
_OWN_NAMES = ("buffers", "in_dims", "rng")
# Kinds of calls that are remembered, and traces for each.
_MOST_KINDS = 1024
_MOST_TRACES = 64
# Their classes read no globals that change.
_NOT_FOLLOWED = ("torch", "builtins")
_RANDOM_IN_VMAP = "called random operation"
_OWN_DRAWS = 'draw by torch, under rng=; or use how="loop", where each member draws its own numbers.'

RULE = """The rule of how="auto", by the first line that applies:
  loop    there is one member, or autocast is on for a device of the call (torch's vmap of a linear layer drops it).
  loop    vmap cannot run the forward (.item(), data-dependent control flow, backward hooks): found by trying.
  vmap    otherwise.
A trace is made on request: how="traced", or tdf.jit around the step."""


class Ensemble:
    """All members of a stacked tree in one call.

    Args:
        apply: The pure function of one member, from `functional`.
        how: How to run the members.

            - `"auto"`: use vmap. Use the loop if there is one member, if autocast is on, or if vmap cannot run the
              forward pass.
            - `"vmap"` or `"loop"`: always use this one.
            - `"traced"`: record the operations of the first call and replay them, as `tdf.jit` does. A replay calls
              no hooks.

            Under autocast, `"vmap"` and `"traced"` may compute in the dtype of the weights, because torch's vmap of a
            linear layer does not cast. `plan()` explains the last choice.
        chunk_size: The largest number of members that vmap, or a trace, runs together. A smaller number needs less
            memory, and is faster where the activations of all members leave the processor's cache. `"auto"` chooses it
            by the largest activation, which a trace of two members shows.
        shared: A filter for the leaves that all members share, such as the leaves of a trunk. They have no member
            dimension. If the inputs are shared as well, vmap runs the shared part of the forward pass only once.
            `combine(trunk, heads)` builds such a tree.

    Raises:
        TypeError: `apply` was not made by `functional`.
        ValueError: `how` is not one of the four options, or `chunk_size` is below 1.
        UnsupportedError: Forward has an argument called `buffers`, `in_dims` or `rng`.

    Shapes:
        A forward that gives (B, *F) for one member gives (E, B, *F).

    Examples:
        >>> models = [nn.Linear(3, 2) for _ in range(4)]
        >>> apply, _, _ = tdf.functional(models[0])
        >>> ensemble = tdf.Ensemble(apply)
        >>> ensemble(tdf.stack_modules(models), torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
        >>> print(ensemble.plan().splitlines()[0])
        vmap, 4 members: by the rule.
    """

    def __init__(
        self,
        apply: Apply,
        how: How = "auto",
        *,
        chunk_size: ChunkSize | None = None,
        shared: "FilterLike | None" = None,
    ) -> None:
        if not isinstance(apply, Apply):
            raise error(
                TypeError,
                "Ensemble: apply is not a pure function.",
                expected="Apply",
                got=type(apply).__name__,
                hint="apply, params, buffers = tdfunc.functional(model).",
            )
        of_forward = signature(apply.module.forward)
        taken = [name for name in _OWN_NAMES if name in of_forward.parameters]
        if taken:
            raise UnsupportedError(
                f"Ensemble: forward has an argument called {taken[0]!r}, which Ensemble uses itself.",
                expected=f"other names than {', '.join(map(repr, _OWN_NAMES))}",
                got=f"forward{of_forward}",
                hint="wrap the module in one whose forward has another name for it.",
            )
        check_choice("Ensemble: how", how, _HOWS)
        if chunk_size is not None and chunk_size != "auto":
            chunk_size = as_count("Ensemble: chunk_size", chunk_size)
        self.apply = apply
        self.how: How = how
        self.chunk_size: ChunkSize | None = chunk_size
        self.shared: Filter | None = None if shared is None else Filter(shared)
        # How the last call ran, why, and with how many members.
        self._last: tuple[str, str, int] | None = None
        # By kind of call: why vmap cannot run it, or None where it has.
        self._tried: dict[Hashable, str | None] = {}
        self._jitted: dict[Hashable, Jitted[Any, Any]] = {}
        # By kind of call and shapes: the members that run together, for chunk_size="auto".
        self._chunk_sizes: dict[Hashable, int] = {}
        # Of buffers that a call drops.
        self._warned = False

    def __reduce__(self) -> Any:
        # Without its traces, which belong to this process.
        return partial(Ensemble, chunk_size=self.chunk_size, shared=self.shared), (self.apply, self.how)

    def __call__(
        self,
        params: Any,
        /,
        *args: Any,
        buffers: Any = None,
        in_dims: Any = None,
        rng: KeyLike | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the members' outputs, stacked along a new first dimension.

        It warns once if forward writes buffers, as BatchNorm does in training mode; `with_buffers` returns them.

        Caches of transformers in the output are stacked by their fields, like its tensors: `past_key_values` has the
        keys and values of all members. Other objects that torch's pytree does not know are refused.

        Args:
            params: The stacked tree, complete as `stack_modules` returns it, or its parameters.
            *args: Arguments of forward. Members share tensors unless `in_dims` maps them. Each member gets its own copy
                of containers and other objects, which forward may fill.
            buffers: The stacked buffers, if `params` has none.
            in_dims: For each of `args` the member dimension, or None; or one for all, as in `torch.vmap`.
            rng: A random key, a seed of one, or a generator, which gives another key at each call; member i draws
                from `fold_in(key, i)`. A tensor of shape (E, 2) has the key of each member.
            **kwargs: Keyword arguments of forward, shared by the members.

        Raises:
            BatchSizeError: The tree is not stacked.
            ValueError: `in_dims` does not fit.
            UnsupportedError: Forward drew random numbers without `rng`, or past the member's key; it returned objects
                that cannot be stacked; or it wrote to an argument that members share.
        """
        out = self._run(params, buffers, args, in_dims, rng, kwargs, keep=False)[0]
        if self._warned or is_compiling():
            return out
        written = list(map(dotted, self.apply.written_buffers))
        if written:
            self._warned = True
            message = f"Ensemble: forward wrote the buffers {brief(written)}, and a call returns the outputs alone."
            hint = "out, buffers = ensemble.with_buffers(params, buffers, x) keeps them"
            if any([module.training for module in self.apply.module.modules()]):
                hint += "; apply.eval() writes none"
            hint += "."
            warnings.warn(explain(message, hint=hint), stacklevel=2)
        return out

    def with_buffers(
        self, params: Any, buffers: Any, /, *args: Any, in_dims: Any = None, rng: KeyLike | None = None, **kwargs: Any
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
        """Return the way of the last call, its reason, and the rule of `auto`.

        If vmap cannot run the forward, the reason is its error and the line that raised it: the innermost line of your
        code, or of the library that the model comes from. If a module of torch raised it, this is the line in torch.
        """
        if self._last is None:
            return f"{self.how}: not called yet.\n{RULE}"
        how, reason, members = self._last
        return f"{how}, {members} member{'s' * (members > 1)}: {reason}\n{RULE}"

    def __repr__(self) -> str:
        return f"Ensemble({type(self.apply.module).__name__}, how={self.how!r}, chunk_size={self.chunk_size})"

    # -- choosing -----------------------------------------------------------------------------------------------

    def _run(
        self, params: Any, buffers: Any, args: tuple[Any, ...], in_dims: Any, rng: Any, kwargs: Any, *, keep: bool
    ) -> Result:
        call = self._make_call(params, buffers, args, in_dims, rng, kwargs, keep)
        if is_compiling():
            # The compiler records the choice, and compiles again when it changes.
            looped = self.how == "loop" or (self.how == "auto" and (call.members == 1 or call.autocast()))
            if looped:
                return self._loop(call)
            return self._vmap(call)
        if self.how == "auto":
            return self._auto(call)
        self._last = (self.how, "given as how=.", call.members)
        if self.how == "traced":
            return self._trace(call)
        if self.how == "loop":
            return self._loop(call)
        kind = call.kind()
        if kind in self._tried:
            return self._vmap(call)
        with refuse_draws("Ensemble: forward draws once for all members.", _OWN_DRAWS):
            result = self._vmap(call)
        self._remember(kind, None)
        return result

    def _make_call(
        self, params: Any, buffers: Any, args: tuple[Any, ...], in_dims: Any, rng: Any, kwargs: Any, keep: bool
    ) -> Call:
        """Return the call of all members, with its arguments checked."""
        shared: set[Path] = set()
        if self.shared is None or not isinstance(params, TensorCollection):
            members = members_of(params)
        else:
            members, shared = find_shared(self.shared, params, buffers)
        leaves = self.apply.leaves(params, buffers, Size((members,)), shared)
        lead: list[int | None] = [0] * len(leaves)
        if shared:
            lead = [None if path in shared else 0 for path in self.apply.paths]
        if keep and None in lead[self.apply.n_params :]:
            raise UnsupportedError(
                "Ensemble.with_buffers: the members share buffers, which each of them would write.",
                expected="buffers that shared= does not match",
                got=f"shared={self.shared}",
                hint='stack them: shared=Filter("trunk.*") & Kind.PARAMETER.',
            )
        dims = flat_dims(in_dims, args, members)
        keys = member_keys(rng, members)
        return Call(leaves, lead, members, args, dims, kwargs, keys, keep)

    def _auto(self, call: Call) -> Result:
        kind = call.kind()
        known_refusal = self._tried.get(kind)
        refused: Exception | None = None
        if call.members == 1:
            reason = "one member needs no vmap."
        elif call.autocast():
            reason = "autocast is on, which torch's vmap does not keep."
        elif known_refusal is not None:
            reason = f"vmap cannot run the forward: {known_refusal}"
        else:
            result, refused = self._attempt(call, kind)
            if refused is None:
                self._last = ("vmap", "by the rule.", call.members)
                return result
            reason = f"vmap cannot run the forward: {_refusal(refused)}"
        # If the input is at fault the loop also raises: its error is the clearer one, and no refusal is remembered.
        try:
            result = self._loop(call)
        except Exception as err:
            _put_before(err, refused)
            raise
        if refused is not None:
            self._remember(kind, _refusal(refused))
        self._last = ("loop", reason, call.members)
        return result

    def _attempt(self, call: Call, kind: Hashable) -> tuple[Any, Exception | None]:
        """Run a call by vmap; return its result, or the error by which vmap cannot run it."""
        first = kind not in self._tried
        before = None
        if first:
            before = foreign_states()
        data = call.counted()
        before_writes = versions(data or [])
        try:
            if first and data is None:
                call = call.with_copies()
            result = self._vmap(call)
        # A forward may raise anything when it is given batched tensors; the loop decides who is at fault.
        except Exception as err:
            check_unwritten(data or [], before_writes, err)
            # The lines stay for the traceback; the tensors of the attempt go before the loop runs.
            traceback.clear_frames(err.__traceback__)
            return None, err
        if first:
            if foreign_states() != before:
                return None, UnsupportedError("it draws from Python's or numpy's generator, once for all members.")
            self._remember(kind, None)
        return result, None

    def _remember(self, kind: Hashable, refusal: str | None) -> None:
        if len(self._tried) >= _MOST_KINDS:
            self._tried.clear()
        self._tried[kind] = refusal

    # -- the three ways -----------------------------------------------------------------------------------------

    def _loop(self, call: Call) -> Result:
        # For each leaf, its value for each member.
        columns: list[Sequence[Any]] = []
        for leaf, dim in zip(call.leaves, call.lead, strict=True):
            columns.append([leaf] * call.members if dim is None else leaf.unbind(0))

        def run(call: Call, i: int) -> Result:
            return self._member(call, i, [column[i] for column in columns])

        results = self._in_turn(call, range(call.members), run)
        outputs, kept = zip(*results, strict=True)
        return stack_outputs(outputs), [torch.stack(parts) for parts in zip(*kept, strict=True)]

    def _in_turn(self, call: Call, starts: Sequence[int], run: Callable[[Call, int], Result]) -> list[Result]:
        """Run one part of the members after the other, each on the data as they were given."""
        shared = []
        if len(starts) > 1:
            shared = call.shared()
        if shared is None:
            return [run(call.with_copies(), start) for start in starts]
        before = versions(shared)
        results: list[Result] = []
        for start in starts:
            check_unwritten(shared, before)
            results.append(run(call.with_containers(), start))
        return results

    def _member(self, call: Call, i: int, leaves: list[Any]) -> Result:
        args = call.args_of(i)
        key = None
        if call.keys is not None:
            key = call.keys[i]
        readable = key is None or is_known(key)

        def run() -> Result:
            # A default generator that cannot be seeded must not be drawn from.
            mode = None
            if key is not None:
                mode = seeded(key, strict=not readable)
            return self.apply.run_leaves(leaves, args, call.kwargs, mode, keep=call.keep)

        if is_compiling() or is_tracing() or not readable:
            return run()
        generators = default_generators(leaves)
        if key is not None:
            # Draws inside fused kernels come from the default generator, which has the member's seed meanwhile.
            return run_seeded(generators, int(random.bits(key)), run)
        result, drew = watch(generators, run)
        if drew:
            raise self._no_key()
        return result

    def _vmap(self, call: Call) -> Result:
        return self._in_chunks(call, lambda part: self._map(part.with_containers()))

    def _in_chunks(self, call: Call, run: Callable[[Call], Result]) -> Result:
        """Run some members at a time, or all together."""
        size = self._count_together(call)
        if size >= call.members:
            return run(call)

        def run_rows(call: Call, start: int) -> Result:
            return run(call.rows(start, min(start + size, call.members)))

        parts = self._in_turn(call, range(0, call.members, size), run_rows)
        outputs, kept = zip(*parts, strict=True)
        return join_chunks(outputs), [torch.cat(new) for new in zip(*kept, strict=True)]

    def _count_together(self, call: Call) -> int:
        """Return how many members run together."""
        if self.chunk_size != "auto":
            return self.chunk_size or call.members
        if is_compiling() or is_tracing() or in_transform():
            return call.members
        kind = (call.kind(), call.members, tuple([x.shape for x in call.tensors()]))
        size = self._chunk_sizes.get(kind)
        if size is None:
            if len(self._chunk_sizes) >= _MOST_KINDS:
                self._chunk_sizes.clear()
            size = self._chunk_sizes[kind] = self._choose_chunk_size(call)
        return size

    def _choose_chunk_size(self, call: Call) -> int:
        few = call.rows(0, min(2, call.members))
        jitted = self._make_jitted(few.lead, few.members, few.dims, few.keep)
        try:
            with torch.no_grad():
                found = jitted.activation_bytes(few.leaves, few.args, few.kwargs, few.keys)
        # What cannot be recorded may raise anything, and runs as without chunks.
        except Exception:
            return call.members
        return choose_chunk_size(found / few.members, call.members)

    def _map(self, call: Call) -> Result:
        """One vmap over the members of the call."""
        flat, spec = tree_flatten(call.args)
        seen: list[Any] = []

        def member(leaves: list[Any], data: list[Any], key: Tensor | None) -> tuple[list[Tensor], list[Any]]:
            args = tree_unflatten(data, spec)
            mode = None
            if key is not None:
                mode = seeded(key)
            out, new = self.apply.run_leaves(leaves, args, call.kwargs, mode, keep=call.keep)
            # Outputs may hold anything: only their tensors go through the vmap.
            seen.extend(tree_flatten(out))
            return [x for x in seen[0] if isinstance(x, Tensor)], new

        key_dim = None if call.keys is None else 0
        mapped_call = torch.vmap(member, in_dims=(call.lead, list(call.dims), key_dim), randomness="error")
        try:
            tensors, new = mapped_call(call.leaves, flat, call.keys)
        except RuntimeError as err:
            if _RANDOM_IN_VMAP in str(err):
                raise self._draw_error(call) from err
            raise
        parts, structure = seen
        check_output(parts)
        mapped = iter(tensors)
        stacked = [next(mapped) if isinstance(part, Tensor) else part for part in parts]
        return tree_unflatten(stacked, structure), new

    def _trace(self, call: Call) -> Result:
        return self._in_chunks(call, self._replay)

    def _replay(self, call: Call) -> Result:
        key = (call.dims, call.keep, call.members, tuple(call.lead))
        jitted = self._jitted.get(key)
        if jitted is None:
            jitted = self._jitted[key] = self._make_jitted(call.lead, call.members, call.dims, call.keep)
        traces = jitted.cache_info().misses
        given = (call.leaves, call.args, call.kwargs, call.keys)
        result = jitted(*given)
        if jitted.cache_info().misses != traces and jitted.draws(*given):
            del self._jitted[key]
            raise self._draw_error(call)
        return result

    def _make_jitted(
        self, lead: list[int | None], members: int, dims: tuple[int | None, ...], keep: bool
    ) -> Jitted[Any, Any]:
        def run(leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], keys: Tensor | None) -> Result:
            call = Call(leaves, lead, members, args, dims, kwargs, keys, keep)
            # Of one member vmap's operations are slower ones (grouped convolutions).
            if members == 1:
                return self._loop(call)
            return self._map(call.with_containers())

        return Jitted(run, None, _MOST_TRACES, reads=self._own_methods())

    def _draw_error(self, call: Call) -> UnsupportedError:
        """Return the error for random numbers that do not come from the keys of a call."""
        if call.keys is None:
            return self._no_key()
        return _past_key()

    def _no_key(self) -> UnsupportedError:
        hint = "pass rng: forward draws in evaluation mode too."
        if any([module.training for module in self.apply.module.modules()]):
            hint = "pass rng, or use apply.eval()."
        return UnsupportedError(
            "Ensemble: forward drew random numbers and no rng was given.",
            expected="rng=key: member i then draws from tdfunc.random.fold_in(key, i)",
            got="rng=None",
            hint=hint,
        )

    def _own_methods(self) -> tuple[FunctionType, ...]:
        """Return the methods of the modules' own classes: a global that they read is part of a trace's key."""
        classes: dict[type, None] = {}
        for module in self.apply.module.modules():
            classes.update(dict.fromkeys(type(module).__mro__))
        methods: list[FunctionType] = []
        for cls in classes:
            if cls.__module__.partition(".")[0] not in _NOT_FOLLOWED:
                methods += [value for value in vars(cls).values() if isinstance(value, FunctionType)]
        return tuple(methods)


def _refusal(err: Exception) -> str:
    """Return the first line of an error, and below it the line of the forward that raised it."""
    text = str(err).strip().split("\n")[0] or type(err).__name__
    line = forward_line(err)
    if line is None:
        return text
    return f"{text}\n  at {line}"


def _put_before(err: BaseException, first: Exception | None) -> None:
    """Have a traceback show an earlier error before another one and its causes."""
    seen = {id(err)}
    earlier = err.__cause__ or err.__context__
    while earlier is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        err = earlier
        earlier = earlier.__cause__ or earlier.__context__
    if first is not None and id(first) not in seen:
        err.__context__ = first


def _past_key() -> UnsupportedError:
    return UnsupportedError(
        "Ensemble: forward drew random numbers past its member's key (torch.poisson does).",
        expected="draws by torch's Python functions: F.dropout, torch.rand, ...",
        got="a draw from torch's default generator",
        hint='use how="loop", where each member runs under its own seed.',
    )
