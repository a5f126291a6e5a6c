"""A program that trains a deep ensemble on handwritten digits in one vmapped step, and reports on it.

`python -m tdfunc.demo` compares the ensemble with a single model and its step with a Python loop over the members,
measures uncertainty about images that are not digits, saves, loads in a fresh process, and writes a report with
a picture. E counts members, B a batch, N images.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tdfunc import random
from tdfunc._jit import jit
from tdfunc.distributed.members import from_local, on_members, shard, to_local
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import init_ensemble, stack_modules, unstack
from tdfunc.metrics import auroc, brier, ece, nll, uncertainty
from tdfunc.modules.extract import split
from tdfunc.modules.functional import functional
from tdfunc.modules.random import seeded
from tdfunc.ops.edits.structure import combine
from tdfunc.ops.math.compare import assert_close
from tdfunc.optim import Optimizer, adam
from tdfunc.storage.api import load, save

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

BATCH = 64
STEPS = 400
CLASSES = 10
# The test NLL is computed after every so many steps.
CURVE_EVERY = 10
_BLUE = "#2c55b8"
_ORANGE = "#e0591b"
_GREY = "#9aa3b5"
PACKAGES = ("sklearn", "matplotlib", "PIL", "tqdm", "rich", "typer")
MEASURES = ("entropy", "expected_entropy", "mutual_information")


class Digits(NamedTuple):
    """Images (N, 64) in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_t: Tensor
    test_x: Tensor
    test_t: Tensor


