"""All losses alike: poison under the mask, empty rows and batches, members, traced code, and narrow dtypes."""

import pytest
import torch
from hypothesis import given, settings

import tdfunc as tdf
from tdfunc.llm import losses
from tests.helpers import assert_pure, quick
from tests.llm.losses.data import make
from tests.llm.losses.test_policy import SEEDS

# Each takes log-probs and a tree of the other streams, all of which may be of a member.
POLICY = {
    "core": lambda x, s: losses.policy_gradient(
        x,
        s["advantages"],
        s["mask"],
        s["old"],
        dual_clip=2.0,
        ref_log_probs=s["ref"],
        kl_coef=0.1,
        entropy=s["entropy"],
        entropy_coef=0.1,
        weights=s["weights"],
    ),
    "tokens": lambda x, s: losses.policy_gradient(x, s["gains"], s["mask"], s["old"], ratio="geometric"),
    "corrected": lambda x, s: losses.grpo(
        x, s["gains"], s["mask"], weights=losses.corrections.truncated_is(x, s["old"], s["mask"], level="geometric")
    ),
    # Limits so wide that some row always has a gradient.
    "gspo": lambda x, s: losses.gspo(x, s["advantages"], s["mask"], s["old"], clip=(0.9, 9.0)),
    "cispo": lambda x, s: losses.cispo(x, s["advantages"], s["mask"], s["old"], max_ratio=1.2),
    "rloo": lambda x, s: losses.rloo(x, s["advantages"], s["mask"], s["old"], clip=(0.9, 99.0)),
    "distill_on_policy": lambda x, s: losses.distill_on_policy(x, s["ref"], s["mask"], s["old"]),
}
ROWS = {
    **POLICY,
    "sft": lambda x, s: losses.sft(x, s["mask"], weights=s["weights"]),
    "minor_sft": lambda x, s: losses.minor_sft(x, s["ref"], s["mask"]),
    "kto": lambda x, s: losses.kto(
        x, s["ref"], s["mask"], s["desirable"], baseline=losses.kto_baseline(s["old"], s["ref"], s["mask"])
    ),
    # The positions are the candidates of each row, -1 of its tokens.
    "distill": lambda x, s: losses.distill(x, s["ref"], s["mask"].any(-1), beta=0.5, tail="bucket"),
}
PAIRS = {
    "dpo": lambda x, s: losses.dpo(x, s["ref"], s["mask"], label_smoothing=0.1),
    "ipo": lambda x, s: losses.ipo(x, s["ref"], s["mask"]),
    "simpo": lambda x, s: losses.simpo(x, s["mask"]),
    "orpo": lambda x, s: losses.orpo(x, s["mask"]),
}
ALL = {**ROWS, **PAIRS}
EACH = quick(ALL, "core", "corrected", "gspo", "kto", "distill", "orpo")


def streams(name, seed, *, members=None, dtype=torch.float64):
    """Log-probs and a tree of the other streams of a loss, with a dimension of members first."""
    lead = () if members is None else (members,)
    s = make(seed, lead=(*lead, 3) if name in PAIRS else lead, dtype=dtype)
    tree = tdf.TensorDict(vars(s))
    if name in PAIRS:
        # Two rows of four, and an empty one in the last pair.
        tree = tree.apply(lambda x: x[..., 1:3, :] if x.shape == s.mask.shape else x[..., 1:3])
        tree = tree.set("mask", tree["mask"].clone().index_fill_(-3, torch.tensor([2]), 0))
    if name == "distill":
        # Candidates are all there or all not, and their probabilities add up to less than 1.
        values = {key: tree[key].masked_fill(~s.mask, -9).log_softmax(-1) - 0.1 for key in ("log_probs", "ref")}
        tree = tree.update({key: x.where(s.mask.any(-1, keepdim=True), torch.nan) for key, x in values.items()})
    return tree["log_probs"], tree.exclude("log_probs")


