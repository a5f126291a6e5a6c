"""The picture at the head of the page: times as fast as the usual way, for the work that users wait for."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.rows import Measured, shown


class Bar(NamedTuple):
    """A row of the page that the picture shows, and its words."""

    part: str
    case: str
    rival: str
    work: str
    against: str


# Rows where tdfunc is slower belong here as well as those where it is faster.
BARS = (
    Bar(
        "training",
        "MLP 16-64-64-1, 64 members",
        "loop of fused torch.optim",
        "training step of 64 small networks",
        "loop of fused torch.optim",
    ),
    Bar(
        "training",
        "MLP 16-64-64-1, 64 members",
        "torch.func, one fused torch.optim",
        "",
        "torch.func, one fused torch.optim",
    ),
    Bar("training", "jit(vmap(grad(loss))), 16 members", "not traced", "gradients of 16 networks", "not traced"),
    Bar(
        "modules", "swap, 122 parameters, the same tree", "functional_call", "weights into a module", "functional_call"
    ),
    Bar("modules", "stack_modules of 4", "stack_module_state", "stack 4 checked ResNets", "stack_module_state"),
    Bar("newer", "set, 100 leaves", "tensordict", "set one of 100 leaves", "tensordict"),
    Bar("newer", "index mask, 100 leaves", "tensordict", "index 100 leaves by a mask", "tensordict"),
    Bar("newer", "add, 100 leaves", "tensordict", "add two trees of 100 leaves", "tensordict"),
    Bar("storage", "save 3000 tensors, 20 MB, fsync", "torch.save", "save 3000 tensors with checksums", "torch.save"),
    Bar("storage", "save 200 tensors, 262 MB, fsync", "save_file", "save 262 MB with checksums", "safetensors"),
    Bar("storage", "load 3000 tensors, 20 MB", "load_file", "load 3000 tensors", "safetensors"),
    Bar("storage", "load 3000 tensors, 20 MB, verified", "load_file", "load 3000 tensors, verified", "safetensors"),
    Bar("gather", "256 rows of 1 GB, on disk", "tensordict", "256 random rows of 1 GB on disk", "tensordict"),
    Bar("map", "normalise and sort 2000 images", "one chunk after another", "map with 2 workers", "one process"),
)


def speedups(measured: dict[str, tuple[Sequence[Measured], str]]) -> list[tuple[Bar, float]]:
    """Return the bars whose part was measured, given cases and clock by part."""
    found: list[tuple[Bar, float]] = []
    for bar in BARS:
        cases, clock = measured.get(bar.part, ((), "cpu"))
        found += [(bar, m.ratio_to(bar.rival, clock)) for m in cases if m.what == bar.case]
    return found


def draw(found: Sequence[tuple[Bar, float]], path: Path) -> None:
    """Write the picture as SVG; equal numbers give an equal file."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.4 + 0.38 * len(found)), layout="constrained")
    axes = figure.subplots()
    values = [value for _, value in found]
    colors = ["#2c55b8" if value >= 1 else "#e0591b" for value in values]
    axes.barh(range(len(found)), [value - 1 for value in values], left=1, color=colors, height=0.62)
    for y, (bar, value) in enumerate(found):
        x = 1.12 * max(value, 1)
        axes.annotate(shown(value), (x, y), va="center", fontweight="bold")
        axes.annotate(bar.against, (x, y), (38, 0), textcoords="offset points", va="center", color="0.4")
    axes.set_yticks(range(len(found)), [bar.work for bar, _ in found])
    axes.set(xscale="log", xlim=(0.7, 1500), ylim=(len(found) - 0.4, -0.6))
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], ["1x", "2x", "5x", "10x", "20x", "50x", "100x", "200x"])
    axes.minorticks_off()
    axes.axvline(1, color="black", lw=0.8)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "tdfunc"}):
        figure.savefig(path, metadata={"Date": None})
