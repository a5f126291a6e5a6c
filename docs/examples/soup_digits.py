"""The best soup: merge weights learned by gradient, and 64 soups in one forward.

Eight models are trained from one start, each with its own learning rate and its own
digits. A soup is their weighted mean. The function that makes it is vmapped in the
weights, so 64 soups are scored at once, and differentiable, so the best weights are
found by Adam.

Run it with: python soup_digits.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict, random

MEMBERS, SOUPS = 8, 64


def train(params: TensorDict, x: Tensor, y: Tensor, rows: Tensor) -> TensorDict:
    """Return members trained at once, each on its rows [steps, members, batch]."""
    optimizer = tdf.optim.adam(lr=torch.logspace(-3.5, -1.5, MEMBERS))
    state = optimizer.init(params)
    apply = tdf.functional(make())[0]

    @tdf.jit
    def step(
        params: TensorDict, state: TensorDict, x: Tensor, y: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(apply(params, x), y)

        grads = torch.vmap(torch.func.grad(loss))(params, x, y)
        return optimizer.update(params, grads, state)

    for own in rows:
        params, state = step(params, state, x[own], y[own])
    return params


def make() -> nn.Module:
    """Return an untrained model."""
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def main() -> None:
    """Train, merge, and compare on digits that neither training nor merging read."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = random.permutation(random.key(0), len(y))
    x, y = x[order], y[order]
    x_valid, y_valid, x_test, y_test = x[900:1300], y[900:1300], x[1300:], y[1300:]

    # The start is the same for all; each member then reads a ninth of the digits.
    start = tdf.split(tdf.init_ensemble(make, 1))[0].expand(MEMBERS)
    shared = random.randint(random.key(1), (40, 1, 64), 0, 900).expand(-1, MEMBERS, -1)
    base = train(start, x, y, shared)[3]
    first = torch.arange(MEMBERS).reshape(1, -1, 1) * 100
    own = first + random.randint(random.key(2), (60, MEMBERS, 64), 0, 100)
    members = train(base.expand(MEMBERS), x, y, own)

    apply = tdf.functional(make())[0]

    def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x), y)

    def soup_loss(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
        soup = tdf.weights.task_arithmetic(base, members, torch.softmax(scores, -1))
        return loss(soup, x, y)

    alone = torch.vmap(loss, (0, None, None))(members, x_valid, y_valid)
    scores = random.normal(random.key(3), (SOUPS, MEMBERS))
    soups = torch.vmap(soup_loss, (0, None, None))(scores, x_valid, y_valid)

    optimizer = tdf.optim.adam(lr=0.1)
    learned = TensorDict({"scores": torch.zeros(MEMBERS)})
    state = optimizer.init(learned)
    step_grad = torch.func.grad(lambda p: soup_loss(p["scores"], x_valid, y_valid))
    for _ in range(100):
        learned, state = optimizer.update(learned, step_grad(learned), state)

    uniform = soup_loss(torch.zeros(MEMBERS), x_test, y_test)
    best = soup_loss(learned["scores"], x_test, y_test)
    by_validation = members[int(alone.argmin())]
    print(f"best single model   {loss(by_validation, x_test, y_test):.3f}")
    print(f"mean of all models  {uniform:.3f}")
    print(
        f"best of {SOUPS} soups    "
        f"{soup_loss(scores[soups.argmin()], x_test, y_test):.3f}"
    )
    print(f"soup by gradient    {best:.3f}")
    weights = torch.softmax(learned["scores"], -1)
    print(f"its weights         {[round(w, 2) for w in weights.tolist()]}")
    assert soup_loss(learned["scores"], x_valid, y_valid) < soups.min()
    assert best < uniform

    # Members that share a start lie in one basin.
    heights = tdf.weights.barriers(lambda p: loss(p, x_test, y_test), members)
    print(f"highest barrier between two members {heights.max():.3f}")
    assert heights.max() < 0.1


if __name__ == "__main__":
    main()
