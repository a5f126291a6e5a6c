"""Numbers that are not finite, weights without a mean, and sizes at the ends of a dtype, in every merging method."""

import math

import pytest
import torch

import tdfunc as tdf
from tests.weights.matrix import METHODS, models_of, options_of, weights_of

pytestmark = pytest.mark.sample(5)

NAN, INF = math.nan, math.inf
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
MEANS = [one for one in METHODS.values() if one.is_mean({})]
means = pytest.mark.parametrize("method", MEANS, ids=lambda one: one.name)
seeds = pytest.mark.parametrize("seed", range(3))
OPTIONS = [
    (one, name)
    for one in METHODS.values()
    for name, default in one.options.items()
    if isinstance(default, float) and name not in ("tol", "eps")
]


def count_of(method):
    """The number of models in the matrix."""
    return method.most or 3


def given(method, dtype=torch.float32, scale=1.0):
    """The matrix' base and models, whose numbers are about `scale`."""
    return [tree.apply(lambda x: (x * scale).to(dtype)) for tree in models_of(method)]


def merge(method, weights, *, dtype=torch.float32, scale=1.0, **more):
    """The merge of the matrix' models."""
    return method(*given(method, dtype, scale), weights, **options_of(method) | more)


def steps(method, weights, **more):
    """The largest distance from the base, of models that are about 1 away from it."""
    base, _ = models_of(method)
    merged = merge(method, weights, **more)
    return max(
        float((x.double() - b).abs().max()) for x, b in zip(merged.leaves(), base.leaves(), strict=True) if x.numel()
    )


def cancelling(count):
    """Weights whose sum is 0, also where it is not after rounding."""
    if count == 1:
        return [[0.0]]
    if count == 2:
        return [[1.0, -1.0], [0.0, 0.0]]
    return [[1.0, -0.5, -0.5], [0.1, 0.2, -0.3], [0.0, 0.0, 0.0]]


# -- weights --------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e39])
def test_weights_are_finite_numbers(method, value):
    """A weight that is NaN, infinite or too large for the computation is an error."""
    weights = [value] + [1.0] * (count_of(method) - 1)

    with pytest.raises(ValueError, match=f"{method.name}: these weights do not define a merge in torch.float32"):
        merge(method, weights)


@every
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_weights_are_finite_numbers_inside_of_transforms(method, transform):
    """One row of a vmapped call, and the weights of a gradient, are checked like others."""
    weights = torch.ones(2, count_of(method))
    weights[1, 0] = NAN
    models = given(method)
    run = lambda w: sum(x.sum() for x in method(*models, w, **options_of(method)).leaves())  # noqa: E731
    call = {"vmap": lambda: torch.vmap(run)(weights), "grad": lambda: torch.func.grad(run)(weights[1])}[transform]

    with pytest.raises(ValueError, match="do not define a merge"):
        call()


@pytest.mark.parametrize(
    ("method", "weights"),
    [(one, weights) for one in MEANS for weights in cancelling(count_of(one))],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_mean_of_weights_that_cancel_is_an_error(method, weights):
    """A method that divides by the sum of the weights raises if it is 0 or lost in rounding."""
    with pytest.raises(ValueError, match="a finite sum other than 0|no negative number"):
        merge(method, weights)


@pytest.mark.parametrize(
    ("method", "weights"),
    [(one, weights) for one in METHODS.values() if one not in MEANS for weights in cancelling(count_of(one))],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_methods_do_not_divide_by_such_a_sum(method, weights, dtype):
    """With weights that cancel, no number is further from the base than the models are, times the weights."""
    assert steps(method, weights, dtype=dtype) < 10


@pytest.mark.parametrize(
    "method", [one for one in METHODS.values() if "normalize" in one.options and one not in MEANS], ids=lambda m: m.name
)
def test_a_divisor_that_is_lost_in_rounding_is_no_divisor(method):
    """Where the weights that are summed cancel, the sum stays a sum, in float32 as in float64."""
    weights = [0.1, 0.2, -0.3]

    assert steps(method, weights, normalize=True) < 10


@pytest.mark.parametrize("method", [one for one in MEANS if one.sign == "any"], ids=lambda one: one.name)
def test_the_mean_of_negative_weights_is_that_of_positive_ones(method):
    """A sum below 0 divides as one above 0."""
    weights = weights_of(method)

    tdf.assert_close(merge(method, -weights), merge(method, weights), atol=1e-5, rtol=1e-5)


def test_sce_has_no_negative_weights():
    """The energies that sce divides by are positive: a negative factor has no meaning, and vmap checks it, too."""
    weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, -0.5, 1.0]])

    models = given(METHODS["sce"])

    with pytest.raises(ValueError, match="no negative number"):
        torch.vmap(lambda w: tdf.weights.sce(*models, w))(weights)


