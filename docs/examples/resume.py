"""Train, get killed, resume: the same weights, bit for bit, dropout included.

A run is one tree: parameters, optimizer state, and the states of all random generators.
A CheckpointManager keeps the last steps in a folder. A step appears in it whole or not
at all, so a process may be killed at any time. This program trains once without
interruption, once in a process that it kills with SIGKILL, and compares the results.

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

STEPS = 60


def train(folder: Path, pause_s: float = 0.0) -> tdf.TensorDict:
    """Train to the last step, from the newest checkpoint if there is one."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)

    torch.manual_seed(0)
    net = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)]
    apply, params, _ = tdf.functional(nn.Sequential(*net))
    optimizer = tdf.optim.adam(lr=3e-3)
    state = optimizer.init(params)
    key = tdf.random.key(1)

    manager = tdf.CheckpointManager(folder, keep_last=2)
    start, latest = 0, manager.latest()
    if latest is not None:
        run = manager.load()
        params, state, start = run["params"], run["state"], latest + 1
        tdf.set_rng_state(run["rng"])
        print(f"  resumed after step {latest}")

    def loss(params: tdf.TensorDict, x: Tensor, y: Tensor, rng: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x, rng=rng), y)

    for step in range(start, STEPS):
        rows = torch.randint(len(x), (64,))  # from torch's global generator
        rng = tdf.random.fold_in(key, step)  # dropout masks of its own for each step
        grads, value = torch.func.grad_and_value(loss)(params, x[rows], y[rows], rng)
        params, state = optimizer.update(params, grads, state)

        # The global generators of torch, numpy and Python; the keys need no state.
        run = {"params": params, "state": state, "rng": tdf.get_rng_state()}
        manager.save(step, run, metadata={"loss": value.item()})
        time.sleep(pause_s)

    return params


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
    print("the resumed run has the same parameters, bit for bit")

    # A step that was being saved is invisible, and goes with the next save.
    assert manager.steps() == [STEPS - 2, STEPS - 1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), pause_s=0.02)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
