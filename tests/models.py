"""Models that many tests share: each with what makes it hard to run as a pure function."""

import torch
from torch import nn

from tdfunc import from_module


class ResidualBlock(nn.Module):
    """Two convolutions and batch norms around a shortcut: (B, C, H, W) to the same."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A small ResNet with running statistics: images (B, 3, H, W) to logits (B, 4)."""

    def __init__(self, width=4, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*[ResidualBlock(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Tied(nn.Module):
    """A language model whose output layer is its embedding: ids (B, T) to logits (B, T, 5)."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, ids):
        return self.out(self.emb(ids))


class Shared(nn.Module):
    """One layer registered under two names: (B, 3) to (B, 3)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x):
        return self.again(torch.tanh(self.first(x)))


class Norm(nn.Module):
    """A linear layer and a batch norm: (B, 3) to (B, 4)."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, x):
        return self.norm(self.linear(x))


class WithState(nn.Module):
    """A layer with a scale that lives in its extra state, and grows at each call: (B, 3) to (B, 2)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.state = {"scale": 1.0}

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state

    def forward(self, x):
        y = self.linear(x) * self.state["scale"]
        self.state["scale"] += 1.0
        return y


def flat(*trees):
    """Leaves by dotted path, as `torch.func.functional_call` takes them."""
    return {".".join(path): leaf for tree in trees for path, leaf in tree.items(True, True)}


def zeros_of(model):
    """A module's tree with every leaf zero, unconnected to the module."""
    return from_module(model).apply(torch.zeros_like).detach()


def make_mlp(dropout=0.0):
    """Features (B, 3) to logits (B, 2)."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))


def make_encoder():
    """A transformer encoder of two layers: (B, T, 8) to (B, T, 8)."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def make_gpt2():
    """A GPT-2 of two layers with tied embeddings: ids (B, T) to logits (B, T, 32)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager")
    return GPT2LMHeadModel(config).eval()


def make_llama():
    """A Llama of two layers with grouped heads: ids (B, T) to logits (B, T, 32)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Logits(nn.Module):
    """A language model of transformers that returns its logits: ids (B, T) to (B, T, V)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


def make_case(name):
    """Return a model of this name and an input for it."""
    images, rows = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6), torch.linspace(-1, 1, 15).reshape(5, 3)
    ids = torch.arange(8).reshape(2, 4)
    makers = {
        "mlp": (make_mlp, rows),
        "resnet": (ResNet, images),
        "encoder": (make_encoder, torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)),
        "tied": (Tied, ids % 5),
        "shared": (Shared, rows),
        "gpt2": (lambda: Logits(make_gpt2()), ids),
        "llama": (lambda: Logits(make_llama()), ids),
    }
    make, x = makers[name]
    return make(), x


CASES = ("mlp", "resnet", "encoder", "tied", "shared", "gpt2", "llama")
