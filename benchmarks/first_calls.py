"""The first call of a training step, which records it, against the first call of a step that XLA compiles."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.func import grad, vmap

import tdfunc as tdf
from benchmarks.measure import Remote
from benchmarks.rows import OURS, Case, Suite, Way
from benchmarks.training import EQUINOX, JAX, JAX_PYTHON, TITLES, loss_of, make_data, make_model, server
from tdfunc.ensemble.stack import stack_modules
from tdfunc.optim import adam

MEMBERS = 8
PLAIN = "tdfunc, not recorded"


def first_ways(model: str) -> dict[str, Way]:
    """Return the first call of a new record, of a new program of JAX, and a call that is not recorded."""
    models = [make_model(model) for _ in range(MEMBERS)]
    x, t = make_data(model)
    apply, _, _ = tdf.functional(models[0])
    params, buffers = tdf.split(stack_modules(models))
    optimizer = adam(lr=1e-3)

    def step(params: Any, buffers: Any, state: Any, x: torch.Tensor, t: torch.Tensor) -> Any:
        def loss(p: Any, b: Any) -> Any:
            y, new = apply.with_buffers(p, b, x)
            return loss_of(y, t), new

        grads, buffers = vmap(grad(loss, has_aux=True))(params, buffers)
        return *optimizer.update(params, grads, state), buffers

    state = optimizer.init(params)
    ways: dict[str, Way] = {
        OURS: lambda: tdf.jit(step)(params, buffers, state, x, t),
        PLAIN: lambda: step(params, buffers, state, x, t),
    }
    if JAX_PYTHON.exists():
        ways |= {way: _first_in_jax(way, model) for way in (JAX, EQUINOX)}
    return ways


def _first_in_jax(way: str, model: str) -> Remote:
    def run(calls: int) -> tuple[float, float]:
        times = [server().send(way=way, setting=(model, MEMBERS, 0.0, None), calls=1, first=True) for _ in range(calls)]
        return sum([cpu for cpu, _ in times]), sum([wall for _, wall in times])

    return Remote(run)


def first_cases() -> Iterator[Case]:
    for model, title in TITLES.items():
        yield Case(f"{title}, {MEMBERS} members", first_ways(model))


SUITE = Suite(
    "first_calls",
    "First calls",
    f"A row is the first call of a training step of {MEMBERS} members, of the models above: tdfunc records it, and XLA "
    "compiles it, with all caches empty. A call that is not recorded is beside it. The very first call of a process "
    "also starts parts of torch, which takes half a second, and is not in the rows.",
    first_cases,
    (),
    (first_ways,),
    compiles=True,
)
