"""Functions of torch that take indices or counts, in transforms inside `jit`: as without it, or refused by name."""

import pytest
import torch
import torch.nn.functional as F

from tdfunc import UnsupportedError
from tdfunc._jit import jit

pytestmark = pytest.mark.sample(5)

CLASSES, ROWS = 5, 4


def label_loss(name, **options):
    """Return a loss of torch of logits and labels."""
    return lambda w, ids: getattr(F, name)(w.expand(ROWS, CLASSES) * 2, ids, **options)


def sum_rows(w, ids):
    """Add rows at repeated indices."""
    return torch.zeros(CLASSES).index_add(0, ids, w[:ROWS])


# Of weights (5,) and indices (4,) in [0, 5).
FUNCTIONS = {
    "one_hot": lambda w, ids: F.one_hot(ids, CLASSES).to(w.dtype) * w,
    "one_hot by name": lambda w, ids: F.one_hot(num_classes=CLASSES, input=ids) * w,
    "one_hot of a result": lambda w, ids: F.one_hot((w * 0).long()[ids], CLASSES) * w,
    "one_hot of many dimensions": lambda w, ids: F.one_hot(ids.view(2, 2), CLASSES) * w,
    "one_hot of none": lambda w, ids: F.one_hot(ids[:0], CLASSES).sum() + w,
    "one_hot without a number": lambda w, ids: F.one_hot(ids).sum() * w,
    "bincount": lambda w, ids: torch.bincount(ids, minlength=CLASSES) * w,
    "weighted bincount": lambda w, ids: torch.bincount(ids, w.detach()[:ROWS], CLASSES) * w,
    "cross_entropy": label_loss("cross_entropy"),
    "smoothed cross_entropy": label_loss("cross_entropy", label_smoothing=0.1),
    "nll_loss": label_loss("nll_loss"),
    "multi_margin_loss": label_loss("multi_margin_loss"),
    "embedding": lambda w, ids: F.embedding(ids, w.expand(3, CLASSES).t()),
    "embedding_bag": lambda w, ids: F.embedding_bag(ids, w.expand(3, CLASSES).t(), ids[:1] * 0),
    "gather": lambda w, ids: w.gather(0, ids),
    "scatter": lambda w, ids: torch.zeros(CLASSES).scatter(0, ids, w[:ROWS]),
    "scatter_reduce": lambda w, ids: torch.zeros(CLASSES).scatter_reduce(0, ids, w[:ROWS], "mean"),
    "index_add": sum_rows,
    "index_put": lambda w, ids: torch.zeros(CLASSES).index_put((ids,), w[:ROWS], accumulate=True),
    "index": lambda w, ids: w[ids],
    "take_along_dim": lambda w, ids: torch.take_along_dim(w, ids),
    "mask": lambda w, ids: w[:ROWS].masked_fill(ids > 1, 0.0),
    "boolean index": lambda w, ids: w[:ROWS][ids > 1].sum(),
    "repeat_interleave": lambda w, ids: w.repeat_interleave(2) * 3,
    "repeat_interleave by counts": lambda w, ids: w[:ROWS].repeat_interleave(ids).sum(),
    "repeat_interleave of a size": lambda w, ids: w[:ROWS].repeat_interleave(ids * 0 + 2, output_size=2 * ROWS),
    "nonzero_static": lambda w, ids: torch.nonzero_static(ids, size=3).sum() * w,
    "tensor_split": lambda w, ids: w.tensor_split(2)[0],
    "tensor_split by places": lambda w, ids: w.tensor_split(ids[:1])[0].sum(),
    "searchsorted": lambda w, ids: torch.searchsorted(torch.arange(5.0), w) * w,
    "bucketize": lambda w, ids: torch.bucketize(w, torch.arange(5.0)) * w,
    "histc": lambda w, ids: torch.histc(w.detach(), 5, -3, 3) * w,
    "isin": lambda w, ids: torch.isin(ids, torch.tensor([0, 1])).sum() * w,
    "unique": lambda w, ids: torch.unique(ids).numel() * w,
    "topk": lambda w, ids: w.topk(2).values,
    "sort": lambda w, ids: w.sort().values,
    "median": lambda w, ids: w.median() * w,
    "quantile": lambda w, ids: w.quantile(0.3) * w,
    "item": lambda w, ids: w * ids[0].item(),
}  # fmt: skip


