"""Models, blocks and threads that meet the faults, for these tests and those of `benchmarks/conformance/faults/`."""

import torch
from torch import nn


def constant(tree, value):
    """The tree with all leaves of one value, without gradients."""
    return tree.apply(lambda p: torch.full_like(p, value)).detach()


class Branches(nn.Linear):
    """Forward depends on a value, and writes in place to a tensor of its own."""

    def forward(self, x):
        y = super().forward(x)
        if y.sum() > 0:
            y = y * 2
        out = torch.zeros(5, self.out_features)
        out += y
        return out


class OldFunction(torch.autograd.Function):
    """An autograd function without setup_context."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class UsesOldFunction(nn.Linear):
    """A layer that ends in the old kind of function."""

    def forward(self, x):
        return OldFunction.apply(super().forward(x))
