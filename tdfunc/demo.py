"""The main job on real data: a deep ensemble on handwritten digits, trained in one vmapped step.

`python -m tdfunc.demo` trains, compares with a single model and with a Python loop over the members, looks at data
that are not digits, saves, loads in a fresh process, and writes a report. E counts members, B a batch, N images.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tdfunc._errors import UnsupportedError, explain
from tdfunc._jit import jit
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import init_ensemble
from tdfunc.ensemble.uncertainty import brier, ece, nll, reliability_curve, uncertainty
from tdfunc.modules.extract import split
from tdfunc.modules.functional import functional
from tdfunc.modules.random import member_generators
from tdfunc.optim import adam
from tdfunc.storage.checkpoint import save

if TYPE_CHECKING:
    from rich.console import Console

BATCH, STEPS, CLASSES = 64, 400, 10


class Digits(NamedTuple):
    """Images (N, 64) in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_t: Tensor
    test_x: Tensor
    test_t: Tensor


class Trained(NamedTuple):
    """A trained ensemble: its stacked tree, and seconds per step."""

    tree: Any
    step_s: float


@dataclass
class Report:
    """What the demo found, in the order found; rendered as a table and as Markdown."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        self.rows.append((name, value))


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


def train(data: Digits, members: int, seed: int, *, steps: int = STEPS, progress: Callable[..., Any] | None = None) -> Trained:
    """Train all members at once: one vmapped gradient and one Adam update a step, traced once and replayed."""
    device = data.train_x.device
    apply, _, _ = functional(make_model())
    params, _ = split(init_ensemble(make_model, members, seed).to(device))
    optimizer = adam(lr=2e-3)
    state = optimizer.init(params)

    def loss(p: Any, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, x), t)

    @jit
    def step(params: Any, state: Any, x: Tensor, t: Tensor) -> Any:
        grads = torch.vmap(torch.func.grad(loss))(params, x, t)
        return optimizer.update(params, grads, state)

    batches = bootstrap(len(data.train_x), members, steps, seed).to(device)
    # The first step traces; it is not part of the time per step.
    params, state = step(params, state, data.train_x[batches[0]], data.train_t[batches[0]])
    started = time.perf_counter()
    rows = range(1, steps)
    for i in progress(rows) if progress is not None else rows:
        params, state = step(params, state, data.train_x[batches[i]], data.train_t[batches[i]])
    return Trained(params, (time.perf_counter() - started) / max(steps - 1, 1))


def train_in_a_loop(data: Digits, members: int, seed: int, steps: int) -> Trained:
    """Train the same members one after another with plain modules and torch.optim, on the same batches."""
    device = data.train_x.device
    models = [make_model() for _ in range(members)]
    tree = init_ensemble(make_model, members, seed)
    for i, model in enumerate(models):
        tree[i].clone().to_module(model)
        model.to(device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3) for model in models]
    batches = bootstrap(len(data.train_x), members, STEPS, seed).to(device)
    started = time.perf_counter()
    for i in range(steps):
        for e, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_x[batches[i, e]]), data.train_t[batches[i, e]]).backward()
            optimizer.step()
    seconds = (time.perf_counter() - started) / steps
    states = [dict(model.named_parameters()) for model in models]
    stacked = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
    return Trained(stacked, seconds)


def predict(tree: Any, x: Tensor) -> Tensor:
    """Return the members' logits (E, N, 10)."""
    apply, _, _ = functional(make_model().eval())
    with torch.no_grad():
        return Ensemble(apply)(tree, x)


# -- data that are not digits -----------------------------------------------------------------------------------


