"""One step of a rule on all leaves: by a kernel on real tensors, leaf by leaf in transforms and compilers.

`Optimizer.update` checks its trees and makes a `Run` of their leaves. `Run.step` calls the kernel (`step_in_place`), or
`_step_plain`; both end in the functions of a `Rule`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc._jit.recording.tracing import recorder
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.optim.apart import lie_apart
from tdfunc.optim.base import How
from tdfunc.optim.checks import warn_graph
from tdfunc.optim.execution import carry_graph, order, restore_members, select_members, takes_kernels
from tdfunc.optim.kernel import Layout, Read, Replay, Written, promote, shorten, step_in_place
from tdfunc.optim.lists import Leaves, Lists, join_complex, place_alike, restore, split_complex
from tdfunc.optim.rule import Rule, Slots, Values, Work, number_of_step, read_values


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
        if any([leaf.is_complex() for leaf in params]):
            return self._step_complex(params, grads, slots, scalars)
        return self._step_real(params, grads, slots, scalars)

    def _step_complex(
        self, params: Leaves, grads: Leaves, slots: Slots, scalars: dict[str, Tensor]
    ) -> tuple[Leaves, Slots, dict[str, Tensor]]:
        """Step real and imaginary parts as two numbers."""
        # Memory is not overwritten: the parts are views of it, and results would be views of the arguments.
        run = replace(self, how=replace(self.how, donate=False))
        is_followed = is_compiling() or in_functorch() or self._is_followed(params, grads)
        # Otherwise a view of a parameter would be the result of a step, which is differentiated.
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_followed):
            parts = {slot: split_complex(leaves) for slot, leaves in slots.items()}
            new, new_parts, new_scalars = run._step_real(split_complex(params), split_complex(grads), parts, scalars)
            new = join_complex(new, params)
            new_slots = {slot: join_complex(leaves, slots[slot]) for slot, leaves in new_parts.items()}
        if not is_followed:
            _keep_requires_grad(new, params)
        return new, new_slots, new_scalars

    def _step_real(
        self, params: Leaves, grads: Leaves, slots: Slots, scalars: dict[str, Tensor]
    ) -> tuple[Leaves, Slots, dict[str, Tensor]]:
        if is_compiling() or in_functorch():
            return self._step_plain(params, grads, slots, scalars)
        if self._is_followed(params, grads):
            after = self._step_plain(params, grads, slots, scalars)
            warn_graph(self.rule.name, [params, *slots.values()], [after[0], *after[1].values()])
            return after
        if not takes_kernels([*params, *grads]):
            with torch.no_grad():
                new, new_slots, new_scalars = self._step_plain(params, grads, slots, scalars)
                # A product of matrices may be whole on each rank, where they have fewer rows than there are ranks.
                new = place_alike(new, params)
                new_slots = {slot: place_alike(leaves, slots[slot]) for slot, leaves in new_slots.items()}
            _keep_requires_grad(new, params)
            return new, new_slots, new_scalars
        active = self.how.active
        layout = Layout(tuple(slots), tuple(scalars), tuple(self.tensors))
        grads = order(grads, params)
        old = layout.join_written(Written(params, slots, scalars))
        reads = layout.join_read(Read(grads, self.count, self.tensors))
        # To keep a member as it is, its old values must be there after the step.
        donate = self.how.donate and active is None and lie_apart(partial(self._names_in, layout), old, reads)
        with torch.no_grad():
            new = old
            if old and not donate:
                new = list(torch._foreach_clone(old))  # pyright: ignore[reportPrivateImportUsage]
            self._call_kernel(layout, new, reads)
            if active is not None:
                new = self._keep_inactive(active, new, old)
        _keep_requires_grad(new, params)
        after = layout.split_written(new, len(params))
        return after.params, after.slots, after.scalars

    def _call_kernel(self, layout: Layout, writes: Leaves, reads: Leaves) -> None:
        """Overwrite tensors by the step, now or at each replay of the trace that is recorded."""
        kernel = partial(step_in_place, self.rule, self.hyper, layout)
        trace = recorder()
        if trace is None:
            kernel(writes, reads)
        else:
            trace.call(Replay(kernel, partial(shorten, self.rule, self.hyper, layout), layout), writes, reads)

    def _keep_inactive(self, active: Tensor, new: Leaves, old: Leaves) -> Leaves:
        """Return the new leaves with the old rows of inactive members."""
        # On another device the members would have to be waited for.
        if any([leaf.device.type != "cpu" for leaf in (active, *old)]):
            return select_members(active, new, old)
        trace = recorder()
        if trace is None:
            restore_members(new, [active, *old])
        else:
            trace.call(restore_members, new, [active, *old])
        return new

    def _names_in(self, layout: Layout) -> list[str]:
        """Return the names of the tensors in both flat lists."""
        paths = self.names()
        of_slots = [f"{slot}.{name}" for slot in layout.slots for name in paths]
        of_grads = [f"gradient of {name}" for name in paths]
        return [*paths, *of_slots, *layout.scalars, *of_grads, "step", *layout.tensors]

    def _is_followed(self, params: Leaves, grads: Leaves) -> bool:
        """Return whether autograd differentiates the step, by its arguments, a hyperparameter or a schedule."""
        if not torch.is_grad_enabled():
            return False
        if carry_graph(params, grads):
            return True
        scheduled = [self._scheduled(value) for value in self.hyper.values() if callable(value)]
        values = [*self.tensors.values(), *scheduled]
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
        work = promote(Work(params, grads, slots, numbers, number_of_step(self.count.double()), self.count.dim()))
        values = read_values(self.rule.name, self.hyper, self.count, self.tensors, self.count.shape)
        self.rule.lists(Lists(inplace=False), work, values)
        new = restore(work.params, params)
        new_slots = {slot: restore(work.slots[slot], old) for slot, old in slots.items()}
        new_scalars = {
            name: torch.as_tensor(work.scalars[name], dtype=old.dtype, device=old.device).expand(old.shape)
            for name, old in scalars.items()
        }
        active = self.how.active
        if active is not None:
            new = select_members(active, new, params)
            new_slots = {slot: select_members(active, leaves, slots[slot]) for slot, leaves in new_slots.items()}
            new_scalars = {name: torch.where(active, value, scalars[name]) for name, value in new_scalars.items()}
        return new, new_slots, new_scalars


def _keep_requires_grad(new: Leaves, old: Leaves) -> None:
    """Let the new parameters, the first of a list, require grad where the old ones do."""
    for leaf, before in zip(new, old, strict=False):
        if leaf is not before:
            leaf.requires_grad_(before.requires_grad)
