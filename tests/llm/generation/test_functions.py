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


@pytest.mark.parametrize("side", ["left", "right"])
def test_responses_are_those_of_the_rows(side):
    """Tokens, masks and log-probs of a padded tree are those of `generate_tokens`, with keys folded with the row."""
    lm, params, buffers = causal_lm(make("llama"))
    td, rows = padded([5, 2, 9], side)
    # At some steps no token is left out.
    options = {"max_new_tokens": 6, "temperature": 2.0, "min_p": 0.02}
    out = generate(lm, params, td, key=random.key(3), buffers=buffers, **options)

    keys = random.fold_in(random.key(3), torch.arange(3))
    expected = generate_tokens(lm, params, rows, GenerationOptions.parse(options), keys=keys, buffers=buffers)
    tokens, masks, log_probs = out["tokens"], out["masks"], out["log_probs"]
    assert [type(each) for each in (tokens, masks, log_probs)] == [Tokens, Masks, LogProbs]
    valid = masks.all_attention_mask[:, 9:]
    for i, (row, response) in enumerate(zip(rows, expected, strict=True)):
        assert torch.equal(tokens.full[i][masks.all_attention_mask[i]], torch.cat([row, response.tokens]))
        assert torch.equal(tokens.response[i][valid[i]], response.tokens)
        assert torch.equal(log_probs.full[i][log_probs.mask[i]], response.log_probs)
        assert torch.equal(log_probs.behaviour[i][valid[i]], response.behaviour)
        assert torch.equal(log_probs.support[i][valid[i]][:, : response.support.shape[1]], response.support)
    assert (log_probs.full[~log_probs.mask] == 0).all()
    assert not any([log_probs.mask[:, :9].any(), tokens.full[~masks.all_attention_mask].any()])
    assert torch.equal(out["name"], td["name"])
    assert "masks" not in td
    same = generate(lm, params, td, key=3, buffers=buffers, options=GenerationOptions.parse(options))
    assert (same["tokens"] == tokens).all()


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


def test_scores_keep_what_the_draws_were_cut_to():
    """Raw scores in the place of the generated ones keep the support; where it does not fit, behaviour is refused."""
    model = make("llama")
    lm, params, buffers = causal_lm(model)
    td, _ = padded([4, 3])
    scorer = TransformersWrapper(model, input_mode="tokens", generate=False)
    cases = [(True, None), (False, None), (True, True), (False, False), (True, False)]
    for pad_output, wrapped in [*cases, (False, True)]:
        options = {"pad_output": pad_output, "max_new_tokens": 3, "temperature": 1.0, "top_k": 4}
        out = generate(lm, params, td, key=1, buffers=buffers, **options)
        out = out.set("attention_mask", out["masks"].all_attention_mask) if pad_output else out
        again = scorer.get_new_version(pad_output=bool(wrapped))
        raw = score(lm, params, out, buffers=buffers) if wrapped is None else again(out)
        if (pad_output, wrapped) in cases:
            both = [score(lm, params, tree, buffers=buffers, under="behaviour")["log_probs"] for tree in (raw, out)]
            pairs = zip(both[0].behaviour, both[1].behaviour, strict=True)
            assert all(torch.allclose(*pair, atol=1e-5) for pair in pairs)
    with pytest.raises(UnsupportedError, match="top-p and min-p"):
        score(lm, params, raw, buffers=buffers, under="behaviour")


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"repetition_penalty": 1.5}, True),
        ({"repetition_penalty": 1.5, "top_k": 5}, True),
        ({"min_new_tokens": 2}, True),
        ({"min_new_tokens": 2, "top_k": 97}, False),
        ({"repetition_penalty": 1.5, "temperature": 0.0}, False),
    ],
    ids=str,
)
def test_behaviour_that_cannot_be_scored_is_refused(options, refused, pad_output):
    """Penalties and least lengths that no support describes, padded and ragged, inside transforms too."""
    lm, params, buffers = causal_lm(make("llama"))
    td, _ = padded([4, 4])
    options = {"temperature": 1.0, "max_new_tokens": 3, "eos_token_ids": [], **options}
    out = generate(lm, params, td, key=1, buffers=buffers, pad_output=pad_output, **options)
    out = out.set("attention_mask", out["masks"].all_attention_mask) if pad_output else out

    def total(params):
        return score(lm, params, out, buffers=buffers, under="behaviour")["log_probs"].full[0].sum()

    for call in (total, torch.func.grad(total)):
        if refused:
            with pytest.raises(UnsupportedError, match="only temperature, top-k, top-p and min-p"):
                call(params)
        else:
            call(params)


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
    for n in range(4):
        assert torch.equal(out["log_probs"].mask[:, n, :4], expected["log_probs"].mask)
        torch.testing.assert_close(out["log_probs"].prompt[:, n], expected["log_probs"].full, atol=1e-5, rtol=0)
        assert torch.equal(out["tokens"].full[0, n, :4], rows[0])


def test_ragged_prompts_give_ragged_responses():
    """A lazy stack gives one, whose rows are those of the padded call; and each form the other, if it is to be."""
    lm, params, buffers = causal_lm(make("llama"))
    td, rows = padded([5, 2])
    ragged = lazy_stack([TensorDict({"tokens": Tokens(prompt=row)}, []) for row in rows])
    options = {"key": 4, "buffers": buffers, "max_new_tokens": 4, "temperature": 1.0}
    found, expected = generate(lm, params, ragged, **options), generate(lm, params, td, **options)

    for i, row in enumerate(rows):
        valid = expected["masks"].all_attention_mask[i]
        assert torch.equal(found[i]["tokens"].full, expected["tokens"].full[i][valid])
        assert torch.equal(found[i]["tokens"].prompt, row)
        assert torch.equal(found[i]["log_probs"].full, expected["log_probs"].full[i][valid])
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
    for record in (out["tokens"], out["log_probs"]):
        assert record.prompt.shape == record.full.shape == (0, 3)
        assert record.response.shape == (0, 0)


ENDS = {"greedy": {}, "beams": {"num_beams": 2}, "an early end": {"eos_token_ids": tuple(range(1000))}}


@pytest.mark.parametrize("options", ENDS.values(), ids=ENDS)
def test_progress_is_shown(capfd, options):
    """`progress=True` counts the tokens of a row, as many as are allowed."""
    lm, params, buffers = causal_lm(make("llama"))

    generate(lm, params, TD, buffers=buffers, max_new_tokens=3, progress=True, **options)

    assert "3/3" in capfd.readouterr().err
