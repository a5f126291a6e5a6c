"""The kernel of a step, which overwrites real tensors: torch's fused kernel where there is one, else foreach kernels.

A trace records it as a function of two flat lists, the tensors that it writes and those that it only reads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc.core.context import has_values
from tdfunc.optim.lists import Coefficient, Leaves, Lists, widen
from tdfunc.optim.rule import Rule, Slots, Values, Work, number_of_step, read_values

_FUSED_DEVICES = ("cpu", "cuda")
# torch 2.13's fused SGD is wrong on the CPU for vectors of 16-bit numbers.
_FUSED_DTYPES = (torch.float32, torch.float64)
# Elements on which the views of a leaf of one member cost little.
_VIEW_ELEMENTS = 1500
# Elements that the vectors of every processor divide: of what is left of a leaf, torch 2.13's fused CPU kernels round
# otherwise than of the rest.
_VECTOR = 16
# Writes to tensors of the first list.
Kernel: TypeAlias = Callable[[Leaves, Leaves], None]
# As well, or returns False and leaves them as they are.
Short: TypeAlias = Callable[[Leaves, Leaves], bool]
# A call of torch's fused kernel; False where it does not take the tensors or values. Any: every value is a float here.
Fused: TypeAlias = Callable[[Work, Any], bool]


# -- the flat lists ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """The tensors that a step writes."""

    params: Leaves
    slots: Slots
    scalars: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Read:
    """The tensors that a step only reads: gradients, the number of earlier steps, hyperparameters."""

    grads: Leaves
    count: Tensor
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The order of flat lists of tensors.

    Written are the parameters, then the leaves of each slot, then the scalars. Read are the gradients, then the number
    of steps, then the hyperparameters that are tensors.
    """

    slots: tuple[str, ...]
    scalars: tuple[str, ...]
    tensors: tuple[str, ...]

    def join_written(self, written: Written) -> Leaves:
        """Return the tensors that are written as a flat list."""
        of_slots = [leaf for slot in self.slots for leaf in written.slots[slot]]
        return [*written.params, *of_slots, *written.scalars.values()]

    def join_read(self, read: Read) -> Leaves:
        """Return the tensors that are only read as a flat list."""
        return [*read.grads, read.count, *read.tensors.values()]

    def count_leaves(self, reads: Leaves) -> int:
        """Return the number of parameters, by the list of tensors that are read."""
        return len(reads) - 1 - len(self.tensors)

    def split_written(self, writes: Leaves, n: int) -> Written:
        """Take the list of tensors that are written apart, for `n` parameters."""
        slots: Slots = {}
        begin = n
        for slot in self.slots:
            slots[slot] = writes[begin : begin + n]
            begin += n
        return Written(writes[:n], slots, dict(zip(self.scalars, writes[begin:], strict=True)))

    def split_read(self, reads: Leaves, n: int) -> Read:
        """Take the list of tensors that are only read apart, for `n` parameters."""
        return Read(reads[:n], reads[n], dict(zip(self.tensors, reads[n + 1 :], strict=True)))


# -- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a step; a tensor where members differ, or on another device than the CPU."""

    values: Values
    scalars: Values
    step: Coefficient

    def vary(self) -> bool:
        """Return whether some number is not a float."""
        if isinstance(self.step, Tensor) and self.step.dim():
            return True
        return any([isinstance(value, Tensor) for value in self.values.values()])


def step_in_place(rule: Rule, hyper: Mapping[str, Any], layout: Layout, writes: Leaves, reads: Leaves) -> None:
    """Step in place on real tensors, a group of one dtype and device at a time; a trace calls this at every replay."""
    n = layout.count_leaves(reads)
    written = layout.split_written(writes, n)
    read = layout.split_read(reads, n)
    with torch.no_grad():
        numbers = _read_numbers(rule, hyper, written, read)
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(written.params):
            groups.setdefault((leaf.dtype, leaf.device), []).append(i)
        for group in groups.values():
            slots: dict[str, Leaves] = {}
            for slot, leaves in written.slots.items():
                slots[slot] = [leaves[i] for i in group]
            params = [written.params[i] for i in group]
            grads = [read.grads[i] for i in group]
            work = Work(params, grads, slots, dict(numbers.scalars), numbers.step, read.count.dim())
            _step_group(rule, work, numbers, written.scalars)


