"""How a step runs: torch's fused kernel or foreach on real tensors, leaf by leaf in transforms and compilers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc._jit.tracing import recorder
from tdfunc.core.context import has_values, in_functorch, is_compiling
from tdfunc.optim._checks import scheduled
from tdfunc.optim._lists import Coefficient, Leaves, Lists
from tdfunc.optim._memory import check_apart, owned

_FUSED_DEVICES = ("cpu", "cuda")
_LOW_PRECISION = (torch.float16, torch.bfloat16)
Values: TypeAlias = dict[str, Coefficient]
Slots: TypeAlias = dict[str, Leaves]


@dataclass
class Work:
    """What a rule reads and assigns: lists of leaves, and the number of this step, counted from 1."""

    params: Leaves
    grads: Leaves
    slots: Slots
    step: Coefficient


# Any: as in `Rule`.
def _no_kernel(work: Work, values: Any) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Rule:
    """One step, written in list arithmetic, and as a call of torch's fused kernel where there is one.

    Its functions are a module's own, or partials of those, so that optimizers can be pickled.

    Args:
        name: How messages call it.
        slots: The trees that it keeps in the state, shaped like the parameters.
        lists: Assigns the lists after the step to its `Work`.
        fused: Overwrites the tensors of its `Work`, or returns False where it does not apply. Called only when all
            values are floats, all members have done as many steps, and the tensors have one dtype, device and layout
            in memory.
    """

    name: str
    slots: tuple[str, ...]
    lists: Callable[[Lists, Work, Values], None]
    fused: Callable[[Work, Any], bool] = _no_kernel


@dataclass(frozen=True, eq=False)
class Run:
    """One step of one rule, with everything but the leaves."""

    rule: Rule
    # Any: floats, tensors and schedules, as in `Optimizer`.
    hyper: Mapping[str, Any]
    count: Tensor
    tensors: dict[str, Tensor]
    active: Tensor | None
    donate: bool
    # Of the leaves, for messages.
    names: Callable[[], list[str]]

    def step(self, params: Leaves, grads: Leaves, slots: Slots) -> tuple[Leaves, Slots]:
        """Return the leaves of the parameters and of the slots after the step."""
        if is_compiling() or in_functorch():
            return self._step_plain(params, grads, slots)
        trace = recorder()
        if trace is None and not _all_real([*params, *grads]):
            return self._step_plain(params, grads, slots)
        old = [*params, *(leaf for slot in slots.values() for leaf in slot)]
        # To keep a member as it is, its old values must be there after the step.
        donate = self.donate and self.active is None
        with torch.no_grad():
            reads = [*grads, self.count, *self.tensors.values()]
            copied = not donate and bool(old)
            new = list(torch._foreach_clone(old)) if copied else owned(old, reads)  # pyright: ignore[reportPrivateImportUsage]
            kernel = partial(_kernel, self.rule, self.hyper, tuple(self.tensors))
            if trace is None:
                kernel(new, reads)
            else:
                trace.call(partial(_checked, kernel, self._names(slots)) if donate else kernel, new, reads)
            if self.active is not None:
                new = _chosen(self.active, new, old)
        for leaf, before in zip(new, params, strict=False):
            if leaf is not before:
                leaf.requires_grad_(before.requires_grad)
        n = len(params)
        return new[:n], {slot: new[n * (i + 1) : n * (i + 2)] for i, slot in enumerate(slots)}

    def _names(self, slots: Slots) -> list[str]:
        """Return how messages call what a kernel writes to and reads."""
        names = self.names()
        written = [*names, *(f"{slot}.{name}" for slot in slots for name in names)]
        return [*written, *(f"gradient of {name}" for name in names), "step", *self.tensors]

    def _step_plain(self, params: Leaves, grads: Leaves, slots: Slots) -> tuple[Leaves, Slots]:
        """Step with functions that every transform knows, on values that it may follow."""
        work = _promoted(Work(params, grads, slots, self.count.double() + 1))
        values = _values(self.rule.name, self.hyper, self.count, self.tensors, self.count.shape)
        self.rule.lists(Lists(inplace=False), work, values)
        new = _restored(work.params, params), {slot: _restored(work.slots[slot], slots[slot]) for slot in slots}
        if self.active is None:
            return new
        active = self.active
        return _chosen(active, new[0], params), {slot: _chosen(active, new[1][slot], slots[slot]) for slot in slots}


def _checked(kernel: Callable[[Leaves, Leaves], None], names: list[str], writes: Leaves, reads: Leaves) -> None:
    check_apart(writes, reads, names)
    kernel(writes, reads)


def _kernel(rule: Rule, hyper: Mapping[str, Any], names: tuple[str, ...], writes: Leaves, reads: Leaves) -> None:
    """Step in place on real tensors, a group of one dtype and device at a time; a trace calls this at every replay."""
    n = len(reads) - 1 - len(names)
    grads, count, tensors = reads[:n], reads[n], dict(zip(names, reads[n + 1 :], strict=True))
    size = count.shape
    if count.dim() and _is_one_number(count):
        count = count[(0,) * count.dim()]
    with torch.no_grad():
        values = {name: _number(value) for name, value in _values(rule.name, hyper, count, tensors, size).items()}
        step = _number(count.double()) + 1
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(writes[:n]):
            groups.setdefault((leaf.dtype, leaf.device), []).append(i)
        for members in groups.values():
            slots = {slot: [writes[n * (k + 1) + i] for i in members] for k, slot in enumerate(rule.slots)}
            _step_group(rule, Work([writes[i] for i in members], [grads[i] for i in members], slots, step), values)


def _step_group(rule: Rule, work: Work, values: Values) -> None:
    targets = [work.params, *work.slots.values()]
    if _can_fuse(work, targets, values):
        grads = list(map(_aligned, work.grads, work.params))
        if rule.fused(Work(work.params, grads, work.slots, work.step), values):
            return
    work = _promoted(work)
    rule.lists(Lists(inplace=True), work, values)
    for old, new in zip(targets, [work.params, *work.slots.values()], strict=True):
        if new[0] is not old[0]:
            torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]


# Any: what a schedule returns, and floats.
def _values(rule: str, hyper: Mapping[str, Any], count: Tensor, tensors: dict[str, Tensor], size: torch.Size) -> Values:
    """Return the hyperparameters at this step: floats, or float64 tensors."""
    values: Values = {}
    for name, value in hyper.items():
        if name in tensors:
            values[name] = tensors[name].double()
        else:
            values[name] = scheduled(rule, name, value(count), size) if callable(value) else float(value)
    return values


def _all_real(leaves: Leaves) -> bool:
    """Whether kernels may run on these: plain tensors with data, no mode that wants to see every operation."""
    return has_values() and all(type(leaf) in (Tensor, Parameter) and leaf.device.type != "meta" for leaf in leaves)


def _can_fuse(work: Work, targets: list[Leaves], values: Values) -> bool:
    return (
        work.params[0].device.type in _FUSED_DEVICES
        and not (isinstance(work.step, Tensor) and work.step.dim())
        and not any(isinstance(value, Tensor) for value in values.values())
        and all(map(_are_alike, *targets))
    )


# torch 2.13's fused CPU kernels walk the memory of all arguments alike: with different strides, or gaps, they are
# silently wrong.
def _are_alike(param: Tensor, *slots: Tensor) -> bool:
    if param.is_contiguous():
        return all(slot.is_contiguous() for slot in slots)
    dense = param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last)
    return dense and all(slot.stride() == param.stride() for slot in slots)


def _aligned(grad: Tensor, param: Tensor) -> Tensor:
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad
    return torch.empty_like(param).copy_(grad)


def _is_one_number(count: Tensor) -> bool:
    """Whether all members have done as many steps; one number expanded to all needs no look at the values."""
    if count.numel() == 0:
        return False
    return not any(count.stride()) or torch.equal(count, count[(0,) * count.dim()].expand(count.shape))


def _number(value: Coefficient) -> Coefficient:
    # On other devices it would wait for the device.
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu" else value


def _promoted(work: Work) -> Work:
    """Compute in float32 where coefficients such as 0.999 would be rounded to 1."""
    slots = {name: _widened(slot) for name, slot in work.slots.items()}
    return Work(_widened(work.params), _widened(work.grads), slots, work.step)


def _widened(leaves: Leaves) -> Leaves:
    return [leaf.float() if leaf.dtype in _LOW_PRECISION else leaf for leaf in leaves]


def _restored(leaves: Leaves, like: Leaves) -> Leaves:
    return [leaf.to(old.dtype) for leaf, old in zip(leaves, like, strict=True)]


def _chosen(active: Tensor, new: Leaves, old: Leaves) -> Leaves:
    return [
        torch.where(active.reshape(*active.shape, *[1] * (x.dim() - active.dim())), x, y)
        for x, y in zip(new, old, strict=True)
    ]
