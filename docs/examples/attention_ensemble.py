"""An ensemble of attention models with dropout, and a shared trunk with an ensemble of heads.

Digits are read as eight tokens, one for each row of pixels. The first part trains eight whole transformers; member i
draws its dropout masks from a generator of its own, so it does not change when there are more members. The second part
keeps one trunk and stacks only the heads, as is common where a whole ensemble would be too large.

Run it with: python attention_ensemble.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

MEMBERS, STEPS = 4, 150


class Attention(nn.Module):
    """One layer of self-attention over the rows of an image, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.randn(8, 32) / 4)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 8, 8]."""
        tokens = self.embed(x) + self.place
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)  # each [B, heads, rows, 16]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(-2))
        return self.head(tokens.mean(1))


def sum_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sum over members. Members do not meet in it, so its gradient holds the gradient of each."""
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="sum") / len(y)


def measure(logits: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the mean accuracy of the members, and that of the ensemble."""
    together = tdf.uncertainty(logits, kind="classification")["mean"]
    return (logits.argmax(-1) == y).float().mean().item(), (together.argmax(-1) == y).float().mean().item()


def count(tree: TensorDict) -> int:
    """Return the number of parameters."""
    return sum(leaf.numel() for leaf in tree.leaves())


def main() -> None:
    """Train the ensemble, then heads on the trunk of its first member."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, x_test, y_test = x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]

    torch.manual_seed(0)
    apply, _, _ = tdf.functional(Attention())
    training = tdf.Ensemble(apply)  # finds out that vmap cannot run dropout inside of attention, and loops
    evaluate = tdf.Ensemble(apply.eval(), how="loop")  # vmap could, but has no rule for torch's fused kernel
    members = tdf.init_ensemble(Attention, MEMBERS)

    # A number as rng gives the same masks in every call: the property that makes the next check possible.
    four, two = training(members, x[:5], rng=0), training(members[:2], x[:5], rng=0)
    torch.testing.assert_close(four[:2], two)
    print(training.plan().splitlines()[0])

    def loss(members: TensorDict, rows: Tensor, rng: torch.Generator) -> Tensor:
        return sum_losses(training(members, x[rows], rng=rng), y[rows])

    optimizer, rng = tdf.optim.adam(lr=1e-2), torch.Generator().manual_seed(0)
    state = optimizer.init(members)
    for _ in range(STEPS):
        grads = torch.func.grad(loss)(members, torch.randint(len(x), (100,)), rng)
        members, state = optimizer.update(members, grads, state)
    with torch.no_grad():
        alone, together = measure(evaluate(members, x_test), y_test)
    print(f"{MEMBERS} transformers: accuracy {alone:.3f} alone, {together:.3f} together")
    assert together > 0.85

    # A shared trunk: the tree of member 0 without its head, and sixteen new heads. Only these are trained.
    _, trunk = tdf.partition(members[0], "head.*")
    heads, _ = tdf.partition(tdf.init_ensemble(Attention, 16), "head.*")
    frozen = apply.eval()

    def run(heads: TensorDict, trunk: TensorDict, x: Tensor) -> Tensor:
        # vmap maps the heads and not the trunk, whose part of the forward is computed once, not sixteen times.
        return torch.vmap(lambda head: frozen(tdf.combine(head, trunk), x))(heads)

    optimizer = tdf.optim.adam(lr=torch.logspace(-2.5, -1.5, 16))  # a learning rate for each head
    state = optimizer.init(heads)

    def head_loss(heads: TensorDict, trunk: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return sum_losses(run(heads, trunk, x), y)

    @tdf.jit  # every tensor that the function uses is an argument, the trunk too
    def step(heads: TensorDict, state: TensorDict, *rest: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        return optimizer.update(heads, torch.func.grad(head_loss)(heads, *rest), state)

    for _ in range(STEPS):
        rows = torch.randint(len(x), (100,))
        heads, state = step(heads, state, trunk, x[rows], y[rows])
    with torch.no_grad():
        alone, together = measure(run(heads, trunk, x_test), y_test)
    print(f"16 heads on one trunk: accuracy {alone:.3f} alone, {together:.3f} together")
    print(f"{count(heads) + count(trunk)} parameters; 16 whole models have {16 * count(members[0])}")
    assert together > 0.85


if __name__ == "__main__":
    main()
