"""Convolutions, norms and upsampling that are computed in pieces have the bits of the whole."""

import resource

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc._jit.replay import probed
from tests.helpers import examples
from tests.jit.blocks import calls_of, pool_all_sizes, threads

MEMBERS = 6


def of_members(fn, x_dim=0):
    """Return a function for each member, of inputs and weights that have the members first, or shared inputs."""
    return torch.vmap(fn, (x_dim, 0))


def norm(x, scale):
    """Return a batch norm in training mode, with a scale."""
    return F.batch_norm(x, None, None, scale, training=True)


# Functions of inputs and weights, and their shapes for one member.
FUNCTIONS = {
    "conv1d": (F.conv1d, (3, 4, 10), (6, 4, 3)),
    "conv2d": (F.conv2d, (3, 4, 8, 8), (6, 4, 3, 3)),
    "conv3d": (F.conv3d, (2, 2, 5, 5, 5), (4, 2, 3, 3, 3)),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (3, 4, 8, 8), (6, 4, 3, 3)),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=2), (3, 4, 8, 8), (6, 4, 3, 3)),
    "transposed": (F.conv_transpose2d, (3, 4, 5, 5), (4, 6, 3, 3)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), (3, 4, 8, 8), (4, 1, 3, 3)),
    "points": (F.conv2d, (3, 16, 8, 8), (16, 16, 1, 1)),
    "batch norm": (norm, (3, 4, 5, 5), (4,)),
    "group norm": (lambda x, w: F.group_norm(x * w, 2), (64, 4, 5, 5), (1,)),
    "nearest": (lambda x, w: F.interpolate(x * w, scale_factor=2), (3, 4, 5, 5), (1,)),
    "bilinear": (lambda x, w: F.interpolate(x * w, scale_factor=2, mode="bilinear"), (3, 4, 5, 5), (1,)),
}


def make_step(fn, mapped):
    """Return a function that returns a result and its gradients, of inputs and weights."""

    def loss(x, weight):
        y = mapped(x, weight)
        return y.sin().sum(), y

    return torch.func.grad(loss, (0, 1), has_aux=True)


def strides(x):
    """Return the strides that matter."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def same(a, b):
    """Return whether two trees have the same numbers and strides."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all([torch.equal(x, y) and strides(x) == strides(y) for x, y in pairs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece_bytes", [1, 4000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pieces_have_the_bits_of_the_whole(name, piece_bytes, dtype, monkeypatch):
    """A replay has the values, strides and gradients of the function."""
    monkeypatch.setattr(probed, "_PIECE_BYTES", piece_bytes)
    fn, x_shape, weight_shape = FUNCTIONS[name]
    x, weight = torch.randn(MEMBERS, *x_shape, dtype=dtype), torch.randn(MEMBERS, *weight_shape, dtype=dtype)
    fn = make_step(fn, of_members(fn))
    with pool_all_sizes():
        step = tdf.jit(fn)
        step(x + 1, weight)
        assert same(step(x, weight), fn(x, weight))


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "strided", "points"])
def test_members_of_one_input(name, monkeypatch):
    """Members that share their input have channels of one convolution."""
    monkeypatch.setattr(probed, "_PIECE_BYTES", 1)
    fn, x_shape, weight_shape = FUNCTIONS[name]
    x, weight = torch.randn(x_shape), torch.randn(MEMBERS, *weight_shape)
    mapped = of_members(fn, None)
    with pool_all_sizes():
        step = tdf.jit(torch.func.grad(lambda w, x: mapped(x, w).sin().sum()))
        step(weight + 1, x)
        got = step(weight, x)

    assert same(got, torch.func.grad(lambda w: mapped(x, w).sin().sum())(weight))


SIZES = st.tuples(
    st.sampled_from([2, 3, 4, 7, 12]),
    st.sampled_from([1, 3, 32]),
    st.sampled_from([1, 3, 4, 8, 16, 20]),
    st.sampled_from([1, 5, 8, 16, 32]),
    st.sampled_from([3, 4, 9, 16]),
)


@examples(1)
@given(SIZES, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_convolutions_of_any_sizes(sizes, kernel, count, is_last, is_shared):
    """Convolutions and their gradients have the bits of the function for any members, channels, layouts and threads."""
    members, batch, channels, made, side = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shape = (batch, channels, side, side)
    x = torch.randn(shape if is_shared else (members, *shape), generator=generator)
    if is_last and is_shared:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(members, made, channels, kernel, kernel, generator=generator)
    fn = make_step(F.conv2d, of_members(F.conv2d, None if is_shared else 0))
    with threads(count), pool_all_sizes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probed, "_PIECE_BYTES", 1)
        step = tdf.jit(fn)
        step(x + 1, weight)
        assert same(step(x, weight), fn(x, weight))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("conv2d", "aten::convolution"),
        ("conv2d", "aten::convolution_backward"),
        ("batch norm", "aten::native_batch_norm_backward"),
        ("group norm", "aten::native_group_norm"),
        ("nearest", "aten::upsample_nearest2d"),
    ],
)
def test_members_are_computed_apart(name, operation, monkeypatch):
    """Large results come in pieces."""
    monkeypatch.setattr(probed, "_PIECE_BYTES", 1)
    fn, x_shape, weight_shape = FUNCTIONS[name]
    # oneDNN has no convolutions of 64 bits: torch computes the members one by one.
    x, weight = torch.randn(MEMBERS, *x_shape).double(), torch.randn(MEMBERS, *weight_shape).double()
    with pool_all_sizes():
        step = tdf.jit(make_step(fn, of_members(fn)))
        step(x, weight)

    assert calls_of(step, operation, x, weight) > 1


