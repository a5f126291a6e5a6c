"""Small modules with every layer that adapters go on, and trained adapters of them."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.pytorch_utils import Conv1D


class Tied(nn.Module):
    """A language model of one linear layer, whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)).tanh())


class TiedLinear(nn.Module):
    """Two linear layers of one weight, each with its bias."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Scaled(nn.Embedding):
    """An embedding whose forward scales that of its class, as Gemma's."""

    def forward(self, input):
        return super().forward(input) * 3


class Routed(nn.Module):
    """Fused experts; the numbers of a token choose two of them."""

    def __init__(self, cls, implementation="grouped_mm"):
        super().__init__()
        size = dict.fromkeys(("hidden_size", "moe_hidden_size", "intermediate_size", "moe_intermediate_size"), 8)
        more = dict(num_local_experts=4, n_routed_experts=4, swiglu_alpha=1.7, swiglu_limit=7.0, post_norm_eps=1e-5)
        more |= dict(hidden_act="silu", mlp_hidden_act="relu2", moe_latent_size=None)
        self.experts = cls(SimpleNamespace(**size, **more, _experts_implementation=implementation))
        for leaf in self.parameters():
            nn.init.normal_(leaf, std=0.5)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, which = tokens[:, :4].softmax(-1).topk(2)
        return self.experts(tokens, which, weights).view_as(x)


def images(*size):
    """Four inputs of a size."""
    return lambda: torch.randn(4, *size)


def ids(high):
    """Four rows of ids above 0, which pads."""
    return lambda: torch.randint(1, high, (4, 5))


# name -> (module, weights, input)
MODULES = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(1, 3)), "*.weight", images(5)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular")), "0.weight", images(4, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, dilation=2)), "0.weight", images(4, 9, 8)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), "0.weight", images(4, 5, 5)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 6, 2)), "0.weight", images(2, 3, 4, 3)),
    "transposed": (lambda: nn.Sequential(Conv1D(7, 5), Conv1D(1, 7)), "*.weight", images(3, 5)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=0)), "0.weight", ids(11)),
    "pads": (lambda: nn.Sequential(nn.Embedding(4, 6, padding_idx=1)), "0.weight", ids(4)),
    "bounded": (lambda: nn.Sequential(nn.Embedding(7, 6, max_norm=1.5, norm_type=1.0)), "0.weight", ids(7)),
    "counted": (lambda: nn.Sequential(nn.Embedding(5, 6, scale_grad_by_freq=True)), "0.weight", ids(5)),
    "scaled": (lambda: nn.Sequential(Scaled(11, 6)), "0.weight", ids(11)),
    "experts": (lambda: Routed(GptOssExperts, "eager"), "*_proj", images(3, 8)),
    "experts without a gate": (lambda: Routed(NemotronHExperts, "batched_mm"), "*.down_proj", images(3, 8)),
    "experts with a norm": (lambda: Routed(MuseSparkExperts, "eager"), "*_proj", images(3, 8)),
    "tied": (Tied, "*.weight", ids(11)),
    "tied linear": (TiedLinear, "*.weight", images(3, 6)),
}
# Modules with layers whose adapters cannot have a bias.
EMBEDDINGS = ("embedding", "pads", "bounded", "counted", "scaled")
NO_BIAS = (*EMBEDDINGS, "experts", "experts without a gate", "experts with a norm", "tied")
# Modules whose adapters PEFT does not have, or computes differently.
NOT_IN_PEFT = ("grouped", "scaled", "bounded", "counted")


def llama(**options):
    """A tiny Llama."""
    size = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**size | dict(num_key_value_heads=2, use_cache=False) | options)).eval()


def experts(implementation="grouped_mm", **options):
    """A tiny Qwen3 with experts, which are fused."""
    size = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    more = dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8)
    config = Qwen3MoeConfig(**size | more | dict(use_cache=False) | options)
    config._experts_implementation = implementation
    return Qwen3MoeForCausalLM(config).eval()


def trained(lora, params, apply, seed=0, scale=0.3):
    """Adapters that change something: those of `init` with noise in all trained leaves."""
    adapters = lora.init(params, key=seed, apply=apply)
    generator = torch.Generator().manual_seed(seed)

    def noisy(path, leaf):
        return leaf if path[-1] in ("A0", "B0") else leaf + scale * torch.randn(leaf.shape, generator=generator)

    return adapters.named_apply(noisy)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))])
        return out


def logits(run, trees, buffers, ids):
    """The logits of a causal model, with the mask and positions that tracing needs."""
    n = ids.shape[-1]
    mask = torch.full((n, n), float("-inf")).triu(1).expand(ids.shape[0], 1, n, n)
    return run(trees, ids, buffers=buffers, attention_mask=mask, position_ids=torch.arange(n)[None]).logits
