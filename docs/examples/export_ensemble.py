"""A trained ensemble as one exported program: a file that runs without the model's code.

The members are a stacked tree. `EnsembleModule` makes them one `nn.Module`, which
`torch.export` turns into a program for any number of examples. Another process loads
the file and runs all members with torch alone. torch fixes the number of examples of norm
layers under vmap: with those, `EnsembleModule(apply, tree, how="loop")` takes any number.

Run it with: python export_ensemble.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import tdfunc as tdf
from tdfunc.nn import EnsembleModule

MEMBERS = 8
# What the other process runs: neither tdfunc nor the class of the network is imported.
READER = """
import sys, torch
program = torch.export.load("ensemble.pt2").module()
probs = program(torch.load("digits.pt")).softmax(-1)
torch.save(probs, "probs.pt")
assert "tdfunc" not in sys.modules
"""


def make() -> nn.Module:
    """Return one member."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(folder: Path) -> None:
    """Export an ensemble, run it elsewhere, and compare."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)

    torch.manual_seed(0)
    apply, _, _ = tdf.functional(make())
    module = EnsembleModule(apply, tdf.init_ensemble(make, MEMBERS))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(60):
        logits = module(x)  # [members, examples, classes]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.repeat(MEMBERS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of {MEMBERS} members: {loss.item():.3f}")

    examples = torch.export.Dim("examples")
    program = torch.export.export(
        module.eval(), (x[:2],), dynamic_shapes={"args": ({0: examples},)}
    )
    torch.export.save(program, folder / "ensemble.pt2")
    torch.save(x[:100], folder / "digits.pt")
    subprocess.run([sys.executable, "-c", READER], cwd=folder, check=True)

    probs = torch.load(folder / "probs.pt")
    torch.testing.assert_close(probs, module(x[:100]).softmax(-1))
    right = (probs.mean(0).argmax(-1) == y[:100]).float().mean()
    print(f"the program of another process agrees, and {right:.0%} of 100 are right")
    assert right > 0.9


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
