"""`Ensemble`: one pure function over all members of a stacked tree, by a loop, by vmap or by a replayed trace.

E is the number of members. All three ways give the numbers of the loop; `auto` chooses among them by the rule that
`plan()` prints.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tdfunc._collection import TensorCollection
from tdfunc._errors import BatchSizeError, CaptureError, UnsupportedError, explain
from tdfunc._jit import jit
from tdfunc.modules.bind import in_transform
from tdfunc.modules.functional import Apply
from tdfunc.modules.random import member_generators, member_seed, seeded

How = Literal["auto", "loop", "vmap", "traced"]
_HOWS = ("auto", "loop", "vmap", "traced")
# From how many calls with the same shapes on a trace pays: it costs 0.1 to 3 seconds, once.
_TRACE_AFTER = 2
# Held while `how="loop"` seeds torch's default generator for draws that take no generator (LSTM dropout).
_DEFAULT_GENERATOR = threading.Lock()
_RANDOM_IN_VMAP = "called random operation"

RULE = """one member: loop (nothing to share).
gradients to come (an input requires grad), inside a transform or compiled region: vmap.
a forward that draws random numbers: vmap, each member with its own generator.
else: vmap for the first {n} calls with the same shapes, then traced (the vmap's operations, replayed).
a forward that vmap cannot run (LSTM, .item(), data-dependent control flow): loop.
Measured on one CPU thread (docs/benchmarks.md): replay is the fastest or within 10 % of it from 4 members on; the
loop at 1 member; vmap costs 150 to 300 us more a call than its replay."""


class Choice(NamedTuple):
    """The way that a call ran, and why."""

    how: str
    reason: str
    members: int


class _Call(NamedTuple):
    """One call, prepared: stacked leaves in plan order, data and how they are mapped."""

    leaves: list[Any]
    members: int
    args: tuple[Any, ...]
    dims: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int | None
    keep: bool


class Ensemble:
    """All members of a stacked tree in one call.

    Args:
        apply: The pure function of one member, from `functional`.
        how: `loop`, `vmap`, `traced`, or `auto` to choose by rule (see `plan`).
        chunk_size: At most this many members at a time under vmap, to bound memory.

    Raises:
        ValueError: `how` is none of these.

    Shapes:
        A forward that gives (B, *F) for one member gives (E, B, *F).

    Examples:
        >>> models = [nn.Linear(3, 2) for _ in range(4)]
        >>> apply, _, _ = tdf.functional(models[0])
        >>> tdf.Ensemble(apply)(tdf.stack_modules(models), torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
    """

    def __init__(self, apply: Apply, how: How = "auto", *, chunk_size: int | None = None) -> None:
        if how not in _HOWS:
            raise ValueError(explain("Ensemble: no such way to run.", expected=" | ".join(_HOWS), got=repr(how)))
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(explain("Ensemble: chunk_size must be positive.", got=str(chunk_size)))
        self.apply = apply
        self.how: How = how
        self.chunk_size = chunk_size
        self._last: Choice | None = None
        self._calls: dict[Any, int] = {}
        # Why vmap or a trace cannot run this forward, found by running it; by (way, mode).
        self._refused: dict[str, str] = {}
        self._jitted: dict[Any, Callable[..., Any]] = {}

    def __call__(self, params: Any, /, *args: Any, buffers: Any = None, in_dims: Any = None, rng: "int | torch.Generator | None" = None, **kwargs: Any) -> Any:
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
            UnsupportedError: Forward drew random numbers and no `rng` was given, or past the member's generator.
        """
        return self._run(params, buffers, args, in_dims, rng, kwargs, keep=False)[0]

    def with_buffers(self, params: Any, buffers: Any, /, *args: Any, in_dims: Any = None, rng: "int | torch.Generator | None" = None, **kwargs: Any) -> tuple[Any, Any]:
        """Return the stacked outputs and the stacked buffers after the call; the given ones are not written."""
        out, new = self._run(params, buffers, args, in_dims, rng, kwargs, keep=True)
        return out, self.apply.rebuild_buffers(params, buffers, new)

    def plan(self) -> str:
        """Return how the last call ran and why, and the rule behind `auto`."""
        rule = RULE.format(n=_TRACE_AFTER)
        if self._last is None:
            return f"how={self.how}: not called yet.\n{rule}"
        how, reason, members = self._last
        return f"{how}, {members} members: {reason}\n{rule}"

    # -- one call -----------------------------------------------------------------------------------------------

    def _run(self, params: Any, buffers: Any, args: tuple[Any, ...], in_dims: Any, rng: Any, kwargs: dict[str, Any], *, keep: bool) -> tuple[Any, list[Any]]:
        size = params._batch_size if isinstance(params, TensorCollection) else None
        if not size:
            raise BatchSizeError(
                explain(
                    "Ensemble: params must be a stacked tree.",
                    expected="batch size [E, ...]",
                    got=f"batch size {list(size)}" if size is not None else type(params).__name__,
                    hint="tdfunc.stack_modules(modules), tdfunc.init_ensemble(make, n) or torch.stack(trees) make one.",
                )
            )
        leaves = self.apply.leaves(params, buffers, size[:1])
        call = _Call(leaves, size[0], args, _dims(in_dims, args, size[0]), kwargs, _seed(rng), keep)
        choice = self._choose(call)
        self._last = choice
        if choice.how == "loop":
            return self._loop(call)
        if choice.how == "vmap":
            return self._vmap(call) if self.how == "vmap" else self._or_loop("vmap", self._vmap, call)
        return self._trace(call) if self.how == "traced" else self._or_vmap(call)

    def _choose(self, call: _Call) -> Choice:
        n = call.members
        if self.how != "auto":
            return Choice(self.how, "as asked for.", n)
        if n == 1:
            return Choice("loop", "one member has nothing to share.", n)
        if "vmap" in self._refused:
            return Choice("loop", f"vmap cannot run this forward: {self._refused['vmap']}", n)
        if call.seed is not None:
            return Choice("vmap", "random numbers are drawn anew in each call.", n)
        if in_transform() or (torch.is_grad_enabled() and _requires_grad(call)):
            return Choice("vmap", "gradients or an outer transform go through the call.", n)
        if "traced" in self._refused:
            return Choice("vmap", f"the forward cannot be traced: {self._refused['traced']}", n)
        if self.chunk_size is not None:
            return Choice("vmap", "the members run in chunks.", n)
        count = self._count(call)
        if count <= _TRACE_AFTER:
            return Choice("vmap", f"call {count} with these shapes; traced from call {_TRACE_AFTER + 1} on.", n)
        return Choice("traced", f"call {count} with these shapes: the trace is replayed.", n)

    def _count(self, call: _Call) -> int:
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in tree_leaves((call.args, call.kwargs)))
        key = (call.members, call.dims, call.keep, shapes)
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key]

    def _or_loop(self, name: str, run: Callable[[_Call], Any], call: _Call) -> Any:
        """Run; where that fails and the loop does not, remember why and use the loop from now on."""
        try:
            return run(call)
        except UnsupportedError:
            raise
        except Exception as err:
            # The loop's own error is the clearer one, if the input is at fault.
            result = self._loop(call)
            self._refused[name] = str(err).strip().split("\n")[0]
            self._last = Choice("loop", f"vmap cannot run this forward: {self._refused[name]}", call.members)
            return result

    def _or_vmap(self, call: _Call) -> Any:
        try:
            return self._trace(call)
        except (CaptureError, RuntimeError, TypeError, ValueError) as err:
            result = self._or_loop("vmap", self._vmap, call)
            self._refused["traced"] = str(err).strip().split("\n")[0]
            self._last = Choice("vmap", f"the forward cannot be traced: {self._refused['traced']}", call.members)
            return result

    # -- the three ways -----------------------------------------------------------------------------------------

    def _loop(self, call: _Call) -> tuple[Any, list[Any]]:
        columns = [leaf.unbind(0) for leaf in call.leaves]
        results: list[Any] = []
        kept: list[list[Any]] = []
        for i in range(call.members):
            args = tuple(_member(arg, dim, i) for arg, dim in zip(call.args, call.dims, strict=True))
            with self._drawing(call, i):
                rng = None if call.seed is None else member_generators(call.seed, i + 1, i)
                out, new = self.apply.run_leaves([column[i] for column in columns], args, call.kwargs, rng, keep=call.keep)
            results.append(out)
            kept.append(new)
        return _stack_outputs(results), [torch.stack(parts) for parts in zip(*kept, strict=True)]

    @contextmanager
    def _drawing(self, call: _Call, member: int) -> Iterator[None]:
        """Let a member draw: from its generator, and (asked for the loop) from the default one under its seed."""
        if torch.compiler.is_compiling():
            yield
            return
        if call.seed is not None and self.how == "loop":
            with _DEFAULT_GENERATOR:
                before = torch.get_rng_state()
                try:
                    torch.default_generator.manual_seed(member_seed(call.seed, member))
                    yield
                finally:
                    torch.set_rng_state(before)
            return
        watch = call.seed is not None or _any_training(self.apply)
        before = torch.get_rng_state() if watch else None
        yield
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise _no_seed() if call.seed is None else _past_seed()

    def _vmap(self, call: _Call) -> tuple[Any, list[Any]]:
        step = self.chunk_size or call.members
        if step >= call.members:
            return self._map(call.leaves, call.args, call, range(call.members))
        parts: list[Any] = []
        for start in range(0, call.members, step):
            rows = range(start, min(start + step, call.members))
            index = slice(rows.start, rows.stop)
            args = tuple(arg if dim is None else tree_map(lambda x, d=dim: _rows(x, d, index), arg) for arg, dim in zip(call.args, call.dims, strict=True))
            parts.append(self._map([leaf[index] for leaf in call.leaves], args, call, rows))
        outs, kept = zip(*parts, strict=True)
        return tree_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0], *outs), [torch.cat(new) for new in zip(*kept, strict=True)]

    def _map(self, leaves: list[Any], args: tuple[Any, ...], call: _Call, rows: range) -> tuple[Any, list[Any]]:
        """One vmap over some members. Outputs may hold anything: only their tensors go through the vmap."""
        generators = None if call.seed is None else member_generators(call.seed, rows.stop, rows.start)
        seen: dict[str, Any] = {}

        def member(own: list[Any], *data: Any) -> tuple[list[Tensor], list[Any]]:
            level = _functorch.maybe_current_level()  # pyright: ignore
            if generators is None:
                out, new = self.apply.run_leaves(own, data, call.kwargs, keep=call.keep)
            else:
                with seeded(generators, level):
                    out, new = self.apply.run_leaves(own, data, call.kwargs, keep=call.keep)
            seen["flat"], seen["spec"] = tree_flatten(out)
            return [x for x in seen["flat"] if isinstance(x, Tensor)], new

        try:
            tensors, new = torch.vmap(member, in_dims=(0, *call.dims), randomness="error")(leaves, *args)
        except RuntimeError as err:
            if _RANDOM_IN_VMAP not in str(err):
                raise
            raise (_no_seed() if call.seed is None else _past_seed()) from err
        mapped = iter(tensors)
        flat = [next(mapped) if isinstance(x, Tensor) else x for x in seen["flat"]]
        return tree_unflatten(flat, seen["spec"]), new

    def _trace(self, call: _Call) -> tuple[Any, list[Any]]:
        if call.seed is not None:
            raise UnsupportedError(explain("Ensemble: how='traced' replays fixed operations and cannot take rng.", hint="use how='vmap' or how='auto'."))
        names = tuple(sorted(call.kwargs))
        key = (call.dims, call.keep, call.members, names)
        if key not in self._jitted:
            dims, keep, members = call.dims, call.keep, call.members

            def mapped(leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                inner = _Call(leaves, members, args, dims, kwargs, None, keep)
                return self._map(leaves, args, inner, range(members))

            self._jitted[key] = jit(mapped)
        return self._jitted[key](call.leaves, call.args, call.kwargs)


def _dims(in_dims: Any, args: tuple[Any, ...], members: int) -> tuple[Any, ...]:
    """Return one entry for each argument, checked against the number of members."""
    dims = tuple(in_dims) if isinstance(in_dims, (tuple, list)) else (in_dims,) * len(args)
    if len(dims) != len(args):
        raise ValueError(explain("Ensemble: in_dims must have one entry for each argument of forward.", expected=f"{len(args)} entries", got=repr(in_dims)))
    for i, (arg, dim) in enumerate(zip(args, dims, strict=True)):
        if not isinstance(dim, int):
            continue
        for x in tree_leaves(arg):
            if isinstance(x, Tensor) and (not -x.dim() <= dim < x.dim() or x.shape[dim] != members):
                raise ValueError(
                    explain(f"Ensemble: argument {i} is mapped over dimension {dim}.", expected=f"{members} members there", got=f"shape {tuple(x.shape)}", hint="use in_dims=None for data that all members share.")
                )
    return dims


def _seed(rng: Any) -> int | None:
    if rng is None or (isinstance(rng, int) and not isinstance(rng, bool)):
        return rng
    if isinstance(rng, torch.Generator):
        return int(torch.randint(0, 1 << 62, (), generator=rng, device=rng.device))
    raise TypeError(explain("Ensemble: rng must be a seed or a generator.", got=f"{rng!r}"))


def _member(arg: Any, dim: Any, i: int) -> Any:
    return arg if dim is None else tree_map(lambda x: x.select(dim, i) if isinstance(x, Tensor) else x, arg)


def _rows(x: Any, dim: int, index: slice) -> Any:
    return x.narrow(dim, index.start, index.stop - index.start) if isinstance(x, Tensor) else x


def _stack_outputs(results: Sequence[Any]) -> Any:
    flats, specs = zip(*[tree_flatten(out) for out in results], strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise UnsupportedError(explain("Ensemble: the members' outputs have different structures.", expected=str(specs[0]), got=str(next(s for s in specs if s != specs[0]))))
    return tree_unflatten([torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*flats, strict=True)], specs[0])


def _requires_grad(call: _Call) -> bool:
    return any([x.requires_grad for x in call.leaves]) or any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((call.args, call.kwargs)))


def _any_training(apply: Apply) -> bool:
    return any(module.training for module in apply.module.modules())


def _no_seed() -> UnsupportedError:
    return UnsupportedError(
        explain("Ensemble: forward drew random numbers and no rng was given.", hint="pass rng=seed: member i draws from a generator seeded by (seed, i); or use apply.eval().")
    )


def _past_seed() -> UnsupportedError:
    return UnsupportedError(
        explain(
            "Ensemble: forward drew random numbers past its member's generator (attention or LSTM dropout do).",
            expected="draws by torch's Python functions: F.dropout, torch.rand, ...",
            hint='use how="loop", where each member runs under its own seed.',
        )
    )
