"""Modules of torch.nn that ran as loops inside torch's vmap: stacked, without a warning."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import tdfunc as tdf
from tdfunc.modules.batching import Batching
from tests.helpers import assert_trees_equal
from tests.modules.batching.cases import MEMBERS, random

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
IDS = torch.tensor([[1, 4, 4, 0], [2, 2, 5, 1]])


def rows(*shape):
    """Inputs that the members share."""
    return torch.randn(shape, dtype=torch.float64)


class Pooled(nn.Module):
    """A convolution, and pooling of random regions."""

    def __init__(self, n):
        super().__init__()
        self.layer = getattr(nn, f"Conv{n}d")(2, 2, 1)
        self.pool = getattr(nn, f"FractionalMaxPool{n}d")(2, output_ratio=0.7)

    def forward(self, x):
        return self.pool(self.layer(x))


class Unpooled(nn.Module):
    """Pooling and its inverse, of the class that torch has for it."""

    def __init__(self):
        super().__init__()
        self.layer, self.pool, self.unpool = nn.Linear(4, 4), nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)

    def forward(self, x):
        return self.unpool(*self.pool(self.layer(x)))


def weight_normed(make, dim):
    """A linear layer whose weight is normalized along a dimension, by its name."""
    return {
        f"{make.__module__.split('.')[-1]}, {dim}": (
            lambda: make(nn.Linear(4, 3), dim=dim),
            rows(2, 4),
        )
    }


MODELS = {
    **weight_normed(weight_norm, 0),
    **weight_normed(weight_norm, 1),
    **weight_normed(weight_norm, None),
    **weight_normed(parametrizations.weight_norm, 0),
    **weight_normed(parametrizations.weight_norm, None),
    "weight norm of a convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 3), dim=2), rows(2, 2, 5)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), rows(2, 4)),
    "old spectral norm": (lambda: spectral_norm(nn.Linear(4, 3)), rows(2, 4)),
    "reflections": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="householder"),
        rows(2, 4),
    ),
    "bag": (lambda: nn.EmbeddingBag(6, 3, mode="max"), IDS),
    "embedding": (lambda: nn.Embedding(6, 3, max_norm=1.0), IDS),
    "unpooling": (Unpooled, rows(2, 3, 4)),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-0.2, 0.3, inplace=True)), rows(2, 4)),
}


def stacked(make):
    """Models, their pure function, and their stacked parameters and buffers."""
    models = [make().double() for _ in range(MEMBERS)]
    apply, _, _ = tdf.functional(models[0])
    params, buffers = tdf.split(tdf.stack_modules(models))
    return models, apply, params, buffers


@pytest.fixture(params=MODELS)
def model(request):
    """A function that makes a model, and its input."""
    return MODELS[request.param]


# torch replaces its older functions.
@pytest.mark.filterwarnings("ignore:apply. forward of Embedding scales rows")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_modules_equal_a_loop(model):
    """The outputs."""
    make, x = model
    models, apply, params, buffers = stacked(make)
    before = buffers.clone()

    got = vmap(lambda p, b: apply(p, x, buffers=b))(params, buffers)

    torch.testing.assert_close(got, torch.stack([each(x) for each in models]), **TIGHT)
    assert_trees_equal(buffers, before)


@pytest.mark.filterwarnings("ignore:apply. forward of Embedding scales rows")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_gradients_of_modules(model):
    """The gradients, with those of `backward`."""
    make, x = model
    models, apply, params, buffers = stacked(make)

    grads = vmap(grad(lambda p, b: apply(p, x, buffers=b).square().sum()))(params, buffers)

    for each in models:
        each(x).square().sum().backward()
    want = tdf.stack([gradients_of(each) for each in models])
    assert_trees_equal(grads, want, rtol=1e-10, atol=1e-10)


def gradients_of(module):
    """The gradients of a module's parameters, as a tree like them."""
    return tdf.split(tdf.from_module(module))[0].apply(lambda leaf: leaf.grad)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("how", ["vmap", "traced"])
