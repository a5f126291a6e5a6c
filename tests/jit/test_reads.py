"""Values of integers among the arguments that a jitted function reads: a record for each, checked at each call."""

import copy
import warnings

import pytest
import torch

import tdfunc as tdf
from tdfunc import UnsupportedError
from tdfunc._jit import jit
from tests.helpers import assert_trees_equal

# Of weights (5,) and indices (4,) in [0, 5): each takes another way for some values.
READERS = {
    "in": lambda w, ids: w * 2 if 3 in ids[-2:] else w,
    "item": lambda w, ids: w * ids[0].item(),
    "int": lambda w, ids: w * int(ids.sum()),
    "bool": lambda w, ids: w * 2 if (ids > 3).any() else w * 3,
    "float": lambda w, ids: w * float(ids.double().mean()),
    "tolist": lambda w, ids: w * sum([i * i for i in ids.tolist()]),
    "range": lambda w, ids: sum([w.sin() for _ in range(int(ids.max()))], w),
    "two reads": lambda w, ids: (w * 2 if ids[1] > 2 else w * 3) if ids[0] > 2 else w.sin(),
    "a list and a loop": lambda w, ids: w * len([i for i in ids if i > 2]),
    "a mask of shapes": lambda w, ids: w if torch.ones(3, dtype=torch.bool).all() else w * ids[0],
}


def written(w, ids):
    """Read integers that were written in place after they were copied, also through a view."""
    copy = ids.clone()
    copy[0] = 4
    copy.view(2, 2)[1].add_(ids[0])
    return w * int(copy.sum())


READERS["written"] = written


def total(fn):
    """Return the sum of the results of a function."""
    return lambda w, ids: fn(w, ids).sum()


TRANSFORMS = {
    "itself": lambda fn: fn,
    "grad": lambda fn: torch.func.grad(total(fn)),
    "vmap": lambda fn: lambda w, ids: torch.vmap(fn, (0, None))(torch.stack([w, w * 2]), ids),
    "vmap of grad": lambda fn: lambda w, ids: torch.vmap(torch.func.grad(total(fn)), (0, None))(w.expand(2, 5), ids),
    "jvp": lambda fn: lambda w, ids: torch.func.jvp(lambda w: fn(w, ids), (w,), (torch.ones_like(w),)),
}


def results(fn, weights, calls):
    """Return the last tensor of the result of each call."""
    return [torch.utils._pytree.tree_leaves(fn(w, ids))[-1] for w, ids in zip(weights, calls, strict=True)]


@pytest.mark.filterwarnings("ignore:.*reads values of its arguments")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", READERS)
def test_values_of_integers_may_be_read(name, transform, generator):
    """The results are the function's own, for values that come first and again."""
    fn = TRANSFORMS[transform](READERS[name])
    calls = [torch.randint(5, (4,), generator=generator) for _ in range(12)] * 2
    weights = [torch.randn(5, generator=generator) for _ in calls]

    assert_trees_equal(results(jit(fn), weights, calls), results(fn, weights, calls))


def test_an_array_of_integers_may_be_read():
    """Outside of transforms, as torch allows it, the function may read its integers as an array of numpy."""

    def fn(w, ids):
        return w * float(ids.numpy().prod())

    calls = [torch.tensor([i, 2, 3, 4]) for i in (1, 2, 1)]
    weights = [torch.randn(5) for _ in calls]

    assert_trees_equal(results(jit(fn), weights, calls), results(fn, weights, calls))


def test_one_record_serves_all_arguments_with_the_value():
    """What was read counts, and not the tensor that it was read from."""
    fn = jit(READERS["bool"])
    for i in range(20):
        fn(torch.ones(5), torch.tensor([i % 3, 1, i % 2 * 4, 0]))

    assert fn.cache_info().misses == 2


def test_values_of_shapes_need_no_check():
    """A constant of the function is read once and is not part of a key."""
    fn = jit(READERS["a mask of shapes"])
    for i in range(3):
        fn(torch.ones(5), torch.full((4,), i))

    assert fn.cache_info().misses == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, ids: w * 2 if w.sum() > 0 else w,
        lambda w, ids: w * (w > 0).sum().item(),
        lambda w, ids: w * float(w[ids].sum()),
        lambda w, ids: w * len((w > ids.sum()).tolist()),
        lambda w, ids: w * int(torch.randint(5, (1,))),
        lambda w, ids: w * int((ids + torch.randint(5, (4,))).sum()),
    ],
    ids=["parameter", "intermediate", "indexed parameter", "list", "draw", "draw and integers"],
)
def test_other_values_are_refused(fn):
    """Values that depend on parameters, or on draws, are refused with the line that reads them."""
    with pytest.raises(UnsupportedError, match=r"(?s)uses the value of a tensor.*test_reads"):
        jit(fn)(torch.ones(5), torch.arange(4))


def test_large_tensors_are_refused():
    """A check that each call computes is of small tensors."""
    with pytest.raises(UnsupportedError, match="uses the value of a tensor"):
        jit(lambda ids: ids * int(ids.sum()))(torch.arange(100_000))


def test_many_values_are_warned_of():
    """Past eight records of a function that reads, a warning names the line that reads."""
    fn = jit(lambda w, ids: w * int(ids[0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(12):
            fn(torch.ones(2), torch.tensor([i]))

    assert ["test_reads.py" in str(one.message) for one in caught] == [True]


def test_a_copy_of_a_function_that_reads_works():
    """`copy.deepcopy` of a jitted function gives one without records."""
    fn = jit(READERS["item"])
    fn(torch.ones(5), torch.arange(1, 5))
    new = copy.deepcopy(fn)

    assert torch.equal(new(torch.ones(5), torch.arange(2, 6)), torch.full((5,), 2.0))


def test_members_that_read_a_mask_share_it():
    """In an ensemble that is traced, all members read the mask that they share."""

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x, mask):
            out = self.layer(x)
            return out if mask.all() else out * mask[:, None]

    models = [Masked() for _ in range(3)]
    apply, _, _ = tdf.functional(models[0])
    ensemble = tdf.Ensemble(apply, how="traced")
    params, x = tdf.stack_modules(models), torch.randn(4, 3)
    masks = [torch.ones(4, dtype=torch.bool), torch.arange(4) > 1]

    got = [ensemble(params, x, mask) for mask in masks * 2]

    expected = [torch.stack([model(x, mask) for model in models]) for mask in masks * 2]
    torch.testing.assert_close(got, expected)
