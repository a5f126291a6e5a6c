"""Modules inside a record: tensors in plain attributes, and kernels whose layout differs from the recorded one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc._jit import jit


class Part(nn.Module):
    """Holds tables in plain attributes; may write to one."""

    def __init__(self, writes=False):
        super().__init__()
        self.tables = [torch.randn(3), {"b": torch.randn(3)}]
        self.writes = writes

    def forward(self, x):
        if self.writes:
            self.tables[0].add_(1)
        return x * self.tables[0].detach() + self.tables[1]["b"]


class Net(nn.Module):
    """A layer and a part."""

    def __init__(self, writes=False):
        super().__init__()
        self.layer, self.part = nn.Linear(3, 3), Part(writes)

    def forward(self, x):
        return self.part(self.layer(x))


TRANSFORMS = {
    "itself": lambda fn: fn,
    "grad": lambda fn: torch.func.grad(lambda p, x: fn(p, x).square().sum()),
    "vmap of grad": lambda fn: (
        lambda p, x: torch.vmap(torch.func.grad(lambda p, x: fn(p, x).square().sum()), (0, None))(
            torch.stack([p, p]), x
        )
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_plain_tensors_of_a_module_are_constants(transform, generator):
    """A tensor in an attribute of a pure function's module needs no argument: no call sees a write to it."""
    apply, params, _ = tdf.functional(Net())
    fn = TRANSFORMS[transform](lambda p, x: apply(p, x))
    x = torch.randn(2, 3, generator=generator)

    torch.testing.assert_close(tree_leaves(jit(fn)(params, x)), tree_leaves(fn(params, x)))


def test_weights_of_a_closure_are_refused(generator):
    """Leaves that the modules of a pure function hold during a call are not among its constants."""
    apply, params, _ = tdf.functional(Net())

    with pytest.raises(tdf.CaptureError, match="layer.weight"):
        jit(lambda x: apply(params, x))(torch.randn(2, 3, generator=generator))


def test_a_write_to_a_plain_tensor_is_refused_by_its_name(generator):
    """The error for a module that writes to a table names the attribute."""
    apply, params, _ = tdf.functional(Net(writes=True))

    with pytest.raises(tdf.ImmutableError, match=r"apply.part.tables\[0\]"):
        jit(lambda p, x: apply(p, x))(params, torch.randn(2, 3, generator=generator))


def norm(x, w):
    """Normalise over a dimension that is not the last in memory, and view the result."""
    return F.batch_norm(x.transpose(1, 2), w, w.square()).transpose(1, 2).reshape(-1, 5)


def norm_and_activation(x, w):
    """Derivatives of both have other strides than their fake kernels give them."""
    y = F.hardswish(F.batch_norm(x.transpose(1, 2), w, w.square()).unsqueeze(2).transpose(0, 1))
    return y.reshape(5, -1).t().reshape(-1, 5)


@pytest.mark.parametrize("fn", [norm, norm_and_activation])
def test_a_view_of_another_layout_than_was_recorded(fn, generator):
    """A replay makes a copy where a kernel's result has no view of the shape."""
    x, w = torch.randn(2, 4, 5, generator=generator), torch.randn(5, generator=generator)
    grad = torch.func.grad(lambda x, w: fn(x, w).square().sum())

    assert torch.equal(jit(fn)(x, w), fn(x, w))
    torch.testing.assert_close(jit(grad)(x, w), grad(x, w))