def test_regions_are_drawn_by_keys(n, how):
    """A member's regions are those of its own call under its key."""
    _, apply, params, _ = stacked(lambda: Pooled(n))
    x = rows(2, 2, *(6,) * n)
    key = tdf.random.key(3)

    got = tdf.Ensemble(apply, how)(params, x, rng=key)
    torch.testing.assert_close(got, tdf.Ensemble(apply, "loop")(params, x, rng=key), **TIGHT)


def test_regions_of_members_differ():
    """Each member has its key."""
    _, apply, params, _ = stacked(lambda: Pooled(2))
    params = params.apply(lambda leaf: leaf[:1].expand_as(leaf).contiguous())

    out = tdf.Ensemble(apply, "vmap")(params, rows(4, 2, 8, 8), rng=5)
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("how", ["loop", "vmap", "traced"])
def test_random_slopes_are_drawn_by_keys(how):
    """RReLU in training mode: a slope for each negative number."""
    _, apply, params, _ = stacked(lambda: nn.Sequential(nn.Linear(50, 50), nn.RReLU(0.2, 0.4)))
    layer, _, _ = tdf.functional(nn.Linear(50, 50))
    x = rows(8, 50)

    got = tdf.Ensemble(apply, how)(params, x, rng=3)
    linear = tdf.Ensemble(layer, "loop")(params["0"], x)
    slopes = (got / linear)[linear < 0]

    torch.testing.assert_close(got[linear > 0], linear[linear > 0], **TIGHT)
    assert 0.2 <= slopes.min() < 0.21
    assert 0.39 < slopes.max() <= 0.4


@pytest.mark.parametrize("lengths", [(7, 6), torch.tensor([7, 6])], ids=["numbers", "tensor"])
def test_gradient_of_a_mean_of_ctc(lengths):
    """The gradient of torch fails under `grad`, where it makes a tensor of lengths; the oracle is `backward`."""
    targets = torch.tensor([[1, 2, 0], [2, 1, 1]])
    scores = random(7, 2, 5)
    target_lengths = (2, 3) if isinstance(lengths, tuple) else torch.tensor([2, 3])

    def loss(x):
        return F.ctc_loss(x.log_softmax(-1), targets, lengths, target_lengths)

    def by_rule(x):
        with Batching():
            return loss(x)

    got = vmap(grad(by_rule))(scores)
    alone = [x.clone().requires_grad_() for x in scores]
    torch.stack([loss(x) for x in alone]).sum().backward()
    torch.testing.assert_close(got, torch.stack([x.grad for x in alone]), **TIGHT)


def test_ctc_with_targets_of_each_member():
    """Targets and lengths that differ by member."""
    scores = random(7, 2, 5).log_softmax(-1)
    targets, lengths = torch.randint(1, 5, (MEMBERS, 2, 3)), torch.tensor([[2, 3], [1, 3], [3, 2]])

    def loss(x, targets, lengths):
        with Batching():
            return F.ctc_loss(x, targets, torch.tensor([7, 7]), lengths, reduction="none")

    got = vmap(loss)(scores, targets, lengths)
    want = [
        F.ctc_loss(*each, torch.tensor([7, 7]), n, reduction="none")
        for *each, n in zip(scores, targets, lengths, strict=True)
    ]
    torch.testing.assert_close(got, torch.stack(want), **TIGHT)


def test_second_derivatives_of_ctc_are_refused():
    """There are none in torch."""
    targets = torch.tensor([[1, 2]])

    def loss(x):
        with Batching():
            return F.ctc_loss(x.log_softmax(-1), targets, (7,), (2,), reduction="sum")

    with pytest.raises(tdf.UnsupportedError, match="differentiated again"):
        vmap(grad(lambda x: grad(loss)(x).square().sum()))(random(7, 1, 5))


