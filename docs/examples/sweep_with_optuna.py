"""Optuna proposes sixteen trials at once, and one vmapped run trains them all.

A searcher with `ask` and `tell` gives a batch of parameters and takes a number for each.
Here a batch is a tree of hyperparameters with a row for each trial, and training it is
one stacked run: as many models as trials, one jitted step. In between the pruner looks
at all of them, and the stack goes on without those that it gives up: they cost nothing
from then on.

Run it with: python sweep_with_optuna.py
"""

import optuna
import torch
import torch.nn.functional as F
from optuna.distributions import FloatDistribution
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

BATCHES, TRIALS, RUNGS, STEPS = 3, 16, 3, 20
SPACE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "weight_decay": FloatDistribution(1e-4, 1.0, log=True),
}

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
apply, weights, _ = tdf.functional(net)
# Hyperparameters that are tensors live in the state, where each trial has a row.
optimizer = tdf.optim.adamw(lr=torch.tensor(0.0), weight_decay=torch.tensor(0.0))


def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one model."""
    return F.cross_entropy(apply(params, x), y)


@tdf.jit
def step(run: TensorDict, x: Tensor, y: Tensor) -> TensorDict:
    """Return all trials after a step, each with the learning rate and decay of its own."""
    grads = torch.vmap(tdf.grad(loss), in_dims=(0, None, None))(run["params"], x, y)
    params, state = optimizer.update(run["params"], grads, run["state"])
    return run.update({"params": params, "state": state})


def start(hyper: TensorDict) -> TensorDict:
    """Return a run with a row for each trial, all from the same weights."""
    params = weights.expand(len(hyper)).clone()
    state = optimizer.init(params).update(hyper)
    return TensorDict({"params": params, "state": state}, hyper.batch_size)


def train(run: TensorDict) -> tuple[TensorDict, Tensor]:
    """Return the run after some steps, and the validation loss of each trial."""
    for _ in range(STEPS):
        run = step(run, x[:1200], y[:1200])
    losses = torch.vmap(loss, in_dims=(0, None, None))(
        run["params"], x[1200:], y[1200:]
    )
    return run, losses


def main() -> None:
    """Search, and compare the best trial with a run of it alone."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A constant liar keeps the trials of one batch apart.
    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())

    rows = 0
    for batch in range(BATCHES):
        trials = [study.ask(SPACE) for _ in range(TRIALS)]
        run = start(tdf.stack([TensorDict(trial.params) for trial in trials]))
        for rung in range(RUNGS):
            rows += STEPS * len(run)
            run, losses = train(run)
            for trial, value in zip(trials, losses.tolist(), strict=True):
                trial.report(value, rung)
            if rung < RUNGS - 1:
                pruned = torch.tensor([trial.should_prune() for trial in trials])
                for i in pruned.nonzero().flatten().tolist():
                    study.tell(trials[i], state=optuna.trial.TrialState.PRUNED)
                trials = [t for t, out in zip(trials, pruned, strict=True) if not out]
                run = run[~pruned]
        for trial, value in zip(trials, losses.tolist(), strict=True):
            study.tell(trial, value)
        print(f"batch {batch}: {len(trials)} of {TRIALS} trials trained to the end,")
        print(f"  best loss so far {study.best_value:.4f}")
    whole = BATCHES * TRIALS * RUNGS * STEPS
    print(f"{rows} steps of one model instead of {whole}: pruned trials cost nothing")
    assert rows < whole

    # A trial of a batch is what it would have been on its own.
    alone = start(TensorDict(study.best_params)[None])
    for _ in range(RUNGS):
        alone, losses = train(alone)
    torch.testing.assert_close(losses.item(), study.best_value, rtol=1e-4, atol=0)
    print(f"the best trial alone: loss {losses.item():.4f}, {study.best_params}")


if __name__ == "__main__":
    main()
