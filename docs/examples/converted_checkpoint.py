"""A checkpoint of `torch.save`, converted in a shell, and its run resumed bit for bit.

The old run saved a dict of the model's state, the optimizer's and the epoch. `tdfunc
convert` writes it as a safetensors file without running a pickle. The optimizer's state
comes back as it was, so that the run continues as if nothing had happened.

Run it with: python converted_checkpoint.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import tdfunc as tdf

EPOCHS = 20


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its optimizer, as any script makes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range
) -> torch.Tensor:
    """Train on all digits in some epochs; return the last loss."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    for _ in epochs:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def main(folder: Path) -> None:
    """Stop half-way, convert, resume, and compare with a run without interruption."""
    whole, optimizer = start()
    expected = train(whole, optimizer, range(EPOCHS))

    model, optimizer = start()
    train(model, optimizer, range(EPOCHS // 2))
    old, new = folder / "old.pt", folder / "new.safetensors"
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states | {"epoch": EPOCHS // 2}, old)

    command = [sys.executable, "-m", "tdfunc", "convert", str(old), str(new)]
    subprocess.run(command, check=True, capture_output=True)

    run = tdf.load(new)
    model, optimizer = start()
    model.load_state_dict(run["model"].state_dict())
    optimizer.load_state_dict(run["optimizer"])
    step = next(iter(optimizer.state.values()))["step"]
    print(f"epoch {run['epoch']}, and AdamW is at step {int(step)}")
    assert int(step) == run["epoch"] == EPOCHS // 2

    loss = train(model, optimizer, range(run["epoch"], EPOCHS))
    print(f"loss {loss:.4f}, without interruption {expected:.4f}")
    assert torch.equal(loss, expected)
    assert (tdf.from_module(model) == tdf.from_module(whole)).all()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
