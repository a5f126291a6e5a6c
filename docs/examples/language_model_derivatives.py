"""Gradients of single sentences and second derivatives of a language model.

A model of transformers is a pure function after `tdf.functional`. Two things about it
need care inside torch.func, and this program shows both:

- It looks at the values of a padding mask, which vmap hides. `attention_inputs` makes
  the mask and the positions beforehand, in the form that every attention takes.
- Fused attention has a first derivative only. Eager attention has all of them; so has
  any attention of torch under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

Families whose norms compute in float32, such as Llama, agree with finite differences to
float32 only, in a double model as well.

Run it with: python language_model_derivatives.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.llm import attention_inputs

torch.manual_seed(0)
tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
config = GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=4, **tokens)
config._attn_implementation = "eager"
model = GPT2LMHeadModel(config).double().eval()
apply, params, buffers = tdf.functional(model)

# Three sentences of 9, 6 and 4 tokens, padded at the left.
lengths = torch.tensor([9, 6, 4])
mask = torch.arange(9) >= 9 - lengths[:, None]
ids = torch.randint(1, 64, (3, 9)) * mask
inputs = attention_inputs(model, mask)
assert inputs["attention_mask"].shape == (3, 1, 9, 9)


def loss(
    params: TensorDict, ids: Tensor, mask: Tensor, inputs: dict[str, Tensor]
) -> Tensor:
    """Return the mean loss of one sentence; the model wants a batch, here of one."""
    batch = {name: value[None] for name, value in inputs.items()}
    out = apply(params, ids[None], buffers=buffers, use_cache=False, **batch)
    each = F.cross_entropy(out.logits[0, :-1], ids[1:], reduction="none")
    real = mask[:-1]  # the first token of a sentence has no prediction
    return (each * real).sum() / real.sum()


# -- the gradient of every sentence: a tree of batch size [3] ----------------------------

grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(
    params, ids, mask, inputs
)
assert grads.batch_size == (3,)

# The oracle: the sentence without pads, by autograd.
alone = ids[1][mask[1]]
F.cross_entropy(model(alone[None]).logits[0, :-1], alone[1:]).backward()
expected = model.transformer.h[0].attn.c_attn.weight.grad
found = grads["transformer", "h", "0", "attn", "c_attn", "weight"][1]
torch.testing.assert_close(found, expected)
squares = [leaf.flatten(1).square().sum(1) for leaf in grads.leaves()]
norms = torch.stack(squares).sum(0).sqrt().tolist()
print(f"norms of the gradients of three sentences: {[round(n, 2) for n in norms]}")


# -- the Hessian times a vector ------------------------------------------------------------


def total(params: TensorDict) -> Tensor:
    """Return the mean loss of the three sentences."""
    each = torch.vmap(loss, in_dims=(None, 0, 0, 0))(params, ids, mask, inputs)
    return each.mean()


def hessian_times(vector: TensorDict) -> TensorDict:
    """Return the derivative of the gradient along a vector, a tree of the parameters' keys."""
    return torch.func.jvp(torch.func.grad(total), (params,), (vector,))[1]


def dot(a: TensorDict, b: TensorDict) -> Tensor:
    """Return the inner product of two trees."""
    return torch.stack(
        [(x * y).sum() for x, y in zip(a.leaves(), b.leaves(), strict=True)]
    ).sum()


# The oracle: a difference of two gradients.
vector = params.apply(torch.randn_like)
step = 1e-5
gradient = torch.func.grad(total)
ahead, behind = gradient(params + vector * step), gradient(params - vector * step)
difference = (ahead - behind) / (2 * step)
tdf.assert_close(hessian_times(vector), difference, rtol=1e-3, atol=1e-5)

# What it is good for: the change of the loss along a step of gradient descent, and the
# step that a parabola has its lowest point at.
slope = gradient(params)
square, curvature = dot(slope, slope), dot(slope, hessian_times(slope))
size = 1e-3
change = total(params - slope * size) - total(params)
expected = -size * square + size**2 / 2 * curvature
torch.testing.assert_close(change, expected, rtol=1e-3, atol=0)
print(f"the best step along the gradient is of size {square / curvature:.3f}")