def test_gradients_of_bags_scaled_by_frequency():
    """By the number of times that an index occurs, as for an embedding: torch's kernel of bags counts wrongly."""
    weights = random(6, 3)

    def bag(w):
        with Batching():
            return F.embedding_bag(IDS, w, mode="sum", scale_grad_by_freq=True).square().sum()

    def summed(w):
        return F.embedding(IDS, w, scale_grad_by_freq=True).sum(1).square().sum()

    torch.testing.assert_close(vmap(grad(bag))(weights), vmap(grad(summed))(weights), **TIGHT)


def test_a_negative_variance_is_refused():
    """For one member of several."""
    variances = torch.ones(MEMBERS, 4)
    variances[1, 2] = -1.0

    def loss(v):
        with Batching():
            return F.gaussian_nll_loss(torch.zeros(4), torch.ones(4), v)

    with pytest.raises(ValueError, match="negative"):
        vmap(loss)(variances)


def test_a_write_of_numbers_that_a_tensor_cannot_hold_is_refused():
    """As torch does, and not by a silent cast."""

    def write(x):
        with Batching():
            return x.clone().clamp_(torch.full((2,), 0.5))

    with pytest.raises(RuntimeError, match="can't be cast"):
        vmap(write)(torch.arange(6).reshape(3, 2))


CALLS = {
    "indices beyond the rows": lambda x: F.embedding_bag(torch.tensor([[9]]), x),
    "a matrix with offsets": lambda x: F.embedding_bag(IDS, x, torch.tensor([0])),
    "a maximum that is scaled": lambda x: F.embedding_bag(IDS, x, mode="max", scale_grad_by_freq=True),
    "another mode": lambda x: F.embedding_bag(IDS, x, mode="min"),
    "a mean that is weighted": lambda x: F.embedding_bag(IDS, x, per_sample_weights=torch.ones(2, 4)),
    "features that differ": lambda x: F.bilinear(x, x, x.new_ones(2, 3, 4)),
    "another norm": lambda x: F.multi_margin_loss(x, torch.zeros(6, dtype=torch.long), p=3),
    "another size of a grid": lambda x: F.affine_grid(x[None, :2], (1, 1, 3, 3, 3), align_corners=False),
    "an index beyond the numbers": lambda x: x.take(torch.tensor([99])),
    "a window beyond the tensor": lambda x: x.unfold(0, 9, 1),
    "fractions above one": lambda x: torch.quantile(x, torch.tensor([0.1, 3.0])),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_torch_refuses_are_refused(name):
    """A rule leaves no mistake unnoticed that a call of one member shows."""
    call = CALLS[name]
    with pytest.raises(Exception) as alone:  # noqa: PT011
        call(torch.randn(6, 3))

    def by_rule(x):
        with Batching():
            return call(x)

    with pytest.raises((alone.type, IndexError)):
        vmap(by_rule)(torch.randn(MEMBERS, 6, 3))


def test_modules_that_read_a_number_of_rows_run_as_a_loop():
    """AdaptiveLogSoftmax picks the rows of each cluster."""
    models, apply, params, _ = stacked(lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10]))
    x, target = rows(5, 16), torch.tensor([0, 4, 6, 12, 19])
    ensemble = tdf.Ensemble(apply)

    got = ensemble(params, x, target)
    torch.testing.assert_close(got.output, torch.stack([each(x, target).output for each in models]), **TIGHT)


class Words(nn.Module):
    """Features, and the clusters of their words."""

    def __init__(self):
        super().__init__()
        self.features, self.words = nn.Linear(4, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])

    def forward(self, x, target):
        return self.words(self.features(x), target).output


