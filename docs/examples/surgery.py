"""Surgery: replace a head, freeze a body, low-rank updates, best weights, pruning.

Parameters are an immutable tree, so every edit is a new tree that shares what did not
change. Nothing has to be copied to be safe, and going back is keeping a name.

Run it with: python surgery.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict


def load_data() -> tuple[TensorDict, TensorDict]:
    """Return training and test digits."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    data = TensorDict({"x": x, "y": y}, [len(y)])[order]
    return data[:1300], data[1300:]


def make(classes: int) -> nn.Sequential:
    """Return an untrained model."""
    body = [nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(48, classes))


def train(
    logits: Callable[[TensorDict, Tensor], Tensor], params: TensorDict, data: TensorDict
) -> TensorDict:
    """Return parameters trained by adam, for a function of them and of the images."""

    def loss(params: TensorDict, batch: TensorDict) -> Tensor:
        return F.cross_entropy(logits(params, batch["x"]), batch["y"])

    optimizer = tdf.optim.adam(lr=1e-2)
    state = optimizer.init(params)
    for _ in range(150):
        grads = torch.func.grad(loss)(params, data[torch.randint(len(data), (64,))])
        params, state = optimizer.update(params, grads, state)
    return params


def main() -> None:
    """Train on five of the digits, then move the model to all ten."""
    torch.manual_seed(0)
    data, test = load_data()
    apply_five, params, _ = tdf.functional(make(5))
    apply, fresh, _ = tdf.functional(make(10))
    old = train(apply_five, params, data[data["y"] < 5])

    def accuracy(params: TensorDict) -> float:
        return (apply(params, test["x"]).argmax(-1) == test["y"]).float().mean().item()

    # Replace: a head for ten digits, whose first rows are those of the old one. `set`
    # replaces an entry; the body is shared, not copied.
    params = old.set("4", fresh["4"])
    rows = torch.cat([old["4", "weight"], fresh["4", "weight"][5:]])
    params = params.at["4", "weight"].set(rows)
    assert params["0", "weight"] is old["0", "weight"]

    # `at` changes what is there: the path must exist, and a leaf keeps its shape.
    try:
        params.at["4", "wieght"].set(torch.zeros(10, 48))
    except tdf.MissingKeyError as error:
        print(f"a typo is found: {str(error).splitlines()[0]}")

    # Freeze: only a part of the tree is an argument of the gradient.
    head, body = tdf.partition(params, "4.*")
    head = train(lambda head, x: apply(tdf.combine(head, body), x), head, data)
    params = tdf.combine(head, body)
    print(f"new head on a frozen body: accuracy {accuracy(params):.3f}")
    assert params["0", "weight"] is old["0", "weight"]

    # Low rank: train two thin factors for each matrix of the body, as LoRA does.
    weights, rest = tdf.partition(params, tdf.Filter("*.weight") & ~tdf.Filter("4.*"))
    down = weights.apply(lambda w: torch.randn(4, w.shape[1]) / w.shape[1] ** 0.5)
    up = weights.apply(lambda w: torch.zeros(w.shape[0], 4))
    factors = TensorDict({"up": up, "down": down})

    def merge(factors: TensorDict) -> TensorDict:
        change = factors["up"].apply(lambda up, down: up @ down, factors["down"])
        return tdf.combine(weights + change, rest)

    assert (merge(factors) == params).all()  # `up` is 0 at first, so nothing changes
    factors = train(lambda factors, x: apply(merge(factors), x), factors, data)
    better = merge(factors)
    print(f"updates of rank 4 to the body: accuracy {accuracy(better):.3f}")
    change = better["0", "weight"] - params["0", "weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 4
    assert accuracy(better) > accuracy(params)

    # Best weights: such a tree never changes, so keeping it is keeping the name. A tree
    # of `from_module` holds the module's own tensors, which training changes: clone it.
    model = make(10)
    better.clone().to_module(model)
    live, best = tdf.from_module(model), tdf.from_module(model).detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert live["0", "weight"].abs().sum() == 0
    best.to_module(model)
    assert torch.equal(model(test["x"]), apply(better, test["x"]))

    # Prune: one expression over the leaves that a filter chooses.
    matrices = better.at[tdf.Filter("*.weight")]
    pruned = matrices.apply(lambda w: w * (w.abs() > w.abs().quantile(0.3)))
    print(f"without the smallest 30% of its weights: {accuracy(pruned):.3f}")
    assert pruned["0", "bias"] is better["0", "bias"]
    assert accuracy(pruned) > 0.8


if __name__ == "__main__":
    main()
