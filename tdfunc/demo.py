"""The main job on real data: a deep ensemble on handwritten digits, trained in one vmapped step.

`python -m tdfunc.demo` trains, compares with a single model and with a Python loop over the members, looks at data
that are not digits, saves, loads in a fresh process, and writes a report. E counts members, B a batch, N images.
"""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tdfunc._jit import jit
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import init_ensemble, stack_modules, unstack
from tdfunc.metrics import brier, ece, nll, reliability_curve, uncertainty
from tdfunc.modules.extract import split
from tdfunc.modules.functional import Apply, functional
from tdfunc.modules.random import member_generators
from tdfunc.ops.structure import iter_items
from tdfunc.optim import Optimizer, adam
from tdfunc.storage.api import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from tdfunc._tensordict import TensorDict

BATCH, STEPS, CLASSES, LR = 64, 400, 10, 2e-3
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


class Report(NamedTuple):
    """What the demo found, and what it checked on the way."""

    tables: list[Table]
    checks: list[str]


def load_digits(seed: int, device: str = "cpu") -> Digits:
    """Return scikit-learn's 1797 handwritten digits, a third of them for testing, split by the seed."""
    from sklearn.datasets import load_digits as bundled

    x, t = bundled(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(t)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].to(device), labels[order].to(device)
    cut = 1200
    return Digits(images[:cut], labels[:cut], images[cut:], labels[cut:])


def make_model() -> nn.Module:
    """Return the network of one member."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


# -- training ---------------------------------------------------------------------------------------------------


def bootstrap(images: int, members: int, steps: int, seed: int) -> Tensor:
    """Return the image numbers (steps, E, B) that each member sees: drawn from its own bootstrap sample.

    Source:
        Breiman, Bagging Predictors (1996): each member's data are drawn with replacement.
    """
    columns: list[Tensor] = []
    for generator in member_generators(seed, members):
        sample = torch.randint(0, images, (images,), generator=generator)
        columns.append(sample[torch.randint(0, images, (steps, BATCH), generator=generator)])
    return torch.stack(columns, 1)


# Any, here and below: trees are `TensorDict`s, and a step returns a pair of them.
def make_step(apply: Apply, optimizer: Optimizer) -> Callable[[Any, Any, Tensor, Tensor], Any]:
    """Return the training step of all members: `step(params, state, x, t)` gives the new params and state."""

    def loss(params: Any, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x), t)

    def step(params: Any, state: Any, x: Tensor, t: Tensor) -> Any:
        grads = torch.vmap(torch.func.grad(loss))(params, x, t)
        return optimizer.update(params, grads, state)

    return step


def stacked_steps(data: Digits, members: int, seed: int, steps: int = STEPS) -> "Iterator[TensorDict]":
    """Train all members at once, and yield their stacked parameters after each step."""
    device = data.train_x.device
    apply, _, _ = functional(make_model())
    params, _ = split(init_ensemble(make_model, members, seed).to(device))
    optimizer = adam(lr=LR)
    state = optimizer.init(params)
    # Traced once, replayed from then on.
    step = jit(make_step(apply, optimizer))
    for rows in bootstrap(len(data.train_x), members, steps, seed).to(device):
        params, state = step(params, state, data.train_x[rows], data.train_t[rows])
        yield params


def loop_steps(data: Digits, members: int, seed: int, steps: int = STEPS) -> Iterator[list[nn.Module]]:
    """Train the same members on the same batches with modules and torch.optim, and yield them after each step."""
    device = data.train_x.device
    models = [make_model() for _ in range(members)]
    for model, member in zip(models, unstack(init_ensemble(make_model, members, seed)), strict=True):
        member.clone().to_module(model)
        model.to(device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=LR, fused=True) for model in models]
    for rows in bootstrap(len(data.train_x), members, steps, seed).to(device):
        for own, model, optimizer in zip(rows, models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_x[own]), data.train_t[own]).backward()
            optimizer.step()
        yield models


def train(
    data: Digits, members: int, seed: int, progress: Callable[[Iterator[Any]], Any] = lambda steps: steps
) -> "TensorDict":
    """Return the stacked parameters of a trained ensemble."""
    *_, params = progress(stacked_steps(data, members, seed))
    return params


def train_single(data: Digits, seed: int) -> nn.Module:
    """Train one plain module on all training images, without a bootstrap: what one would do without an ensemble."""
    model = make_model()
    unstack(init_ensemble(make_model, 1, seed))[0].to_module(model)
    model.to(data.train_x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(0, len(data.train_x), (BATCH,), generator=generator).to(data.train_x.device)
        optimizer.zero_grad()
        F.cross_entropy(model(data.train_x[rows]), data.train_t[rows]).backward()
        optimizer.step()
    return model


def predict(params: Any, x: Tensor) -> Tensor:
    """Return the members' logits (E, N, 10)."""
    apply, _, _ = functional(make_model().eval())
    with torch.no_grad():
        return Ensemble(apply)(params, x)