def _read_numbers(rule: Rule, hyper: Mapping[str, Any], written: Written, read: Read) -> _Numbers:
    count = _merge(read.count)
    values = read_values(rule.name, hyper, count, read.tensors, read.count.shape)
    return _Numbers(
        values={name: _number(value) for name, value in values.items()},
        scalars={name: _number(_merge(value).double()) for name, value in written.scalars.items()},
        step=number_of_step(_number(count.double())),
    )


def _step_group(rule: Rule, work: Work, numbers: _Numbers, scalars: dict[str, Tensor]) -> None:
    """Step leaves of one dtype and device."""
    lists = [work.params, *work.slots.values()]
    fused = rule.fused
    if not _has_fused(work.params[0]):
        fused = None
    if fused is not None and numbers.vary():
        fused = _choose_for_members(rule, {**numbers.values, "": numbers.step}, lists)
    if not all(map(_are_laid_out, *lists)):
        fused = None
    if fused is not None and fused(replace(work, grads=_align(work.grads, work.params)), numbers.values):
        return
    work = _step_lists(rule, work, numbers.values)
    # Every group computes the same.
    for name, value in scalars.items():
        value.copy_(torch.as_tensor(work.scalars[name], dtype=value.dtype))


def _has_fused(leaf: Tensor) -> bool:
    return leaf.dtype in _FUSED_DTYPES and leaf.device.type in _FUSED_DEVICES


def _align(grads: Leaves, params: Leaves) -> Leaves:
    """Return gradients with the strides of their parameters."""
    aligned: Leaves = []
    for grad, param in zip(grads, params, strict=True):
        if grad.stride() != param.stride():
            grad = torch.empty_like(param).copy_(grad)
        aligned.append(grad)
    return aligned


def _step_lists(rule: Rule, work: Work, values: Values) -> Work:
    """Overwrite the tensors of a `Work` by list arithmetic; return it with the scalars after the step."""
    targets = [work.params, *work.slots.values()]
    work = promote(work)
    rule.lists(Lists(inplace=True), work, values)
    for old, new in zip(targets, [work.params, *work.slots.values()], strict=True):
        if any(map(is_not, old, new)):
            torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]
    return work


def promote(work: Work) -> Work:
    """Compute in float32 where coefficients such as 0.999 would be rounded to 1; the slots are wide already."""
    # A rule assigns the slots; the caller still has the old ones.
    return replace(work, params=widen(work.params), grads=widen(work.grads), slots=dict(work.slots))


def _merge(value: Tensor) -> Tensor:
    """Return one number where all members have the same."""
    if value.numel() and value.dim():
        first = value[(0,) * value.dim()]
        # One number expanded to all members needs no look at the values, which a mode that captures kernels refuses.
        if not any(value.stride()) or (has_values() and torch.equal(value, first.expand(value.shape))):
            return first
    return value


def _number(value: Coefficient) -> Coefficient:
    # On other devices it would wait for the device.
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return value.item()
    return value


# torch 2.13's fused CPU kernels walk the memory of all arguments alike: with different strides, or gaps, they are
# silently wrong.
def _are_laid_out(param: Tensor, *slots: Tensor) -> bool:
    if param.is_contiguous():
        return all(slot.is_contiguous() for slot in slots)
    dense = param.is_contiguous(memory_format=torch.channels_last)
    return dense and all(slot.stride() == param.stride() for slot in slots)


# -- members with different numbers -----------------------------------------------------------------------------------


