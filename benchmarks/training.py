"""Training small members: the Adam step under `jit`, what tracing gains, and dropout by keys."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import tdfunc as tdf
from benchmarks.models import mlp
from benchmarks.rows import Case, Row, Suite, Way
from tdfunc._jit import jit
from tdfunc.ensemble.stack import stack_modules
from tdfunc.optim import adam

LOOP, FOREACH, UNTRACED = "loop of torch.optim", "vmap(grad(functional_call))", "not traced"
DEFAULT = "torch.vmap(randomness='different')"
MEMBERS, TRACED = (16, 64), (4, 16)


def adam_ways(members: int) -> dict[str, Way]:
    models = [mlp(16, 64, 64, 1) for _ in range(members)]
    x, t = torch.randn(32, 16), torch.randn(32, 1)
    return {"tdfunc": ours(models, x, t), LOOP: loop(models, x, t), FOREACH: stacked(models, x, t)}


def ours(models: list[nn.Module], x: Tensor, t: Tensor) -> Way:
    apply, _, _ = tdf.functional(models[0])
    params, _ = tdf.split(stack_modules(models))
    optimizer = adam(lr=1e-3)

    @jit
    def step(params: Any, state: Any, x: Tensor, t: Tensor) -> Any:
        grads = vmap(grad(lambda p: F.mse_loss(apply(p, x), t)))(params)
        return optimizer.update(params, grads, state, donate=True)

    now = [params, optimizer.init(params)]

    def call() -> None:
        now[:] = step(now[0], now[1], x, t)

    return call


def loop(models: list[nn.Module], x: Tensor, t: Tensor) -> Way:
    members = [copy.deepcopy(model) for model in models]
    optimizers = [torch.optim.Adam(member.parameters(), lr=1e-3) for member in members]

    def call() -> None:
        for member, optimizer in zip(members, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(member(x), t).backward()
            optimizer.step()

    return call


def stacked(models: list[nn.Module], x: Tensor, t: Tensor) -> Way:
    """Return the usual functional step: out of place, with `torch._foreach_*`, as an ensemble is written by hand."""
    skeleton = copy.deepcopy(models[0]).to("meta")
    params = {name: leaf.detach() for name, leaf in stack_module_state(models)[0].items()}
    names = list(params)
    grads_of = vmap(grad(lambda p: F.mse_loss(functional_call(skeleton, p, (x,)), t)))
    now: list[Any] = [
        list(params.values()),
        [torch.zeros_like(p) for p in params.values()],
        [torch.zeros_like(p) for p in params.values()],
        0,
    ]

    def call() -> None:
        p, mean, square, count = now
        found = grads_of(dict(zip(names, p, strict=True)))
        grads = [found[name] for name in names]
        count += 1
        mean = torch._foreach_lerp(mean, grads, 0.1)
        square = torch._foreach_add(
            torch._foreach_mul(square, 0.999), torch._foreach_mul(torch._foreach_mul(grads, grads), 0.001)
        )
        scale = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(square, 1 - 0.999**count)), 1e-8)
        step = torch._foreach_div(torch._foreach_div(mean, 1 - 0.9**count), scale)
        now[:] = [torch._foreach_add(p, step, alpha=-1e-3), mean, square, count]

    return call


def jit_ways(members: int) -> dict[str, Way]:
    models = [mlp(8, 32, 32, 4) for _ in range(members)]
    x, t = torch.randn(16, 8), torch.randn(16, 4)
    apply, _, _ = tdf.functional(models[0])
    params, _ = tdf.split(stack_modules(models))

    def grads(params: Any, x: Tensor, t: Tensor) -> Any:
        return vmap(grad(lambda p: F.mse_loss(apply(p, x), t)))(params)

    traced = jit(grads)
    return {"tdfunc": lambda: traced(params, x, t), UNTRACED: lambda: grads(params, x, t)}


def dropout_ways(*, compiled: bool) -> dict[str, Way]:
    members, x = tdf.TensorDict({}, [16]), torch.randn(16, 128, 1024)
    ensemble, key = tdf.Ensemble(tdf.functional(nn.Dropout(0.1))[0]), tdf.random.key(0)

    def by_keys(x: Tensor, key: Tensor) -> Tensor:
        return ensemble(members, x, in_dims=0, rng=key)

    run = torch.compile(by_keys, fullgraph=True) if compiled else by_keys
    default = vmap(lambda x: F.dropout(x, 0.1), randomness="different")
    return {"tdfunc": lambda: run(x, key), DEFAULT: lambda: default(x)}


def training_cases() -> list[Case]:
    dropouts = [Case(what, dropout_ways(compiled=what == COMPILED)) for what in (KEYS, COMPILED)]
    steps = [Case(f"Adam step, {members} members", adam_ways(members)) for members in MEMBERS]
    return [
        *dropouts,
        *steps,
        *[Case(f"jit(vmap(grad(loss))), {members} members", jit_ways(members)) for members in TRACED],
    ]


KEYS, COMPILED = "dropout of 16 members by keys", "dropout of 16 members by keys, compiled"
STEPS = tuple(f"Adam step, {members} members" for members in MEMBERS)
SUITE = Suite(
    "training",
    "Training steps",
    "Adam: members of 16-64-64-1, 32 rows; ours under `jit` with `donate=True`, the loop with a `torch.optim.Adam` for "
    "each member, the third way out of place with `torch._foreach_*`. jit: members of 8-32-32-4, 16 rows. Tracing "
    "itself is not part of the time. Dropout: 128 x 1024 numbers a member, compiled by inductor.",
    training_cases,
    (
        Row("dropout by keys under vmap", DEFAULT, 1.5, "at most", (KEYS,)),
        Row("dropout by keys under vmap, compiled", DEFAULT, 3, "faster", (COMPILED,)),
        Row("Adam step of 16 to 64 small members", LOOP, 10, "faster", STEPS),
        Row("Adam step of 16 to 64 small members", FOREACH, 1.8, "faster", STEPS),
        Row(
            "jit(vmap(grad(loss))), 4 to 16 members",
            UNTRACED,
            2.5,
            "faster",
            tuple(f"jit(vmap(grad(loss))), {m} members" for m in TRACED),
        ),
    ),
    (adam_ways, ours, loop, stacked, jit_ways, dropout_ways),
)
