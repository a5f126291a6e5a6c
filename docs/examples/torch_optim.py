"""Checkpoints for a training loop that you already have: nn.Module, torch.optim, lr_scheduler.

Nothing in the loop changes. The module's parameters, the optimizer and the schedule become one checkpoint, which is
written whole or not at all and checked when it is read. The best step by validation loss is kept as well.

Run it with: python torch_optim.py
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn

import tdfunc as tdf

EPOCHS = 60


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features, standardized, and the classes of the wines, in random order."""
    features, classes = load_wine(return_X_y=True)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(classes)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean(0)) / x.std(0))[order], y[order]


class Trainer:
    """An ordinary torch training loop, with two methods that save and load all of its state."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)
        self.manager = tdf.CheckpointManager(folder, keep_last=2, keep_best=1, metric="loss")
        self.x, self.y = load_data()

    def train(self, first: int, last: int) -> None:
        """Train from one epoch to another and save after each."""
        for epoch in range(first, last):
            for rows in torch.randperm(120).split(30):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()
                self.optimizer.step()
            self.schedule.step()
            with torch.no_grad():
                self.save(epoch, F.cross_entropy(self.model(self.x[120:]), self.y[120:]).item())

    def save(self, epoch: int, loss: float) -> None:
        """Save model, optimizer, schedule and random generators as one step."""
        optimizer = self.optimizer.state_dict()
        tree = {
            "model": tdf.from_module(self.model),
            "optimizer": {str(i): state for i, state in optimizer["state"].items()},
            "groups": json.dumps(optimizer["param_groups"]),
            "schedule": json.dumps(self.schedule.state_dict()),
            "rng": tdf.get_rng_state(),
        }
        self.manager.save(epoch, tree, metadata={"loss": loss})

    def load(self, epoch: int) -> None:
        """Put everything back as it was after an epoch."""
        tree = self.manager.load(epoch)
        # load_state_dict copies into the parameters that the optimizer holds; `to_module` would put in new ones.
        self.model.load_state_dict(tree["model"].state_dict())
        state = {int(i): dict(entry.items()) for i, entry in tree["optimizer"].items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": json.loads(tree["groups"])})
        self.schedule.load_state_dict(json.loads(tree["schedule"]))
        tdf.set_rng_state(tree["rng"])


def main(folder: Path) -> None:
    """Train at once and in two parts, and compare."""
    whole = Trainer(folder / "whole")
    whole.train(0, EPOCHS)

    first = Trainer(folder / "parts")
    first.train(0, EPOCHS // 2)
    second = Trainer(folder / "parts")  # a new process would do the same
    second.load(second.manager.latest())
    print(f"resumed after epoch {second.manager.latest()}, learning rate {second.schedule.get_last_lr()[0]:.2e}")
    second.train(EPOCHS // 2, EPOCHS)

    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    print("trained at once or in two parts: the same parameters, bit for bit")

    # The best step stays in the folder beside the last two.
    manager = second.manager
    best = manager.best()
    print(f"steps on disk: {manager.steps()}, best is {best} with loss {manager.metadata(best)['loss']:.4f}")
    assert len(manager.steps()) <= 3

    # A part of a step: only the leaves of the model are read. `to_module` without `with` is for good.
    manager.load(best, keys="model.*")["model"].to_module(whole.model)
    accuracy = (whole.model(whole.x[120:]).argmax(-1) == whole.y[120:]).float().mean().item()
    print(f"accuracy of the best step: {accuracy:.3f}")
    assert accuracy > 0.9


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
