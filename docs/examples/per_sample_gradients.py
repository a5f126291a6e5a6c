"""From a checkpoint to a pure function, and the gradient of every single sample.

`tdf.functional` turns a module into a function of its parameters, so torch.func can
differentiate it with respect to the whole tree, and vmap does that for every sample at
once. The first part finds wrong labels by the size of their gradients. The second does
the same with a checkpoint that transformers wrote.

Run it with: python per_sample_gradients.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import tdfunc as tdf
from tdfunc import TensorDict


def norms(grads: TensorDict) -> Tensor:
    """Return the norm of each sample's gradient; samples are the batch of the tree."""
    squares = [leaf.flatten(1).square().sum(1) for leaf in grads.leaves()]
    return torch.stack(squares).sum(0).sqrt()


def find_wrong_labels(folder: Path) -> None:
    """Train on digits of which some are mislabelled, then look at the gradients."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(x), generator=generator)[:60]
    shift = torch.randint(1, 10, (60,), generator=generator)
    y = y.index_put((wrong,), (y[wrong] + shift) % 10)

    # Any torch code may have trained the model. We get a file with its state dict.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.save(net.state_dict(), folder / "digits.pt")

    # A state dict has flat keys with dots; the tree of a module is nested.
    state_dict = torch.load(folder / "digits.pt", weights_only=True)
    params = TensorDict(state_dict).unflatten_keys(".")
    apply, _, _ = tdf.functional(net)

    def loss(params: TensorDict, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, x), y)  # of one sample

    # The gradient of each sample's loss: a tree of batch size [1797].
    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    assert grads.batch_size == torch.Size([len(x)])

    # The oracle: sample 5 alone.
    tdf.assert_close(grads[5], torch.func.grad(loss)(params, x[5], y[5]))

    # Mislabelled samples pull hardest.
    found = torch.isin(norms(grads).topk(60).indices, wrong).sum().item()
    print(f"of the 60 largest gradients, {found} have wrong labels; by chance 2 would")
    assert found > 40

    # A private (DP-SGD) step: clip each gradient, sum, add noise.
    clipped = grads * (1.0 / norms(grads)).clamp(max=1.0)
    assert norms(clipped).max() < 1.001
    noise = params.apply(lambda p: torch.randn(p.shape, generator=generator))
    private = params - 1.0 / len(x) * (clipped.sum(0) + 0.5 * noise)
    before, after = loss(params, x, y), loss(private, x, y)
    print(f"loss before {before:.4f}, after one private step {after:.4f}")


def differentiate_a_language_model(folder: Path) -> None:
    """Do the same with a folder that `save_pretrained` wrote."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **tokens)
    # vmap has a rule for each operation of eager attention, and none for the fused one.
    config._attn_implementation = "eager"
    GPT2LMHeadModel(config).save_pretrained(folder)

    # The model gives structure and code; `like` checks that the file fits it.
    apply, own, buffers = tdf.functional(GPT2LMHeadModel(config).eval())
    params = tdf.load(folder, like=own)

    def loss(params: TensorDict, ids: Tensor) -> Tensor:
        logits = apply(params, ids[None], buffers=buffers).logits[0]
        return F.cross_entropy(logits[:-1], ids[1:])

    ids = torch.randint(64, (6, 16))
    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, ids)
    print(f"gradients of 6 sentences: {[round(n, 2) for n in norms(grads).tolist()]}")

    # The oracle: transformers loads the folder, autograd differentiates one sentence.
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    F.cross_entropy(model(ids[2:3]).logits[0, :-1], ids[2, 1:]).backward()
    expected = model.transformer.wte.weight.grad  # the head is tied to it: one leaf
    torch.testing.assert_close(grads["transformer", "wte", "weight"][2], expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        find_wrong_labels(Path(temporary))
        differentiate_a_language_model(Path(temporary) / "gpt2")
