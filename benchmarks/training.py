"""Training steps of small members: `jit` against loops, `functional_call`, compilers, JAX; and the gain of tracing."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import tdfunc as tdf
from benchmarks.measure import Remote
from benchmarks.models.small import Encoder, mlp, norm_cnn
from benchmarks.rows import OURS, Case, Row, Suite, Way
from tdfunc import random
from tdfunc._jit import jit
from tdfunc.ensemble.stack import stack_modules
from tdfunc.optim import adam

LOOP, STACKED = "loop of fused torch.optim", "torch.func, one fused torch.optim"
CHUNKED = "tdfunc in chunks"
FOREACH, UNTRACED, DONATED = "vmap(grad(functional_call))", "not traced", "tdfunc with donate=True"
DROPPED, RATES, WITHOUT = "MLP with dropout", "MLP with a learning rate for each member", "the same step without"
DEFAULT = "torch.vmap(randomness='different')"
DRAWS, DRAWS_COMPILED = "dropout of 16 members by keys", "dropout of 16 members by keys, compiled"
COMPILED, INDUCTOR, JAX, EQUINOX = "torch.compile", "jit(backend='inductor')", "jax.jit", "equinox"
FEW, TRACED = (1, 4, 16, 64), (4, 16)
MEMBERS = {"mlp": (*FEW, 256), "cnn": FEW, "transformer": FEW}
# Where the ways that compile for half a minute are measured, without dropout. torch 2.13's compiler fails on BatchNorm
# in `vmap(grad(...))`: "Cannot call sizes() on tensor with symbolic sizes/strides".
COMPILED_MEMBERS = {COMPILED: {"mlp": (1, 64), "transformer": (4,)}}
COMPILED_MEMBERS[INDUCTOR] = COMPILED_MEMBERS[COMPILED] | {"cnn": (4,)}
DROPOUT, LR = 0.1, 1e-3
# The Python of an environment with jax, equinox and optax.
JAX_PYTHON = Path(os.environ.get("TDFUNC_JAX_PYTHON", Path(sys.prefix) / "jax" / "bin" / "python"))
TITLES = {"mlp": "MLP 16-64-64-1", "cnn": "CNN with BatchNorm", "transformer": "transformer"}


def make_model(model: str, dropout: float = 0.0) -> nn.Module:
    if model == "mlp":
        return mlp(16, 64, 64, 1, dropout=dropout)
    return norm_cnn(dropout) if model == "cnn" else Encoder(dropout)


def make_data(model: str) -> tuple[Tensor, Tensor]:
    if model == "mlp":
        return torch.randn(32, 16), torch.randn(32, 1)
    return torch.randn(32, 1, 8, 8) if model == "cnn" else torch.randn(32, 16, 32), torch.randint(10, (32,))


def loss_of(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t) if t.dtype == torch.int64 else F.mse_loss(y, t)


def step_ways(model: str, members: int, dropout: float = 0.0) -> dict[str, Way]:
    models = [make_model(model, dropout) for _ in range(members)]
    x, t = make_data(model)
    ways: dict[str, Way] = {OURS: ours(models, x, t, dropout), DONATED: ours(models, x, t, dropout, donate=True)}
    ways |= {LOOP: loop(models, x, t), STACKED: stacked_fused(models, x, t)}
    if is_compiled(COMPILED, model, members, dropout):
        ways[COMPILED] = stacked(models, x, t, torch.compile)
    if is_compiled(INDUCTOR, model, members, dropout):
        ways[INDUCTOR] = ours(models, x, t, backend="inductor")
    if JAX_PYTHON.exists():
        ways |= {way: in_jax(way, model, members, dropout) for way in (JAX, EQUINOX)}
    return ways


def is_compiled(way: str, model: str, members: int, dropout: float) -> bool:
    return not dropout and members in COMPILED_MEMBERS[way].get(model, ())


class Stacked(NamedTuple):
    """Members as one tree, and a module of their architecture."""

    module: nn.Module
    tree: tdf.TensorDict
    count: int


def stack(models: Sequence[nn.Module] | Stacked) -> Stacked:
    if isinstance(models, Stacked):
        return models
    return Stacked(models[0], stack_modules(models), len(models))


def ours(
    models: Sequence[nn.Module] | Stacked,
    x: Tensor,
    t: Tensor,
    dropout: float = 0.0,
    backend: str | None = None,
    lr: Any = LR,
    *,
    donate: bool = False,
) -> Way:
    """Return the step that the guides show, or the one that gives up its arguments."""
    module, tree, members = stack(models)
    apply, _, _ = tdf.functional(module)
    params, buffers = tdf.split(tree)
    optimizer = adam(lr=lr)

    @jit(backend=backend)
    def step(params: Any, buffers: Any, state: Any, key: Tensor, x: Tensor, t: Tensor) -> Any:
        keys = random.split(key, members + 1) if dropout else None

        def loss(p: Any, b: Any, one: Tensor | None) -> Any:
            y, new = apply.with_buffers(p, b, x, rng=one)
            return loss_of(y, t), new

        in_dims = (0, 0, 0 if dropout else None)
        grads, buffers = vmap(grad(loss, has_aux=True), in_dims)(params, buffers, None if keys is None else keys[1:])
        return *optimizer.update(params, grads, state, donate=donate), buffers, key if keys is None else keys[0]

    now: list[Any] = [params, optimizer.init(params), buffers, random.key(0)]

    def call() -> None:
        params, state, buffers, key = now
        now[:] = step(params, buffers, state, key, x, t)

    return call


def in_chunks(models: Sequence[nn.Module] | Stacked, x: Tensor, t: Tensor, chunk_size: Any = "auto") -> Way | None:
    """Return the step of the guides for some members at a time; None where their activations fit into the cache."""
    module, tree, members = stack(models)
    apply, _, _ = tdf.functional(module)
    params, buffers = tdf.split(tree)
    optimizer = adam(lr=LR)

    @jit(chunk_size=chunk_size, in_dims=(0, 0, 0, None, None))
    def step(params: Any, buffers: Any, state: Any, x: Tensor, t: Tensor) -> Any:
        def loss(p: Any, b: Any) -> Any:
            y, new = apply.with_buffers(p, b, x)
            return loss_of(y, t), new

        grads, buffers = vmap(grad(loss, has_aux=True))(params, buffers)
        params, state = optimizer.update(params, grads, state)
        return params, buffers, state

    now: list[Any] = [params, buffers, optimizer.init(params)]
    if step.chunk_size(*now, x, t) == members:
        return None

    def call() -> None:
        now[:] = step(*now, x, t)

    return call


def loop(models: Sequence[nn.Module], x: Tensor, t: Tensor) -> Way:
    members = [copy.deepcopy(model) for model in models]
    optimizers = [torch.optim.Adam(member.parameters(), lr=LR, fused=True) for member in members]

    def call() -> None:
        for member, optimizer in zip(members, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(member(x), t).backward()
            optimizer.step()

    return call


def stacked_fused(models: Sequence[nn.Module], x: Tensor, t: Tensor) -> Way:
    """Return the fastest step that torch has for stacked parameters: one backward pass, and one fused Adam for all."""
    skeleton = copy.deepcopy(models[0]).to("meta")
    params, buffers = stack_module_state(models)
    # BatchNorm writes these in place.
    buffers = {name: leaf.clone() for name, leaf in buffers.items()}
    optimizer = torch.optim.Adam(list(params.values()), lr=LR, fused=True)

    def loss(p: Any, b: Any) -> Tensor:
        return loss_of(functional_call(skeleton, (p, b), (x,)), t)

    losses = vmap(loss, randomness="different")

    def call() -> None:
        optimizer.zero_grad()
        losses(params, buffers).sum().backward()
        optimizer.step()

    return call


def stacked(models: Sequence[nn.Module], x: Tensor, t: Tensor, compiled: Callable[..., Any] | None = None) -> Way:
    """Return the usual functional step: out of place, with `torch._foreach_*`, as an ensemble is written by hand."""
    skeleton = copy.deepcopy(models[0]).to("meta")
    leaves, buffers = stack_module_state(models)
    # BatchNorm writes these in place.
    buffers = {name: leaf.clone() for name, leaf in buffers.items()}
    names = list(leaves)

    def loss(p: Any, b: Any) -> Tensor:
        return loss_of(functional_call(skeleton, (p, b), (x,)), t)

    def step(p: Any, mean: Any, square: Any, count: Tensor) -> Any:
        found = vmap(grad(loss), randomness="different")(dict(zip(names, p, strict=True)), buffers)
        grads, count = [found[name] for name in names], count + 1
        mean = torch._foreach_lerp(mean, grads, 0.1)
        square = torch._foreach_add(
            torch._foreach_mul(square, 0.999), torch._foreach_mul(torch._foreach_mul(grads, grads), 0.001)
        )
        scale = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(square, 1 - 0.999**count)), 1e-8)
        change = torch._foreach_div(torch._foreach_div(mean, 1 - 0.9**count), scale)
        return torch._foreach_add(p, change, alpha=-LR), mean, square, count

    run = step if compiled is None else compiled(step)
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    start = [leaf.detach() for leaf in leaves.values()]
    now: list[Any] = [start, zeros, [zero.clone() for zero in zeros], torch.tensor(0.0)]

    def call() -> None:
        now[:] = run(*now)

    return call


class Server:
    """The process that runs `benchmarks/jax_steps.py`."""

    def __init__(self) -> None:
        command = [str(JAX_PYTHON), str(Path(__file__).with_name("jax_steps.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


server = cache(Server)


def in_jax(way: str, model: str, members: int, dropout: float, width: int | None = None) -> Way:
    def run(calls: int) -> tuple[float, float]:
        cpu, wall = server().send(way=way, setting=(model, members, dropout, width), calls=calls)
        return cpu, wall

    return Remote(run)


def jit_ways(members: int) -> dict[str, Way]:
    models = [mlp(8, 32, 32, 4) for _ in range(members)]
    x, t = torch.randn(16, 8), torch.randn(16, 4)
    apply, _, _ = tdf.functional(models[0])
    params, _ = tdf.split(stack_modules(models))

    def grads(params: Any, x: Tensor, t: Tensor) -> Any:
        return vmap(grad(lambda p: F.mse_loss(apply(p, x), t)))(params)

    traced = jit(grads)
    return {OURS: lambda: traced(params, x, t), UNTRACED: lambda: grads(params, x, t)}


def part_ways(part: str, members: int) -> dict[str, Way]:
    """Return a step with one thing more, and the step without it."""
    x, t = make_data("mlp")
    dropout = DROPOUT if part == DROPPED else 0.0
    models = [make_model("mlp", dropout) for _ in range(members)]
    lr = LR if part == DROPPED else torch.full((members,), LR)
    plain = [make_model("mlp") for _ in range(members)]
    return {OURS: ours(models, x, t, dropout, lr=lr), WITHOUT: ours(plain, x, t)}


def title_of(model: str, members: int, dropout: float = 0.0) -> str:
    return f"{TITLES[model]}{', dropout' if dropout else ''}, {members} member{'s' * (members > 1)}"


def part_title(part: str, members: int) -> str:
    return f"{part}, {members} member{'s' * (members > 1)}"


SETTINGS = [(model, members, dropout) for model in TITLES for dropout in (0.0, DROPOUT) for members in MEMBERS[model]]


def dropout_ways(*, compiled: bool) -> dict[str, Way]:
    members, x = tdf.TensorDict({}, [16]), torch.randn(16, 128, 1024)
    ensemble, key = tdf.Ensemble(tdf.functional(nn.Dropout(0.1))[0]), tdf.random.key(0)

    def by_keys(x: Tensor, key: Tensor) -> Tensor:
        return ensemble(members, x, in_dims=0, rng=key)

    run = torch.compile(by_keys, fullgraph=True) if compiled else by_keys
    default = vmap(lambda x: F.dropout(x, 0.1), randomness="different")
    return {"tdfunc": lambda: run(x, key), DEFAULT: lambda: default(x)}


def training_cases() -> Iterator[Case]:
    for what in (DRAWS, DRAWS_COMPILED):
        yield Case(what, dropout_ways(compiled=what == DRAWS_COMPILED))
    for model, members, dropout in SETTINGS:
        # Without what was compiled before, whose guards a call would look at.
        torch.compiler.reset()
        yield Case(title_of(model, members, dropout), step_ways(model, members, dropout), series=f"{model}, {dropout}")
    for part in (DROPPED, RATES):
        for members in MEMBERS["mlp"]:
            yield Case(part_title(part, members), part_ways(part, members))
    for members in TRACED:
        yield Case(f"jit(vmap(grad(loss))), {members} members", jit_ways(members))


def rows_against(rival: str, why: str = "") -> list[Row]:
    """Return a row for each model: never slower than the rival, however many members."""
    rows: list[Row] = []
    for model in TITLES:
        settings = [setting for setting in SETTINGS if setting[0] == model]
        if rival in COMPILED_MEMBERS:
            settings = [setting for setting in settings if is_compiled(rival, *setting)]
        cases = tuple(title_of(*setting) for setting in settings)
        if cases:
            rows.append(Row(f"training step, {TITLES[model]}", rival, 1, "faster", cases, why=why))
    return rows


DISPATCH = (
    "for few members, a step is many calls of small kernels, and each call takes torch some microseconds that"
    " a compiled program saves; convolutions and attention use torch's kernels"
)
KERNELS = "products of matrices, sums and the fused Adam take most of the step, and are the same kernels for both"
MASKS = (
    "the masks alone, in a replay, take 40 us beside a step of 110 at 1 member (some 30 calls of numpy, whose code a "
    "step finds in no cache) and 290 us of 1250 at 64 members (three rounds of a hash for each 64 bits, a comparison)"
)
ENDS = (
    "torch 2.13's fused kernel takes one rate, so it runs at rate 1 on zeros, and two more calls multiply and add; the "
    "ends of leaves that no vector fills are joined first, so that each member gets the bits that it gets by itself"
)
MANY = tuple(title_of("mlp", members) for members in (16, 64))
REACH = {LOOP: 16, COMPILED: 1.2, EQUINOX: 1.7, JAX: 1.3}
SUITE = Suite(
    "training",
    "Training steps",
    "A row is one step of Adam for all members, with 32 examples. The models are an MLP, a CNN with BatchNorm"
    " on 8x8 images, and a transformer encoder with two layers, width 32 and 16 tokens. Each model is also "
    "measured with dropout of 0.1; tdfunc and JAX use keys. tdfunc runs under `jit`, as the guides show it; a column "
    "has the same step with `donate=True`. The loop has one `torch.optim.Adam(fused=True)` per member. "
    "`torch.func, one fused torch.optim` is one backward pass through `vmap(functional_call)` and one fused Adam of "
    "the stacked parameters. `torch.compile` compiles `vmap(grad(functional_call))` with an update out of place by "
    "`torch._foreach_*`; it fails for BatchNorm. `jax.jit` is a bare function "
    "of arrays, and equinox has its modules under `filter_jit`, both with optax and donation. JAX runs in a "
    "separate process on one core, its CPU time counts, and its rounds alternate with ours. The rows *jit* "
    "have members of 8-32-32-4 and 16 examples. The rows of dropout have 128 x 1024 numbers per member; "
    "inductor compiles the compiled ones.",
    training_cases,
    (
        Row("dropout by keys under vmap", DEFAULT, 1.5, "at most", (DRAWS,)),
        Row("dropout by keys under vmap, compiled", DEFAULT, 3, "faster", (DRAWS_COMPILED,)),
        Row("Adam step of 16 to 64 small members", LOOP, 10, "faster", MANY),
        Row("Adam step of 16 to 64 small members", STACKED, 1.8, "faster", MANY),
        *[
            Row("Adam step of 64 small members", rival, reach, "faster", MANY[1:], why=KERNELS)
            for rival, reach in REACH.items()
        ],
        *rows_against(LOOP, MASKS),
        *rows_against(STACKED, KERNELS),
        *rows_against(COMPILED, DISPATCH),
        *rows_against(JAX, DISPATCH),
        *rows_against(EQUINOX, DISPATCH),
        *[
            Row(f"step, {part}", WITHOUT, reach, "at most", tuple([part_title(part, m) for m in ms]), why=why)
            for part, reach, ms, why in (
                (DROPPED, 1.4, (1, 4), MASKS),
                (DROPPED, 1.25, (16, 64, 256), MASKS),
                (RATES, 1.2, MEMBERS["mlp"], ENDS),
            )
        ],
        Row(
            "jit(vmap(grad(loss))), 4 to 16 members",
            UNTRACED,
            2.5,
            "faster",
            tuple(f"jit(vmap(grad(loss))), {m} members" for m in TRACED),
        ),
    ),
    (step_ways, ours, loop, stacked, stacked_fused, part_ways, jit_ways, dropout_ways),
    compiles=True,
)