class Table(NamedTuple):
    """A part of the report."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str


def load_digits(seed: int, device: str = "cpu") -> Digits:
    """Return scikit-learn's 1797 handwritten digits, a third of them for testing, split by the seed."""
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    x, t = bundled(return_X_y=True)
    parts = train_test_split(x / 16, t, train_size=1200, random_state=seed)
    train_x, test_x, train_t, test_t = [torch.tensor(part) for part in parts]
    return Digits(train_x.float().to(device), train_t.to(device), test_x.float().to(device), test_t.to(device))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the network of one member."""
    layers: list[nn.Module] = []
    for width in (64, 128):
        layers += [nn.Linear(width, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(128, CLASSES)).to(dtype)


def learning_rates(members: int) -> Tensor:
    """Return a learning rate for each member (E,), from 1e-3 to 4e-3; how many there are changes none."""
    return 1e-3 * 4 ** (torch.arange(members) * 0.618 % 1)


# -- training ---------------------------------------------------------------------------------------------------


def bootstrap(images: int, members: int, steps: int, seed: int) -> Tensor:
    """Return the image numbers (steps, E, B) of each member's batches, sampled from its own bootstrap sample.

    Source:
        Breiman, Bagging Predictors (1996): each member's data are drawn with replacement.
    """

    def draw(key: Tensor) -> Tensor:
        own, order = random.split(key)
        sample = random.randint(own, (images,), 0, images)
        return sample[random.randint(order, (steps, BATCH), 0, images)]

    keys = random.fold_in(random.key(seed), torch.arange(members))
    return torch.vmap(draw, out_dims=1)(keys)


# Any, here and below: trees are `TensorDict`s, and a step returns a tuple of them.
def make_step(training: Ensemble, optimizer: Optimizer) -> Callable[[Any, Any, Any, Tensor, Tensor, Tensor], Any]:
    """Return the training step of all members: `step(params, buffers, state, x, t, key)` gives the first three anew."""

    def step(params: Any, buffers: Any, state: Any, x: Tensor, t: Tensor, key: Tensor) -> Any:
        def loss(params: Any) -> tuple[Tensor, Any]:
            logits, new = training.with_buffers(params, buffers, x, in_dims=0, rng=key)
            # The losses of the members are independent: the gradient of the sum holds the gradient of each.
            return torch.vmap(F.cross_entropy)(logits, t).sum(), new

        grads, new = torch.func.grad(loss, has_aux=True)(params)
        params, state = optimizer.update(params, grads, state)
        return params, new, state

    return step


def stacked_steps(data: Digits, rows: Tensor, seed: int, own: Tensor | None = None) -> "Iterator[TensorDict]":
    """Train all members at once on images by number (steps, E, B), and yield their trees after each step.

    With `own`, only the members with these numbers are trained, each as among all members.
    """
    device = data.train_x.device
    members = rows.shape[1]
    if own is None:
        own = torch.arange(members)
    make = partial(make_model, data.train_x.dtype)
    apply, _, _ = functional(make())
    params, buffers = split(init_ensemble(make, members, key=seed)[own].to(device))
    optimizer = adam(lr=learning_rates(members)[own].to(device))
    state = optimizer.init(params)
    key = random.key(seed, device=device)
    # Traced once, replayed from then on.
    step = jit(make_step(Ensemble(apply), optimizer))
    for i, batch in enumerate(rows[:, own].to(device)):
        images = data.train_x[batch], data.train_t[batch]
        keys = random.fold_in(random.fold_in(key, i), own.to(device))
        params, buffers, state = step(params, buffers, state, *images, keys)
        yield combine(params, buffers)


def loop_steps(data: Digits, rows: Tensor, seed: int, *, keys: bool = False) -> Iterator[list[nn.Module]]:
    """Train the same members on the same batches with modules and torch.optim, and yield them after each step.

    With `keys` they have the dropout masks of `stacked_steps`; otherwise torch samples the masks.
    """
    device = data.train_x.device
    make = partial(make_model, data.train_x.dtype)
    models = [make() for _ in range(rows.shape[1])]
    for model, member in zip(models, unstack(init_ensemble(make, len(models), key=seed)), strict=True):
        member.clone().to_module(model)
        model.to(device)
    rates = learning_rates(len(models)).tolist()
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=lr, fused=True) for model, lr in zip(models, rates, strict=True)
    ]
    key = random.key(seed, device=device)
    for step, batch in enumerate(rows.to(device)):
        for i, (own, model, optimizer) in enumerate(zip(batch, models, optimizers, strict=True)):
            optimizer.zero_grad()
            masks = nullcontext()
            if keys:
                masks = seeded(random.fold_in(random.fold_in(key, step), i))
            with masks:
                logits = model(data.train_x[own])
            F.cross_entropy(logits, data.train_t[own]).backward()
            optimizer.step()
        yield models


def learn(data: Digits, members: int, seed: int) -> tuple[Any, Tensor]:
    """Train all members, and return their parameters and test NLLs (points, E + 1), the ensemble's last."""
    from tqdm import tqdm

    rows = bootstrap(len(data.train_x), members, STEPS, seed)
    curves: list[Tensor] = []
    params: Any = None
    bar = tqdm(stacked_steps(data, rows, seed), f"training {members} members", STEPS, disable=None)
    for step, params in enumerate(bar, 1):
        if step % CURVE_EVERY == 0:
            logits = predict(params, data.test_x)
            curves.append(torch.stack([nll(y, data.test_t) for y in (*logits, logits)]))
    return params, torch.stack(curves)


def predict(params: Any, x: Tensor) -> Tensor:
    """Return the members' logits (E, N, 10)."""
    apply, _, _ = functional(make_model().eval())
    with torch.no_grad():
        return Ensemble(apply)(params, x)


# -- data that are not digits -----------------------------------------------------------------------------------


