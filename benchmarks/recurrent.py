"""Recurrent members: a training step and a forward pass of LSTMs and GRUs, against a loop over them and JAX."""

from collections.abc import Iterator

import torch

import tdfunc as tdf
from benchmarks.models.small import Recurrent
from benchmarks.rows import OURS, Case, Row, Suite, Way
from benchmarks.training import DONATED, EQUINOX, JAX_PYTHON, LOOP, in_jax, loop, ours
from tdfunc.ensemble.stack import stack_modules

KINDS = ("LSTM", "GRU")
WIDTHS = (16, 64)
MEMBERS = (4, 16, 64)
MODULES = "loop of modules"


def title_of(kind: str, width: int, members: int) -> str:
    return f"{kind}, {width} wide, {members} members"


def step_ways(kind: str, width: int, members: int) -> dict[str, Way]:
    models = [Recurrent(kind, width) for _ in range(members)]
    x, t = torch.randn(32, 24, 4), torch.randint(10, (32,))
    ways = {
        OURS: ours(models, x, t),
        DONATED: ours(models, x, t, donate=True),
        LOOP: loop(models, x, t),
    }
    if JAX_PYTHON.exists():
        ways[EQUINOX] = in_jax(EQUINOX, kind.lower(), members, 0.0, width)
    return ways


def forward_ways(kind: str, width: int, members: int) -> dict[str, Way]:
    models = [Recurrent(kind, width) for _ in range(members)]
    x = torch.randn(32, 24, 4)
    ensemble = tdf.Ensemble(tdf.functional(models[0])[0])
    tree = stack_modules(models)

    def run() -> None:
        with torch.no_grad():
            ensemble(tree, x)

    def run_loop() -> None:
        with torch.no_grad():
            for model in models:
                model(x)

    return {OURS: run, MODULES: run_loop}


def forward_title(kind: str, width: int, members: int) -> str:
    return f"forward of {title_of(kind, width, members)}"


def recurrent_cases() -> Iterator[Case]:
    for kind in KINDS:
        for width in WIDTHS:
            for members in MEMBERS:
                yield Case(title_of(kind, width, members), step_ways(kind, width, members))
    for kind in KINDS:
        for width in WIDTHS:
            for members in MEMBERS:
                yield Case(forward_title(kind, width, members), forward_ways(kind, width, members))


def _titles(kind: str, widths: tuple[int, ...] = WIDTHS, members: tuple[int, ...] = MEMBERS) -> tuple[str, ...]:
    return tuple([title_of(kind, width, count) for width in widths for count in members])


KERNEL = "the kernel of a wide member takes most of the step, and it is the same for both"
PRODUCTS = "the batched product and tanh take most of a step of 64 units, and are the same kernels for both"
# By torch's profiler, of a step of 16 members of 16 units.
BITS = "oneDNN's kernel, which keeps the bits of nn.LSTM, takes two thirds of a step of 16 units"
CALLS = "each time has some ten calls of torch forward and backward, and XLA compiles the loop over times"
WHY = {"LSTM": BITS, "GRU": CALLS}
SUITE = Suite(
    "recurrent",
    "Recurrent members",
    "A row is one step of Adam for all members under `jit`, or one forward pass of an `Ensemble` without gradients. "
    "Each member has one recurrent layer of the given width and a linear layer on its last output. The data are 32 "
    "sequences of 24 times with 4 numbers each. The loop has one `torch.optim.Adam(fused=True)` per member. equinox "
    "has its cells in `lax.scan` under `filter_jit`, with optax and donation, in a separate process on one core. "
    "tdfunc runs an LSTM in float32 by the kernel of torch's own `nn.LSTM`, to the same bits, and a GRU by one "
    "batched product per time. The first calls are the record and two whole steps.",
    recurrent_cases,
    (
        Row("Adam step of LSTMs", LOOP, 0.97, "faster", _titles("LSTM"), why=KERNEL),
        Row("Adam step of 16 or more small LSTMs", LOOP, 1.6, "faster", _titles("LSTM", (16,), (16, 64))),
        Row("Adam step of GRUs", LOOP, 2, "faster", _titles("GRU"), why=PRODUCTS),
        *[Row(f"Adam step of {kind}s", EQUINOX, 1, "faster", _titles(kind), why=WHY[kind]) for kind in KINDS],
        Row(
            "forward pass of GRUs", MODULES, 1.5, "faster",
            tuple([forward_title("GRU", width, members) for width in WIDTHS for members in MEMBERS]), why=PRODUCTS,
        ),
    ),
    (step_ways, forward_ways),
    compiles=True,
)  # fmt: skip
