"""`Ensemble(how="auto")` against the best of its three ways."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks.measure import Effort, Timing, measure
from benchmarks.models import Encoder, cnn, mlp
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
        return min(WAYS, key=lambda way: self.timings[way].cpu_us)

    @property
    def ratio(self) -> float:
        """Return the time of auto over that of the best way."""
        return self.timings["auto"].cpu_us / self.timings[self.best].cpu_us

    @property
    def reached(self) -> bool:
        return self.ratio <= WITHIN


def measure_cell(model: str, members: int, effort: Effort) -> Cell:
    make, shape = MODELS[model]
    modules = [make().eval() for _ in range(members)]
    apply, _, _ = tdf.functional(modules[0])
    tree, x = stack_modules(modules), torch.randn(*shape)
    ensembles = {how: Ensemble(apply, how) for how in ("auto", *WAYS)}

    def way(ensemble: Any) -> Callable[[], Tensor]:
        return lambda: ensemble(tree, x)

    with torch.no_grad(), warnings.catch_warnings():
        # torch's fused encoder layer has no batching rule, and says so.
        warnings.filterwarnings("ignore", "There is a performance drop")
        for ensemble in ensembles.values():
            for _ in range(WARM_UP):
                ensemble(tree, x)
        timings = measure({how: way(ensemble) for how, ensemble in ensembles.items()}, effort)
        ensembles["auto"](tree, x)
    chosen = ensembles["auto"].plan().partition(",")[0]
    return Cell(model, members, chosen, timings)


def cells(effort: Effort, say: Callable[[str], None], members: tuple[int, ...] = MEMBERS) -> list[Cell]:
    found: list[Cell] = []
    for model in MODELS:
        for count in members:
            cell = measure_cell(model, count, effort)
            found.append(cell)
            times = ", ".join(f"{how} {cell.timings[how].cpu_us:.0f}" for how in WAYS)
            say(f"{model}, E={count}: auto is {cell.chosen}, {cell.ratio:.2f} of {cell.best}; us: {times}")
    return found
