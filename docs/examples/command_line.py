"""Checkpoints in a shell: what a run holds, what changed, averages, other formats.

The program trains a small model with a CheckpointManager, then runs the command
`tdfunc` as you would in a shell, and checks the results. The command also reads shards,
memory-mapped folders and files of torch.save, and holds little of them in memory.

Run it with: python command_line.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch import Tensor, nn

import tdfunc as tdf


def make() -> nn.Module:
    """Return the model."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def train(folder: Path) -> None:
    """Save three steps of a run on the iris data."""
    features, classes = load_iris(return_X_y=True)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(classes)
    torch.manual_seed(0)
    apply, params, _ = tdf.functional(make())
    optimizer = tdf.optim.adam(lr=1e-2)
    state = optimizer.init(params)
    manager = tdf.CheckpointManager(folder, metric="loss")

    def loss(params: tdf.TensorDict) -> Tensor:
        return F.cross_entropy(apply(params, x), y)

    for step in range(1, 91):
        grads, value = torch.func.grad_and_value(loss)(params)
        params, state = optimizer.update(params, grads, state)
        if step % 30 == 0:
            tree = {"params": params, "state": state, "rng": tdf.get_rng_state()}
            manager.save(step, tree, metadata={"loss": value.item()})


def call(folder: Path, line: str, status: int = 0) -> str:
    """Run a line in a shell, check its exit status and return its output."""
    print(f"\n$ tdfunc {line}")
    command = [sys.executable, "-m", "tdfunc", *line.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout


def main(folder: Path) -> None:
    """Go through the commands that a finished run is good for."""
    train(folder / "run")

    # A table of the steps, then the leaves of the newest.
    table = call(folder, "show run --filter params.*")
    print(table)
    assert "params.0.weight" in table

    # Two steps: the exit status is 1 where they differ. `--values` reads the numbers.
    steps = "run/step-0000000060 run/step-0000000090"
    print(call(folder, f"diff {steps} --values", status=1))

    # The mean of the weights of two steps; counters and generators have no mean.
    call(folder, f"average {steps} --filter params.* -o soup.safetensors")
    a, b = (tdf.load(folder / step, where="params.*") for step in steps.split())
    tdf.assert_close(tdf.load(folder / "soup.safetensors"), (a + b) / 2)

    # A plain state dict for a program without tdfunc.
    call(folder, "convert soup.safetensors soup.pt")
    state_dict = torch.load(folder / "soup.pt", weights_only=True)
    print(f"soup.pt is a plain state dict: {list(state_dict)}")
    names = [name.removeprefix("params.") for name in state_dict]
    make().load_state_dict(dict(zip(names, state_dict.values(), strict=True)))

    # Scripts read JSON. `verify` compares every checksum.
    print(json.loads(call(folder, "show soup.safetensors --json"))["leaves"][0])
    print(call(folder, "verify run"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
