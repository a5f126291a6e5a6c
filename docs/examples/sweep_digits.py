"""Sixty-four learning rates at once, and the best one trained again alone.

Sixty-four networks with BatchNorm and dropout train on handwritten digits, each with a
learning rate of its own, in one jitted step. Every random number comes from a key, so a
member does not depend on the others: the best one by validation is trained once more,
alone and in a plain loop, and comes out the same.

Run it with: python sweep_digits.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict, random

MEMBERS, STEPS = 64, 120


def make() -> nn.Module:
    """Return the network of one member."""
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(32, 10)).double()


def train_together(x: Tensor, y: Tensor, lr: Tensor, key: Tensor) -> TensorDict:
    """Return the trained parameters and buffers of all members, stacked."""
    apply, _, _ = tdf.functional(make())
    ensemble, optimizer = tdf.Ensemble(apply), tdf.optim.adam(lr=lr)
    params, buffers = tdf.split(tdf.init_ensemble(make, MEMBERS))
    state = optimizer.init(params)

    @tdf.jit
    def step(
        params: TensorDict,
        buffers: TensorDict,
        state: TensorDict,
        x: Tensor,
        y: Tensor,
        key: Tensor,
    ) -> tuple[TensorDict, ...]:
        def loss(params: TensorDict) -> tuple[Tensor, TensorDict]:
            logits, new = ensemble.with_buffers(params, buffers, x, rng=key)
            return torch.vmap(F.cross_entropy, (0, None))(logits, y).sum(), new

        grads, new = torch.func.grad(loss, has_aux=True)(params)
        return *optimizer.update(params, grads, state), new

    for number in range(STEPS):
        own = random.fold_in(key, number)
        rows = random.randint(own, 64, 0, len(x))
        params, state, buffers = step(params, buffers, state, x[rows], y[rows], own)
    return tdf.combine(params, buffers)


def train_alone(x: Tensor, y: Tensor, lr: Tensor, key: Tensor, i: int) -> TensorDict:
    """Return the parameters and buffers of member i, trained by itself."""
    apply, _, _ = tdf.functional(make())
    optimizer = tdf.optim.adam(lr=lr)
    params, buffers = tdf.split(tdf.init_ensemble(make, i + 1)[i])
    state = optimizer.init(params)
    for number in range(STEPS):
        own = random.fold_in(key, number)
        rows = random.randint(own, 64, 0, len(x))
        member = random.fold_in(own, i)

        def loss(params: TensorDict) -> tuple[Tensor, TensorDict]:
            logits, new = apply.with_buffers(params, buffers, x[rows], rng=member)  # noqa: B023
            return F.cross_entropy(logits, y[rows]), new  # noqa: B023

        grads, buffers = torch.func.grad(loss, has_aux=True)(params)
        params, state = optimizer.update(params, grads, state)
    return tdf.combine(params, buffers)


def main() -> None:
    """Sweep, choose, and train the chosen member again."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels) / 16, torch.tensor(labels)
    order = random.permutation(random.key(1), len(y))
    x, y = x[order], y[order]
    x, y, x_valid, y_valid = x[:1300], y[:1300], x[1300:], y[1300:]

    hyper = tdf.sweep.grid(lr=torch.logspace(-5, 0, MEMBERS, dtype=torch.float64))
    trained = train_together(x, y, hyper["lr"], random.key(0))
    evaluate = tdf.Ensemble(tdf.functional(make().eval())[0])
    logits = evaluate(trained, x_valid)
    scores = torch.vmap(F.cross_entropy, (0, None))(logits, y_valid)
    run = TensorDict(
        {"model": trained, "hyper": hyper, "number": torch.arange(MEMBERS)}, [MEMBERS]
    )
    best = tdf.sweep.best(run, scores)
    i, lr = int(best["number"]), best["hyper", "lr"]
    accuracy = (logits[i].argmax(-1) == y_valid).double().mean().item()
    print(f"best of {MEMBERS}: member {i}, lr {lr.item():.4f}, accuracy {accuracy:.3f}")
    assert accuracy > 0.9

    alone = train_alone(x, y, lr, random.key(0), i)
    gap = max(float(leaf.abs().max()) for leaf in (alone - best["model"]).leaves())
    print(f"alone it has the same weights, to {gap:.0e}")
    assert gap < 1e-8


if __name__ == "__main__":
    main()