def test_clusters_of_words_of_shared_targets_are_stacked():
    """The rows of each cluster are the same for all members, whose features differ."""
    models, apply, params, _ = stacked(Words)
    x, target = rows(5, 4), torch.tensor([0, 4, 6, 12, 19])
    ensemble = tdf.Ensemble(apply, "vmap")

    torch.testing.assert_close(ensemble(params, x, target), torch.stack([each(x, target) for each in models]), **TIGHT)


def test_what_members_share_is_computed_once():
    """No argument differs: the function is torch's, with its result shared."""
    with Batching(), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = vmap(lambda x: F.embedding_bag(IDS, torch.eye(6)) + x)(torch.zeros(2, 2, 6))

    torch.testing.assert_close(got[0], F.embedding_bag(IDS, torch.eye(6)))


ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)
ENDS_OF_MEMBERS = torch.tensor([[2, 2, 6], [1, 3, 6], [0, 6, 6]], dtype=torch.int32)


def grouped(rows, matrices, ends):
    """Rows times the matrices of their groups."""
    return F.grouped_mm(rows, matrices, offs=ends)


def grouped_by_rule(*args):
    """The same by the rule."""
    with Batching():
        return grouped(*args)


@pytest.mark.parametrize("ends", [ENDS, ENDS_OF_MEMBERS], ids=["shared", "each"])
@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_groups_of_rows(dims, ends):
    """The experts of all members are one call, with the bits of each member's own, and its gradients."""
    rows_of = torch.randn(*[MEMBERS] * (dims[0] == 0), 6, 4)
    matrices = torch.randn(*[MEMBERS] * (dims[1] == 0), 3, 4, 8)
    dims = (*dims, 0 if ends.dim() == 2 else None)
    args = (rows_of, matrices, ends)

    def gradients(fn):
        return lambda *args: grad(lambda r, m: fn(r, m, args[2]).square().sum(), (0, 1))(*args[:2])

    got = vmap(gradients(grouped_by_rule), dims)(*args)
    alone = [[x if d is None else x[i] for x, d in zip(args, dims, strict=True)] for i in range(MEMBERS)]
    want = [torch.stack(parts) for parts in zip(*[gradients(grouped)(*each) for each in alone], strict=True)]
    torch.testing.assert_close(list(got), want, rtol=1e-6, atol=1e-6)


def test_rows_behind_the_last_group_are_in_none():
    """They would be the first rows of the next member."""
    rows_of, matrices = torch.randn(MEMBERS, 6, 4), torch.randn(MEMBERS, 2, 4, 8)
    ends = torch.tensor([1, 4], dtype=torch.int32)

    def of_matrices(fn):
        return grad(lambda m, r: fn(r, m, ends)[:4].square().sum())

    got = vmap(of_matrices(grouped_by_rule))(matrices, rows_of)
    torch.testing.assert_close(
        got, torch.stack([of_matrices(grouped)(*each) for each in zip(matrices, rows_of, strict=True)])
    )


def test_second_derivatives_of_groups():
    """Both products are differentiated by each other."""
    rows_of, matrices = torch.randn(MEMBERS, 6, 4), torch.randn(MEMBERS, 3, 4, 8)

    def norm(fn):
        first = grad(lambda m, r: fn(r, m, ENDS).sin().sum())
        return grad(lambda m, r: first(m, r).square().sum())

    def by_loops(rows, matrices, ends):
        starts = [0, *ends.tolist()[:-1]]
        return torch.cat([rows[a:b] @ m for a, b, m in zip(starts, ends.tolist(), matrices, strict=True)])

    got = vmap(norm(grouped_by_rule))(matrices, rows_of)
    want = [norm(by_loops)(*each) for each in zip(matrices, rows_of, strict=True)]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_averages_of_whole_images(n):
    """Of channels that come last in memory, torch's average sets strides by a method without a batching rule."""
    x = random(2, *(5,) * n, 3).movedim(-1, 2)
    pool = getattr(F, f"adaptive_avg_pool{n}d")

    def by_rule(x):
        with Batching():
            return pool(x, 1)

    torch.testing.assert_close(vmap(by_rule)(x), torch.stack([pool(each, 1) for each in x]), **TIGHT)