def gradient(fn, log_probs, tree):
    """The loss, its metrics and its gradient."""
    params = tdf.TensorDict({"log_probs": log_probs})
    (loss, metrics), grads = tdf.value_and_grad(lambda p: fn(p["log_probs"], tree), has_aux=True)(params)
    return {"loss": loss, "metrics": metrics, "grad": grads["log_probs"]}


def same(found, expected):
    """Assert that losses, metrics and gradients are equal."""
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["grad"], expected["grad"])
    tdf.assert_close(found["metrics"], expected["metrics"])


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_values_under_the_mask_never_matter(name, seed):
    """NaN and infinities there leave the loss, its metrics and its gradient as zeros do; the gradient there is 0."""
    log_probs, tree = streams(name, seed)
    counted = tree["mask"].any(-1, keepdim=True).expand(tree["mask"].shape) if name == "distill" else tree["mask"]
    clean = tree.apply(lambda x: x if not x.is_floating_point() else x.nan_to_num(0, 0, 0))
    found = gradient(ALL[name], log_probs, tree)
    expected = gradient(ALL[name], log_probs.nan_to_num(0, 0, 0), clean)

    same(found, expected)
    assert found["grad"].isfinite().all()
    assert (found["grad"][~counted] == 0).all()
    assert (found["grad"][counted] != 0).any()


EMPTY = {
    "a mask of False": lambda x, tree: (x, tree.set("mask", torch.zeros_like(tree["mask"]))),
    "no rows": lambda x, tree: (x[:0], tree.apply(lambda leaf: leaf[:0])),
    "no positions": lambda x, tree: (
        x[..., :0],
        tree.apply(lambda leaf: leaf[..., :0] if leaf.shape == x.shape else leaf),
    ),
}
# The last dimension of the streams of `distill` is the vocabulary.
EMPTIED = [(name, kind) for name in EACH for kind in EMPTY if (name, kind) != ("distill", "no positions")]


# The last dimension of the streams of `distill` is the vocabulary.
POSITIONED = quick([name for name in ALL if name != "distill"], "core", "corrected", "gspo", "kto", "orpo")


def check_zero(found):
    """Assert that a loss is 0 with gradients of 0, and its metrics numbers."""
    assert found["loss"] == 0
    assert (found["grad"] == 0).all()
    assert {name: number for name, number in tdf.scalars(found["metrics"]).items() if number != number} == {}


@pytest.mark.parametrize("name", EACH)
def test_without_tokens_a_loss_is_zero(name):
    """A mask of False: 0 with gradients of 0, and finite metrics."""
    log_probs, tree = streams(name, 0)
    check_zero(gradient(ALL[name], log_probs, tree.set("mask", torch.zeros_like(tree["mask"]))))


@pytest.mark.parametrize("name", EACH)
def test_without_rows_a_loss_is_zero(name):
    """An empty batch."""
    log_probs, tree = streams(name, 0)
    check_zero(gradient(ALL[name], log_probs[:0], tree.apply(lambda x: x[:0])))


@pytest.mark.parametrize("name", POSITIONED)
def test_without_positions_a_loss_is_zero(name):
    """Rows of no length."""
    log_probs, tree = streams(name, 0)
    none = tree.apply(lambda x: x[..., :0] if x.shape == log_probs.shape else x)
    check_zero(gradient(ALL[name], log_probs[..., :0], none))


def test_the_check_of_zero_can_fail():
    """By the loss, the gradient or a metric that is not a number."""
    right = {"loss": torch.zeros(()), "grad": torch.zeros(2), "metrics": tdf.TensorDict({"a": torch.zeros(())})}
    check_zero(right)
    with pytest.raises(AssertionError):
        check_zero({**right, "loss": torch.ones(())})
    with pytest.raises(AssertionError):
        check_zero({**right, "grad": torch.ones(2)})
    with pytest.raises(AssertionError):
        check_zero({**right, "metrics": tdf.TensorDict({"a": torch.tensor(torch.nan)})})