def test_gradients_of_a_shared_input_are_not_cut(monkeypatch):
    """They are sums over all channels."""
    monkeypatch.setattr(probed, "_PIECE_BYTES", 1)
    x, weight = torch.randn(3, 4, 8, 8), torch.randn(6, 4, 3, 3)
    with pool_all_sizes():
        step = tdf.jit(torch.func.grad(lambda x, w: F.conv2d(x, w).sin().sum(), (0, 1)))
        step(x, weight)

    assert calls_of(step, "aten::convolution_backward", x, weight) == 1


def test_other_settings_are_probed_again(monkeypatch):
    """A recorded function has the bits of the function also after torch's settings change."""
    monkeypatch.setattr(probed, "_PIECE_BYTES", 1)
    x, weight = torch.randn(MEMBERS, 32, 8, 9, 9), torch.randn(MEMBERS, 16, 8, 3, 3)
    fn = make_step(F.conv2d, of_members(F.conv2d))
    with pool_all_sizes():
        step = tdf.jit(fn)
        step(x, weight)
        # torch's own context warns of Intel's GPUs.
        torch._C._set_mkldnn_enabled(False)
        try:
            assert same(step(x, weight), fn(x, weight))
        finally:
            torch._C._set_mkldnn_enabled(True)
        with threads(2):
            assert same(step(x, weight), fn(x, weight))


def test_pieces_with_other_bits_are_not_used(monkeypatch):
    """An operation is computed whole where a piece has other bits, and each size of pieces is tried."""
    tried = []

    class Other(probed.Pieces):
        def compute(self, begin, *args, **kwargs):
            tried.append(self)
            return super().compute(begin, *args, **kwargs) + 1e-3

    monkeypatch.setattr(probed, "_PIECE_BYTES", 1)
    monkeypatch.setattr(probed, "Pieces", Other)
    x, weight = torch.randn(MEMBERS, 3, 5, 11, 11), torch.randn(MEMBERS, 7, 5, 3, 3)
    with pool_all_sizes():
        step = tdf.jit(of_members(F.conv2d))
        step(x, weight)
        assert torch.equal(step(x, weight), of_members(F.conv2d)(x, weight))

    # Of 6 members: pieces of 1, 2 and 3.
    assert len(set(tried)) == 3


@pytest.mark.parametrize("side", [745, 577])
def test_few_numbers_are_not_compared(side):
    """The gradient of a weight that is one number may be equal by chance: then it is computed as a whole."""
    x, weight = torch.randn(3, 2, 1, side, side), torch.randn(3, 3, 1, 1, 1)
    fn = make_step(F.conv2d, of_members(F.conv2d))
    step = tdf.jit(fn)
    step(x + 1, weight)

    assert same(step(x, weight), fn(x, weight))


@pytest.mark.parametrize("fn", [lambda x: F.layer_norm(x, (64,)), lambda x: F.group_norm(x[..., None], 4)])
def test_no_rows(fn):
    """Results without numbers are results."""
    with pool_all_sizes():
        step = tdf.jit(lambda x, weight: (fn(x), weight * 2))
        step(torch.ones(0, 64), torch.ones(8))

        assert step(torch.ones(0, 64), torch.ones(8))[0].numel() == 0


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (3, 4, 5), (2, 6, 4, 4)])
@pytest.mark.parametrize("order", ["contiguous", "turned", "last"])
def test_batch_norms_of_any_order(shape, order):
    """Torch's kernel for given memory does not write the mean of inputs that are not contiguous."""
    x = torch.randn(shape)
    if order == "turned":
        x = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    if order == "last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)

    def fn(x):
        return F.batch_norm(x, None, None, training=True)

    with pool_all_sizes():
        step = tdf.jit(fn)
        step(x + 1)
        for _ in range(3):
            assert torch.equal(step(x), fn(x))


def test_under_autocast():
    """A function that is recorded in autocast computes in 16 bits."""
    x, weight = torch.randn(MEMBERS, 3, 4, 8, 8), torch.randn(MEMBERS, 6, 4, 3, 3)
    fn = of_members(F.conv2d)
    with pool_all_sizes(), torch.autocast("cpu", torch.bfloat16):
        step = tdf.jit(fn)
        step(x + 1, weight)
        assert same(step(x, weight), fn(x, weight))


@pytest.mark.slow
def test_large_convolutions_take_no_new_pages():
    """A step whose convolution has a result and a gradient of 48 MB gets few pages after its first calls."""
    x, weight = torch.randn(24, 16, 8, 64, 64), torch.randn(24, 8, 8, 1, 1)
    step = tdf.jit(make_step(F.conv2d, of_members(F.conv2d)))
    for _ in range(4):
        y = step(x, weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        y = step(x, weight)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    assert tree_leaves(y)[0].shape == x.shape
    # A result of 48 MB has 12,288.
    assert after - before < 4_000
