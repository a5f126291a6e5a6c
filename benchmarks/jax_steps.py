"""Training steps in JAX, in a process of their own: `benchmarks.training` starts it in an environment that has JAX.

It reads requests from standard input, a line of JSON each, calls a step some times and answers how long that took, in
nanoseconds of CPU time (of all threads of this process, which has one core) and of the clock on the wall. The first
call of a step compiles it; steps of another setting are dropped.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Before JAX starts its threads.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax, random

Step = Callable[[], Any]
BATCH, LR, MOMENTUM, EPS = 32, 1e-3, 0.9, 1e-5
TOKENS, WIDTH, HEADS, HIDDEN, LAYERS, CLASSES = 16, 32, 4, 64, 2, 10


# -- the forward passes on dicts of arrays -------------------------------------------------------------------


def linear(p: Any, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


def drop(x: Any, rate: float, key: Any) -> Any:
    if not rate:
        return x
    return jnp.where(random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def mlp(p: Any, stats: Any, x: Any, key: Any, rate: float) -> tuple[Any, Any]:
    for i, one in enumerate(random.split(key, 2)):
        x = drop(jax.nn.relu(linear(p[i], x)), rate, one)
    return linear(p[2], x), stats


def conv(p: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(x, p["weight"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return y + p["bias"][:, None, None]


def batch_norm(p: Any, s: Any, x: Any) -> tuple[Any, Any]:
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    n = x.size / x.shape[1]
    new = {
        "mean": (1 - 0.1) * s["mean"] + 0.1 * lax.stop_gradient(mean),
        "var": (1 - 0.1) * s["var"] + 0.1 * lax.stop_gradient(var) * n / (n - 1),
    }
    scale = (p["weight"] * lax.rsqrt(var + EPS))[:, None, None]
    return (x - mean[:, None, None]) * scale + p["bias"][:, None, None], new


def cnn(p: Any, stats: Any, x: Any, key: Any, rate: float) -> tuple[Any, Any]:
    new: list[Any] = []
    for i, one in enumerate(random.split(key, 2)):
        x, kept = batch_norm(p[i]["norm"], stats[i], conv(p[i]["conv"], x))
        x = drop(lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"), rate, one)
        new.append(kept)
    return linear(p[2], x.reshape(len(x), -1)), new


def layer_norm(p: Any, x: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + EPS) * p["weight"] + p["bias"]


def attention(p: Any, x: Any, rate: float, key: Any) -> Any:
    b, t, _ = x.shape
    q, k, v = jnp.split(linear(p["in"], x).reshape(b, t, 3 * HEADS, -1).swapaxes(1, 2), 3, axis=1)
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1]), axis=-1)
    return linear(p["out"], (drop(weights, rate, key) @ v).swapaxes(1, 2).reshape(b, t, -1))


def transformer(p: Any, stats: Any, x: Any, key: Any, rate: float) -> tuple[Any, Any]:
    for i, one in enumerate(random.split(key, LAYERS)):
        a, b, c, d = random.split(one, 4)
        x = layer_norm(p[i]["norm1"], x + drop(attention(p[i], x, rate, a), rate, b))
        hidden = drop(jax.nn.relu(linear(p[i]["up"], x)), rate, c)
        x = layer_norm(p[i]["norm2"], x + drop(linear(p[i]["down"], hidden), rate, d))
    return linear(p[LAYERS], x.mean(1)), stats


# -- parameters ----------------------------------------------------------------------------------------------


def init_linear(key: Any, inputs: int, outputs: int) -> Any:
    bound = inputs**-0.5
    a, b = random.split(key)
    return {
        "weight": random.uniform(a, (outputs, inputs), minval=-bound, maxval=bound),
        "bias": random.uniform(b, (outputs,), minval=-bound, maxval=bound),
    }


def init_norm(size: int) -> Any:
    return {"weight": jnp.ones(size), "bias": jnp.zeros(size)}


def init_mlp(key: Any) -> tuple[Any, Any]:
    sizes = ((16, 64), (64, 64), (64, 1))
    return [init_linear(one, *size) for one, size in zip(random.split(key, 3), sizes, strict=True)], []


def init_cnn(key: Any) -> tuple[Any, Any]:
    a, b, c = random.split(key, 3)
    params: list[Any] = []
    for one, inputs, outputs in ((a, 1, 8), (b, 8, 16)):
        weight = random.normal(one, (outputs, inputs, 3, 3)) * (inputs * 9) ** -0.5
        params.append({"conv": {"weight": weight, "bias": jnp.zeros(outputs)}, "norm": init_norm(outputs)})
    return [*params, init_linear(c, 64, CLASSES)], [{"mean": jnp.zeros(n), "var": jnp.ones(n)} for n in (8, 16)]


def init_transformer(key: Any) -> tuple[Any, Any]:
    params: list[Any] = []
    for one in random.split(key, LAYERS):
        a, b, c, d = random.split(one, 4)
        layer = {"in": init_linear(a, WIDTH, 3 * WIDTH), "out": init_linear(b, WIDTH, WIDTH)}
        layer |= {"up": init_linear(c, WIDTH, HIDDEN), "down": init_linear(d, HIDDEN, WIDTH)}
        params.append(layer | {"norm1": init_norm(WIDTH), "norm2": init_norm(WIDTH)})
    return [*params, init_linear(key, WIDTH, CLASSES)], []


def squared(y: Any, t: Any) -> Any:
    return jnp.square(y - t).mean()


def cross_entropy(y: Any, t: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(y, t).mean()


def data_of(model: str, width: int | None = None) -> tuple[Any, Any]:
    a, b = random.split(random.key(1))
    if width is not None:
        shape = {"mlp": (BATCH, 16), "transformer": (BATCH, TOKENS, width)}.get(model, (BATCH, 24, 4))
        return random.normal(a, shape), random.randint(b, (BATCH,), 0, CLASSES)
    if model == "mlp":
        return random.normal(a, (BATCH, 16)), random.normal(b, (BATCH, 1))
    shape = (BATCH, 1, 8, 8) if model == "cnn" else (BATCH, TOKENS, WIDTH)
    return random.normal(a, shape), random.randint(b, (BATCH,), 0, CLASSES)


FORWARDS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
INITS = {"mlp": init_mlp, "cnn": init_cnn, "transformer": init_transformer}
LOSSES = {"mlp": squared, "cnn": cross_entropy, "transformer": cross_entropy}


def make_bare(model: str, members: int, rate: float, width: int | None = None) -> Step:
    """Return a step of `jax.jit` on dicts and lists of arrays, which donates its arguments."""
    assert width is None
    forward, loss_of, (x, t) = FORWARDS[model], LOSSES[model], data_of(model)
    params, stats = jax.vmap(INITS[model])(random.split(random.key(0), members))
    optimizer = optax.adam(LR)

    @partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(params: Any, stats: Any, state: Any, key: Any, x: Any, t: Any) -> Any:
        key, now = random.split(key)

        def loss(p: Any, s: Any, one: Any) -> Any:
            y, new = forward(p, s, x, one, rate)
            return loss_of(y, t), new

        keys = random.split(now, members)
        grads, stats = jax.vmap(jax.grad(loss, has_aux=True))(params, stats, keys)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), stats, state, key

    now: list[Any] = [params, stats, optimizer.init(params), random.key(2)]

    def call() -> Any:
        now[:] = step(*now, x, t)
        return now

    return call


# -- equinox -------------------------------------------------------------------------------------------------


class Mlp(eqx.Module):
    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, rate: float, width: int | None = None) -> None:
        sizes = (16, 64, 64, 1)
        if width is not None:
            sizes = (16, width, width, CLASSES)
        keys = random.split(key, 3)
        self.layers = [eqx.nn.Linear(*size, key=one) for *size, one in zip(sizes, sizes[1:], keys, strict=False)]
        self.dropout = eqx.nn.Dropout(rate, inference=not rate)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        a, b = random.split(key)
        for layer, one in zip(self.layers[:2], (a, b), strict=True):
            x = self.dropout(jax.nn.relu(layer(x)), key=one)
        return self.layers[2](x), state


class Cnn(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, rate: float, width: int | None = None) -> None:
        assert width is None
        a, b, c = random.split(key, 3)
        self.convs = [eqx.nn.Conv2d(1, 8, 3, padding=1, key=a), eqx.nn.Conv2d(8, 16, 3, padding=1, key=b)]
        self.norms = [eqx.nn.BatchNorm(n, axis_name="batch", mode="batch") for n in (8, 16)]
        self.pool, self.head = eqx.nn.MaxPool2d(2, 2), eqx.nn.Linear(64, CLASSES, key=c)
        self.dropout = eqx.nn.Dropout(rate, inference=not rate)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        for conv_, norm, one in zip(self.convs, self.norms, random.split(key), strict=True):
            x, state = norm(conv_(x), state)
            x = self.dropout(self.pool(jax.nn.relu(x)), key=one)
        return self.head(x.reshape(-1)), state


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, rate: float, width: int) -> None:
        a, b, c = random.split(key, 3)
        biases: Any = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(HEADS, width, **biases, dropout_p=rate, inference=not rate, key=a)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.up, self.down = eqx.nn.Linear(width, 2 * width, key=b), eqx.nn.Linear(2 * width, width, key=c)
        self.dropout = eqx.nn.Dropout(rate, inference=not rate)

    def __call__(self, x: Any, key: Any) -> Any:
        a, b, c, d = random.split(key, 4)
        x = jax.vmap(self.norms[0])(x + self.dropout(self.attention(x, x, x, key=a), key=b))
        hidden = self.dropout(jax.nn.relu(jax.vmap(self.up)(x)), key=c)
        return jax.vmap(self.norms[1])(x + self.dropout(jax.vmap(self.down)(hidden), key=d))


class Transformer(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: Any, rate: float, width: int | None = None) -> None:
        width = width or WIDTH
        self.blocks = [Block(one, rate, width) for one in random.split(key, LAYERS)]
        self.head = eqx.nn.Linear(width, CLASSES, key=key)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        for block, one in zip(self.blocks, random.split(key, LAYERS), strict=True):
            x = block(x, one)
        return self.head(x.mean(0)), state


class Recurrent(eqx.Module):
    cell: Any
    head: eqx.nn.Linear

    def __init__(self, kind: Any, key: Any, rate: float, width: int | None = None) -> None:
        assert width is not None
        a, b = random.split(key)
        self.cell, self.head = kind(4, width, key=a), eqx.nn.Linear(width, CLASSES, key=b)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        zeros = jnp.zeros(self.cell.hidden_size)
        first = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros
        last, _ = lax.scan(lambda now, one: (self.cell(one, now), None), first, x)
        return self.head(last[0] if isinstance(last, tuple) else last), state


MODULES = {
    "mlp": Mlp,
    "cnn": Cnn,
    "transformer": Transformer,
    "lstm": partial(Recurrent, eqx.nn.LSTMCell),
    "gru": partial(Recurrent, eqx.nn.GRUCell),
}


def make_equinox(model: str, members: int, rate: float, width: int | None = None) -> Step:
    """Return a step of equinox's modules under `filter_jit` with donation; with a width, of a classifier."""
    loss_of = LOSSES[model] if width is None else cross_entropy
    x, t = data_of(model, width)
    make = eqx.filter_vmap(lambda key: eqx.nn.make_with_state(MODULES[model])(key, rate, width))
    modules, states = make(random.split(random.key(0), members))
    optimizer = optax.adam(LR)

    @eqx.filter_jit(donate="all-except-first")
    def step(data: Any, modules: Any, states: Any, state: Any, key: Any) -> Any:
        key, now = random.split(key)
        x, t = data

        @eqx.filter_vmap
        @eqx.filter_grad(has_aux=True)
        def gradients(module: Any, s: Any, one: Any) -> Any:
            keys = random.split(one, len(x))
            run = jax.vmap(module, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
            y, new = run(x, s, keys)
            return loss_of(y, t), new

        grads, states = gradients(modules, states, random.split(now, members))
        updates, state = optimizer.update(grads, state, eqx.filter(modules, eqx.is_inexact_array))
        return eqx.apply_updates(modules, updates), states, state, key

    now: list[Any] = [modules, states, optimizer.init(eqx.filter(modules, eqx.is_inexact_array)), random.key(2)]

    def call() -> Any:
        now[:] = step((x, t), *now)
        return now

    return call


MAKERS = {"jax.jit": make_bare, "equinox": make_equinox}


def serve() -> None:
    """Answer requests until standard input ends."""
    steps: dict[str, Step] = {}
    setting: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["setting"] != setting:
            setting = request["setting"]
            steps.clear()
        way = request["way"]
        if request.get("first"):
            # What was compiled before would be found again.
            jax.clear_caches()
            steps.pop(way, None)
        if way not in steps:
            steps[way] = MAKERS[way](*setting)
        step, out = steps[way], None
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(request["calls"]):
            out = step()
        jax.block_until_ready(eqx.filter(out, eqx.is_array))
        print(json.dumps([time.process_time_ns() - cpu, time.perf_counter_ns() - wall]), flush=True)


if __name__ == "__main__":
    serve()
