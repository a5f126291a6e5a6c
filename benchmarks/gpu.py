"""`python -m benchmarks.gpu`, a part of `make gpu`: the rows that matter on a GPU, into `results/<device>.json`.

Rounds of all ways alternate, as on the CPU; a time is the median of rounds between two events of the device, the
waiting of the device for Python included. `--device cpu` runs the same programs by another clock and keeps nothing.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree

import tdfunc as tdf
from benchmarks import training
from benchmarks.models.small import ResNet
from benchmarks.rows import OURS, shown, time_shown

JIT, FUSED = "tdf.jit", "loop of torch.optim, fused"
GRAPHS, FOREACH, MODULE, CALL = "torch.compile, CUDA graphs", training.FOREACH, "module(x)", "functional_call"
# Each compiles for up to a minute.
COMPILED = {"mlp": (1, 64, 1024), "transformer": (64,), "cnn": (64,)}
# A loop over more members takes seconds a step.
LOOPED = {"mlp": 1024, "cnn": 256, "transformer": 256}

FOLDER = Path(__file__).with_name("results")

Call = Callable[[], Any]
Makers = dict[str, Callable[[], Call]]


class Row(NamedTuple):
    """A way of a case: the median of its rounds and the seconds of its first calls, or why there is no time."""

    what: str
    way: str
    us: float = 0.0
    rounds: int = 0
    first_s: float = 0.0
    error: str = ""


class Plan(NamedTuple):
    """Where, and for how long."""

    device: torch.device
    quick: bool
    # Of `time.monotonic()`: ways that would begin later are left out.
    deadline: float

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 15

    @property
    def round_s(self) -> float:
        return 0.001 if self.quick else 0.02


def time_us(plan: Plan, call: Call, calls: int) -> float:
    """Return the microseconds of a call."""
    if plan.device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6
    first, last = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls * 1e3


def measure(what: str, makers: Makers, plan: Plan) -> list[Row]:
    """Make, warm up and time the ways of a case; an error of one is its row."""
    rows: list[Row] = []
    ready: dict[str, tuple[Call, int, float]] = {}
    for way, make in makers.items():
        if time.monotonic() > plan.deadline:
            rows.append(Row(what, way, error="left out: the time was up"))
            continue
        try:
            begin = time.monotonic()
            with torch.device(plan.device):
                call = make()
            time_us(plan, call, 3)
            first_s = time.monotonic() - begin
            ready[way] = call, max(1, int(plan.round_s * 1e6 / max(time_us(plan, call, 1), 1))), first_s
        # A rival may fail in any way, and the other rows are still wanted.
        except Exception as err:
            rows.append(Row(what, way, error=f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}"[:200]))
    times: dict[str, list[float]] = {way: [] for way in ready}
    for i in range(plan.rounds):
        names = list(ready)
        for way in names[i % max(len(names), 1) :] + names[: i % max(len(names), 1)]:
            # Two rounds of a slow way are enough.
            if i < 2 or sum(times[way]) * ready[way][1] < 2e6:
                times[way].append(time_us(plan, ready[way][0], ready[way][1]))
    rows += [Row(what, way, median(us), len(us), ready[way][2]) for way, us in times.items()]
    return sorted(rows, key=lambda row: list(makers).index(row.way))


# -- ways -----------------------------------------------------------------------------------------------------------


def with_cuda_graphs(plan: Plan, step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a step whose results are the next step's arguments: clones, since a graph overwrites its results."""
    run = (
        torch.compile(step, mode="reduce-overhead")
        if plan.device.type == "cuda"
        else torch.compile(step, backend="eager")
    )

    def call(*state: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return torch_pytree.tree_map(torch.clone, run(*state))

    return call


def step_makers(model: str, members: int, plan: Plan) -> Makers:
    """Return the ways to train so many members by Adam."""

    @cache
    def made() -> Any:
        return [training.make_model(model) for _ in range(members)], *training.make_data(model)

    backend = "cudagraphs" if plan.device.type == "cuda" else None
    makers: Makers = {
        OURS: lambda: training.ours(*made(), backend=backend, donate=True),
        JIT: lambda: training.ours(*made(), donate=True),
        FOREACH: lambda: training.stacked(*made()),
    }
    if members <= LOOPED[model]:
        makers[FUSED] = lambda: training.loop(*made())
    if members in COMPILED[model]:
        makers[GRAPHS] = lambda: training.stacked(*made(), partial(with_cuda_graphs, plan))
    return makers


def apply_makers() -> Makers:
    """Return the ways to call a narrow ResNet-18 with given weights."""

    @cache
    def made() -> Any:
        model = ResNet().eval().requires_grad_(False)
        return model, torch.randn(32, 3, 32, 32), *tdf.functional(model)

    def ours(backend: str | None = None) -> Call:
        _, x, apply, params, buffers = made()
        fn = lambda p, b, x: apply(p, x, buffers=b)  # noqa: E731
        run = tdf.jit(fn, backend=backend) if backend else fn
        return lambda: run(params, buffers, x)

    def theirs() -> Call:
        model, x, *_ = made()
        weights = dict(model.named_parameters()) | dict(model.named_buffers())
        return lambda: functional_call(model, weights, (x,))

    def plain() -> Call:
        model, x, *_ = made()
        return lambda: model(x)

    return {OURS: ours, "cudagraphs": partial(ours, "cudagraphs"), MODULE: plain, CALL: theirs}


def score_makers(plan: Plan) -> Makers:
    """Return the ways to score rows of a small Llama in bfloat16."""
    # It imports transformers.
    from benchmarks import llm

    made = cache(lambda: llm.score_ways((16, 12) if plan.quick else llm.LENGTHS, torch.bfloat16))
    return {way: partial(lambda way: made()[way], way) for way in (OURS, llm.MODEL)}


def file_makers(plan: Plan, folder: Path) -> Iterator[tuple[str, Makers]]:
    """Return the ways to save leaves of a device, and to load them to it."""
    size = (32, 8) if plan.quick else (640, 512)
    leaves = {f"layers.{i}.weight": torch.randn(size, device=plan.device) for i in range(200)}
    tree, ours, theirs = tdf.TensorDict(leaves).unflatten_keys("."), folder / "ours.safetensors", folder / "theirs.st"
    what = f"{sum(x.nbytes for x in leaves.values()) / 1e6:.0f} MB in 200 tensors"
    save: Makers = {
        OURS: lambda: partial(tdf.save, tree, ours, fsync=False),
        "save_file": lambda: partial(save_file, leaves, theirs),
    }
    yield f"save {what}", save
    tdf.save(tree, ours)
    save_file(leaves, theirs)
    place = str(plan.device) if plan.device.type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    load: Makers = {
        OURS: lambda: partial(tdf.load, ours, device=plan.device),
        "load_file": lambda: partial(load_file, theirs, device=place),
    }
    yield f"load {what}", load


def cases(plan: Plan) -> Iterator[tuple[str, Makers]]:
    """Return all cases, the most telling ones first: the time may end before them."""
    yield "apply, ResNet-18 of 4 channels", apply_makers()
    with suppress(ImportError):
        yield "score 4 rows, bfloat16", score_makers(plan)
    with TemporaryDirectory() as folder:
        yield from file_makers(plan, Path(folder))
    members = (1, 2) if plan.quick else (64, 1, 16, 1024, 4, 256)
    for count in members:
        for model in training.TITLES:
            yield f"Adam step, {training.title_of(model, count)}", step_makers(model, count, plan)


# -- results --------------------------------------------------------------------------------------------------------


def describe(plan: Plan) -> dict[str, str]:
    """Return the device and the versions."""
    is_gpu = plan.device.type == "cuda"
    name = torch.cuda.get_device_name(plan.device) if is_gpu else "CPU"
    driver = f", CUDA {torch.version.cuda}" if is_gpu else ""
    return {"device": name, "versions": f"tdfunc {tdf.__version__}, torch {torch.__version__}{driver}"}


def store(found: Sequence[Row], about: dict[str, str], folder: Path = FOLDER) -> Path:
    """Write the rows of a device, and return the file's path."""
    path = folder / f"{re.sub('[^a-z0-9]+', '-', about['device'].lower())}.json"
    path.write_text(json.dumps({**about, "rows": [row._asdict() for row in found]}, indent=1) + "\n")
    return path


def main() -> None:
    """Measure and print, and store the rows of a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few members and short rounds, only printed")
    parser.add_argument("--minutes", type=float, default=5.5, help="when to begin no more ways")
    options = parser.parse_args()
    torch.manual_seed(0)
    plan = Plan(torch.device(options.device), options.quick, time.monotonic() + options.minutes * 60)
    about = describe(plan)
    print(*about.values(), sep="\n", flush=True)
    found: list[Row] = []
    for what, makers in cases(plan):
        torch.compiler.reset()
        rows = measure(what, makers, plan)
        own = next((row.us for row in rows if row.way == OURS), 0.0)
        for row in rows:
            ratio = f" ({shown(row.us / own)})" if own and row.us and row.way != OURS else ""
            print(f"{what:44} {row.way:32} {row.error or time_shown(row.us) + ratio}", flush=True)
        found += rows
    if plan.device.type == "cuda" and not plan.quick:
        print(f"written: {store(found, about)}; `python -m benchmarks --only` puts it on docs/benchmarks.md")


if __name__ == "__main__":
    main()
