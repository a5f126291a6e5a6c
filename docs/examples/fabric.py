"""Lightning Fabric trains an ensemble: devices, precision, data loaders and logs.

`EnsembleModule` owns the stacked weights of all members as its parameters, so Fabric
takes it, and torch's optimizer of it, like any other module: `devices=2` or
`precision="bf16-mixed"` change nothing below. `tdf.scalars` names the losses of the
members for its loggers.

Run it with: python fabric.py
"""

import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.nn import EnsembleModule

MEMBERS, EPOCHS = 8, 6


def make() -> nn.Module:
    """Return one member."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def member_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each member: logits are [E, B, 10]."""
    labels = labels.expand(logits.shape[:-1])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels).mean(1)


def main(folder: Path) -> None:
    """Train with Fabric, then compare a member with a run of it alone."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDict({"x": x, "y": y}, [len(x)])

    logger = CSVLogger(folder, name="digits", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    fabric.launch()

    torch.manual_seed(0)
    start, (apply, _, _) = tdf.init_ensemble(make, MEMBERS), tdf.functional(make())
    model = EnsembleModule(apply, start)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, adam = fabric.setup(model, adam)
    # A whole batch is one call of the tree, and moves to the device as one.
    loader = DataLoader(data, batch_size=200, collate_fn=tdf.collate)
    loader = fabric.setup_dataloaders(loader)

    step = 0
    for _ in range(EPOCHS):
        for batch in loader:
            losses = member_losses(model(batch["x"]), batch["y"])
            adam.zero_grad()
            fabric.backward(losses.sum())  # each member's own gradient
            adam.step()
            metrics = TensorDict({"loss": {"mean": losses.mean(), "member": losses}})
            fabric.log_dict(tdf.scalars(metrics), step)
            step += 1
    tree = model.module.tree.detach()
    tdf.save(tree, folder / "members.safetensors")

    rows = list(csv.DictReader((folder / "digits/version_0/metrics.csv").open()))
    first, last = float(rows[0]["loss/mean"]), float(rows[-1]["loss/mean"])
    print(f"{MEMBERS} members, {step} steps: mean loss {first:.3f}, then {last:.3f}")
    assert set(tdf.scalars(metrics)) < set(rows[0])
    assert last < 0.5 < first

    # The oracle: member 3 on its own, without Fabric.
    alone = make()
    start[3].to_module(alone)
    adam = torch.optim.Adam(alone.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for batch in data.split(200):
            adam.zero_grad()
            F.cross_entropy(alone(batch["x"]), batch["y"]).backward()
            adam.step()
    loaded = tdf.load(folder / "members.safetensors")
    tdf.assert_close(loaded[3], tdf.from_module(alone).detach(), rtol=1e-3, atol=1e-5)
    print("member 3 has the weights of a run of it alone")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
