"""From a checkpoint to a pure function, and the gradient of every single sample in one call.

`tdf.functional` turns a module into a function of its parameters, so torch.func can differentiate it with respect to
the whole tree and vmap can do that for every sample at once. The first part finds wrong labels by the size of their
gradients; the second does the same computation with a checkpoint that transformers wrote.

Run it with: python per_sample_gradients.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import tdfunc as tdf


def norms(grads: tdf.TensorDict) -> torch.Tensor:
    """Return the norm over all leaves of each sample's gradient; the samples are the batch of the tree."""
    return torch.stack([leaf.flatten(1).square().sum(1) for leaf in grads.leaves()]).sum(0).sqrt()


def find_wrong_labels(folder: Path) -> None:
    """Train on digits of which some are mislabelled, and look at the gradients afterwards."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(x), generator=generator)[:60]
    y = y.index_put((wrong,), (y[wrong] + 1 + torch.randint(9, (60,), generator=generator)) % 10)

    # Any torch code may have trained the model. What reaches us is a file with its state dict.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.save(net.state_dict(), folder / "digits.pt")

    # A state dict has flat keys with dots; the tree of a module is nested.
    params = tdf.TensorDict(torch.load(folder / "digits.pt", weights_only=True)).unflatten_keys(".")
    apply, _, _ = tdf.functional(net)

    def loss(params: tdf.TensorDict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply(params, x), y)  # one sample

    # The gradient of the loss of one sample, for all of them: a tree of batch size [1797].
    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    assert grads.batch_size == torch.Size([len(x)])

    # The oracle: autograd on sample 5 alone. `grads[5]` is its tree.
    tdf.assert_close(grads[5], torch.func.grad(loss)(params, x[5], y[5]))

    # Mislabelled samples pull hardest.
    suspects = norms(grads).topk(60).indices
    found = torch.isin(suspects, wrong).sum().item()
    print(f"of the 60 samples with the largest gradients, {found} are mislabelled; by chance it would be 2")
    assert found > 40

    # A private (DP-SGD) step: clip each sample's gradient, sum, add noise. Each line is arithmetic on trees.
    clipped = grads * (1.0 / norms(grads)).clamp(max=1.0)
    assert norms(clipped).max() < 1.001
    noisy = clipped.sum(0).apply(lambda g: g + 0.5 * torch.randn(g.shape, generator=generator))
    private = params - 1.0 / len(x) * noisy
    print(f"loss before {loss(params, x, y):.4f}, after one private step {loss(private, x, y):.4f}")


def differentiate_a_language_model(folder: Path) -> None:
    """Do the same with a folder that `save_pretrained` wrote."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    # vmap has a rule for each operation of eager attention, and none for the fused kernel.
    config._attn_implementation = "eager"
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")

    # The model gives structure and code; `like` checks that the file fits it, key by key. The tied head is one leaf.
    apply, own, buffers = tdf.functional(GPT2LMHeadModel(config).eval())
    params = tdf.load(folder / "gpt2", like=own)

    def loss(params: tdf.TensorDict, ids: torch.Tensor) -> torch.Tensor:
        logits = apply(params, ids[None], buffers=buffers).logits[0]
        return F.cross_entropy(logits[:-1], ids[1:])

    ids = torch.randint(64, (6, 16))
    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, ids)
    print(f"norms of the gradients of 6 sentences: {[round(n, 2) for n in norms(grads).tolist()]}")

    # The oracle: transformers loads the folder, and autograd differentiates one sentence.
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    F.cross_entropy(model(ids[2:3]).logits[0, :-1], ids[2, 1:]).backward()
    torch.testing.assert_close(grads["transformer", "wte", "weight"][2], model.transformer.wte.weight.grad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        find_wrong_labels(Path(temporary))
        differentiate_a_language_model(Path(temporary))