def _choose_for_members(rule: Rule, numbers: Values, lists: list[Leaves]) -> Fused | None:
    """Return the call of the fused kernel where members differ in these numbers; None where there is none.

    It depends on the size of a member and not on their number, so that a member is rounded alike among any others.
    A trace chooses once for all of its replays: this reads shapes and layouts, and no values.
    """
    fused = rule.fused
    varied = {name: x.dim() for name, x in numbers.items() if isinstance(x, Tensor) and x.dim()}
    if fused is None or not varied:
        return None
    for leaves in lists:
        if not all([leaf.device.type == "cpu" and leaf.is_contiguous() for leaf in leaves]):
            return None
    sizes = [leaf.shape[max(varied.values()) :].numel() for leaf in lists[0]]
    if sum(sizes) >= _VIEW_ELEMENTS * len(sizes):
        return partial(_fused_by_member, rule, fused)
    if varied.keys() == {"lr"}:
        return partial(_fused_by_rate, fused, rule.decoupled)
    return None


def _fused_by_rate(fused: Fused, decoupled: bool, work: Work, values: Values) -> bool:
    """Call the fused kernel at rate 1 on zeros, and add the changes, each times the rate of its member.

    Weight decay that is added to the gradient would be in the changes; then this returns False.
    """
    params = work.params
    factor = values["weight_decay"]
    if not decoupled and factor != 0.0:
        return False
    changes = [torch.zeros_like(param) for param in params]
    lists = [changes, *work.slots.values(), work.grads]
    ends = _Ends(lists)
    new, *slots, grads = ends.lists
    whole = replace(work, params=new, grads=grads, slots=dict(zip(work.slots, slots, strict=True)))
    if not fused(whole, {**values, "lr": 1.0, "weight_decay": 0.0}):
        return False
    ends.write_back()
    ops = Lists(inplace=True)
    if factor != 0.0:
        params = ops.run("mul", params, 1 - values["lr"] * factor)
    ops.run("addcmul", params, changes, values["lr"])
    return True


class _Ends:
    """The ends of leaves, each less than a vector: in a list, they are one more leaf that is whole vectors long.

    Attributes:
        lists: The lists, each with its ends as one more leaf.
    """

    def __init__(self, lists: list[Leaves]) -> None:
        rests = [leaf.numel() % _VECTOR for leaf in lists[0]]
        padding = lists[0][0].new_zeros(-sum(rests) % _VECTOR)
        self.lists = lists
        # Views of all lists, in their order.
        self._ends: Leaves = []
        # Of the last list, which the kernel only reads, and of the padding in front.
        self._read_only = sum(map(bool, rests)) + 1
        if not any(rests):
            return
        for leaves in lists:
            self._ends += [leaf.view(-1)[-rest:] for leaf, rest in zip(leaves, rests, strict=True) if rest]
            self._ends.append(padding)
        self._joined = torch.cat(self._ends)
        rows = self._joined.view(len(lists), -1).unbind(0)
        self.lists = [[*leaves, row] for leaves, row in zip(lists, rows, strict=True)]

    def write_back(self) -> None:
        """Copy the ends into their leaves."""
        if self._ends:
            written = self._ends[: -self._read_only]
            parts = self._joined.split([end.numel() for end in self._ends])
            torch._foreach_copy_(written, parts[: len(written)])  # pyright: ignore[reportPrivateImportUsage]


def _fused_by_member(rule: Rule, fused: Fused, work: Work, values: Values) -> bool:
    """Step each member with its own numbers, as a run of this member does: by the fused kernel where it takes them."""
    numbers: Values = {**values, "": work.step}
    size = next(value.shape for value in numbers.values() if isinstance(value, Tensor))
    columns: list[list[float]] = []
    for value in numbers.values():
        if isinstance(value, Tensor):
            columns.append(value.flatten().tolist())
        else:
            columns.append([value] * size.numel())
    lists = [work.params, work.grads, *work.slots.values()]
    # For each list, the leaves of each member.
    views: list[Iterable[tuple[Tensor, ...]]] = []
    for leaves in lists:
        by_leaf = [leaf.flatten(0, len(size) - 1).unbind(0) for leaf in leaves]
        views.append(zip(*by_leaf, strict=True))
    for row, *leaves in zip(zip(*columns, strict=True), *views, strict=True):
        params, grads, *slots = map(list, leaves)
        own: Values = dict(zip(numbers, row, strict=True))
        step = own.pop("")
        member = Work(params, grads, dict(zip(work.slots, slots, strict=True)), {}, step, 0)
        if not fused(member, own):
            _step_lists(rule, member, own)
    return True


