"""AdamW as it is used in practice: groups, clipping, a schedule, averaged weights.

Weight decay is for matrices and not for biases and norms, one clip is for all gradients
together, the learning rate warms up and falls as a cosine, and evaluation uses a moving
average of the weights. The same recipe in torch.optim ends at the same weights.

Run it with: python parameter_groups.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.optim import schedules

STEPS, WARMUP, PEAK, DECAY = 120, 20, 1e-2, 0.1
# A schedule is a function of the number of steps done, which is a tensor.
schedule = schedules.warmup_cosine_decay(PEAK / WARMUP, PEAK, WARMUP, STEPS)


def make() -> nn.Module:
    """Return a model with matrices, biases and a norm."""
    body = [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(64, 10))


def train_with_torch(model: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    """Train a module by the same recipe in torch.optim."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, weight_decay=0.0)
    scale = [float(schedule(torch.tensor(step))) / PEAK for step in range(STEPS + 1)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale.__getitem__)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def main() -> None:
    """Train both ways and compare."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    torch.manual_seed(0)
    batches = torch.randint(1400, (STEPS, 64))
    model = make()
    apply, params, _ = tdf.functional(model)

    # A group is a filter, here a predicate: `*.weight` would match the norm's weight.
    # A leaf is in the first group that matches it. The clip is for all groups together.
    matrices = tdf.Filter(lambda path, leaf: leaf.ndim > 1)
    decayed, plain = (tdf.optim.adamw(schedule, weight_decay=w) for w in (DECAY, 0.0))
    groups = tdf.optim.multi({matrices: decayed, "*": plain})
    optimizer = tdf.optim.chain(tdf.optim.clip_by_global_norm(1.0), groups)

    def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x), y)

    @tdf.jit
    def step(
        params: TensorDict, state: TensorDict, average: TensorDict, x: Tensor, y: Tensor
    ) -> tuple[TensorDict, TensorDict, TensorDict]:
        grads = torch.func.grad(loss)(params, x, y)
        params, state = optimizer.update(params, grads, state)
        return params, state, average.lerp(params, 0.05)

    state, average = optimizer.init(params), params
    for rows in batches:
        params, state, average = step(params, state, average, x[rows], y[rows])

    # The oracle: torch.optim with the same batches ends at the same weights.
    train_with_torch(model, x, y, batches)
    expected = tdf.from_module(model).detach()
    tdf.assert_close(params, expected, rtol=1e-3, atol=1e-4)
    print("tdfunc.optim and torch.optim end at the same weights")

    for name, tree in (("last", params), ("averaged", average)):
        logits = apply(tree, x[1400:])
        right = (logits.argmax(-1) == y[1400:]).float().mean()
        value = F.cross_entropy(logits, y[1400:])
        print(f"{name} weights: loss {value:.4f}, accuracy {right:.3f}")
        assert right > 0.9


if __name__ == "__main__":
    main()
