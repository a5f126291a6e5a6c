"""One step of sampling against the processors of transformers, and the frequencies of its draws."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc import random
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.sampling import choose, penalize, threshold


def parse(**kwargs):
    """Options of sampling."""
    return GenerationOptions.parse({"do_sample": True, **kwargs})


def hf_scores(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The scores of transformers, -inf where cut: the oracle."""
    warpers = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [] if top_k is None else [hf.TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [hf.TopPLogitsWarper(top_p)]
    warpers += [] if min_p is None else [hf.MinPLogitsWarper(min_p)]
    for warper in warpers:
        logits = warper(None, logits)
    return logits


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.4, 1.0, 1.7]),
        "top_k": st.none() | st.integers(1, 50),
        "top_p": st.none() | st.floats(0.05, 0.99),
        "min_p": st.none() | st.floats(0.01, 0.9),
    }
)


@given(OPTIONS, st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_cuts_and_log_probs_are_those_of_transformers(options, seed):
    """Support, behaviour and raw log-probs of the drawn tokens are those of its warpers, in their order."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 40, generator=generator, dtype=torch.float64) * 3
    uniforms = torch.rand(4, 1, generator=generator, dtype=torch.float64)
    expected = hf_scores(logits, **options)
    kept = expected > -torch.inf
    parsed = parse(**options)

    choice = choose(logits, logits, parsed, uniforms)
    assert torch.equal(logits / options["temperature"] >= threshold(logits / options["temperature"], parsed), kept)
    log_probs = expected.log_softmax(-1).gather(-1, choice.ids[:, None])[:, 0]
    torch.testing.assert_close(choice.behaviour, log_probs)
    torch.testing.assert_close(choice.log_probs, logits.log_softmax(-1).gather(-1, choice.ids[:, None])[:, 0])
    support = torch.empty(4, 0, dtype=torch.int64) if choice.support is None else choice.support
    left = [[i for i in row if i >= 0] for row in support.tolist()]
    assert left == [[] if row.all() else row.nonzero().squeeze(-1).tolist() for row in kept]


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}], ids=str
)
def test_draws_have_the_frequencies_of_the_distribution(cuts):
    """A chi-square test of 20,000 draws, each row with a key of its own."""
    count = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    probs = hf_scores(logits[None], temperature=0.8, **cuts).double().softmax(-1)[0]
    keys = random.fold_in(random.key(5), torch.arange(count))
    uniforms = torch.vmap(lambda key: random.uniform(key, (1,), dtype=torch.float64))(keys)
    wide = logits.expand(count, -1)

    ids = choose(wide, wide, parse(temperature=0.8, **cuts), uniforms).ids
    found = torch.bincount(ids, minlength=12).double()
    assert (found[probs == 0] == 0).all()
    left = probs > 0
    statistic = ((found[left] - count * probs[left]) ** 2 / (count * probs[left])).sum()
    # The 0.9999 quantile of chi-square with 11 degrees of freedom.
    assert statistic < 37.4


@pytest.mark.parametrize("options", [parse(), parse(top_k=2), parse(top_p=0.5), parse(min_p=0.5)])
def test_the_ends_of_the_distribution(options):
    """The least uniform number draws the first possible token, the greatest the last; equal logits stay together."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)

    assert choose(logits, logits, parse(), uniforms).ids.tolist() == [1, 2]
    equal = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert choose(equal, equal, parse(top_k=2), uniforms[:1]).support.tolist() == [[0, 1, 2]]
    broken = torch.full((2, 4), torch.nan)
    choice = choose(broken, broken, options, uniforms)
    assert ((choice.ids >= 0) & (choice.ids < 4)).all()
    assert choice.log_probs.isnan().all()


@given(st.floats(0.3, 3.0), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_penalties_are_those_of_transformers(penalty, seed):
    """Repetition penalty and banned ids against its processors."""
    generator = torch.Generator().manual_seed(seed)
    logits, ids = torch.randn(3, 20, generator=generator), torch.randint(20, (3, 6), generator=generator)
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter(1, ids, True)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    expected[:, [4, 7]] = -torch.inf

    assert torch.equal(penalize(logits, seen, penalty, torch.tensor([4, 7])), expected)
    assert penalize(logits, None, 1.0, None) is logits