# -- data that are not digits -----------------------------------------------------------------------------------


def photo_patches(count: int, seed: int) -> Tensor:
    """Return grey patches (N, 64) in [0, 1] of scikit-learn's two bundled photographs, 64x64 pixels shrunk to 8x8."""
    from sklearn.datasets import load_sample_images

    generator = torch.Generator().manual_seed(seed)
    photos = [torch.tensor(image).float().mean(-1) / 255 for image in load_sample_images().images]
    patches: list[Tensor] = []
    for i in range(count):
        photo = photos[i % len(photos)]
        top, left = [int(torch.randint(0, size - 64, (), generator=generator)) for size in photo.shape]
        patches.append(F.avg_pool2d(photo[None, top : top + 64, left : left + 64], 8).reshape(64))
    return torch.stack(patches)


def corrupt(x: Tensor, seed: int) -> Tensor:
    """Return images whose pixels are shuffled, each in an order of its own: the ink of a digit and no shape of one."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
    return x.gather(1, noise.argsort(1))


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Return the images (N, 64) rotated about their centre, bilinearly."""
    angle = torch.tensor(degrees * torch.pi / 180)
    matrix = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), [len(x), 1, 8, 8], align_corners=False).to(x)
    return F.grid_sample(x.reshape(-1, 1, 8, 8), grid, align_corners=False).reshape(-1, 64)


