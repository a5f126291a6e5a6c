"""Functions that torch cannot batch, with arguments of members: the cases of the tests of rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import grad
from torch.nn import functional as F

from tdfunc.modules.batching import Batching

MEMBERS = 3
SPACES = {1: (6,), 2: (6, 4), 3: (4, 6, 2)}


@dataclass
class Case:
    """A function, and arguments whose dimension of members is `dims` (None: shared)."""

    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    dims: tuple[int | None, ...]
    # The derivatives that there are, for a member's own call as well.
    second: bool = True
    forward: bool = True
    recorded: bool = True

    def by_rule(self, *args):
        """Call the function under the mode."""
        with Batching():
            return self.fn(*args)

    def member(self, i):
        """Return the arguments of a member."""
        return [x if dim is None else x.select(dim, i) for x, dim in zip(self.args, self.dims, strict=True)]

    def trained(self):
        """Return the places of the arguments that are differentiated."""
        return tuple(i for i, x in enumerate(self.args) if x.is_floating_point())

    def gradient(self, fn):
        """Return the function of the gradients of a sum of squares."""
        return grad(lambda *args: total(fn(*args)), self.trained())


def total(out):
    """A number of all numbers of an output that has derivatives."""
    parts = out if isinstance(out, tuple) else (out,)
    return sum([x.square().sum() for x in parts if x.is_floating_point()])


def random(*shape):
    """Numbers that have all derivatives."""
    return torch.randn(MEMBERS, *shape, dtype=torch.float64)


def spread(*shape, shift=0.1):
    """Numbers of which no two are near each other, in random order."""
    n = MEMBERS * torch.Size(shape).numel()
    return torch.randperm(n).reshape(MEMBERS, *shape).to(torch.float64) / n + shift


IDS = torch.tensor([[1, 4, 4, 0], [2, 2, 5, 1], [3, 0, 5, 5]])
FLAT, OFFSETS = torch.tensor([1, 4, 4, 0, 2, 5, 1]), torch.tensor([0, 2, 2, 5])
ENDS = torch.tensor([0, 2, 2, 7])
LABELS = torch.tensor([1, 0, 4, 2])


def bag(ids, *options, second=True, **named):
    """An embedding bag as a function of its weight."""
    return Case(lambda w: F.embedding_bag(ids, w, *options, **named), (spread(6, 4),), (0,), second)


def of_classes(targets, in_lengths, target_lengths, shape=(7, 2, 5), dims=(0,), **options):
    """CTC as a function of scores."""

    def fn(scores):
        return F.ctc_loss(scores.log_softmax(-1), targets, in_lengths, target_lengths, **options)

    return Case(fn, (random(*shape),), dims, second=False, forward=False)


def unpool(n):
    """Unpooling of the numbers that pooling left."""

    def fn(x):
        pooled, places = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
        return getattr(F, f"max_unpool{n}d")(pooled, places, 2)

    return Case(fn, (spread(2, 2, *SPACES[n]),), (0,))


def fractional(n, batch=(2,)):
    """Pooling of random regions that are given."""
    samples = torch.rand(*(batch or (1,)), 2, n, dtype=torch.float64)

    def fn(x):
        return getattr(F, f"fractional_max_pool{n}d")(x, 2, output_size=(2,) * n, _random_samples=samples)

    return Case(fn, (spread(*batch, 2, *(5,) * n),), (0,))


def written(name, *args, dims=(0, 0)):
    """A method that writes in place, on a tensor that was made by the function."""

    def fn(x, y):
        out = x * 1
        getattr(out, name)(*[y if arg == "y" else arg for arg in args])
        return out

    return Case(fn, (spread(3, 4), spread(3, 4, shift=0.11)), dims)


def set_where(value):
    """A write of one number where a mask says so."""

    def fn(x):
        out = x * 1
        out[x > 0.5] = value
        return out

    return Case(fn, (spread(3, 4),), (0,))


def normalized_out(x, y):
    """A norm whose result is written into another tensor."""
    with torch.no_grad():
        out = F.normalize(x.detach(), dim=0, out=(y * 0).detach())
    return x * y * out


# A gradient that is scaled is not the derivative of the output.
SCALED = {"second": False, "forward": False}
WINDOW = torch.hann_window(8, dtype=torch.float64)


def inverse_stft(x, **options):
    """A signal there and back."""
    spectrum = torch.stft(x, 8, 2, window=WINDOW, return_complex=True)
    return torch.istft(spectrum, 8, 2, window=WINDOW, **options)


def of_one(fn, *args, dims=None, **options):
    """A case whose arguments all differ by member."""
    return Case(fn, args, dims or (0,) * len(args), **options)


CASES = {
    # embeddings
    **{f"bag of rows, {mode}": bag(IDS, mode=mode) for mode in ("sum", "mean", "max")},
    **{f"bag of segments, {mode}": bag(FLAT, OFFSETS, mode=mode) for mode in ("sum", "mean", "max")},
    **{f"bag of rows, padded, {mode}": bag(IDS, mode=mode, padding_idx=5) for mode in ("sum", "mean", "max")},
    **{
        f"bag of segments, padded, {mode}": bag(FLAT, OFFSETS, mode=mode, padding_idx=-2)
        for mode in ("sum", "mean", "max")
    },
    **{
        f"bag with ends, {mode}": bag(FLAT, ENDS, mode=mode, include_last_offset=True)
        for mode in ("sum", "mean", "max")
    },
    "bag of nothing": bag(FLAT[:0], OFFSETS[:1], mode="max", second=False),
    "bag of one padding": bag(FLAT[:2] * 0 + 3, OFFSETS[:1], mode="mean", padding_idx=3),
    "weighted bag": of_one(
        lambda w, s: F.embedding_bag(IDS, w, mode="sum", per_sample_weights=s),
        *(random(6, 4), random(3, 4)),
    ),
    "weighted bag of segments": of_one(
        lambda w, s: F.embedding_bag(FLAT, w, OFFSETS, mode="sum", per_sample_weights=s, padding_idx=1),
        *(random(6, 4), random(7)),
    ),
    "bags of each member": of_one(
        lambda w, ids: F.embedding_bag(ids, w), random(6, 4), torch.stack([IDS, IDS + 0, 5 - IDS])
    ),
    "bag, normalized": of_one(lambda w: F.embedding_bag(IDS, w * 1, max_norm=1.0), random(6, 4)),
    "embedding, normalized": of_one(lambda w: F.embedding(IDS, w * 1, max_norm=1.0), random(6, 4)),
    "embedding, normalized, padded": of_one(
        lambda w: F.embedding(IDS, w * 1, 5, 0.5, 1.0, scale_grad_by_freq=True), random(6, 4), **SCALED
    ),
    # losses
    **{
        f"ctc, {r}": of_classes(torch.tensor([[1, 2, 0], [2, 1, 1]]), (7, 6), (2, 3), reduction=r)
        for r in ("sum", "none")
    },
    "ctc, list of targets": of_classes(
        torch.tensor([1, 2, 1, 1, 1]), torch.tensor([7, 6]), torch.tensor([2, 3]), reduction="none"
    ),
    "ctc, infinite": of_classes(
        torch.tensor([1, 2, 1, 1, 1]), torch.tensor([7, 3]), torch.tensor([2, 3]), zero_infinity=True, reduction="sum"
    ),
    "ctc, blank": of_classes(torch.tensor([[1, 2], [2, 0]]), (7, 6), (2, 2), blank=4, reduction="sum"),
    "ctc, one sequence": of_classes(torch.tensor([1, 2]), torch.tensor(7), torch.tensor(2), shape=(7, 5)),
    "multi margin": of_one(lambda x: F.multi_margin_loss(x, LABELS, margin=0.4), random(4, 5)),
    "multi margin, weighted": of_one(
        lambda x: F.multi_margin_loss(x, LABELS, p=2, weight=x.detach()[0], reduction="none"),
        random(4, 5),
        second=False,
    ),
    "multi margin, one example": of_one(lambda x: F.multi_margin_loss(x, LABELS[0], reduction="sum"), random(5)),
    "multilabel margin": of_one(
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 2, -1, 0, 0], [4, -1, 3, 3, 3]])),
        random(2, 5),
    ),
    "multilabel margin, one example": of_one(
        lambda x: F.multilabel_margin_loss(x, torch.tensor([1, 2, 0, 3, 4]), reduction="sum"),
        random(5),
    ),
    "soft margin": of_one(lambda x: F.soft_margin_loss(x, (x.detach() * 7).sin().sign()), random(2, 5)),
    "divergence": of_one(lambda x, y: F.kl_div(x, y.exp(), reduction="batchmean"), random(2, 5), random(2, 5)),
    "margin ranking": of_one(lambda x, y: F.margin_ranking_loss(x, y, torch.ones(2, 5)), random(2, 5), random(2, 5)),
    "triplets": of_one(F.triplet_margin_loss, random(2, 5), random(2, 5), random(2, 5)),
    "normal likelihood": of_one(
        lambda x, y, v: F.gaussian_nll_loss(x, y, v.exp()), random(2, 5), random(2, 5), random(2, 1)
    ),
    "normal likelihood, whole": of_one(
        lambda x, y, v: F.gaussian_nll_loss(x, y, v * v, full=True, eps=0.3, reduction="sum"),
        *(random(2, 5), random(2, 5), random(2)),
        second=False,
    ),
    # pooling
    **{f"unpool {n}": unpool(n) for n in SPACES},
    **{f"random regions {n}": fractional(n) for n in (2, 3)},
    **{f"random regions of one image {n}": fractional(n, ()) for n in (2, 3)},
    **{
        f"nearest exact {n}": of_one(
            lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), random(2, 2, *SPACES[n])
        )
        for n in SPACES
    },
    "nearest exact, smaller": of_one(lambda x: F.interpolate(x, (3, 5), None, "nearest-exact"), random(2, 2, 6, 4)),
    **{
        f"affine grid {n}": of_one(
            lambda x, n=n: F.affine_grid(x, (2, 3, 4, 5, 2)[: n + 2], align_corners=n == 2), random(2, n, n + 1)
        )
        for n in (2, 3)
    },
    # products and norms
    "linear of turned inputs": of_one(
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b), random(2, 3, 4), random(5, 4), random(5)
    ),
    "linear of no rows": of_one(lambda x, w: F.linear(x.transpose(0, 1), w), random(0, 3, 4), random(5, 4)),
    "linear of four dimensions": of_one(lambda x, w: F.linear(x.mT, weight=w), random(2, 3, 4, 2), random(5, 4)),
    "product of turned inputs": of_one(lambda x, w: x.transpose(0, 1) @ w, random(2, 3, 4), random(4, 5)),
    "product with a vector": of_one(lambda x, w: torch.matmul(x.transpose(0, 1), w), random(2, 3, 4), random(4)),
    "product with batches": of_one(lambda x, w: x.transpose(0, 1).matmul(w), random(2, 3, 4), random(3, 4, 5)),
    "bilinear": of_one(F.bilinear, random(2, 4), random(2, 5), random(3, 4, 5), random(3)),
    "bilinear without bias": of_one(F.bilinear, random(2, 2, 4), random(2, 2, 5), random(3, 4, 5)),
    "renorm": of_one(lambda x: torch.renorm(x, 2, 1, 1.5), random(3, 4)),
    "renorm by another norm": of_one(lambda x: x.renorm(1, -2, 1.5), random(3, 4, 2)),
    "norm into a tensor": of_one(normalized_out, random(4), random(4), second=False),
    **{
        f"distances {p}": of_one(lambda x, p=p: F.pdist(x, p), random(4, 3), second=False, forward=False)
        for p in (1, 2, 3.5, torch.inf)
    },
    "lu": of_one(lambda x: torch.linalg.lu(x)[1:], random(4, 4)),
    "lu of a tall matrix": of_one(lambda x: torch.linalg.lu(x)[1:], random(2, 4, 3)),
    "reflections": of_one(torch.linalg.householder_product, random(5, 3), random(3)),
    "fewer reflections": of_one(torch.linalg.householder_product, random(2, 4, 4), random(2, 2)),
    "stft": of_one(
        lambda x: torch.view_as_real(torch.stft(x, 8, 3, window=WINDOW, return_complex=True)), random(2, 32)
    ),
    "stft of a short window": of_one(
        lambda x, w: torch.stft(
            x, 8, 3, 5, w, center=False, normalized=True, onesided=False, return_complex=True
        ).abs(),
        *(random(32), random(5)),
    ),
    "istft": of_one(inverse_stft, random(32)),
    "istft of a length": of_one(lambda x: inverse_stft(x, length=20), random(2, 32)),
    # indices
    "take": of_one(lambda x: x.take(torch.tensor([[0, 5], [5, -1]])), random(3, 4)),
    "put": of_one(lambda x, y: x.put(torch.tensor([0, 5, 2]), y), random(3, 4), random(3)),
    "put and add": of_one(lambda x, y: torch.put(x, torch.tensor([0, 5, 0]), y, True), random(3, 4), random(3)),
    "masked scatter": of_one(lambda x, y: x.masked_scatter(x > y[0, 0], y), random(3, 4), random(4, 4)),
    "masked scatter of rows": of_one(
        lambda x, y: torch.masked_scatter(x, torch.tensor([[True], [False], [True]]), y), random(3, 4), random(2, 4)
    ),
    "masked select": of_one(
        lambda x: x.masked_select(torch.tensor([True, False, True, False])), random(3, 4), recorded=False
    ),
    "combinations": of_one(lambda x: torch.combinations(x, 3), random(5)),
    "windows": of_one(lambda x: x.unfold(-1, 3, 2), random(2, 8)),
    "windows side by side": of_one(lambda x: x.unfold(0, 2, 2), random(5, 2)),
    "windows apart": of_one(lambda x: x.unfold(1, 2, 3), random(2, 9, 2)),
    "padding": of_one(lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y], True, -1.0), random(3, 2), random(5, 2)),
    "padding on the left": of_one(
        lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y], padding_side="left"), random(3), random(5)
    ),
    "columns": of_one(lambda x, y: torch.column_stack([x, y]), random(3), random(3, 2)),
    "moved axes": of_one(lambda x: x.moveaxis(0, 1), random(3, 2)),
    **{
        f"index reduce, {r}": of_one(
            lambda x, y, r=r: x.index_reduce(1, torch.tensor([0, 2, 2]), y, r, include_self=r == "mean"),
            *(spread(2, 4), spread(2, 3, shift=0.11)),
        )
        for r in ("mean", "amax", "amin")
    },
    # writes in place
    "clamp_": written("clamp_", 0.21, 0.63),
    "clamp_ by tensors": written("clamp_", "y"),
    "cumsum_": written("cumsum_", 1),
    "cumprod_": written("cumprod_", 0),
    "square_": written("square_"),
    "tril_": written("tril_", -1),
    "lerp_": written("lerp_", "y", 0.3),
    "addcmul_": written("addcmul_", "y", "y"),
    "xlogy_": written("xlogy_", "y"),
    "renorm_": written("renorm_", 2, 0, 0.5),
    "index_copy_": written("index_copy_", 0, torch.tensor([1, 2, 0]), "y"),
    "index_copy_ of one row": of_one(
        lambda x, y: (x * 1).index_copy_(0, torch.tensor(1), y), random(3, 4), random(1, 4)
    ),
    "scatter_": written("scatter_", 0, torch.tensor([[1, 2, 0, 0], [2, 0, 1, 1], [0, 1, 2, 2]]), "y"),
    "masked_scatter_": written("masked_scatter_", torch.eye(3, 4).bool(), "y"),
    "fill_diagonal_": written("fill_diagonal_", 3.0),
    "remainder by an operator": written("__imod__", "y"),
    "numbers set by a mask": set_where(2.0),
    "tensor set by a mask": set_where(torch.tensor(2)),
    # numbers
    "log ndtr": of_one(lambda x: torch.special.log_ndtr(x * 9), random(3, 4)),
    "quantile": of_one(lambda x: x.quantile(0.3, 1), random(3, 5)),
    "quantiles": of_one(
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.6], dtype=torch.float64), 0, keepdim=True), random(4, 2)
    ),
    "quantile of all": of_one(lambda x: torch.quantile(x, 0.5, keepdim=True, interpolation="midpoint"), random(4, 2)),
    "lower quantile": of_one(lambda x: torch.nanquantile(x, 0.7, -1, interpolation="lower"), random(4, 3)),
    "leaks": of_one(F.rrelu, random(4, 2)),
    "leaks of given slopes": of_one(lambda x: F.rrelu(x, 0.2, upper=0.6), random(4, 2)),
    "average of a line, channels last": of_one(lambda x: F.adaptive_avg_pool1d(x.mT, 1), random(2, 5, 3)),
    "average of an image, channels last": of_one(
        lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), (1, 1)), random(2, 5, 4, 3)
    ),
    "average of a space": of_one(lambda x: F.adaptive_avg_pool3d(x, 1), random(2, 3, 4, 2, 3)),
    "averages of parts": of_one(lambda x: F.adaptive_avg_pool2d(x, (2, 1)), random(2, 3, 4, 5)),
    "gates": of_one(lambda x: F.glu(x, 0), random(4, 2)),
}