def photo_patches(count: int, seed: int) -> Tensor:
    """Return grey patches (N, 64) in [0, 1] of scikit-learn's two bundled photographs, 64x64 pixels shrunk to 8x8."""
    from sklearn.datasets import load_sample_images
    from sklearn.feature_extraction.image import extract_patches_2d

    photos = [torch.tensor(image).float().mean(-1).numpy() / 255 for image in load_sample_images().images]
    halves = [extract_patches_2d(photo, (64, 64), max_patches=-(-count // 2), random_state=seed) for photo in photos]
    patches = torch.cat([torch.tensor(half) for half in halves])[:count]
    return F.avg_pool2d(patches[:, None], 8).reshape(count, 64)


def corrupt(x: Tensor, seed: int) -> Tensor:
    """Return images whose pixels are shuffled, each in its own order: the ink of a digit without its shape."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
    return x.gather(1, noise.argsort(1))


# -- the parts of the report ------------------------------------------------------------------------------------


def compare(data: Digits, logits: Tensor, single: Tensor) -> Table:
    """Compare a single model, the members on average, and the ensemble on the test digits."""
    t = data.test_t

    def accuracy(y: Tensor, t: Tensor) -> Tensor:
        if y.ndim == 3:
            y = uncertainty(y, kind="classification")["mean"]
        return (y.argmax(-1) == t).double().mean()

    rows: list[tuple[str, ...]] = []
    for name, score in (("accuracy", accuracy), ("NLL (nats)", nll), ("Brier score", brier), ("ECE", ece)):
        mean_of_members = torch.stack([score(y, t) for y in logits]).mean()
        values = (score(single, t), mean_of_members, score(logits, t))
        rows.append((name, *[f"{float(value):.4f}" for value in values]))
    note = (
        f"{len(data.train_x)} training and {len(t)} test digits of 8x8 pixels (scikit-learn). The single model saw all "
        "training images, each member a bootstrap sample of them (63 % of the images). Lower is better except for "
        "accuracy; an average of members is less confident than they are, which can cost it ECE on easy data."
    )
    return Table("Quality on the test digits", ("", "single model", "members, mean", "ensemble"), rows, note)


def race(data: Digits, members: int, seed: int, checks: list[str], rounds: int = 7, steps: int = 3) -> Table:
    """Time the vmapped step against the Python loop in turns, and check that both give the same weights."""
    device = data.train_x.device
    images = bootstrap(len(data.train_x), members, rounds * steps + 2, seed)
    difference = _largest_difference(data, images[:10], seed)
    same = "after 10 steps in float64 the loop has the same weights, dropout included"
    checks.append(f"{same} (largest difference {difference:.1e})")
    ways: list[Iterator[Any]] = [stacked_steps(data, images, seed), loop_steps(data, images, seed)]
    for way in ways:
        # The first steps trace and allocate.
        next(way)
        next(way)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, way in enumerate(ways):
            started = time.perf_counter()
            for _ in range(steps):
                next(way)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[i].append((time.perf_counter() - started) / steps)
    ours, loop = map(median, times)
    rows = [
        ("one jitted step of all", f"{ours * 1e3:.2f} ms", "1.0"),
        ("Python loop over the members", f"{loop * 1e3:.2f} ms", f"{loop / ours:.1f}"),
    ]
    note = (
        f"A step of all {members} members, {BATCH} images each; medians of {rounds} rounds in turns, on "
        f"{device} with {torch.get_num_threads()} CPU thread(s). The loop: torch.optim.Adam(fused=True)."
    )
    return Table("Speed of training", ("", "a step", "ratio"), rows, note)


def _largest_difference(data: Digits, images: Tensor, seed: int) -> float:
    """Train in both ways in float64; return the largest difference of the weights, which rounding must explain."""
    # Rounding of float32 turns a unit of ReLU on or off now and then.
    precise = Digits(*[x.double() if x.is_floating_point() else x for x in data])
    stacked = stacked_steps(precise, images, seed)
    looped = loop_steps(precise, images, seed, keys=True)
    largest = 0.0
    for params, models in zip(stacked, looped, strict=True):
        leaves = (params - stack_modules(models)).leaves()
        largest = max(float(leaf.abs().max()) for leaf in leaves)
        if largest > 1e-9:
            raise RuntimeError(f"the vmapped step and the loop give different weights: they differ by {largest:.1e}")
    return largest


def doubts(data: Digits, params: Any, seed: int) -> "dict[str, TensorDict]":
    """Return the uncertainty on the test digits and on images that are not digits, or no longer."""
    count = len(data.test_x)
    device = data.test_x.device
    images = {
        "test digits": data.test_x,
        "photo patches": photo_patches(count, seed).to(device),
        "shuffled digits": corrupt(data.test_x, seed),
    }
    return {name: uncertainty(predict(params, x), kind="classification") for name, x in images.items()}


def out_of_distribution(found: "dict[str, TensorDict]") -> Table:
    """Compare uncertainty on the test digits with that on the other images."""
    digits = found["test digits"]
    rows: list[tuple[str, ...]] = []
    for name, tree in found.items():
        areas = ["", ""]
        if tree is not digits:
            areas = [_area(digits, tree, measure) for measure in ("entropy", "mutual_information")]
        means = [f"{float(tree[measure].mean()):.3f}" for measure in MEASURES]
        rows.append((name, *means, *areas))
    header = ("mean, in nats", "entropy", "expected entropy", "mutual information", "AUROC, entropy", "AUROC, m.i.")
    note = (
        "Photo patches are cut from scikit-learn's two photographs and shrunk to 8x8; shuffled digits are the test "
        "digits with the pixels of each in a random order. AUROC: how often such an image is less certain than a digit."
    )
    return Table("Uncertainty on images that are not digits", header, rows, note)


def _area(digits: "TensorDict", others: "TensorDict", measure: str) -> str:
    """Return how well a measure tells other images from digits."""
    scores = torch.cat([digits[measure], others[measure]])
    is_other = torch.arange(len(scores)) >= len(digits)
    return f"{float(auroc(scores, is_other)):.3f}"


_FRESH_PROCESS = """
import sys, torch
from tdfunc.demo import predict
from tdfunc.storage.api import load
params, expected = load(sys.argv[1]), load(sys.argv[2])
if not torch.equal(predict(params, expected["x"]), expected["logits"]):
    sys.exit("the predictions differ")
"""


def save_and_reload(data: Digits, params: Any, out: Path, checks: list[str]) -> None:
    """Save the ensemble, check that a fresh process predicts the same, and make one member a plain module."""
    path = out / "ensemble.safetensors"
    expected = out / "expected.safetensors"
    params = params.cpu()
    x = data.test_x.cpu()
    logits = predict(params, x)
    save(params, path)
    save(type(params)({"logits": logits, "x": x}), expected)
    # Raises if the process fails.
    subprocess.run([sys.executable, "-c", _FRESH_PROCESS, str(path), str(expected)], check=True)
    expected.unlink()
    size = path.stat().st_size / 1e6
    checks.append(f"a fresh process loads {path.name} ({size:.1f} MB) and predicts the same, bit for bit")
    model = make_model().eval()
    member = len(logits) - 1
    params[member].to_module(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits[member])
    checks.append(f"member {member} is a plain nn.Module again and gives the same logits")


# -- plot -------------------------------------------------------------------------------------------------------


def plot_overview(curves: Tensor, speed: Table, found: "dict[str, TensorDict]", path: Path) -> None:
    """Draw training, the time of a step, and uncertainty about images that are not digits, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    steps = range(CURVE_EVERY, STEPS + 1, CURVE_EVERY)
    for i, member in enumerate(curves[:, :-1].T.tolist()):
        left.plot(steps, member, color=_GREY, lw=0.8, label="" if i else "each member")
    left.plot(steps, curves[:, -1].tolist(), color=_BLUE, lw=2.5, label="ensemble")
    left.set(title="Better than each of its members", xlabel="training step", ylabel="test NLL (nats)", yscale="log")
    left.legend(frameon=False)
    ours, loop = [float(row[1].split()[0]) for row in speed.rows]
    bars = middle.barh(["tdfunc", "loop over\nmodules"], [ours, loop], color=(_BLUE, _GREY), height=0.55)
    middle.bar_label(bars, [f" {ours:.1f} ms, {loop / ours:.1f}x faster", f" {loop:.1f} ms"])
    middle.set(title=f"One training step of {curves.shape[1] - 1} networks", xlim=(0, 1.25 * loop))
    middle.set(xlabel="milliseconds", ylim=(1.6, -0.6))
    # One below the other, each scaled to its highest bin.
    colors = (_BLUE, _ORANGE, _ORANGE)
    for i, (tree, color) in enumerate(zip(found.values(), colors, strict=True)):
        counts = torch.histc(tree["mutual_information"].cpu().float(), 40, 0, 1.2)
        heights = 0.8 * counts / counts.max()
        right.fill_between(torch.linspace(0, 1.2, 40), -i, heights - i, color=color, step="post")
    right.set(title="Uncertainty about images that are not digits", xlabel="mutual information (nats)")
    right.set(yticks=[0, -1, -2], yticklabels=[name.replace(" ", "\n") for name in found])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


# -- the command ------------------------------------------------------------------------------------------------


def run(members: int, seed: int, out: Path, device: str) -> str:
    """Do the whole job, write the report, the plot and the checkpoint into a folder, and return the report."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    checks: list[str] = []
    data = load_digits(seed, device)
    params, curves = learn(data, members, seed)
    # Without an ensemble one would train on all images.
    generator = torch.Generator().manual_seed(seed)
    everything = torch.randint(0, len(data.train_x), (STEPS, 1, BATCH), generator=generator)
    *_, (model,) = loop_steps(data, everything, seed)
    single = model.eval()(data.test_x).detach()
    logits = predict(params, data.test_x)
    speed = race(data, members, seed, checks)
    found = doubts(data, params, seed)
    plot_overview(curves, speed, found, out / "overview.svg")
    save_and_reload(data, params, out, checks)
    seconds = time.perf_counter() - started
    parts = [
        "# A deep ensemble on handwritten digits",
        f"{members} members, {STEPS} steps, seed {seed}: {seconds:.0f} s without imports. Written by `tdfunc.demo`.",
        _OVERVIEW,
    ]
    for table in (compare(data, logits, single), speed, out_of_distribution(found)):
        rows = [table.header, ("---",) * len(table.header), *table.rows]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        parts += [f"## {table.title}", "\n".join(lines), table.note]
    parts += ["## Checked", "\n".join(f"- {check}" for check in checks)]
    report = "\n\n".join(parts) + "\n"
    (out / "report.md").write_text(report)
    return report


def run_distributed(members: int, seed: int, out: Path, steps: int = STEPS) -> str:
    """Train the members spread over the ranks of torchrun, save and predict together, and compare with one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = load_digits(seed)
    rows = bootstrap(len(data.train_x), members, steps, seed)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    *_, own = stacked_steps(data, rows, seed, to_local(shard(torch.arange(members), mesh)))
    seconds = time.perf_counter() - started
    tree = from_local(own, mesh)
    path = out / "ensemble.safetensors"
    save(tree, path)
    logits = on_members(predict, mesh)(tree, data.test_x).full_tensor()
    score = f"test NLL {nll(logits, data.test_t):.3f}"
    lines = [f"{members} members on {mesh.size()} ranks, {steps} steps in {seconds:.1f} s; {score}"]
    if dist.get_rank() == 0:
        *_, alone = stacked_steps(data, rows, seed)
        torch.testing.assert_close(predict(alone, data.test_x), logits, rtol=0, atol=0)
        assert_close(load(path), alone, rtol=0, atol=0)
        lines.append(f"one process trains, predicts and loads {path.name} the same, bit for bit")
    dist.barrier()
    dist.destroy_process_group()
    return "\n".join(lines)


_OVERVIEW = "![Training curves, speed of a step, and uncertainty about images that are not digits](overview.svg)"


def main() -> None:
    """Run the demo from the command line."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tdfunc.demo needs {', '.join(missing)}: pip install 'tdfunc[demo]'")
    import typer
    from rich.console import Console
    from rich.markdown import Markdown

    # The matrices are small: more threads wait for each other more than they compute.
    torch.set_num_threads(1)

    def command(
        members: int = typer.Option(16, help="Members of the ensemble.", min=2),
        seed: int = typer.Option(0, help="Seeds the split, the members and their data."),
        out: Path = typer.Option(  # noqa: B008
            Path("demo-output"), help="Folder for the report, the plot and the checkpoint.", file_okay=False
        ),
        device: str = typer.Option("cpu", help="cpu, cuda, ..."),
        distributed: bool = typer.Option(False, help="Spread the members over the processes of torchrun."),
    ) -> None:
        """Train a deep ensemble on handwritten digits and report on it."""
        if distributed:
            lines = run_distributed(members, seed, out)
            if os.environ.get("RANK") == "0":
                Console().print(lines)
            return
        report = run(members, seed, out, device).replace(f"{_OVERVIEW}\n\n", "")
        Console().print(Markdown(f"{report}\n\nReport, plot and checkpoint: {out / 'report.md'}"))

    typer.run(command)


if __name__ == "__main__":
    main()