@pytest.mark.parametrize("name", EACH)
def test_members_are_mapped(name):
    """Vmap over members, each with its own streams and mask, is a loop; so are their gradients."""
    log_probs, tree = streams(name, 1, members=3)

    found = torch.vmap(lambda x, s: gradient(ALL[name], x, s))(log_probs, tree)

    for i in range(3):
        alone = gradient(ALL[name], log_probs[i], tree.apply(lambda x, i=i: x[i]))
        same({key: value[i] for key, value in found.items()}, alone)
    assert found["metrics"].batch_size == (3,)


def test_coefficients_may_differ_between_members():
    """Clips, weights of penalties and divisors as tensors."""
    log_probs, tree = streams("core", 2, members=2)

    def member(x, s, high, coef, divisor):
        options = {"clip": (0.2, high), "normalize": divisor, "ref_log_probs": s["ref"], "kl_coef": coef}
        return losses.policy_gradient(x, s["gains"], s["mask"], s["old"], **options).loss

    values = [torch.tensor(x, dtype=torch.float64) for x in ([0.1, 0.3], [0.0, 2.0], [5.0, 50.0])]
    found = torch.vmap(member)(log_probs, tree, *values)
    alone = [member(log_probs[i], tree.apply(lambda x, i=i: x[i]), *[x[i].item() for x in values]) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize("name", EACH)
def test_traced_code_gives_the_same(name):
    """`tdf.jit` of a loss and its gradient, on other streams and other masks than it was traced with."""
    traced = tdf.jit(lambda x, s: gradient(ALL[name], x, s))
    traced(*streams(name, 3))
    log_probs, tree = streams(name, 4)

    same(traced(log_probs, tree), gradient(ALL[name], log_probs, tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_compiled_code_gives_the_same(name):
    """`torch.compile(fullgraph=True)` of a loss."""
    log_probs, tree = streams(name, 5)
    torch._dynamo.reset()
    compiled = torch.compile(ALL[name], fullgraph=True, backend="aot_eager")
    found, expected = compiled(log_probs, tree), ALL[name](log_probs, tree)

    torch.testing.assert_close(found[0], expected.loss)
    tdf.assert_close(found[1], expected.metrics)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EACH)
def test_narrow_streams_are_computed_in_float32(name, dtype):
    """The result of 16 bits is that of the same values in float32, exactly; the gradient comes in 16 bits."""
    log_probs, tree = streams(name, 6)
    narrow = tree.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    wide = narrow.apply(lambda x: x.float() if x.is_floating_point() else x)
    found = gradient(ALL[name], log_probs.to(dtype), narrow)
    expected = gradient(ALL[name], log_probs.to(dtype).float(), wide)

    assert found["loss"].dtype == torch.float32
    assert torch.equal(found["loss"], expected["loss"])
    assert found["grad"].dtype == dtype
    assert torch.equal(found["grad"], expected["grad"].to(dtype))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_losses_are_pure_and_take_masks_of_numbers(name, dtype):
    """Nothing that comes in is written to; a mask of 0 and 1, as tokenizers give it, is one of bools."""
    log_probs, tree = streams(name, 7)
    clean = tree.set("x", log_probs).apply(lambda x: x.nan_to_num(0, 0, 0) if x.is_floating_point() else x)
    assert_pure(lambda s: ALL[name](s["x"], s), clean)

    expected = ALL[name](log_probs, tree)
    numbers = tree.set("mask", tree["mask"].to(dtype))
    if name != "distill":
        assert torch.equal(ALL[name](log_probs, numbers).loss, expected.loss)


@pytest.mark.parametrize("name", ["core", "kto", "distill"])
def test_batches_of_more_dimensions_are_flat_ones(name):
    """(2, 2, T) gives the number of (4, T)."""
    log_probs, tree = streams(name, 8)
    square = tree.apply(lambda x: x.reshape(2, 2, *x.shape[1:]))

    torch.testing.assert_close(ROWS[name](log_probs.reshape(2, 2, -1), square).loss, ROWS[name](log_probs, tree).loss)
