"""`Ensemble(how="auto")` against the better of the loop and vmap, and beside a trace that was asked for."""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks.measure import Effort, Sampler, Timing
from benchmarks.models.small import Encoder, cnn, mlp
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import stack_modules

MEMBERS = (1, 4, 16, 64)
WAYS = ("loop", "vmap", "traced")
WARM_UP = 5
WITHIN = 1.10

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 8-32-32-4, 16 rows": (lambda: mlp(8, 32, 32, 4), (16, 8)),
    "MLP 64-128-10, 64 rows": (lambda: mlp(64, 128, 10), (64, 64)),
    "CNN on 16x16, 4 images": (cnn, (4, 3, 16, 16)),
    "CNN on 16x16, 32 images": (cnn, (32, 3, 16, 16)),
    "transformer encoder, 4 of 16 tokens": (Encoder, (4, 16, 32)),
}


class Cell(NamedTuple):
    """One model at one number of members: what auto chose, and the time of each way."""

    model: str
    members: int
    chosen: str
    timings: dict[str, Timing]

    @property
    def best(self) -> str:
        """Return the faster of the two ways that auto chooses from."""
        return min(("loop", "vmap"), key=lambda way: self.timings[way].cpu_us)

    @property
    def gain(self) -> float:
        """Return how many times faster the trace is than auto."""
        return self.timings["auto"].cpu_us / self.timings["traced"].cpu_us

    @property
    def ratio(self) -> float:
        """Return the time of auto over that of the best way."""
        return self.timings["auto"].cpu_us / self.timings[self.best].cpu_us

    @property
    def reached(self) -> bool:
        return self.ratio <= WITHIN


class Prepared(NamedTuple):
    """One cell, warmed up: its ensembles have traced what they will."""

    model: str
    members: int
    sampler: Sampler
    auto: Ensemble

    def cell(self) -> Cell:
        return Cell(self.model, self.members, self.auto.plan().partition(",")[0], self.sampler.timings())


def prepare_cell(model: str, members: int) -> Prepared:
    make, shape = MODELS[model]
    modules = [make().eval() for _ in range(members)]
    apply, _, _ = tdf.functional(modules[0])
    tree, x = stack_modules(modules), torch.randn(*shape)
    ensembles = {how: Ensemble(apply, how) for how in ("auto", *WAYS)}

    def way(ensemble: Any) -> Callable[[], Tensor]:
        return lambda: ensemble(tree, x)

    with quiet_no_grad():
        for ensemble in ensembles.values():
            for _ in range(WARM_UP):
                ensemble(tree, x)
    sampler = Sampler({how: way(ensemble) for how, ensemble in ensembles.items()})
    return Prepared(model, members, sampler, ensembles["auto"])


@contextmanager
def quiet_no_grad():
    with torch.no_grad(), warnings.catch_warnings():
        # torch's fused encoder layer has no batching rule, and says so.
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def cells(effort: Effort, say: Callable[[str], None]) -> list[Cell]:
    prepared = [prepare_cell(model, members) for model in MODELS for members in MEMBERS]
    # In passes over all of them, as `rows.measure_cases`.
    with quiet_no_grad():
        for _ in range(effort.passes):
            for found in prepared:
                found.sampler.run(effort)
    done = [found.cell() for found in prepared]
    for cell in done:
        times = ", ".join(f"{how} {cell.timings[how].cpu_us:.0f}" for how in WAYS)
        gain = f"{cell.ratio:.2f} of {cell.best}, traced {cell.gain:.2f}x faster"
        say(f"{cell.model}, E={cell.members}: auto is {cell.chosen}, {gain}; us: {times}")
    return done