# -- replays of a trace -----------------------------------------------------------------------------------------------


class Replay:
    """A kernel that reads the layout of its tensors once, since later calls have the same layout.

    Args:
        kernel: The kernel for tensors of any layout.
        shorten: A function that returns a shorter way for tensors laid out like these, or None.
        layout: The order of the tensors.
    """

    def __init__(self, kernel: Kernel, shorten: Callable[[Leaves, Leaves], Short | None], layout: Layout) -> None:
        self._kernel = kernel
        self._shorten = shorten
        self._layout = layout
        self._looked = False
        self._short: Short | None = None

    def __call__(self, writes: Leaves, reads: Leaves) -> None:
        """Overwrite the tensors by one step."""
        if not self._looked:
            self._short = self._shorten(writes, reads)
            self._looked = True
        if self._short is None or not self._short(writes, reads):
            self._kernel(writes, reads)

    def again(self) -> "Replay":
        """Return the same kernel for tensors of another layout."""
        return Replay(self._kernel, self._shorten, self._layout)

    def count_apart(self, writes: Leaves, reads: Leaves) -> int:
        """Return the number of leaves, if a step of some elements is one call and no other elements matter; else 0."""
        n = self._layout.count_leaves(reads)
        # A hyperparameter with a value for each member would have to be cut as well.
        if any([x.dim() for x in reads[n + 1 :]]) or self._shorten(writes, reads) is None:
            return 0
        return n


# Any: schedules and floats.
def shorten(rule: Rule, hyper: Mapping[str, Any], layout: Layout, writes: Leaves, reads: Leaves) -> Short | None:
    """Return the call of the fused kernel that `step_in_place` comes to for tensors laid out like these, or None."""
    n = layout.count_leaves(reads)
    written = layout.split_written(writes, n)
    read = layout.split_read(reads, n)
    if not _is_one_call(rule, hyper, written, read):
        return None
    names = layout.tensors
    floats: Values = {name: 0.0 if name in names else float(value) for name, value in hyper.items()}
    step = rule.fused
    if any([x.dim() for x in read.tensors.values()]):
        step = _choose_for_members(rule, floats | read.tensors, [written.params, *written.slots.values()])
    if step is None:
        return None
    first = (0,) * read.count.dim()
    spans = {slot: slice(n * k, n * (k + 1)) for k, slot in enumerate(layout.slots, 1)}

    def run(writes: Leaves, reads: Leaves) -> bool:
        slots = {slot: writes[span] for slot, span in spans.items()}
        number = number_of_step(float(reads[n][first]))
        work = Work(writes[:n], reads[:n], slots, {}, number, len(first))
        values = dict(floats)
        for name, value in zip(names, reads[n + 1 :], strict=True):
            if value.dim():
                values[name] = value.double()
            else:
                values[name] = _number(value)
        return step(work, values)

    return run


# Any: schedules and floats.
def _is_one_call(rule: Rule, hyper: Mapping[str, Any], written: Written, read: Read) -> bool:
    """Return whether one call of the fused kernel is the step, by layouts alone."""
    params = written.params
    if rule.fused is None or rule.scalars or any(map(callable, hyper.values())):
        return False
    count = read.count
    is_one_number = count.device.type == "cpu" and not any(count.stride()) and count.numel() > 0
    if not is_one_number:
        return False
    kinds = {(leaf.dtype, leaf.device) for leaf in params}
    if len(kinds) != 1 or not _has_fused(params[0]):
        return False
    if not all(map(_are_laid_out, params, *written.slots.values())):
        return False
    return [x.stride() for x in read.grads] == [x.stride() for x in params]
