"""`generate` on trees: layouts, samples, the ratio of a policy with itself, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc import LeafMismatchError, MissingKeyError, TensorDict, UnsupportedError, lazy_stack, random
from tdfunc.llm import (
    GenerationOptions,
    LogProbs,
    Masks,
    Tokens,
    TransformersWrapper,
    causal_lm,
    generate,
    generate_tokens,
    score,
)
from tests.helpers import assert_trees_equal
from tests.llm.generation.test_rows import prompts
from tests.llm.models import make


def padded(lengths, side="left", seed=0):
    """A tree of prompts with pads of any id, their mask, and the rows."""
    rows, width = prompts(lengths, seed), max(lengths)
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        part = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, part], mask[i, part] = row, True
    tokens = Tokens(prompt=ids, batch_size=[len(rows)])
    return TensorDict({"tokens": tokens, "attention_mask": mask, "name": torch.arange(len(rows))}, [len(rows)]), rows


SIDES = pytest.mark.parametrize("generated", ["left", "right"], indirect=True)
# At some steps no token is left out.
CUT = {"max_new_tokens": 6, "temperature": 2.0, "min_p": 0.02}


@pytest.fixture(scope="module")
def generated(request):
    """A padded tree, its rows, and what `generate` made of it."""
    lm, params, buffers = causal_lm(make("llama"))
    td, rows = padded([5, 2, 9], request.param)
    return td, rows, generate(lm, params, td, key=random.key(3), buffers=buffers, **CUT)


@SIDES
def test_responses_are_those_of_the_rows(generated):
    """Tokens, masks and log-probs of a padded tree are those of `generate_tokens`, with keys folded with the row."""
    _, rows, out = generated
    lm, params, buffers = causal_lm(make("llama"))
    keys = random.fold_in(random.key(3), torch.arange(3))
    expected = generate_tokens(lm, params, rows, GenerationOptions.parse(CUT), keys=keys, buffers=buffers)
    tokens, masks, log_probs = out["tokens"], out["masks"], out["log_probs"]
    whole, valid = masks.all_attention_mask, masks.all_attention_mask[:, 9:]

    full = [torch.cat([row, each.tokens]).tolist() for row, each in zip(rows, expected, strict=True)]
    assert [ids[mask].tolist() for ids, mask in zip(tokens.full, whole, strict=True)] == full
    response = [each.tokens.tolist() for each in expected]
    assert [ids[mask].tolist() for ids, mask in zip(tokens.response, valid, strict=True)] == response
    known = [values[mask].tolist() for values, mask in zip(log_probs.full, log_probs.mask, strict=True)]
    assert known == [each.log_probs.tolist() for each in expected]
    behaviour = [values[mask].tolist() for values, mask in zip(log_probs.behaviour, valid, strict=True)]
    assert behaviour == [each.behaviour.tolist() for each in expected]
    support = zip(log_probs.support, valid, expected, strict=True)
    support = [ids[mask][:, : each.support.shape[1]].tolist() for ids, mask, each in support]
    assert support == [each.support.tolist() for each in expected]


@SIDES
def test_pads_have_no_log_probs_and_no_ids(generated):
    """Both are 0, and no position of a prompt has a log-prob."""
    *_, out = generated
    tokens, masks, log_probs = out["tokens"], out["masks"], out["log_probs"]

    assert (log_probs.full[~log_probs.mask] == 0).all()
    assert not log_probs.mask[:, :9].any()
    assert not tokens.full[~masks.all_attention_mask].any()


@SIDES
def test_records_lie_beside_the_entries_of_the_tree(generated):
    """The result has records of the three classes and what the tree had; the tree is left alone."""
    td, _, out = generated

    assert [type(out[name]) for name in ("tokens", "masks", "log_probs")] == [Tokens, Masks, LogProbs]
    assert torch.equal(out["name"], td["name"])
    assert "masks" not in td


@SIDES
def test_a_number_and_parsed_options_are_as_a_key_and_arguments(generated):
    """The tokens are the same."""
    td, _, out = generated
    lm, params, buffers = causal_lm(make("llama"))
    same = generate(lm, params, td, key=3, buffers=buffers, options=GenerationOptions.parse(CUT))

    assert (same["tokens"] == out["tokens"]).all()


@given(
    st.sampled_from([0.5, 1.0, 1.6]),
    st.none() | st.integers(1, 60),
    st.none() | st.floats(0.1, 0.95),
    st.none() | st.floats(0.02, 0.5),
    st.sampled_from([0, 3]),
)
@settings(max_examples=8, deadline=None)
def test_the_ratio_of_a_policy_with_itself_is_one(temperature, top_k, top_p, min_p, least):
    """Scores of the responses, raw and under the sampler, are those that generation gave."""
    lm, params, buffers = causal_lm(make("llama"))
    params = params.to(torch.float64)
    td, _ = padded([6, 3, 1])
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if any(cuts.values()):
        cuts |= {"min_new_tokens": least, "eos_token_ids": range(0, 97, 2)}
    out = generate(lm, params, td, key=1, buffers=buffers, max_new_tokens=5, temperature=temperature, **cuts)
    again = out.set("attention_mask", out["masks"].all_attention_mask)
    found = score(lm, params, again, buffers=buffers, temperature=temperature, under="behaviour")["log_probs"]
    raw = score(lm, params, again, buffers=buffers)["log_probs"]

    valid = out["masks"].all_attention_mask[:, 6:]
    ratio = (found.behaviour - out["log_probs"].behaviour).exp()[valid]
    assert (ratio - 1).abs().max() < 1e-5
    torch.testing.assert_close(raw.response[valid], out["log_probs"].response[valid], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def cut():
    """Responses of top-k by `pad_output`, and a function that scores them raw, padded, ragged, or as `score` does."""
    model = make("llama")
    lm, params, buffers = causal_lm(model)
    td, _ = padded([4, 3])
    options = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 4}
    outs = {pad: generate(lm, params, td, key=1, buffers=buffers, pad_output=pad, **options) for pad in (True, False)}
    outs[True] = outs[True].set("attention_mask", outs[True]["masks"].all_attention_mask)
    scorer = TransformersWrapper(model, input_mode="tokens", generate=False)

    def scored(pad_output, wrapped):
        out = outs[pad_output]
        if wrapped is None:
            return out, score(lm, params, out, buffers=buffers)
        return out, scorer.get_new_version(pad_output=wrapped)(out)

    return scored


@pytest.mark.parametrize(
    ("pad_output", "wrapped"), [(True, None), (False, None), (True, True), (False, False), (True, False)]
)
def test_scores_keep_what_the_draws_were_cut_to(cut, pad_output, wrapped):
    """Raw scores in the place of the generated ones keep the support."""
    lm, params, buffers = causal_lm(make("llama"))
    out, raw = cut(pad_output, wrapped)
    found, expected = (score(lm, params, tree, buffers=buffers, under="behaviour")["log_probs"] for tree in (raw, out))

    torch.testing.assert_close(list(found.behaviour), list(expected.behaviour), atol=1e-5, rtol=1e-5)


def test_behaviour_is_refused_where_the_support_does_not_fit(cut):
    """Padded scores of ragged draws."""
    lm, params, buffers = causal_lm(make("llama"))
    _, raw = cut(False, True)
    with pytest.raises(UnsupportedError, match="top-p and min-p"):
        score(lm, params, raw, buffers=buffers, under="behaviour")


def drawn_total(options, pad_output):
    """A tree of parameters, and a function of it: the sum of a row of behaviour log-probs of draws with the options."""
    lm, params, buffers = causal_lm(make("llama"))
    td, _ = padded([4, 4])
    options = {"temperature": 1.0, "max_new_tokens": 3, "eos_token_ids": [], **options}
    out = generate(lm, params, td, key=1, buffers=buffers, pad_output=pad_output, **options)
    out = out.set("attention_mask", out["masks"].all_attention_mask) if pad_output else out

    def total(params):
        return score(lm, params, out, buffers=buffers, under="behaviour")["log_probs"].full[0].sum()

    return params, total


WAYS = pytest.mark.parametrize("transform", [lambda total: total, torch.func.grad], ids=["plain", "grad"])
PADDED = pytest.mark.parametrize("pad_output", [True, False], ids=["padded", "ragged"])


@WAYS
@PADDED
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"repetition_penalty": 1.5, "top_k": 5}, {"min_new_tokens": 2}],
    ids=str,
)
def test_behaviour_that_cannot_be_scored_is_refused(options, pad_output, transform):
    """Penalties and least lengths that no support describes, padded and ragged, inside transforms too."""
    params, total = drawn_total(options, pad_output)
    with pytest.raises(UnsupportedError, match="only temperature, top-k, top-p and min-p"):
        transform(total)(params)


@WAYS
@PADDED
@pytest.mark.parametrize(
    "options",
    [{"min_new_tokens": 2, "top_k": 97}, {"repetition_penalty": 1.5, "temperature": 0.0}],
    ids=str,
)
def test_behaviour_that_can_be_scored_is(options, pad_output, transform):
    """Where a support describes a least length, and where greedy draws have no distribution."""
    params, total = drawn_total(options, pad_output)

    transform(total)(params)


def test_several_responses_are_a_dimension_of_the_result():
    """Entries of the tree are expanded to it; the prompts' log-probs are scored if they are to be."""
    lm, params, buffers = causal_lm(make("gpt2"))
    td, rows = padded([4, 2])
    options = {"max_new_tokens": 3, "temperature": 1.0, "num_return_sequences": 4}
    out = generate(lm, params, td, key=0, buffers=buffers, prompt_log_probs=True, **options)

    assert out.batch_size == (2, 4)
    assert out["tokens"].response.shape == (2, 4, 3)
    assert out["name"].tolist() == [[0] * 4, [1] * 4]
    expected = score(lm, params, td.set("tokens", Tokens(full=td["tokens"].prompt, batch_size=[2])), buffers=buffers)
    mask, prompt = (x[:, None].expand(2, 4, 4) for x in (expected["log_probs"].mask, expected["log_probs"].full))
    assert torch.equal(out["log_probs"].mask[..., :4], mask)
    torch.testing.assert_close(out["log_probs"].prompt, prompt, atol=1e-5, rtol=0)
    assert out["tokens"].full[0, :, :4].tolist() == [rows[0].tolist()] * 4


