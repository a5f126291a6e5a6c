"""Where stacking ends: a training step of members of several widths, against a loop over them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.models.small import Encoder, mlp, norm_cnn
from benchmarks.rows import OURS, Case, Measured, Row, Suite, Way
from benchmarks.training import CHUNKED, DONATED, LOOP, STACKED, in_chunks, loop, ours, stacked_fused

MEMBERS = (4, 16, 64)
# Makers of a member by its width, and of the inputs; a width is a number of units, channels, or features of a token.
MODELS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": ((16, 64, 256, 512, 1024), lambda width: mlp(16, width, width, 10), lambda width: torch.randn(32, 16)),
    "CNN": ((8, 16, 32, 64), lambda width: norm_cnn(width=width), lambda width: torch.randn(32, 1, 8, 8)),
    "transformer": ((16, 32, 64, 256), lambda width: Encoder(width=width), lambda width: torch.randn(32, 16, width)),
}


def title_of(model: str, width: int, members: int) -> str:
    return f"{model}, {width} wide, {members} members"


def width_ways(model: str, width: int, members: int) -> dict[str, Way]:
    _, make, inputs = MODELS[model]
    models, x, t = [make(width) for _ in range(members)], inputs(width), torch.randint(10, (32,))
    chunked = in_chunks(models, x, t)
    return {
        OURS: ours(models, x, t),
        **({} if chunked is None else {CHUNKED: chunked}),
        DONATED: ours(models, x, t, donate=True),
        LOOP: loop(models, x, t),
        STACKED: stacked_fused(models, x, t),
    }


def width_cases() -> Iterator[Case]:
    for model, (widths, _, _) in MODELS.items():
        for width in widths:
            for members in MEMBERS:
                yield Case(title_of(model, width, members), width_ways(model, width, members))


def speedups(measured: Sequence[Measured]) -> dict[str, dict[int, dict[int, float]]]:
    """Return the speed-ups over the loop by model, members and width."""
    found = {m.what: m.ratio_to(LOOP) for m in measured}
    return {
        model: {
            members: {w: found[title_of(model, w, members)] for w in widths if title_of(model, w, members) in found}
            for members in MEMBERS
        }
        for model, (widths, _, _) in MODELS.items()
    }


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Write the chart as SVG: a panel for each model, a line for each number of members."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (model, lines) in zip(panels, speedups(measured).items(), strict=True):
        for (members, line), color in zip(lines.items(), ("#9db4e8", "#5a7fd6", "#1f3f8f"), strict=True):
            axes.plot(list(line), list(line.values()), "o-", color=color, label=f"{members} members", markersize=4)
        widths = MODELS[model][0]
        axes.axhline(1, color="#e0591b", lw=1)
        axes.set(xscale="log", yscale="log", title=model, xlabel="width of a member")
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5x", "1x", "2x", "5x", "10x", "20x"])
        axes.minorticks_off()
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times as fast as the loop")
    panels[-1].legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "tdfunc"}):
        figure.savefig(path, metadata={"Date": None})


# What a step takes at least of the speed of the best rival.
REACH = 0.95
COPIES = (
    "a step writes new parameters and a new state beside the old ones, which stay as they are: 5.8 ms for 4 million "
    "parameters, where the fused kernel takes 2.9, and both wait for memory; with `donate=True` it writes into the old "
    "ones"
)
ACTIVATIONS = (
    "the products are the same kernels for both, and the activations of all members together leave the cache: with "
    '`chunk_size="auto"` they stay in it'
)


def rows_against(rival: str) -> list[Row]:
    """Return a row for each model: about as fast as the rival at least, whatever its width."""
    rows: list[Row] = []
    for model, (widths, _, _) in MODELS.items():
        cases = tuple([title_of(model, width, members) for width in widths for members in MEMBERS])
        why = COPIES if model == "MLP" else ACTIVATIONS
        rows.append(Row(f"training step of any width, {model}", rival, REACH, "faster", cases, why=why))
    return rows


SUITE = Suite(
    "widths",
    "Where stacking ends",
    "A row is one step of Adam for all members under `jit`, as the guides show it, with 32 examples. The chart "
    "compares it with a loop over modules with one `torch.optim.Adam(fused=True)` per member. The MLP has 16 "
    "inputs, two hidden layers of the given width and 10 outputs. The CNN has two convolutions on images of "
    "8 x 8, the first with the given number of channels, the second with twice as many. The transformer has "
    "two layers on 16 tokens of the given width. If one member keeps a core busy by itself, stacking gains "
    "nothing: the kernels take the time, and they are the same. Where the activations of all members leave the cache, "
    'the step is also measured with `tdf.jit(chunk_size="auto")`, which computes some members at a time.',
    width_cases,
    (*rows_against(LOOP), *rows_against(STACKED)),
    (width_ways,),
    compiles=True,
)
