"""Sixteen models in one jitted loop: schedule, early stopping, save, reload, resume.

The loss is written for one model. vmap maps its gradient over the members, `tdf.jit` records the whole step and replays
it. Each member stops when its own validation loss has not improved for some epochs; the others go on.

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
from tdfunc import TensorDict

MEMBERS, EPOCHS, PATIENCE = 16, 24, 4


def load_data() -> tuple[TensorDict, TensorDict, TensorDict]:
    """Return training, validation and test digits."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDict({"x": torch.tensor(pixels, dtype=torch.float32) / 16, "y": torch.tensor(labels)}, [len(labels)])
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    return data[:1000], data[1000:1300], data[1300:]


def make() -> nn.Module:
    """Return one member."""
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


apply, _, _ = tdf.functional(make())
ensemble = tdf.Ensemble(apply)
# A schedule is a function of the step, a tensor. Each member is clipped by its own norm.
optimizer = tdf.optim.chain(
    tdf.optim.clip_by_member_norm(1.0),
    tdf.optim.adam(lr=lambda step: 5e-3 * (1 + torch.cos(step / (EPOCHS * 20) * torch.pi))),
)


def loss(params: TensorDict, batch: TensorDict) -> Tensor:
    """Return the loss of one model."""
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])


@tdf.jit
def step(members: TensorDict, state: TensorDict, batch: TensorDict, active: Tensor) -> tuple[TensorDict, TensorDict]:
    """Return the members and the optimizer's state after one step of the active members."""
    grads = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(members, batch)
    return optimizer.update(members, grads, state, active=active)


def start() -> TensorDict:
    """Return the run before its first epoch: everything that changes while it trains is one tree."""
    torch.manual_seed(0)
    members = tdf.init_ensemble(make, MEMBERS)
    return TensorDict(
        {
            "members": members,
            "state": optimizer.init(members),
            "kept": members,  # the best weights of each member so far
            "best": torch.full((MEMBERS,), torch.inf),
            "waited": torch.zeros(MEMBERS, dtype=torch.long),  # epochs without improvement
            "rng": tdf.get_rng_state(),
        }
    )


def train_epoch(run: TensorDict, train: TensorDict, held: TensorDict) -> TensorDict:
    """Return the run after one more epoch."""
    tdf.set_rng_state(run["rng"])
    members, state, waited = run["members"], run["state"], run["waited"]
    for batch in DataLoader(train, batch_size=50, shuffle=True, collate_fn=tdf.collate):
        members, state = step(members, state, batch, waited < PATIENCE)

    now = torch.vmap(loss, in_dims=(0, None))(members, held)  # the validation loss of each member
    better = now < run["best"]
    return run.replace(
        members=members,
        state=state,
        kept=members.where(better, run["kept"]),  # one bool for each member
        best=torch.where(better, now, run["best"]),
        waited=torch.where(better, 0, waited + 1),
        rng=tdf.get_rng_state(),
    )


def main(folder: Path) -> None:
    """Train, save, resume from the middle, reload and evaluate."""
    train, held, test = load_data()
    manager = tdf.CheckpointManager(folder / "run", keep_last=EPOCHS)
    run = start()
    for epoch in range(EPOCHS):
        run = train_epoch(run, train, held)
        manager.save(epoch, run, metadata={"loss": run["best"].mean().item()})
        if (run["waited"] >= PATIENCE).all():
            break
    stopped = (run["waited"] >= PATIENCE).sum().item()
    print(f"{epoch + 1} epochs, {stopped} of {MEMBERS} members stopped early")

    # Resume from the middle, as a new process would: the same weights, bit for bit.
    resumed = manager.load(epoch // 2)
    for _ in range(epoch // 2, epoch):
        resumed = train_epoch(resumed, train, held)
    assert (resumed["kept"] == run["kept"]).all()
    print(f"resumed after epoch {epoch // 2}: the same weights")

    # The result to hand on is one file. A member is a row of the tree, and a plain nn.Module again.
    tdf.save(run["kept"], folder / "ensemble.safetensors")
    members = tdf.load(folder / "ensemble.safetensors")
    model = make()
    members[3].to_module(model)
    logits = ensemble(members, test["x"])  # [16, 497, 10]
    torch.testing.assert_close(model(test["x"]), logits[3])

    doubt = tdf.uncertainty(logits, kind="classification")
    wrong = doubt["mean"].argmax(-1) != test["y"]
    alone = (logits.argmax(-1) == test["y"]).float().mean().item()
    print(f"accuracy of a member {alone:.3f} on average, of the ensemble {1 - wrong.float().mean():.3f}")
    among = wrong[doubt["entropy"].topk(50).indices].sum()
    print(f"{among} of {wrong.sum()} errors are among the 50 images with the largest entropy")
    assert 1 - wrong.float().mean() >= alone
    assert among > 0.5 * wrong.sum()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
