"""Many adapters of one language model in one step, against one adapter that trains on as many tokens."""

from collections.abc import Callable

import torch
import transformers
from torch.nn import functional as F

import tdfunc as tdf
from benchmarks.rows import OURS, Case, Row, Suite, Way

ONE, MERGED = "one adapter", "changed weights for each"
ADAPTERS, LENGTH = 64, 32
LORA = tdf.lora.Lora("*_proj.weight", rank=8, alpha=16)


def step_ways() -> dict[str, Way]:
    """Return a jitted step of Adam: 64 adapters, a row each, and one adapter with all rows."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="eager",
        use_cache=False,
    )
    apply, params, buffers = tdf.functional(transformers.LlamaForCausalLM(config))
    run = LORA.attach(apply)
    ids = torch.randint(512, (ADAPTERS, LENGTH))
    mask = torch.full((1, 1, LENGTH, LENGTH), float("-inf")).triu(1)
    positions = torch.arange(LENGTH)[None]
    many = torch.stack([LORA.init(params, key=i) for i in range(ADAPTERS)])

    def merged(trees: tuple[tdf.TensorDict, tdf.TensorDict], ids: torch.Tensor, **options: torch.Tensor) -> object:
        return apply(LORA.merge(*trees), ids, **options)

    def way(run: Callable[..., object], adapters: tdf.TensorDict, ids: torch.Tensor, lr: float | torch.Tensor) -> Way:
        optimizer = tdf.optim.adam(lr=lr)

        @tdf.jit
        def step(adapters, state, params, buffers, ids, mask, positions):
            def loss(adapters, ids):
                options = {"attention_mask": mask, "position_ids": positions, "buffers": buffers}
                logits = run((params, adapters), ids, **options).logits
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

            grad = torch.func.grad(loss)
            grads = torch.vmap(grad)(adapters, ids) if adapters.batch_size else grad(adapters, ids)
            return optimizer.update(adapters, grads, state, donate=True)

        now = [adapters, optimizer.init(adapters)]

        def call() -> None:
            now[:] = step(*now, params, buffers, ids, mask, positions)

        return call

    rates = torch.logspace(-4, -3, ADAPTERS)
    return {
        OURS: way(run, many, ids[:, None], rates),
        ONE: way(run, many[0], ids, 1e-3),
        MERGED: way(merged, many, ids[:, None], rates),
    }


CASE = f"{ADAPTERS} adapters, {LENGTH} tokens each"
SMALL = "each product with an adapter is 64 small ones; a run on a faster processor gave 1.15x"
SUITE = Suite(
    "lora",
    "Adapters",
    "A row is one step of Adam with `donate=True` on a Llama with four layers and width 256. The adapters "
    "have rank 8, on seven kinds of linear layers. The first case has 64 adapters, each with its own learning"
    " rate and 32 tokens. Its rivals are one adapter with all 2048 tokens, and a step that adds each adapter "
    "to a copy of the weights.",
    lambda: [Case(CASE, step_ways())],
    (Row("64 adapters in one step, equal total tokens, d = 256", ONE, 1.2, "at most", (CASE,), why=SMALL),),
    (step_ways,),
)