def photo_patches(count: int, seed: int) -> Tensor:
    """Return 8x8 grey patches (N, 64) in [0, 1], cut from scikit-learn's two bundled photographs."""
    from sklearn.datasets import load_sample_images

    generator = torch.Generator().manual_seed(seed)
    photos = [torch.tensor(image).float().mean(-1) / 255 for image in load_sample_images().images]
    patches: list[Tensor] = []
    for i in range(count):
        photo = photos[i % len(photos)]
        # Patches of 64x64 pixels shrunk to 8x8 have structure; 8x8 pixels of sky would be flat.
        top = int(torch.randint(0, photo.shape[0] - 64, (), generator=generator))
        left = int(torch.randint(0, photo.shape[1] - 64, (), generator=generator))
        patch = photo[top : top + 64, left : left + 64]
        patches.append(F.avg_pool2d(patch[None, None], 8).reshape(64))
    return torch.stack(patches)


def corrupt(x: Tensor, seed: int) -> Tensor:
    """Return images whose pixels are shuffled (one order for each image): ink as in a digit, no shape of one."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
    return x.gather(1, noise.argsort(1))


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Return the images (N, 64) rotated about their centre, bilinearly."""
    angle = torch.tensor(degrees * torch.pi / 180)
    matrix = torch.stack([torch.stack([angle.cos(), -angle.sin(), angle * 0]), torch.stack([angle.sin(), angle.cos(), angle * 0])])
    grid = F.affine_grid(matrix[None].expand(len(x), 2, 3), [len(x), 1, 8, 8], align_corners=False).to(x.device)
    return F.grid_sample(x.reshape(-1, 1, 8, 8), grid, align_corners=False).reshape(-1, 64)