def test_ragged_prompts_give_ragged_responses():
    """A lazy stack gives one, whose rows are those of the padded call; and each form the other, if it is to be."""
    lm, params, buffers = causal_lm(make("llama"))
    td, rows = padded([5, 2])
    ragged = lazy_stack([TensorDict({"tokens": Tokens(prompt=row)}, []) for row in rows])
    options = {"key": 4, "buffers": buffers, "max_new_tokens": 4, "temperature": 1.0}
    found, expected = generate(lm, params, ragged, **options), generate(lm, params, td, **options)

    masks = expected["masks"].all_attention_mask
    full = [ids[mask].tolist() for ids, mask in zip(expected["tokens"].full, masks, strict=True)]
    assert [row["tokens"].full.tolist() for row in found.unbind(0)] == full
    assert [row["tokens"].prompt.tolist() for row in found.unbind(0)] == [row.tolist() for row in rows]
    log_probs = [values[mask].tolist() for values, mask in zip(expected["log_probs"].full, masks, strict=True)]
    assert [row["log_probs"].full.tolist() for row in found.unbind(0)] == log_probs
    other = generate(lm, params, ragged, pad_output=True, **options)
    assert torch.equal(torch.stack(list(other["tokens"].response)), expected["tokens"].response)
    other = generate(lm, params, td, pad_output=False, **options)
    assert torch.equal(other[1]["tokens"].full, found[1]["tokens"].full)


