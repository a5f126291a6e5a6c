"""The training step of docs/training.md, with all that it has, against a loop that does the same for each member."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks.models.small import Encoder, norm_cnn
from benchmarks.rows import OURS, Case, Row, Suite, Way
from benchmarks.training import LOOP
from benchmarks.widths import REACH

WIDTHS = {"MLP": (16, 64, 256, 512, 1024), "CNN": (8, 32), "transformer": (16, 64, 256)}
MEMBERS = (8, 64)
# Of one case that would take more than a minute.
LEFT_OUT = ("transformer", 256, 64)
MAX_NORM = 1.0
BATCH = 32


def make_mlp(width: int) -> nn.Module:
    """Return a member with BatchNorm and dropout, as in the guide."""

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]

    return nn.Sequential(*block(16), *block(width), nn.Linear(width, 10))


# Makers of a member and the shape of an example, by width.
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "MLP": (make_mlp, lambda width: (16,)),
    "CNN": (lambda width: norm_cnn(width=width), lambda width: (1, 8, 8)),
    "transformer": (lambda width: Encoder(width=width), lambda width: (16, width)),
}


def losses(logits: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(F.cross_entropy)(logits, y)


def guide_ways(model: str, width: int, members: int) -> dict[str, Way]:
    make_of, shape_of = MODELS[model]
    batch = {
        "x": torch.randn(members, BATCH, *shape_of(width)),
        "y": torch.randint(10, (members, BATCH)),
    }
    rates = torch.logspace(-3, -1.5, members)
    return {
        OURS: _ours(lambda: make_of(width), members, batch, rates),
        LOOP: _loop(lambda: make_of(width), members, batch, rates),
    }


def _ours(make: Callable[[], nn.Module], members: int, batch: dict[str, Tensor], rates: Tensor) -> Way:
    apply, _, _ = tdf.functional(make())
    training = tdf.Ensemble(apply)
    params, buffers = tdf.split(tdf.init_ensemble(make, members))
    opt = tdf.optim.chain(tdf.optim.clip_by_member_norm(MAX_NORM), tdf.optim.adam(lr=rates))

    @tdf.jit
    def step(params: Any, buffers: Any, state: Any, batch: Any, key: Tensor, active: Tensor) -> Any:
        def loss(params: Any) -> Any:
            logits, new = training.with_buffers(params, buffers, batch["x"], in_dims=0, rng=key)
            return losses(logits, batch["y"]).sum(), new

        grads, buffers = torch.func.grad(loss, has_aux=True)(params)
        params, state = opt.update(params, grads, state, active=active)
        return params, buffers, state

    now: list[Any] = [params, buffers, opt.init(params)]
    key, active = tdf.random.key(0), torch.ones(members, dtype=torch.bool)
    number = iter(range(1 << 62))

    def call() -> None:
        params, buffers, state = now
        now[:] = step(params, buffers, state, batch, tdf.random.fold_in(key, next(number)), active)

    return call


def _loop(make: Callable[[], nn.Module], members: int, batch: dict[str, Tensor], rates: Tensor) -> Way:
    models = [make() for _ in range(members)]
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=rate, fused=True)
        for model, rate in zip(models, rates.tolist(), strict=True)
    ]

    def call() -> None:
        for model, optimizer, x, y in zip(models, optimizers, batch["x"], batch["y"], strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()

    return call


def title_of(model: str, width: int, members: int) -> str:
    return f"{model}, {width} wide, {members} members"


def settings() -> Iterator[tuple[str, int, int]]:
    """Yield the model, the width and the number of members of each case."""
    for model, widths in WIDTHS.items():
        for width in widths:
            yield from [(model, width, members) for members in MEMBERS if (model, width, members) != LEFT_OUT]


def guide_cases() -> Iterator[Case]:
    for setting in settings():
        yield Case(title_of(*setting), guide_ways(*setting))


SUITE = Suite(
    "guide",
    "The step of the guide",
    "A row is the step of the page *Training*: a gradient of the sum of losses, gradients clipped by member, Adam with "
    "a learning rate for each member, members that can stop, and a batch of 32 for each. The MLP has BatchNorm and "
    "dropout behind two hidden layers of the given width; `widths` has the same CNN and transformer. The loop has "
    "modules, `clip_grad_norm_` and one `torch.optim.Adam(fused=True)` for each member.",
    guide_cases,
    (Row("the step of the guide", LOOP, REACH, "faster", tuple([title_of(*setting) for setting in settings()])),),
    (guide_ways,),
    compiles=True,
)