def auroc(negative: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive score is the higher one (ties count half).

    Source:
        The Mann-Whitney U statistic over the number of pairs.
    """
    scores = torch.cat([negative, positive]).double()
    ranks = torch.empty_like(scores)
    ordered, order = scores.sort()
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    # Equal scores share their mean rank.
    values, inverse, counts = torch.unique(ordered, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    mean_rank = ends - (counts.double() - 1) / 2
    ranks[order] = mean_rank[inverse]
    n, m = len(positive), len(negative)
    return float((ranks[len(negative) :].sum() - n * (n + 1) / 2) / (n * m))


# -- the parts of the report ------------------------------------------------------------------------------------


def compare(data: Digits, trained: Trained, report: Report) -> Tensor:
    """Add accuracy, NLL, Brier and ECE of the ensemble and of its members on their own; return the logits."""
    logits = predict(trained.tree, data.test_x)
    t = data.test_t
    single = logits[0]
    ensemble = uncertainty(logits, kind="classification")["mean"]
    report.add("test accuracy, one member", f"{(single.argmax(-1) == t).double().mean():.4f}")
    report.add("test accuracy, ensemble", f"{(ensemble.argmax(-1) == t).double().mean():.4f}")
    for name, score in (("NLL (nats)", nll), ("Brier score", brier), ("ECE", ece)):
        report.add(f"{name}, one member", f"{float(score(single, t)):.4f}")
        report.add(f"{name}, ensemble", f"{float(score(logits, t)):.4f}")
    return logits


def time_the_loop(data: Digits, members: int, seed: int, trained: Trained, report: Report, steps: int = 10) -> None:
    """Add the time per step against a Python loop, after checking that both give the same weights."""
    loop = train_in_a_loop(data, members, seed, steps)
    ours = train(data, members, seed, steps=steps) if steps != STEPS else trained
    worst = max(float((ours.tree[tuple(name.split("."))] - leaf).abs().max()) for name, leaf in loop.tree.items())
    if worst > 1e-4:
        raise RuntimeError(explain("demo: the vmapped step and the loop give different weights.", expected="equal to 1e-4", got=f"{worst:.2e}"))
    report.add("training, vmapped and traced", f"{trained.step_s * 1e3:.2f} ms a step for all {members} members")
    report.add("training, Python loop", f"{loop.step_s * 1e3:.2f} ms a step ({loop.step_s / trained.step_s:.1f}x), measured over {steps} steps")
    report.checks.append(f"{steps} steps of the loop give the same weights (largest difference {worst:.1e})")


def out_of_distribution(data: Digits, tree: Any, seed: int, report: Report) -> None:
    """Add how uncertainty rises on photo patches and on corrupted digits."""
    count = len(data.test_x)
    inside = uncertainty(predict(tree, data.test_x), kind="classification")
    for name, images in (("photo patches", photo_patches(count, seed).to(data.test_x.device)), ("corrupted digits", corrupt(data.test_x, seed))):
        outside = uncertainty(predict(tree, images), kind="classification")
        for measure in ("entropy", "mutual_information"):
            before, after = float(inside[measure].mean()), float(outside[measure].mean())
            title = measure.replace("_", " ")
            report.add(f"{title} on digits / {name}", f"{before:.3f} / {after:.3f} nats, AUROC {auroc(inside[measure], outside[measure]):.3f}")
            if after <= before:
                report.checks.append(f"WARNING: {title} does not rise on {name}")


def save_and_reload(data: Digits, tree: Any, out: Path, report: Report) -> None:
    """Save, load in a fresh process, compare predictions there; make one member a plain module."""
    path = out / "ensemble.safetensors"
    save(tree.cpu(), path)
    logits = predict(tree.cpu(), data.test_x.cpu())
    save_logits = out / "logits.safetensors"
    save(type(tree)({"logits": logits, "x": data.test_x.cpu()}), save_logits)
    code = (
        "import sys, torch\nfrom tdfunc.demo import predict\nfrom tdfunc.storage.checkpoint import load\n"
        "tree, expected = load(sys.argv[1]), load(sys.argv[2])\n"
        "assert torch.equal(predict(tree, expected['x']), expected['logits'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path), str(save_logits)], capture_output=True, text=True, check=False)
    save_logits.unlink()
    if result.returncode:
        raise RuntimeError(explain("demo: a fresh process does not predict the same from the saved file.", got=result.stderr.strip()[-500:]))
    report.checks.append(f"a fresh process loads {path.name} ({path.stat().st_size / 1e3:.0f} kB) and predicts the same, bit for bit")
    model = make_model()
    tree.cpu()[min(3, tree.batch_size[0] - 1)].to_module(model)
    with torch.no_grad():
        torch.testing.assert_close(model(data.test_x.cpu()), logits[min(3, tree.batch_size[0] - 1)])
    report.checks.append("one member is a plain nn.Module again and gives the same logits")


# -- plots ------------------------------------------------------------------------------------------------------


def plot_reliability(logits: Tensor, t: Tensor, path: Path) -> None:
    """Draw accuracy against confidence, for one member and for the ensemble."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(4.5, 4.5))
    axes.plot([0, 1], [0, 1], color="0.7", lw=1)
    for name, y in (("one member", logits[0]), ("ensemble", logits)):
        curve = reliability_curve(y, t)
        used = curve["count"] > 0
        axes.plot(curve["confidence"][used].cpu(), curve["accuracy"][used].cpu(), marker="o", label=name)
    axes.set(xlabel="confidence", ylabel="accuracy", title="Reliability on the test digits")
    axes.legend()
    _write(figure, path)


def plot_digits(x: Tensor, scores: Tensor, predicted: Tensor, path: Path) -> None:
    """Draw the images with the lowest and the highest mutual information."""
    plt = _pyplot()
    order = scores.argsort().cpu()
    figure, axes = plt.subplots(2, 8, figsize=(9, 2.8))
    for row, chosen in enumerate((order[:8], order.flip(0)[:8])):
        for column, i in enumerate(chosen.tolist()):
            axes[row, column].imshow(x[i].reshape(8, 8).cpu(), cmap="gray_r")
            axes[row, column].set_title(f"{int(predicted[i])}  ({float(scores[i]):.2f})", fontsize=8)
            axes[row, column].axis("off")
    figure.suptitle("Most (top) and least (bottom) certain digits: prediction (mutual information, nats)", fontsize=9)
    _write(figure, path)


def plot_rotation(x: Tensor, tree: Any, path: Path) -> None:
    """Draw mean entropy and mutual information as the test digits turn."""
    plt = _pyplot()
    angles = list(range(0, 181, 15))
    found = [uncertainty(predict(tree, rotate(x, angle)), kind="classification") for angle in angles]
    figure, axes = plt.subplots(figsize=(5.5, 3.5))
    for measure in ("entropy", "expected_entropy", "mutual_information"):
        axes.plot(angles, [float(u[measure].mean()) for u in found], marker="o", label=measure.replace("_", " "))
    axes.set(xlabel="rotation (degrees)", ylabel="mean (nats)", title="Uncertainty under rotation")
    axes.legend()
    _write(figure, path)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _write(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)


# -- the command ------------------------------------------------------------------------------------------------


def run(members: int, seed: int, out: Path, device: str, console: "Console") -> Report:
    """Do the whole job and write the report; returns what was found."""
    from tqdm import tqdm

    check_options(members, out, device)
    report, started = Report(), time.perf_counter()
    data = load_digits(seed, device)
    report.add("data", f"{len(data.train_x)} training and {len(data.test_x)} test digits of 8x8 pixels (scikit-learn)")
    trained = train(data, members, seed, progress=lambda rows: tqdm(rows, desc=f"training {members} members", file=sys.stderr))
    report.add("trained", f"{members} members, {STEPS} steps of {BATCH} bootstrapped images each")
    logits = compare(data, trained, report)
    console.print("timing a Python loop over the members ...")
    time_the_loop(data, members, seed, trained, report)
    out_of_distribution(data, trained.tree, seed, report)
    save_and_reload(data, trained.tree, out, report)
    found = uncertainty(logits, kind="classification")
    plot_reliability(logits, data.test_t, out / "reliability.png")
    plot_digits(data.test_x, found["mutual_information"], found["mean"].argmax(-1), out / "digits.png")
    plot_rotation(data.test_x, trained.tree, out / "rotation.png")
    report.add("wall time", f"{time.perf_counter() - started:.0f} s")
    (out / "report.md").write_text(markdown(report))
    return report


def check_options(members: int, out: Path, device: str) -> None:
    """Raise for options that cannot work, before any work is done; make the output folder."""
    if members < 2:
        raise UnsupportedError(explain("demo: an ensemble needs at least two members.", got=f"--members {members}"))
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as err:
        raise UnsupportedError(explain(f"demo: device {device!r} cannot be used.", got=str(err).split("\n")[0], hint="leave --device out to run on the CPU.")) from err
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UnsupportedError(explain(f"demo: the folder {str(out)!r} cannot be made.", got=str(err), hint="choose another with --out.")) from err


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    table = "\n".join(f"| {name} | {value} |" for name, value in report.rows)
    checks = "\n".join(f"- {check}" for check in report.checks)
    plots = "\n\n".join(f"![{name}]({name}.png)" for name in ("reliability", "digits", "rotation"))
    return f"# A deep ensemble on handwritten digits\n\n| | |\n|---|---|\n{table}\n\nChecked:\n\n{checks}\n\n{plots}\n"


def main() -> None:
    """Run the demo from the command line."""
    import typer
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def command(
        members: int = typer.Option(16, help="Members of the ensemble."),
        seed: int = typer.Option(0, help="Seeds the split, the members and their data."),
        out: Path = typer.Option(Path("demo-output"), help="Folder for the report, the plots and the checkpoint."),  # noqa: B008
        device: str = typer.Option("cpu", help="cpu, cuda, ..."),
    ) -> None:
        """Train a deep ensemble on handwritten digits and report on it."""
        try:
            report = run(members, seed, out, device, console)
        except UnsupportedError as err:
            console.print(str(err), style="red", markup=False)
            raise typer.Exit(2) from err
        table = Table("", "", title="A deep ensemble on handwritten digits", show_header=False)
        for name, value in report.rows:
            table.add_row(name, value)
        console.print(table)
        for check in report.checks:
            console.print(f"checked: {check}", markup=False)
        console.print(f"report, plots and checkpoint: {out}/", markup=False)

    typer.run(command)


if __name__ == "__main__":
    main()