TD = padded([3, 2])[0]
REFUSED = [
    (TD, {"options": GenerationOptions(max_new_tokens=2)}, TypeError, "options= excludes further options"),
    (TensorDict({}, [2]), {}, MissingKeyError, "prompt"),
    (TensorDict({"tokens": TD["tokens"].unsqueeze(1)}, [2]), {}, LeafMismatchError, "are not rows of the batch"),
    (
        TD.set("attention_mask", torch.arange(6).view(2, 3) < 3).reshape(1, 2),
        {},
        ValueError,
        "prompt of row 0, 1 has no",
    ),
]


@pytest.mark.parametrize(("td", "options", "kind", "pattern"), REFUSED)
def test_wrong_calls_are_errors(td, options, kind, pattern):
    """Each names the row, the option or the entry."""
    lm, params, buffers = causal_lm(make("llama"))
    with pytest.raises(kind, match=pattern):
        generate(lm, params, td, buffers=buffers, max_new_tokens=2, **options)


SAMPLERS = [{"temperature": 1.0, "n": 2}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 4, "pad_output": False}]


@pytest.mark.parametrize("options", [*SAMPLERS, {}, {"num_beams": 2}, {"max_tokens": 0}], ids=str)
def test_log_probs_are_left_out_on_request(options):
    """The tokens are the same, and the log-probs of an earlier call are removed."""
    lm, params, buffers = causal_lm(make("gpt2"))
    td = padded([4, 2])[0].set("log_probs", LogProbs(batch_size=[2]))
    options = {"key": 0, "buffers": buffers, "max_new_tokens": 3, **options}
    out, less = (generate(lm, params, td, logprobs=each, **options) for each in (True, False))

    assert ["log_probs" in each for each in (out, less)] == [True, False]
    assert_trees_equal(out["tokens"], less["tokens"])


def test_an_empty_batch_gives_an_empty_batch():
    """No rows, with the parts that rows have."""
    lm, params, buffers = causal_lm(make("llama"))
    td = TensorDict({"tokens": Tokens(prompt=torch.zeros(0, 3, dtype=torch.int64), batch_size=[0])}, [0])

    out = generate(lm, params, td, buffers=buffers, max_new_tokens=2)

    assert out.batch_size == (0,)
    parts = {"prompt": (0, 3), "response": (0, 0), "full": (0, 3)}
    assert {name: getattr(out["tokens"], name).shape for name in parts} == parts
    assert {name: getattr(out["log_probs"], name).shape for name in parts} == parts


ENDS = {"greedy": {}, "beams": {"num_beams": 2}, "an early end": {"eos_token_ids": tuple(range(1000))}}


@pytest.mark.parametrize("options", ENDS.values(), ids=ENDS)
def test_progress_is_shown(terminal, options):
    """`progress=True` counts the tokens of a row, as many as are allowed."""
    lm, params, buffers = causal_lm(make("llama"))

    generate(lm, params, TD, buffers=buffers, max_new_tokens=3, progress=True, **options)

    assert "3/3" in terminal.readouterr().err