def floats(lowest, highest):
    """Numbers some of which are outside of the range, one is nan, and two are its ends."""
    x = torch.rand(MEMBERS, 50) * (highest - lowest) * 1.4 + lowest * 1.2
    x[:, :3] = torch.tensor([lowest, highest, torch.nan])
    return x


# name -> (numbers, bins, lowest, highest)
HISTOGRAMS = {
    "experts": lambda: (torch.randint(9, (MEMBERS, 50)).float(), 8, 0, 7),
    "range": lambda: (floats(-1.5, 2.0), 13, -1.5, 2.0),
    "small range": lambda: (floats(0.0, 0.1), 7, 0, 0.1),
    "float64": lambda: (floats(-1.0, 1.0).double(), 30, -1, 1),
    "many dimensions": lambda: (floats(0.0, 1.0).reshape(MEMBERS, 5, 10), 4, 0, 1),
    "none": lambda: (torch.zeros(MEMBERS, 0), 4, 0, 1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(name):
    """The counts of a member are those of the kernel, and torch does not warn of a loop."""
    x, *how = HISTOGRAMS[name]()

    def by_rule(x):
        with Batching():
            return torch.histc(x, *how)

    torch.testing.assert_close(vmap(by_rule)(x), torch.stack([torch.histc(each, *how) for each in x]), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_histograms_of_the_range_of_the_numbers():
    """The range differs by member."""
    x = torch.randn(MEMBERS, 20)

    def by_rule(x):
        with Batching():
            return torch.histc(x, 5)

    torch.testing.assert_close(vmap(by_rule)(x), torch.stack([torch.histc(each, 5) for each in x]), rtol=0, atol=0)


class Shared(torch.nn.Linear):
    """Writes into a tensor that is not a member's."""

    def __init__(self, write):
        super().__init__(2, 2)
        self.write = write

    def forward(self, x):
        return self.write(torch.ones(3, 2), super().forward(x))


def set_rows(out, h):
    """Write rows by index."""
    out[PLACES] = h
    return out


PLACES = torch.tensor([2, 0, 1])
# method that the hint names -> a write
WRITES = {
    "index_add": lambda out, h: out.index_add_(0, PLACES, h),
    "scatter_add": lambda out, h: out.scatter_add_(0, PLACES[:, None].expand(3, 2), h),
    "index_put": set_rows,
    "add": lambda out, h: out.add_(h),
    "mul": lambda out, h: out.mul_(h),
}


@pytest.mark.parametrize(
    "transform", [lambda fn: fn, lambda fn: tdf.jit(fn, captures="constants")], ids=["plain", "jit"]
)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_shared_tensor_names_the_line_and_the_method(name, transform):
    """The message of torch names neither."""
    models = [Shared(WRITES[name]) for _ in range(MEMBERS)]
    apply = tdf.functional(models[0])[0]
    step = transform(vmap(grad(lambda params, x: apply(params, x).sum()), (0, None)))

    with pytest.raises(RuntimeError, match=rf"(?s)got: .*test_models\.py.*hint:.*`x = x\.{name}\(\.\.\.\)`"):
        step(tdf.stack_modules(models), torch.randn(3, 2))


def test_a_write_into_a_shared_tensor_is_a_loop():
    """The plan has torch's own first line and the line of the forward; the numbers are those of the modules."""
    models = [Shared(WRITES["index_add"]) for _ in range(MEMBERS)]
    ensemble, x = tdf.Ensemble(tdf.functional(models[0])[0]), torch.randn(3, 2)

    got = ensemble(tdf.stack_modules(models), x)

    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))
    assert "index_add_(self, *extra_args) is not possible" in ensemble.plan()
    assert "out.index_add_(0, PLACES, h)" in ensemble.plan()
