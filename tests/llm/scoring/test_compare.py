"""`compare` against formulas written out, and the causes that it names, made on random distributions."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import LogProbs, compare
from tests.helpers import assert_trees_equal

V = 50


def drawn(seed, rows=8, length=64):
    """Logits and tokens drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, length, V, generator=generator, dtype=torch.float64)
    ids = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator).view(rows, length, 1)
    return logits, ids


def log_probs(logits, ids):
    """The log-probs of tokens."""
    return logits.log_softmax(-1).gather(-1, ids).squeeze(-1)


def reported(seed):
    """Log-probs, those of another model, their mask, and the report of both, by their own mask and by a given one."""
    generator = torch.Generator().manual_seed(seed)
    a, b = -3 * torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[0, 0] = True
    cases = (mask, None), (~mask, mask)
    return a, b, mask, *[compare(LogProbs(full=a, mask=own, batch_size=[4]), b, given, worst=3) for own, given in cases]


@given(seed=st.integers(0, 2**16))
def test_the_numbers_are_the_formulas(seed):
    """Divergences and the effective sample size, over the tokens of the mask alone."""
    a, b, mask, report, _ = reported(seed)
    gap = (b - a)[mask]
    ratio = gap.exp()
    expected = {
        "ratio": gap.abs().exp().mean(),
        "k1": (a - b)[mask].mean(),
        "k3": (ratio - 1 - ratio.log()).mean(),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
    }

    torch.testing.assert_close({name: report[name] for name in expected}, expected)


@given(seed=st.integers(0, 2**16))
def test_a_mask_that_is_given_takes_the_place_of_the_own(seed):
    """The report is the same."""
    *_, report, same = reported(seed)

    assert_trees_equal(same, report)


@given(seed=st.integers(0, 2**16))
def test_the_worst_token_has_the_largest_gap(seed):
    """As many as were asked for, or as there are; the first is of the mask."""
    a, b, mask, report, _ = reported(seed)
    (row, column), *others = report["worst"].tolist()

    assert len(others) == min(3, int(mask.sum())) - 1
    assert mask[row, column]
    torch.testing.assert_close((b - a)[row, column].abs(), report["largest"])


@pytest.fixture(scope="module", params=range(3))
def sampled(request):
    """Logits, tokens drawn from them, their log-probs, and the ten likeliest logits with the mask of tokens in them."""
    logits, ids = drawn(request.param)
    kept = torch.where(logits >= logits.topk(10, -1).values[..., -1:], logits, -torch.inf)
    return SimpleNamespace(
        logits=logits,
        ids=ids,
        log_probs=log_probs(logits, ids),
        kept=kept,
        inside=kept.gather(-1, ids).squeeze(-1).isfinite(),
        others=drawn(request.param + 10)[0],
    )


CAUSES = [
    pytest.param(lambda s: [s.log_probs + 1e-5], "none", id="rounding"),
    pytest.param(lambda s: [s.inside * s.log_probs.roll(1, -1), s.inside], "shift by one", id="shifted right"),
    pytest.param(lambda s: [s.inside * s.log_probs.roll(-1, -1), s.inside], "shift by one", id="shifted left"),
    pytest.param(lambda s: [log_probs(s.logits.bfloat16(), s.ids)], "dtype", id="bfloat16"),
    pytest.param(lambda s: [log_probs(s.logits / 0.5, s.ids)], "temperature", id="colder"),
    pytest.param(lambda s: [log_probs(s.logits / 1.7, s.ids)], "temperature", id="warmer"),
    pytest.param(lambda s: [log_probs(s.kept, s.ids).nan_to_num(), s.inside], "truncation", id="top-k"),
    pytest.param(lambda s: [log_probs(s.others, s.ids)], "unknown", id="another model"),
]


@pytest.mark.parametrize(("change", "cause"), CAUSES)
def test_causes(sampled, change, cause):
    """Each cause is named on data that have it."""
    assert compare(sampled.log_probs, *change(sampled))["cause"] == cause


@pytest.mark.parametrize(
    ("size", "errors", "cause"), [(0.4, 2.5, "dtype"), (0.4, 3.5, "unknown"), (0.52, 0.0, "unknown")]
)
def test_limits_of_rounding(sampled, size, errors, cause):
    """It is below half a nat, and its mean within three standard errors of 0."""
    a = sampled.log_probs
    signs = (-1.0) ** torch.arange(a.numel()).view(a.shape)

    assert compare(a, a + size * (signs + errors / a.numel() ** 0.5))["cause"] == cause


def test_five_tokens_are_the_worst(sampled):
    """If no other number is given."""
    assert len(compare(sampled.log_probs, sampled.log_probs + 1e-5)["worst"]) == 5
