"""An ensemble of attention models with dropout, and many heads on one shared trunk.

Digits are read as eight tokens, one for each row of pixels. The first part trains whole
models; member i draws its dropout masks from a key of its own, so it does not change
when there are more members. The second part keeps one trunk and stacks only the
heads, as is common where a whole ensemble would be too large.

Run it with: python attention_ensemble.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

MEMBERS, HEADS, STEPS = 4, 16, 150


class Attention(nn.Module):
    """One layer of self-attention over the rows of an image, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 32) / 4)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 8, 8]."""
        tokens = self.embed(x) + self.place
        heads = self.qkv(tokens).unflatten(-1, (3, 2, 16))  # [B, 8, 3, 2, 16]
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, 2, 8, 16]
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(-2))
        return self.head(tokens.mean(1))


def sum_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sum over members, whose gradient holds the gradient of each."""
    return torch.vmap(F.cross_entropy, in_dims=(0, None))(logits, y).sum()


def report(name: str, logits: Tensor, y: Tensor) -> float:
    """Print the accuracy of the members and of the ensemble; return the latter."""
    alone = (logits.argmax(-1) == y).float().mean()
    mean = tdf.metrics.uncertainty(logits, kind="classification")["mean"]
    together = (mean.argmax(-1) == y).float().mean().item()
    print(f"{name}: accuracy {alone:.3f} alone, {together:.3f} together")
    return together


def count(tree: TensorDict) -> int:
    """Return the number of parameters."""
    return sum(leaf.numel() for leaf in tree.leaves())


def main() -> None:
    """Train the ensemble, then heads on the trunk of its first member."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    x, y, x_test, y_test = x[:1400], y[:1400], x[1400:], y[1400:]

    torch.manual_seed(0)
    apply, _, _ = tdf.functional(Attention())
    # Evaluation could use vmap, which has no rule for torch's fused kernel.
    training, evaluation = tdf.Ensemble(apply), tdf.Ensemble(apply.eval(), how="loop")
    members = tdf.init_ensemble(Attention, MEMBERS)

    # A key gives the same masks in every call, so each step has its own.
    key = tdf.random.key(0)
    four, two = training(members, x[:5], rng=key), training(members[:2], x[:5], rng=key)
    torch.testing.assert_close(four[:2], two)
    print(training.plan().splitlines()[0])

    def loss(members: TensorDict, rows: Tensor, rng: Tensor) -> Tensor:
        return sum_losses(training(members, x[rows], rng=rng), y[rows])

    optimizer = tdf.optim.adam(lr=1e-2)
    state = optimizer.init(members)
    for number in range(STEPS):
        rng = tdf.random.fold_in(key, number)
        grads = torch.func.grad(loss)(members, torch.randint(len(x), (100,)), rng)
        members, state = optimizer.update(members, grads, state)
    with torch.no_grad():
        logits = evaluation(members, x_test)
    assert report(f"{MEMBERS} whole models", logits, y_test) > 0.85

    # The trunk is member 0 without its head. The heads are new, and only they train.
    _, trunk = tdf.partition(members[0], "head.*")
    heads, _ = tdf.partition(tdf.init_ensemble(Attention, HEADS, key=1), "head.*")
    # Shared leaves have no dimension of members, and what they compute runs once.
    run = tdf.Ensemble(apply.eval(), shared=~tdf.Filter("head.*"))

    def head_loss(heads: TensorDict, trunk: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return sum_losses(run(tdf.combine(trunk, heads), x), y)

    optimizer = tdf.optim.adam(lr=torch.logspace(-2.5, -1.5, HEADS))  # one for each
    state = optimizer.init(heads)

    @tdf.jit  # every tensor that the function uses is an argument, the trunk too
    def step(
        heads: TensorDict, state: TensorDict, trunk: TensorDict, x: Tensor, y: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        grads = torch.func.grad(head_loss)(heads, trunk, x, y)
        return optimizer.update(heads, grads, state)

    for _ in range(STEPS):
        rows = torch.randint(len(x), (100,))
        heads, state = step(heads, state, trunk, x[rows], y[rows])
    logits = run(tdf.combine(trunk, heads), x_test)
    assert report(f"{HEADS} heads, one trunk", logits, y_test) > 0.85
    shared, whole = count(heads) + count(trunk), HEADS * count(members[0])
    print(f"parameters: {shared}; of {HEADS} whole models {whole}")


if __name__ == "__main__":
    main()