def auroc(negative: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive score is the higher one (ties count half).

    Source:
        The Mann-Whitney U statistic over the number of pairs.
    """
    higher = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    return float(higher.mean())


# -- the parts of the report ------------------------------------------------------------------------------------


def compare(data: Digits, logits: Tensor, single: Tensor) -> Table:
    """Compare a single model, the members on average, and the ensemble on the test digits."""
    t = data.test_t

    def accuracy(p: Tensor) -> Tensor:
        return (p.argmax(-1) == t).double().mean()

    mean = uncertainty(logits, kind="classification")["mean"]
    rows = [_row("accuracy", accuracy(single), [accuracy(y) for y in logits], accuracy(mean))]
    for name, score in (("NLL (nats)", nll), ("Brier score", brier), ("ECE", ece)):
        rows.append(_row(name, score(single, t), [score(y, t) for y in logits], score(logits, t)))
    note = (
        f"{len(data.train_x)} training and {len(t)} test digits of 8x8 pixels (scikit-learn). The single model saw all "
        "training images, each member a bootstrap sample of them (63 % of the images). Lower is better but for "
        "accuracy; an average of members is less confident than they are, which can cost it ECE on easy data."
    )
    return Table("Quality on the test digits", ("", "single model", "members, mean", "ensemble"), rows, note)


def _row(name: str, single: Tensor, members: list[Tensor], ensemble: Tensor) -> tuple[str, ...]:
    values = (single, torch.stack(members).mean(), ensemble)
    return name, *[f"{float(value):.4f}" for value in values]


def race(data: Digits, members: int, seed: int, report: Report, rounds: int = 7, steps: int = 3) -> Table:
    """Time the vmapped step against the Python loop in turns, and check that both give the same weights."""
    total = rounds * steps + 2
    ways: list[Iterator[Any]] = [way(data, members, seed, total) for way in (stacked_steps, loop_steps)]
    # The first steps trace and allocate.
    results = [[next(way) for _ in range(2)][-1] for way in ways]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, way in enumerate(ways):
            _wait(data.train_x.device)
            started = time.perf_counter()
            for _ in range(steps):
                results[i] = next(way)
            _wait(data.train_x.device)
            times[i].append((time.perf_counter() - started) / steps)
    params, models = results
    worst = _largest_difference(params, stack_modules(models))
    if worst > 1e-4:
        raise error(
            RuntimeError,
            "demo: the vmapped step and the loop give different weights.",
            expected="equal to 1e-4",
            got=f"a difference of {worst:.1e}",
        )
    report.checks.append(f"after {total} steps the loop has the same weights (largest difference {worst:.1e})")
    ours, loop = [median(found) for found in times]
    rows = [
        ("vmapped gradient, jit", f"{ours * 1e3:.2f} ms", "1.0"),
        ("Python loop over the members", f"{loop * 1e3:.2f} ms", f"{loop / ours:.1f}"),
    ]
    note = (
        f"A step of all {members} members, {BATCH} images each; medians of {rounds} rounds in turns, on "
        f"{data.train_x.device} with {torch.get_num_threads()} CPU thread(s). The loop: torch.optim.Adam(fused=True)."
    )
    return Table("Speed of training", ("", "a step", "ratio"), rows, note)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest_difference(a: "TensorDict", b: "TensorDict") -> float:
    pairs = zip(iter_items(a, True, True), iter_items(b, True, True), strict=True)
    return max(float((x - y).abs().max()) for (_, x), (_, y) in pairs)


def out_of_distribution(data: Digits, params: Any, seed: int) -> Table:
    """Compare uncertainty on the test digits with that on images that are not digits or no longer."""
    count, device = len(data.test_x), data.test_x.device
    inside = uncertainty(predict(params, data.test_x), kind="classification")
    others = {"photo patches": photo_patches(count, seed).to(device), "shuffled digits": corrupt(data.test_x, seed)}
    rows: list[tuple[str, ...]] = [("test digits", *[f"{float(inside[m].mean()):.3f}" for m in MEASURES], "", "")]
    for name, images in others.items():
        outside = uncertainty(predict(params, images), kind="classification")
        means = [f"{float(outside[m].mean()):.3f}" for m in MEASURES]
        rows.append((name, *means, *[f"{auroc(inside[m], outside[m]):.3f}" for m in (MEASURES[0], MEASURES[2])]))
    header = ("mean, in nats", "entropy", "expected entropy", "mutual information", "AUROC, entropy", "AUROC, m.i.")
    note = (
        "Photo patches are cut from scikit-learn's two photographs and shrunk to 8x8; shuffled digits are the test "
        "digits with the pixels of each in a random order. AUROC: how often such an image is less certain than a digit."
    )
    return Table("Uncertainty on images that are not digits", header, rows, note)


def under_rotation(data: Digits, params: Any) -> Table:
    """Follow uncertainty and accuracy as the test digits turn."""
    rows: list[tuple[str, ...]] = []
    worst = (0.0, 0, 0.0, 0.0)
    for angle in range(0, 181, 15):
        found = uncertainty(predict(params, rotate(data.test_x, angle)), kind="classification")
        right = (found["mean"].argmax(-1) == data.test_t).double().mean()
        rows.append((str(angle), *[f"{float(found[m].mean()):.3f}" for m in MEASURES], f"{float(right):.3f}"))
        if angle == 90:
            counts = torch.bincount(found["mean"].argmax(-1), minlength=CLASSES).double() / len(data.test_t)
            worst = (float(counts.max()), int(counts.argmax()), float(found["entropy"].mean()), float(right))
    share, digit, entropy, right = worst
    note = (
        f"An ensemble does not notice everything: at 90 degrees {share:.0%} of digits are taken for a {digit}, with "
        f"a mean entropy of {entropy:.3f} nats and an accuracy of {right:.0%}. (Digits fill the height of their image, "
        "not its width: turned ones have ink where in training few others had any.)"
    )
    header = ("degrees", "entropy", "expected entropy", "mutual information", "accuracy")
    return Table("Test digits under rotation (means, nats)", header, rows, note)


_FRESH_PROCESS = """
import sys, torch
from tdfunc.demo import predict
from tdfunc.storage.api import load
params, expected = load(sys.argv[1]), load(sys.argv[2])
if not torch.equal(predict(params, expected["x"]), expected["logits"]):
    sys.exit("the predictions differ")
"""


def save_and_reload(data: Digits, params: Any, out: Path, report: Report) -> None:
    """Save the ensemble, check that a fresh process predicts the same, and make one member a plain module."""
    path, expected = out / "ensemble.safetensors", out / "expected.safetensors"
    params, x = params.cpu(), data.test_x.cpu()
    logits = predict(params, x)
    save(params, path)
    save(type(params)({"logits": logits, "x": x}), expected)
    command = [sys.executable, "-c", _FRESH_PROCESS, str(path), str(expected)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    expected.unlink()
    if result.returncode:
        raise error(
            RuntimeError,
            "demo: a fresh process does not predict the same from the saved file.",
            got=result.stderr.strip()[-500:],
        )
    size = path.stat().st_size / 1e6
    report.checks.append(f"a fresh process loads {path.name} ({size:.1f} MB) and predicts the same, bit for bit")
    model, member = make_model(), len(logits) - 1
    params[member].to_module(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits[member])
    report.checks.append(f"member {member} is a plain nn.Module again and gives the same logits")


# -- plots ------------------------------------------------------------------------------------------------------


def plot_reliability(single: Tensor, logits: Tensor, t: Tensor, path: Path) -> None:
    """Draw accuracy against confidence for the single model and for the ensemble, with the number of predictions."""
    figure, (top, bottom) = _pyplot().subplots(
        2, 1, figsize=(5, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", label="calibrated")
    for i, (name, y) in enumerate((("single model", single), ("ensemble", logits))):
        curve = {key: value.cpu().numpy() for key, value in reliability_curve(y, t, bins=10).items()}
        used = curve["count"] > 0
        label = f"{name}, ECE {float(ece(y, t)):.3f}"
        top.plot(curve["confidence"][used], curve["accuracy"][used], marker="o", label=label)
        centres = (curve["lower"] + curve["upper"]) / 2
        bottom.bar(centres + (i - 0.5) * 0.035, curve["count"], width=0.035)
    top.set(ylabel="accuracy", title="Reliability on the test digits", ylim=(-0.03, 1.03))
    bottom.set(xlabel="confidence", ylabel="images", yscale="log", xlim=(0, 1.02))
    top.legend(frameon=False, loc="lower right")
    _write(figure, path)


def plot_digits(x: Tensor, t: Tensor, found: "TensorDict", path: Path) -> None:
    """Draw the images with the lowest and the highest mutual information."""
    order = found["mutual_information"].argsort().cpu()
    predicted = found["mean"].argmax(-1)
    figure = _pyplot().figure(figsize=(9, 4.2), layout="constrained")
    rows = figure.subfigures(2, 1)
    for row, title, chosen in zip(rows, ("most certain", "least certain"), (order[:8], order.flip(0)[:8]), strict=True):
        row.suptitle(f"{title}: prediction (mutual information in nats)", fontsize=10)
        for axes, i in zip(row.subplots(1, 8), chosen.tolist(), strict=True):
            right = bool(predicted[i] == t[i])
            axes.imshow(x[i].reshape(8, 8).cpu().numpy(), cmap="gray_r", vmin=0, vmax=1)
            text = f"{int(predicted[i])}" if right else f"{int(predicted[i])}, is {int(t[i])}"
            text += f"\n({float(found['mutual_information'][i]):.3f})"
            axes.set_title(text, fontsize=9, color="black" if right else "firebrick")
            axes.axis("off")
    _write(figure, path)


def plot_rotation(table: Table, path: Path) -> None:
    """Draw the table of means under rotation."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    angles = [int(row[0]) for row in table.rows]
    for column, name in enumerate(table.header[1:-1], 1):
        left.plot(angles, [float(row[column]) for row in table.rows], marker="o", ms=4, label=name)
    right.plot(angles, [float(row[-1]) for row in table.rows], marker="o", ms=4, color="0.3")
    for axes, title in ((left, "mean uncertainty (nats)"), (right, "accuracy")):
        axes.set(xlabel="rotation (degrees)", title=title, xticks=range(0, 181, 30), ylim=(0, None))
        axes.grid(color="0.9")
    left.legend(frameon=False, fontsize=8)
    _write(figure, path)


# Any: matplotlib is optional, and is imported where it is used.
def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _write(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    _pyplot().close(figure)


# -- the command ------------------------------------------------------------------------------------------------


def run(members: int, seed: int, out: Path, device: str) -> Report:
    """Do the whole job and write the report, the plots and the checkpoint into a folder."""
    from tqdm import tqdm

    check_options(members, out, device)
    started = time.perf_counter()
    report = Report([], [])
    data = load_digits(seed, device)
    params = train(data, members, seed, lambda steps: tqdm(steps, f"training {members} members", STEPS, disable=None))
    single = train_single(data, seed)(data.test_x).detach()
    logits = predict(params, data.test_x)
    rotation = under_rotation(data, params)
    report.tables.append(compare(data, logits, single))
    report.tables.append(race(data, members, seed, report))
    report.tables.append(out_of_distribution(data, params, seed))
    report.tables.append(rotation)
    save_and_reload(data, params, out, report)
    plot_reliability(single, logits, data.test_t, out / "reliability.png")
    plot_digits(data.test_x, data.test_t, uncertainty(logits, kind="classification"), out / "digits.png")
    plot_rotation(rotation, out / "rotation.png")
    seconds = time.perf_counter() - started
    (out / "report.md").write_text(markdown(report, members, seed, seconds))
    return report


def check_options(members: int, out: Path, device: str) -> None:
    """Make the output folder, and refuse options that cannot work before any work is done.

    Raises:
        UnsupportedError: There are too few members, or the device or the folder cannot be used.
    """
    if members < 2:
        raise UnsupportedError(
            "demo: an ensemble needs members that can disagree.",
            expected="--members 2 or more",
            got=f"--members {members}",
        )
    try:
        float(torch.ones((), device=device))
    # torch raises an AssertionError for a device that it was built without.
    except (RuntimeError, AssertionError, NotImplementedError) as err:
        raise UnsupportedError(
            f"demo: device {device!r} cannot be used.",
            got=str(err).split("\n")[0],
            hint="leave --device out to run on the CPU.",
        ) from err
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").touch()
    except OSError as err:
        raise UnsupportedError(
            f"demo: cannot write into the folder {str(out)!r}.", got=str(err), hint="choose another with --out."
        ) from err


_CAPTIONS = {
    "reliability": "How often predictions of a confidence are right; below, how many there are of each.",
    "digits": "The test digits that the members agree on most and least; wrong predictions in red.",
    "rotation": "Uncertainty and accuracy as the test digits turn.",
}


def markdown(report: Report, members: int, seed: int, seconds: float) -> str:
    """Return the report as Markdown."""
    parts = [
        "# A deep ensemble on handwritten digits",
        f"{members} members, {STEPS} steps, seed {seed}: {seconds:.0f} s without imports. Written by `tdfunc.demo`.",
    ]
    for table in report.tables:
        lines = [table.header, ("---",) * len(table.header), *table.rows]
        parts += [f"## {table.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines), table.note]
    parts += ["## Checked", "\n".join(f"- {check}" for check in report.checks), "## Plots"]
    parts += [f"{caption}\n\n![{name}]({name}.png)" for name, caption in _CAPTIONS.items()]
    return "\n\n".join(parts) + "\n"


def show(report: Report, console: "Console") -> None:
    """Print the report's tables and checks."""
    from rich.table import Table as RichTable

    for table in report.tables[:-1]:
        shown = RichTable(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
        for i, name in enumerate(table.header):
            shown.add_column(name, justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, "")
    console.print(report.tables[-1].note, "", markup=False, highlight=False)
    for check in report.checks:
        console.print(f"checked: {check}", markup=False, highlight=False)


def main() -> None:
    """Run the demo from the command line."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"tdfunc.demo needs {', '.join(missing)}: pip install 'tdfunc[demo]'")
    import typer
    from rich.console import Console

    # The matrices are small: more threads wait for each other more than they compute.
    torch.set_num_threads(1)
    console = Console()

    def command(
        members: int = typer.Option(16, help="Members of the ensemble."),
        seed: int = typer.Option(0, help="Seeds the split, the members and their data."),
        out: Path = typer.Option(Path("demo-output"), help="Folder for the report, the plots and the checkpoint."),  # noqa: B008
        device: str = typer.Option("cpu", help="cpu, cuda, ..."),
    ) -> None:
        """Train a deep ensemble on handwritten digits and report on it."""
        try:
            report = run(members, seed, out, device)
        except (UnsupportedError, OSError) as err:
            console.print(str(err), style="red", markup=False, highlight=False)
            raise typer.Exit(2) from None
        show(report, console)
        console.print(f"report, plots and checkpoint: {out / 'report.md'}", markup=False, highlight=False)

    typer.run(command)


if __name__ == "__main__":
    main()
