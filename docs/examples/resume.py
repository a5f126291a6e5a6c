"""Train, get killed, resume: the same batches, losses and weights, dropout included.

A run is one tree: parameters, optimizer state, and the place in the data. A
CheckpointManager keeps the last steps in a folder. A step appears in it whole or not
at all, so a process may be killed at any time. This program trains once without
interruption, once in a process that it kills with SIGKILL, and compares the batches,
the losses and the parameters bit for bit.

Run it with: python resume.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf

BATCH_SIZE, EPOCHS = 128, 4
STEPS = 60  # 15 batches in an epoch; the last has 5 rows


def train(folder: Path, pause_s: float = 0.0) -> tdf.TensorDict:
    """Train to the last step, from the newest checkpoint if there is one."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)

    torch.manual_seed(0)
    net = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)]
    apply, params, _ = tdf.functional(nn.Sequential(*net))
    optimizer = tdf.optim.adam(lr=3e-3)
    state = optimizer.init(params)
    dropout_key = tdf.random.key(1)
    place = tdf.random.key(2)  # the start of the first epoch

    manager = tdf.CheckpointManager(folder, keep_last=2)
    start, latest = 0, manager.latest()
    if latest is not None:
        run = manager.load()
        params, state, place, start = (
            run["params"],
            run["state"],
            run["place"],
            latest + 1,
        )
        print(f"  resumed after step {latest}")

    def loss(params: tdf.TensorDict, x: Tensor, y: Tensor, rng: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x, rng=rng), y)

    order = tdf.random.batches(place, len(x), BATCH_SIZE, epochs=EPOCHS)
    for step, (rows, place) in enumerate(order, start):
        rng = tdf.random.fold_in(dropout_key, step)  # other dropout masks in each step
        grads, value = torch.func.grad_and_value(loss)(params, x[rows], y[rows], rng)
        params, state = optimizer.update(params, grads, state)
        with open(folder.with_suffix(".log"), "a") as log:
            log.write(f"{step} {value.item().hex()} {rows.tolist()}\n")

        # The place of the next batch is saved with the parameters; keys need no state.
        run = {"params": params, "state": state, "place": place}
        manager.save(step, run, metadata={"loss": value.item()})
        time.sleep(pause_s)

    return params


def read_log(folder: Path) -> dict[str, str]:
    """Return the loss and the rows of each step; of a step that was repeated, both times must agree."""
    lines: dict[str, str] = {}
    for line in folder.with_suffix(".log").read_text().splitlines():
        step, rest = line.split(maxsplit=1)
        assert lines.setdefault(step, rest) == rest
    return lines


def main(folder: Path) -> None:
    """Compare a run without interruption with one that is killed half-way."""
    print("without interruption:")
    whole = train(folder / "whole")
    metadata = tdf.CheckpointManager(folder / "whole").metadata(STEPS - 1)
    print(f"  loss {metadata['loss']:.4f}")

    print("killed half-way:")
    manager = tdf.CheckpointManager(folder / "killed")
    command = [sys.executable, __file__, str(folder / "killed")]
    process = subprocess.Popen(command)
    while (manager.latest() or 0) < STEPS // 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()  # SIGKILL: the process has no chance to clean up
    assert process.wait() != 0
    print(f"  killed after step {manager.latest()}")

    resumed = train(folder / "killed")
    assert (resumed == whole).all()
    assert read_log(folder / "killed") == read_log(folder / "whole")
    print("the resumed run has the same batches, losses and parameters, bit for bit")

    # A step that was being saved is invisible, and goes with the next save.
    assert manager.steps() == [STEPS - 2, STEPS - 1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), pause_s=0.02)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
