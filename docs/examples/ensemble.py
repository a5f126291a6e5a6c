"""Sixteen models in one jitted loop: schedule, early stopping, save, reload, resume.

The loss is written for one model. vmap maps its gradient over the members, `tdf.jit`
records the whole step and replays it. Each member stops when its own validation loss
has not improved for some epochs; the others go on.

Run it with: python ensemble.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tdfunc as tdf
from tdfunc import TensorDict, sweep
from tdfunc.optim import schedules

MEMBERS, EPOCHS = 16, 24


def load_data() -> tuple[TensorDict, TensorDict, TensorDict]:
    """Return training, validation and test digits."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    data = TensorDict({"x": x, "y": y}, [len(y)])[order]
    return data[:1000], data[1000:1300], data[1300:]


def make() -> nn.Module:
    """Return one member."""
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


apply, _, _ = tdf.functional(make())
clip = tdf.optim.clip_by_member_norm(1.0)  # each member by its own norm
adam = tdf.optim.adam(lr=schedules.cosine_decay(1e-2, EPOCHS * 20))
optimizer, stopping = tdf.optim.chain(clip, adam), sweep.EarlyStopping(patience=4)


def loss(params: TensorDict, batch: TensorDict) -> Tensor:
    """Return the loss of one model."""
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])


@tdf.jit
def train_step(
    members: TensorDict, state: TensorDict, batch: TensorDict, active: Tensor
) -> tuple[TensorDict, TensorDict]:
    """Return members and optimizer state after one step of the active members."""
    grads = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(members, batch)
    return optimizer.update(members, grads, state, active=active)


def start() -> TensorDict:
    """Return the run before its first epoch: all that training changes, as one tree."""
    torch.manual_seed(0)
    members = tdf.init_ensemble(make, MEMBERS)
    run = {"members": members, "state": optimizer.init(members)}
    run |= {"kept": members, "stopping": stopping.init(MEMBERS)}
    return TensorDict(run | {"rng": tdf.get_rng_state()})


def train_epoch(run: TensorDict, train: TensorDict, held: TensorDict) -> TensorDict:
    """Return the run after one more epoch."""
    tdf.set_rng_state(run["rng"])
    members, state, active = run["members"], run["state"], run["stopping", "active"]
    for batch in DataLoader(train, 50, shuffle=True, collate_fn=tdf.collate):
        members, state = train_step(members, state, batch, active)

    # Its validation loss decides whether a member goes on, and which weights it keeps.
    losses = torch.vmap(loss, in_dims=(0, None))(members, held)
    stops = stopping.update(losses, run["stopping"])
    kept = sweep.keep_best(run["kept"], members, stops["improved"])
    run = run.replace(members=members, state=state, kept=kept, stopping=stops)
    return run.replace(rng=tdf.get_rng_state())


def main(folder: Path) -> None:
    """Train, save, resume from the middle, reload and evaluate."""
    train, held, test = load_data()
    manager = tdf.CheckpointManager(folder / "run", keep_last=EPOCHS)
    run, epoch = start(), 0
    while epoch < EPOCHS and run["stopping", "active"].any():
        run, epoch = train_epoch(run, train, held), epoch + 1
        manager.save(epoch, run)
    stopped = (~run["stopping", "active"]).sum()
    print(f"{epoch} epochs, {stopped} of {MEMBERS} members stopped early")

    # Resume from the middle, as a new process would: the same weights, bit for bit.
    resumed = manager.load(epoch // 2)
    for _ in range(epoch // 2, epoch):
        resumed = train_epoch(resumed, train, held)
    assert (resumed["kept"] == run["kept"]).all()
    print(f"resumed after epoch {epoch // 2}: the same weights")

    # The result is one file. A member is a row of the tree, and a plain module again.
    tdf.save(run["kept"], folder / "ensemble.safetensors")
    members = tdf.load(folder / "ensemble.safetensors")
    logits = tdf.Ensemble(apply)(members, test["x"])  # [16, 497, 10]
    model = make()
    members[3].to_module(model)
    torch.testing.assert_close(model(test["x"]), logits[3])

    doubt = tdf.metrics.uncertainty(logits, kind="classification")
    wrong = doubt["mean"].argmax(-1) != test["y"]
    alone = (logits.argmax(-1) != test["y"]).float().mean()
    print(f"errors: a member {alone:.1%}, the ensemble {wrong.float().mean():.1%}")
    among = wrong[doubt["entropy"].topk(50).indices].sum()
    print(f"{among} of {wrong.sum()} errors are among the 50 images with most entropy")
    assert wrong.float().mean() <= alone
    assert among > 0.5 * wrong.sum()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
