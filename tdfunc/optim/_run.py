"""One step of a rule: torch's fused kernel or foreach on real tensors, leaf by leaf in transforms and compilers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc._jit.tracing import recorder
from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values, in_functorch, is_compiling
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.memory import find_overlaps, is_read_only, repeats_itself, span_bytes
from tdfunc.optim._base import How
from tdfunc.optim._checks import check_scheduled
from tdfunc.optim._lists import Coefficient, Leaves, Lists, restore, spread, widen
from tdfunc.optim._replay import Apart, Replay, Short

_FUSED_DEVICES = ("cpu", "cuda")
# torch 2.13's fused SGD is wrong on the CPU for vectors of 16-bit numbers.
_FUSED_DTYPES = (torch.float32, torch.float64)
# Elements on which the views of a leaf of one member cost little.
_VIEW_ELEMENTS = 1500
# Elements that the vectors of every processor divide: of what is left of a leaf, torch 2.13's fused CPU kernels round
# otherwise than of the rest.
_VECTOR = 16
Values: TypeAlias = dict[str, Coefficient]
Slots: TypeAlias = dict[str, Leaves]


@dataclass(slots=True)
class Work:
    """The lists of leaves that a rule reads and assigns, its scalars, and the number of this step, counted from 1."""

    params: Leaves
    grads: Leaves
    slots: Slots
    scalars: Values
    step: Coefficient
    # How many leading dimensions of the leaves are the batch.
    dims: int


@dataclass(frozen=True, eq=False)
class Rule:
    """One step, written in list arithmetic, and as a call of torch's fused kernel where there is one.

    Its functions are defined in a module, or are partials of such functions, so that optimizers can be pickled.

    Args:
        name: Its name in messages.
        slots: The trees that it keeps in the state, of zeros shaped like the parameters, in float32 at least.
        lists: A function that assigns the lists after the step to its `Work`.
        fused: A function that overwrites the tensors of its `Work`, or returns False. It is called only when all
            values are floats, all members have done as many steps, and the tensors are of float32 or float64, on one
            device and in one layout.
        scalars: The numbers of each member that it keeps in the state; they begin as 1.
        fill: A mapping from slots to the hyperparameters that fill them before the first step.
        shape: The shape of a slot for a parameter of some shape with so many batch dimensions, in rules whose elements
            depend on each other; there hyperparameters must have the batch size.
        layout: The layout of gradients, if it differs from the layout of the parameters.
        check: A function that raises if the rule does not take such parameters.
        decoupled: True if weight decay shrinks the parameters.
        upgrade: A function that returns the state of an older version as a state of this one.
    """

    name: str
    slots: tuple[str, ...]
    lists: Callable[[Lists, Work, Values], None]
    fused: Callable[[Work, Any], bool] | None = None
    scalars: tuple[str, ...] = ()
    fill: Mapping[str, str] = field(default_factory=dict[str, str])
    shape: Callable[[str, torch.Size, int], torch.Size] | None = None
    layout: torch.layout | None = None
    check: Callable[[TensorCollection, Leaves], None] | None = None
    decoupled: bool = False
    # Any: a state that is not checked yet.
    upgrade: Callable[[Any], Any] | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """One step of one rule, with everything but the leaves."""

    rule: Rule
    # Any: floats, tensors and schedules, as in `Optimizer`.
    hyper: Mapping[str, Any]
    count: Tensor
    tensors: dict[str, Tensor]
    how: How
    # Of the leaves, for messages.
    names: Callable[[], list[str]]

    def step(
        self, params: Leaves, grads: Leaves, slots: Slots, scalars: dict[str, Tensor]
    ) -> tuple[Leaves, Slots, dict[str, Tensor]]:
        """Return the leaves of the parameters and of the slots, and the scalars, after the step."""
        if not takes_kernels([*params, *grads]) or self._is_followed(params, grads):
            return self._step_plain(params, grads, slots, scalars)
        trace = recorder()
        active = self.how.active
        old = [*params, *(leaf for slot in slots.values() for leaf in slot), *scalars.values()]
        reads = [*grads, self.count, *self.tensors.values()]

        def names() -> list[str]:
            paths = self.names()
            written = [*paths, *(f"{slot}.{name}" for slot in slots for name in paths), *scalars]
            return [*written, *(f"gradient of {name}" for name in paths), "step", *self.tensors]

        # To keep a member as it is, its old values must be there after the step.
        donate = self.how.donate and active is None and lie_apart(names, old, reads)
        with torch.no_grad():
            new = old if donate or not old else list(torch._foreach_clone(old))  # pyright: ignore[reportPrivateImportUsage]
            kernel = partial(_kernel, self.rule, self.hyper, tuple(self.tensors))
            if trace is None:
                kernel(new, reads)
            else:
                trace.call(Replay(kernel, partial(_shorten, self.rule, self.hyper, tuple(self.tensors))), new, reads)
            if active is not None:
                new = select_members(active, new, old)
        for leaf, before in zip(new, params, strict=False):
            if leaf is not before:
                leaf.requires_grad_(before.requires_grad)
        n = len(params)
        rows = {slot: new[n * (i + 1) : n * (i + 2)] for i, slot in enumerate(slots)}
        return new[:n], rows, dict(zip(scalars, new[n * (len(slots) + 1) :], strict=True))

    def _is_followed(self, params: Leaves, grads: Leaves) -> bool:
        """Return whether autograd differentiates the step, by its arguments, a hyperparameter or a schedule."""
        if not torch.is_grad_enabled():
            return False
        if carry_graph(params, grads):
            return True
        values = [*self.tensors.values(), *[self._scheduled(value) for value in self.hyper.values() if callable(value)]]
        return any([isinstance(value, Tensor) and value.requires_grad for value in values])

    def _scheduled(self, schedule: Callable[[Tensor], Any]) -> Any:
        """Return the value of a schedule, or None where it reads its own tensors while a trace is recorded."""
        watch = recorder()
        # Else each replay calls the schedule itself, outside of the trace.
        if watch is None:
            return schedule(self.count)
        return watch.attempt(lambda: schedule(self.count))

    def _step_plain(
        self, params: Leaves, grads: Leaves, slots: Slots, scalars: dict[str, Tensor]
    ) -> tuple[Leaves, Slots, dict[str, Tensor]]:
        """Step with functions that every transform supports."""
        if not params:
            return params, slots, scalars
        numbers: Values = {name: value.double() for name, value in scalars.items()}
        work = _promote(Work(params, grads, slots, numbers, self.count.double() + 1, self.count.dim()))
        values = read_values(self.rule.name, self.hyper, self.count, self.tensors, self.count.shape)
        self.rule.lists(Lists(inplace=False), work, values)
        new = restore(work.params, params)
        new_slots = {slot: restore(work.slots[slot], old) for slot, old in slots.items()}
        new_scalars = {
            name: torch.as_tensor(work.scalars[name], device=old.device).to(old.dtype).expand(old.shape)
            for name, old in scalars.items()
        }
        if (active := self.how.active) is not None:
            new = select_members(active, new, params)
            new_slots = {slot: select_members(active, leaves, slots[slot]) for slot, leaves in new_slots.items()}
            new_scalars = {name: torch.where(active, value, scalars[name]) for name, value in new_scalars.items()}
        return new, new_slots, new_scalars


def decay(
    ops: Lists, work: Work, values: Values, *, decoupled: bool = False, maximize: bool = False
) -> tuple[Leaves, Leaves]:
    """Return the parameters and gradients with weight decay, which shrinks parameters or is added to gradients."""
    factor = values["weight_decay"]
    params = work.params
    grads = work.grads
    if maximize:
        grads = ops.run("neg", grads, keep=True)
    if isinstance(factor, Tensor) or factor != 0.0:
        if decoupled:
            params = ops.run("mul", params, 1 - values["lr"] * factor)
        else:
            grads = ops.add(grads, params, factor, keep=not maximize)
    return params, grads


def takes_kernels(leaves: Leaves) -> bool:
    """Return whether kernels may write to copies of these: real tensors, or tensors of a trace, at each replay."""
    if is_compiling() or in_functorch():
        return False
    if recorder() is not None:
        return True
    return has_values() and all([type(x) in (Tensor, Parameter) and x.device.type != "meta" for x in leaves])


def lie_apart(names: Callable[[], list[str]], writes: Leaves, reads: Leaves) -> bool:
    """Return whether no memory of the first list is shared: it may be overwritten. A trace checks it at each replay."""
    reads = [read._values() if read.is_sparse else read for read in reads]
    if any(map(is_read_only, writes)):
        return False
    if any(map(repeats_itself, writes)) or any(_find_shared(writes, reads)):
        return False
    trace = recorder()
    if trace is not None:
        # New memory overlaps nothing at a replay either.
        given = [(name, x) for name, x in zip(names(), (*writes, *reads), strict=False) if trace.is_given(x)]
        tensors = [x for _, x in given]
        n = sum(map(trace.is_given, writes))
        lengths = list(map(span_bytes, tensors))
        refuse = partial(_refuse_shared, [name for name, _ in given])
        trace.call(Apart(refuse, lengths[:n], lengths[n:]), tensors[:n], tensors[n:])
    return True


def _refuse_shared(names: list[str], writes: Leaves, reads: Leaves) -> None:
    """Raise if leaves share memory, or cannot be written to, and it was otherwise when they were traced."""
    for name, leaf in zip(names, writes, strict=False):
        if is_read_only(leaf):
            raise UnsupportedError(
                f"update(donate=True): {name!r} is on a read-only array, a write would end the process.",
                expected="memory that can be written to, as when the function was traced",
                hint="clone() the tree before the first step, or leave out donate.",
            )
    for i, j in _find_shared(writes, reads):
        raise UnsupportedError(
            f"update(donate=True): {names[i]!r} and {names[j]!r} share memory, which one would overwrite.",
            expected="leaves apart in memory, as they were when the function was traced",
            got=f"overlapping tensors of shapes {[list((*writes, *reads)[k].shape) for k in (i, j)]}",
            hint="clone() the tree before the first step, or leave out donate.",
        )


def _find_shared(writes: Leaves, reads: Leaves) -> Iterator[tuple[int, int]]:
    """Yield pairs of tensors that overlap, at least one of them of the first list."""
    return (pair for pair in find_overlaps([*writes, *reads]) if min(pair) < len(writes))


def _kernel(rule: Rule, hyper: Mapping[str, Any], names: tuple[str, ...], writes: Leaves, reads: Leaves) -> None:
    """Step in place on real tensors, a group of one dtype and device at a time; a trace calls this at every replay."""
    n = len(reads) - 1 - len(names)
    grads = reads[:n]
    count = reads[n]
    tensors = dict(zip(names, reads[n + 1 :], strict=True))
    stored = dict(zip(rule.scalars, writes[n * (len(rule.slots) + 1) :], strict=True))
    with torch.no_grad():
        merged = _merge(count)
        values = read_values(rule.name, hyper, merged, tensors, count.shape)
        values = {name: _number(value) for name, value in values.items()}
        step = _number(merged.double()) + 1
        scalars: Values = {name: _number(_merge(value).double()) for name, value in stored.items()}
        varies = (isinstance(step, Tensor) and step.dim()) or any([isinstance(x, Tensor) for x in values.values()])
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(writes[:n]):
            groups.setdefault((leaf.dtype, leaf.device), []).append(i)
        for (dtype, device), group in groups.items():
            slots = {slot: [writes[n * (k + 1) + i] for i in group] for k, slot in enumerate(rule.slots)}
            params = [writes[i] for i in group]
            work = Work(params, [grads[i] for i in group], slots, dict(scalars), step, count.dim())
            fused = rule.fused if dtype in _FUSED_DTYPES and device.type in _FUSED_DEVICES else None
            if fused is not None and varies:
                fused = _choose_for_members(rule, {**values, "": step}, [params, *slots.values()])
            if fused is not None and all(map(_are_laid_out, params, *slots.values())):
                aligned = [
                    grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
                    for grad, param in zip(work.grads, params, strict=True)
                ]
                if fused(replace(work, grads=aligned), values):
                    continue
            work = _step_lists(rule, work, values)
            # Every group computes the same.
            for name, value in stored.items():
                value.copy_(torch.as_tensor(work.scalars[name]))


def _choose_for_members(rule: Rule, numbers: Values, lists: list[Leaves]) -> Callable[[Work, Any], bool] | None:
    """Return the call of the fused kernel where members differ in these numbers; None where there is none.

    It depends on the size of a member and not on their number, so that a member is rounded alike among any others.
    A trace chooses once for all of its replays: this reads shapes and layouts, and no values.
    """
    fused = rule.fused
    varied = {name: x.dim() for name, x in numbers.items() if isinstance(x, Tensor) and x.dim()}
    plain = all([leaf.device.type == "cpu" and leaf.is_contiguous() for leaves in lists for leaf in leaves])
    if fused is None or not varied or not plain:
        return None
    sizes = [leaf.shape[max(varied.values()) :].numel() for leaf in lists[0]]
    if sum(sizes) >= _VIEW_ELEMENTS * len(sizes):
        return partial(_fused_by_member, rule, fused)
    if varied.keys() == {"lr"}:
        return partial(_fused_by_rate, fused, rule.decoupled)
    return None


def _fused_by_rate(fused: Callable[[Work, Any], bool], decoupled: bool, work: Work, values: Values) -> bool:
    """Call the fused kernel at rate 1 on zeros, and add the changes, each times the rate of its member.

    Weight decay that is added to the gradient would be in the changes; then this returns False.
    """
    params = work.params
    rate = values["lr"]
    factor = values["weight_decay"]
    if not decoupled and factor != 0.0:
        return False
    changes = [torch.zeros_like(param) for param in params]
    lists = [changes, *work.slots.values(), work.grads]
    odd = [(i, rest) for i, param in enumerate(params) if (rest := param.numel() % _VECTOR)]
    ends: Leaves = []
    joined = padding = params[0].new_zeros(-sum([rest for _, rest in odd]) % _VECTOR)
    if odd:
        # The ends of all leaves are one more leaf, whole vectors long.
        ends = [x for leaves in lists for x in (*[leaves[i].view(-1)[-rest:] for i, rest in odd], padding)]
        joined = torch.cat(ends)
        rows = joined.view(len(lists), -1).unbind(0)
        lists = [[*leaves, row] for leaves, row in zip(lists, rows, strict=True)]
    new, *slots, grads = lists
    whole = replace(work, params=new, grads=grads, slots=dict(zip(work.slots, slots, strict=True)))
    if not fused(whole, {**values, "lr": 1.0, "weight_decay": 0.0}):
        return False
    if odd:
        written = ends[: -len(odd) - 1]
        torch._foreach_copy_(written, joined.split([x.numel() for x in ends])[: len(written)])  # pyright: ignore[reportPrivateImportUsage]
    ops = Lists(inplace=True)
    if factor != 0.0:
        params = ops.run("mul", params, 1 - rate * factor)
    ops.run("addcmul", params, changes, rate)
    return True


def _fused_by_member(rule: Rule, fused: Callable[[Work, Any], bool], work: Work, values: Values) -> bool:
    """Step each member with its own numbers, as a run of this member does: by the fused kernel where it takes them."""
    numbers: Values = {**values, "": work.step}
    size = next(value.shape for value in numbers.values() if isinstance(value, Tensor))
    columns = [
        value.flatten().tolist() if isinstance(value, Tensor) else [value] * size.numel() for value in numbers.values()
    ]
    lists = [work.params, work.grads, *work.slots.values()]
    views = [zip(*[leaf.flatten(0, len(size) - 1).unbind(0) for leaf in leaves], strict=True) for leaves in lists]
    for row, *leaves in zip(zip(*columns, strict=True), *views, strict=True):
        params, grads, *slots = map(list, leaves)
        own = dict(zip(numbers, row, strict=True))
        member = Work(params, grads, dict(zip(work.slots, slots, strict=True)), {}, own.pop(""), 0)
        if not fused(member, own):
            _step_lists(rule, member, own)
    return True


def _step_lists(rule: Rule, work: Work, values: Values) -> Work:
    """Overwrite the tensors of a `Work` by list arithmetic; return it with the scalars after the step."""
    targets = [work.params, *work.slots.values()]
    work = _promote(work)
    rule.lists(Lists(inplace=True), work, values)
    for old, new in zip(targets, [work.params, *work.slots.values()], strict=True):
        if any(map(is_not, old, new)):
            torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]
    return work


def _merge(value: Tensor) -> Tensor:
    """Return one number where all members have the same."""
    if value.numel() and value.dim():
        first = value[(0,) * value.dim()]
        # One number expanded to all members needs no look at the values, which a mode that captures kernels refuses.
        if not any(value.stride()) or (has_values() and torch.equal(value, first.expand(value.shape))):
            return first
    return value


# Any: schedules and floats.
def _shorten(
    rule: Rule, hyper: Mapping[str, Any], names: tuple[str, ...], writes: Leaves, reads: Leaves
) -> Short | None:
    """Return the call of the fused kernel that `_kernel` comes to for tensors laid out like these; None for another."""
    n = len(reads) - 1 - len(names)
    params = writes[:n]
    grads = reads[:n]
    count = reads[n]
    tensors = reads[n + 1 :]
    kinds = {(leaf.dtype, leaf.device) for leaf in params}
    one_number = count.device.type == "cpu" and not any(count.stride()) and count.numel() > 0
    if rule.fused is None or rule.scalars or any(map(callable, hyper.values())) or not one_number or len(kinds) != 1:
        return None
    if params[0].dtype not in _FUSED_DTYPES or params[0].device.type not in _FUSED_DEVICES:
        return None
    rows = [writes[n * k : n * (k + 1)] for k in range(1 + len(rule.slots))]
    if not all(map(_are_laid_out, *rows)) or [x.stride() for x in grads] != [x.stride() for x in params]:
        return None
    fused = rule.fused
    first = (0,) * count.dim()
    slots = list(enumerate(rule.slots, 1))
    floats: Values = {name: 0.0 if name in names else float(value) for name, value in hyper.items()}
    numbers = floats | dict(zip(names, tensors, strict=True))
    if any([x.dim() for x in tensors]):
        step = _choose_for_members(rule, numbers, rows)
    else:
        step = fused
    if step is None:
        return None

    def run(writes: Leaves, reads: Leaves) -> bool:
        kept = {slot: writes[n * k : n * (k + 1)] for k, slot in slots}
        work = Work(writes[:n], reads[:n], kept, {}, float(reads[n][first]) + 1.0, len(first))
        values = dict(floats)
        for name, value in zip(names, reads[n + 1 :], strict=True):
            if value.dim():
                values[name] = value.double()
            else:
                values[name] = _number(value)
        return step(work, values)

    return run


# Any: schedules and floats.
def read_values(
    rule: str, hyper: Mapping[str, Any], count: Tensor, tensors: dict[str, Tensor], size: torch.Size
) -> Values:
    """Return the hyperparameters at this step: floats, or float64 tensors."""
    values: Values = {}
    for name, value in hyper.items():
        if name in tensors:
            values[name] = tensors[name].double()
        else:
            if callable(value):
                values[name] = check_scheduled(rule, name, value(count), size)
            else:
                values[name] = float(value)
    return values


# torch 2.13's fused CPU kernels walk the memory of all arguments alike: with different strides, or gaps, they are
# silently wrong.
def _are_laid_out(param: Tensor, *slots: Tensor) -> bool:
    if param.is_contiguous():
        return all(slot.is_contiguous() for slot in slots)
    dense = param.is_contiguous(memory_format=torch.channels_last)
    return dense and all(slot.stride() == param.stride() for slot in slots)


def _number(value: Coefficient) -> Coefficient:
    # On other devices it would wait for the device.
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return value.item()
    return value


def free_lists(leaves: Leaves) -> Lists:
    """Return list arithmetic for these leaves, of which every operation must be called with `keep=True`."""
    return Lists(inplace=bool(leaves) and takes_kernels(leaves) and recorder() is None)


def carry_graph(params: Leaves, grads: Leaves) -> bool:
    """Return whether autograd has recorded how these came about: gradients with a derivative, and results of steps.

    A parameter that requires grad is an input of a loss, and not of its training.
    """
    if any([grad.requires_grad for grad in grads]):
        return True
    return any([param.requires_grad and not param.is_leaf for param in params])


def grads_of(params: Leaves, grads: Leaves | None = None) -> "torch.set_grad_enabled":
    """Return a context that records derivatives where a transform takes them, or where the leaves carry them."""
    followed = is_compiling() or in_functorch() or carry_graph(params, grads or [])
    return torch.set_grad_enabled(torch.is_grad_enabled() and followed)


def _promote(work: Work) -> Work:
    """Compute in float32 where coefficients such as 0.999 would be rounded to 1; the slots are wide already."""
    # A rule assigns the slots; the caller still has the old ones.
    return replace(work, params=widen(work.params), grads=widen(work.grads), slots=dict(work.slots))


def select_members(active: Tensor, new: Leaves, old: Leaves) -> Leaves:
    """Return the new leaves where a member is active, else the old ones."""
    masks = spread(active, new, dtype=torch.bool)
    return [torch.where(mask, x, y) for mask, x, y in zip(masks, new, old, strict=True)]
