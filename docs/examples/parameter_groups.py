"""AdamW as it is used in practice: parameter groups, clipping, a schedule, and averaged weights.

Weight decay is for matrices and not for biases and norms, one clip is for all gradients together, the learning rate
warms up and then falls as a cosine, and evaluation uses an exponential moving average of the weights. The same recipe
in torch.optim runs beside it and ends at the same weights.

Run it with: python parameter_groups.py
"""

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

STEPS, WARMUP, PEAK, DECAY = 120, 20, 1e-2, 0.1


def make() -> nn.Module:
    """Return a model with matrices, biases and a norm."""
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def schedule(step: Tensor) -> Tensor:
    """Return the learning rate. The step is a tensor, so `torch.where` stands in place of `if`."""
    cosine = 0.5 * PEAK * (1 + torch.cos((step - WARMUP) / (STEPS - WARMUP) * torch.pi))
    return torch.where(step < WARMUP, PEAK * (step + 1) / WARMUP, cosine)


def scale(step: int) -> float:
    """Return the same schedule for torch, as a factor of the peak."""
    return (step + 1) / WARMUP if step < WARMUP else 0.5 * (1 + math.cos((step - WARMUP) / (STEPS - WARMUP) * math.pi))


def train_with_torch(model: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    """Train a module by the same recipe in torch.optim."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()


def main() -> None:
    """Train both ways and compare."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    batches = torch.randint(1400, (STEPS, 64))
    model = make()
    apply, params, _ = tdf.functional(model)

    # A group is a filter: here a predicate of the path and the leaf. `*.weight` would take the norm's weight as well.
    matrices = tdf.Filter(lambda path, leaf: leaf.ndim > 1)
    clip = tdf.optim.clip_by_global_norm(1.0)
    decayed = tdf.optim.masked(tdf.optim.adamw(lr=schedule, weight_decay=DECAY), matrices)
    plain = tdf.optim.masked(tdf.optim.adamw(lr=schedule, weight_decay=0.0), ~matrices)

    def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x), y)

    @tdf.jit
    def step(params: TensorDict, state: TensorDict, average: TensorDict, *batch: Tensor) -> tuple[TensorDict, ...]:
        grads = clip(torch.func.grad(loss)(params, *batch))  # one norm, over both groups
        params, first = decayed.update(params, grads, state["decayed"])
        params, second = plain.update(params, grads, state["plain"])
        return params, TensorDict({"decayed": first, "plain": second}), average.lerp(params, 0.05)

    state = TensorDict({"decayed": decayed.init(params), "plain": plain.init(params)})
    average = params
    for rows in batches:
        params, state, average = step(params, state, average, x[rows], y[rows])

    # The oracle: torch.optim with the same batches ends at the same weights.
    train_with_torch(model, x, y, batches)
    tdf.assert_close(params, tdf.from_module(model).detach(), rtol=1e-3, atol=1e-4)
    print("tdfunc.optim and torch.optim end at the same weights")

    with torch.no_grad():
        for name, tree in (("last weights", params), ("averaged weights", average)):
            logits = apply(tree, x[1400:])
            right = (logits.argmax(-1) == y[1400:]).float().mean()
            print(f"{name}: loss {F.cross_entropy(logits, y[1400:]):.4f}, accuracy {right:.3f}")
            assert right > 0.9


if __name__ == "__main__":
    main()
