"""Surgery on a trained model: replace the head, freeze the body, add low-rank updates, keep the best weights.

Parameters are an immutable tree, so every edit is a new tree that shares what did not change. Nothing has to be copied
"to be safe", and going back is keeping a name.

Run it with: python surgery.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict


def load_data() -> TensorDict:
    """Return the digits in random order."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDict({"x": torch.tensor(pixels, dtype=torch.float32) / 16, "y": torch.tensor(labels)}, [len(labels)])
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]


def make(classes: int) -> nn.Module:
    """Return an untrained model."""
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, classes))


Loss = Callable[[TensorDict, TensorDict], Tensor]


def fit(loss: Loss, params: TensorDict, data: TensorDict, *, steps: int, lr: float) -> TensorDict:
    """Return parameters trained by adam."""
    optimizer = tdf.optim.adam(lr=lr)
    state = optimizer.init(params)
    for _ in range(steps):
        grads = torch.func.grad(loss)(params, data[torch.randint(len(data), (64,))])
        params, state = optimizer.update(params, grads, state)
    return params


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Return the share of right answers."""
    return (logits.argmax(-1) == y).float().mean().item()


def main() -> None:
    """Train on small digits, then move the model to all of them."""
    torch.manual_seed(0)
    data = load_data()
    train, test = data[:1300], data[1300:]
    small = train[train["y"] < 5]
    apply_5, params, _ = tdf.functional(make(5))
    apply, fresh, _ = tdf.functional(make(10))
    old = fit(lambda p, b: F.cross_entropy(apply_5(p, b["x"]), b["y"]), params, small, steps=100, lr=1e-2)

    # Replace: a new head of another size. The body is shared, not copied.
    params = old.set("4", fresh["4"])
    assert params["0", "weight"] is old["0", "weight"]
    # Keep what the old head knows: its five rows become the first of the ten.
    params = params.at["4", "weight"].apply(lambda w: torch.cat([old["4", "weight"], 0.1 * w[5:]]))

    # Freeze: only a part of the tree is an argument of the gradient.
    head, body = tdf.partition(params, "4.*")
    head = fit(
        lambda h, b: F.cross_entropy(apply(tdf.combine(h, body), b["x"]), b["y"]), head, train, steps=100, lr=1e-2
    )
    params = tdf.combine(head, body)
    print(f"new head on a frozen body: accuracy {accuracy(apply(params, test['x']), test['y']):.3f}")
    assert params["0", "weight"] is old["0", "weight"]

    # Low rank: train two thin factors for each matrix of the body, as LoRA does.
    weights, rest = tdf.partition(params, tdf.Filter("*.weight") & ~tdf.Filter("4.*"))
    down = weights.apply(lambda w: torch.randn(4, w.shape[1]) / w.shape[1] ** 0.5)
    up = weights.apply(lambda w: torch.zeros(w.shape[0], 4))
    factors = TensorDict({"up": up, "down": down})

    def merge(factors: TensorDict) -> TensorDict:
        change = factors["up"].apply(lambda b, a: b @ a, factors["down"])
        return tdf.combine(weights + change, rest)

    assert (merge(factors) == params).all()  # the factor `up` is zero at first, so nothing changes
    factors = fit(lambda f, b: F.cross_entropy(apply(merge(f), b["x"]), b["y"]), factors, train, steps=300, lr=1e-2)
    better = merge(factors)
    size, whole = (sum(leaf.numel() for leaf in tree.leaves()) for tree in (factors, weights))
    print(f"low-rank updates, {size} numbers for {whole}: {accuracy(apply(better, test['x']), test['y']):.3f}")
    rank = torch.linalg.matrix_rank(better["0", "weight"] - params["0", "weight"], rtol=1e-4)
    assert rank == 4

    # Best weights: a tree from `functional` or an optimizer never changes, so keeping it is keeping the name.
    # `tdf.from_module` is different: it holds the module's own tensors, which training changes.
    model = make(10)
    better.clone().to_module(model)
    own = tdf.from_module(model)
    best = own.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert own["0", "weight"].abs().sum() == 0
    assert (best == better).all()
    best.to_module(model)
    print(f"after an accident, the best weights are back: {accuracy(model(test['x']), test['y']):.3f}")

    # Prune: one expression over the leaves that a filter chooses.
    matrices, others = tdf.partition(better, "*.weight")
    pruned = tdf.combine(matrices.apply(lambda w: w.where(w.abs() > w.abs().quantile(0.3), torch.zeros(()))), others)
    print(f"without the smallest 30% of its weights: accuracy {accuracy(apply(pruned, test['x']), test['y']):.3f}")
    assert accuracy(apply(pruned, test["x"]), test["y"]) > 0.85


if __name__ == "__main__":
    main()