@pytest.mark.parametrize(("method", "option"), OPTIONS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("value", [NAN, INF, [1.0, NAN, 1.0], torch.tensor(NAN)], ids=["nan", "inf", "list", "tensor"])
def test_options_are_finite(method, option, value):
    """An option that is not finite would drop all numbers, or none, silently."""
    with pytest.raises(ValueError, match=f"{option} must be finite"):
        merge(method, weights_of(method), **{option: value})


# -- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", tdf.weights.METHODS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@seeds
def test_a_number_that_is_not_finite_is_handed_on(method, value, seed):
    """Where one model has NaN or an infinity, the merge has no finite number."""
    base, stacked = models_of(method)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = stacked["layer", "matrix"].shape[1:]
    at = [int(torch.randint(n, (), generator=generator)) for n in (count_of(method), rows, columns)]
    leaf = stacked["layer", "matrix"].clone()
    leaf[tuple(at)] = value

    merged = method(base, stacked.set(("layer", "matrix"), leaf), weights_of(method), **options_of(method))

    assert not merged["layer", "matrix"][at[1], at[2]].isfinite()


@pytest.mark.parametrize(
    "method", [one for one in METHODS.values() if one.base == "required"], ids=lambda one: one.name
)
def test_a_nan_of_the_base_is_handed_on(method):
    """A method that reads the base gives NaN where the base is NaN."""
    base, stacked = models_of(method)
    leaf = base["layer", "vector"].clone()
    leaf[2] = NAN

    merged = method(base.set(("layer", "vector"), leaf), stacked, weights_of(method), **options_of(method))

    assert merged["layer", "vector"][2].isnan()


@every
def test_other_leaves_do_not_see_it(method):
    """A leaf without NaN is merged as if no other had one."""
    base, stacked = models_of(method)
    broken = stacked.set(("layer", "matrix"), torch.full_like(stacked["layer", "matrix"], NAN))

    merged = method(base, broken, weights_of(method), **options_of(method))

    expected = method(base, stacked, weights_of(method), **options_of(method))
    assert torch.equal(merged["layer", "vector"], expected["layer", "vector"])


@every
def test_a_result_is_rounded_once_to_a_narrow_dtype(method):
    """Numbers too large for float16 become infinite as torch casts them."""
    base, stacked = (tree.apply(lambda x: (x * 3e4).clamp(-6e4, 6e4).half()) for tree in models_of(method))
    weights = 4 * weights_of(method)

    merged = method(base, stacked, weights, **options_of(method))

    wide = method(base.float(), stacked.float(), weights, **options_of(method))
    tdf.assert_close(merged, wide.half(), atol=0, rtol=0)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_base_that_is_wider_than_the_models_is_not_rounded(method, dtype):
    """The result has the base's dtype, and its digits."""
    base, stacked = models_of(method)
    stacked = stacked.to(dtype)

    merged = method(base, stacked, weights_of(method), **options_of(method))

    wide = method(base, stacked.double(), weights_of(method), **options_of(method))
    tolerance = 1e-6 if method.base == "unused" else 0
    tdf.assert_close(merged, wide, atol=tolerance, rtol=tolerance)


# The score of arcee_fusion has a constant of 1e-8.
SIZED = [
    (one, scale)
    for one in METHODS.values()
    for scale in (1e-15, 1e15, 1e20, 1e30)
    if scale > 1 or one.name != "arcee_fusion"
]


@pytest.mark.parametrize(("method", "scale"), SIZED, ids=lambda value: getattr(value, "name", value))
def test_sizes_whose_squares_overflow(method, scale):
    """A finite number in float32 is the number of float64, also where squares are out of the range of float32."""
    merged = merge(method, weights_of(method), scale=scale)

    expected = merge(method, weights_of(method), scale=scale, dtype=torch.float64)
    known = expected.apply(lambda x, y: torch.where(y.isfinite(), x, y.double()), merged)
    tdf.assert_close(merged.double() / scale, known / scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 1.0])
@seeds
def test_nuslerp_of_directions_that_are_nearly_opposite(gap, place, seed):
    """Their cosine rounds to -1 in float32, or to its neighbour: the arc between them is found by their sum."""
    generator = torch.Generator().manual_seed(seed)
    x, away = torch.randn(2, 50, generator=generator)
    models = tdf.TensorDict({"w": torch.stack([x, gap * away - x])}, [2])

    merged = tdf.weights.nuslerp(None, models, [1 - place, place])

    expected = tdf.weights.nuslerp(None, models.double(), [1 - place, place])
    error = (merged["w"].double() - expected["w"]).norm() / x.norm()
    assert error < 1e-5 + 5e-7 / max(gap, 1e-7) * (gap > 0)