def total(fn):
    """Return the sum of the results of a function."""
    return lambda w, ids: fn(w, ids).sum()


def along(fn):
    """Return the derivative of a function along its first argument."""
    return lambda w, ids: torch.func.jvp(lambda w: fn(w, ids), (w,), (torch.ones_like(w),))[1]


TRANSFORMS = {
    "grad": lambda fn: torch.func.grad(total(fn)),
    "jvp": along,
    "grad of grad": lambda fn: torch.func.grad(lambda w, ids: torch.func.grad(total(fn))(w, ids).square().sum()),
    "vmap over indices": lambda fn: lambda w, ids: torch.vmap(fn, (None, 0))(w, torch.stack([ids, ids.flip(0)])),
    "vmap over weights": lambda fn: lambda w, ids: torch.vmap(fn, (0, None))(torch.stack([w, w * 2]), ids),
    "vmap of grad": lambda fn: lambda w, ids: torch.vmap(torch.func.grad(total(fn)), (0, None))(w.expand(2, 5), ids),
    "grad of vmap": lambda fn: lambda w, ids: torch.func.grad(
        lambda w: torch.vmap(total(fn), (None, 0))(w, torch.stack([ids, ids])).sum()
    )(w),
    "backward": lambda fn: lambda w, ids: torch.autograd.grad(
        (total(fn)(v := w.detach().requires_grad_(), ids)), v, allow_unused=True
    ),
}  # fmt: skip


def run(fn, w, ids):
    """Return the result as lists; "refused" where values are read, "raises" for other errors."""
    try:
        return [x.tolist() for x in torch.utils._pytree.tree_leaves(fn(w, ids)) if x is not None]
    except UnsupportedError:
        return "refused"
    except (RuntimeError, NotImplementedError):
        return "raises"


def are_equal(result, other):
    """Whether results are equal up to rounding: a record sums by a rule where torch loops over the members."""
    if isinstance(result, str) or isinstance(other, str):
        return result == other
    pairs = zip(result, other, strict=True)
    return all([torch.allclose(torch.tensor(x), torch.tensor(y), rtol=1e-6, equal_nan=True) for x, y in pairs])


# torch warns where a map is a loop, and of memory that it must copy.
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*input value tensor is non-contiguous")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_is_refused_only_where_the_function_is(name, transform, generator):
    """Where `jit(f)` works, and a transform of f, `jit` of the transform gives its results for other indices too."""
    fn = FUNCTIONS[name]
    changed = TRANSFORMS[transform](fn)
    w = torch.randn(CLASSES, generator=generator)
    calls = [torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(3)]
    jitted = jit(changed)

    expected = [run(changed, w, ids) for ids in calls]
    got = [run(jitted, w, ids) for ids in calls]

    is_refused = run(jit(fn), w, calls[0]) == "refused"
    assert is_refused or "raises" in expected or all(map(are_equal, got, expected))


READERS = ["boolean index", "repeat_interleave by counts", "tensor_split by places", "unique", "bincount"]


@pytest.mark.parametrize("name", READERS)
def test_functions_that_read_values_are_refused_as_such(name):
    """A function that needs the values of its indices is refused by this reason, not by an error about memory."""
    with pytest.raises(UnsupportedError, match="uses the value of a tensor"):
        jit(FUNCTIONS[name])(torch.ones(CLASSES), torch.zeros(ROWS, dtype=torch.int64))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap of grad", "grad of grad"])
@pytest.mark.parametrize("bad", [-1, CLASSES])
def test_classes_are_checked_inside_a_gradient(transform, bad):
    """A replay raises for a class out of range, as torch's function does."""
    fn = TRANSFORMS[transform](FUNCTIONS["one_hot"])
    jitted, w = jit(fn), torch.ones(CLASSES)
    jitted(w, torch.zeros(ROWS, dtype=torch.int64))
    ids = torch.tensor([0, 1, bad, 2])

    with pytest.raises(RuntimeError, match="one_hot"):
        jitted(w, ids)
    with pytest.raises(RuntimeError, match="Class values"):
        fn(w, ids)
