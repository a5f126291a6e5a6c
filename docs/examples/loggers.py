"""The numbers of a run in tensorboard, wandb or mlflow.

`tdf.scalars` gives the numbers of a tree by name: metrics of all members, hyperparameters,
norms of gradients by layer. Loggers take such a dict, or one entry of it at a time.

Run it with: python loggers.py
"""

import tempfile
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import tdfunc as tdf
from tdfunc import TensorDict, random

MEMBERS, STEPS = 4, 30

apply, weights, _ = tdf.functional(nn.Linear(3, 1))
x = random.normal(random.key(0), (64, 3))
y = x.sum(1, keepdim=True)
optimizer = tdf.optim.sgd(lr=torch.logspace(-3, -1, MEMBERS))


def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one model."""
    return (apply(params, x) - y).square().mean()


def main(folder: Path) -> None:
    """Train members of different learning rates, log, and read the log again."""
    params = weights.expand(MEMBERS).clone()
    state = optimizer.init(params)
    writer = SummaryWriter(str(folder))
    gradient = torch.vmap(tdf.value_and_grad(loss), in_dims=(0, None, None))
    logged = []
    for step in range(STEPS):
        values, grads = gradient(params, x, y)
        params, state = optimizer.update(params, grads, state)
        norms = grads.apply(lambda leaf: leaf.flatten(1).norm(dim=1))
        metrics = TensorDict({"loss": values, "norm": norms, "mean": values.mean()})
        numbers = tdf.scalars(
            metrics
        )  # wandb.log(numbers), mlflow.log_metrics(numbers)
        logged.append(numbers)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
    writer.close()

    events = EventAccumulator(str(folder))
    events.Reload()
    names = events.Tags()["scalars"]
    print(f"{len(names)} curves: {', '.join(names[:5])}, ...")
    assert set(names) == set(logged[0])
    for name in names:
        read = [event.value for event in events.Scalars(name)]
        torch.testing.assert_close(read, [numbers[name] for numbers in logged])
    last = [logged[-1][f"loss/{i}"] for i in range(MEMBERS)]
    print(f"last losses of the members: {[round(value, 3) for value in last]}")
    assert last[-1] < last[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
