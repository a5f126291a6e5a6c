"""The demo's step functions under `torch.compile`: one graph, and none made again when only values change."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import tdfunc as tdf
from tdfunc import demo
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import init_ensemble
from tdfunc.optim import adam

MEMBERS, CALLS = 4, 3


class Compiled(NamedTuple):
    """What compiling one function gave: graphs made for its first call, all graphs after more calls, and breaks."""

    what: str
    graphs: int
    graphs_after: int
    breaks: int

    @property
    def reached(self) -> bool:
        return (self.graphs, self.graphs_after, self.breaks) == (1, 1, 0)


def step_functions() -> dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]]:
    """Return the functions, each with its arguments for call i: the same shapes, other values."""
    apply, _, _ = tdf.functional(demo.make_model())
    optimizer = adam(lr=demo.learning_rates(MEMBERS))
    run = Ensemble(apply.eval())

    @torch.no_grad()
    def predict(params: Any, x: Tensor) -> Tensor:
        return run(params, x)

    def training(i: int) -> tuple[Any, ...]:
        params, buffers = tdf.split(ensemble(i))
        x, t = torch.rand(MEMBERS, demo.BATCH, 64), torch.randint(0, demo.CLASSES, (MEMBERS, demo.BATCH))
        return params, buffers, optimizer.init(params), x, t, tdf.random.key(i)

    return {
        "training step: BatchNorm, dropout by keys and Adam": (demo.make_step(Ensemble(apply), optimizer), training),
        "prediction: Ensemble": (predict, lambda i: (ensemble(i), torch.rand(demo.BATCH, 64))),
    }


def ensemble(i: int) -> Any:
    return init_ensemble(demo.make_model, MEMBERS, key=i)


def compile_counts(say: Callable[[str], None]) -> list[Compiled]:
    found: list[Compiled] = []
    for what, (fn, arguments) in step_functions().items():
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(fn, fullgraph=True, backend=counter)
        compiled(*arguments(0))
        first = counter.frame_count
        for i in range(1, CALLS):
            compiled(*arguments(i))
        breaks = sum(counters["graph_break"].values())
        found.append(Compiled(what, first, counter.frame_count, breaks))
        say(f"{what}: {first} graph, {counter.frame_count} after {CALLS} calls, {breaks} breaks")
    return found
