"""Modules and ensembles of them that the tests share."""

import torch
import torch.nn.functional as F
from torch import nn

from tdfunc import Ensemble, functional, stack_modules


def ensemble_of(modules, how="auto", **options):
    """An ensemble over some modules, and their stacked tree."""
    apply, _, _ = functional(modules[0])
    return Ensemble(apply, how, **options), stack_modules(modules)


def line(ensemble):
    """The first line of the plan: how the last call ran, and why."""
    return ensemble.plan().splitlines()[0]


class Block(nn.Module):
    """A residual block with batch norms and a shortcut: (B, C, H, W) to (B, C', H', W')."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_resnet():
    """A small ResNet: images (B, 3, 8, 8) to logits (B, 4)."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), Block(4, 8, 2), Block(8, 8, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def make_cnn():
    """A convolution with its batch norm: images (B, 3, 8, 8) to logits (B, 4)."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def make_transformer(dropout=0.0):
    """A transformer encoder of two layers: (B, T, 8) to (B, T, 8)."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def make_mlp(dropout=0.0):
    """Features (B, 3) to logits (B, 2)."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


class Returns(nn.Module):
    """Gives fn(y) of y = linear(x), (B, 3) to (B, 2)."""

    def __init__(self, fn):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.fn = fn

    def forward(self, x, *args, **kwargs):
        return self.fn(self.linear(x), *args, **kwargs)


class Attention(nn.Module):
    """Attention whose dropout torch draws inside an operation: (B, 3) to (B, 4)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        y = self.linear(x)[None]
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5 if self.training else 0.0)[0]
