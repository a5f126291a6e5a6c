"""vLLM's engine against the model of transformers that it runs, before and after pushes."""

import pytest
import torch
from vllm import LLM

import tdfunc as tdf
from tdfunc import ConcurrencyError, TensorDict, TreeStructureError, UnsupportedError
from tdfunc.llm import Tokens, causal_lm, compare, vLLMWrapper
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.wrappers.engine import Engine
from tests.engines.tiny import CLOSE, check_equal, make_model, make_tokenizer

LENGTHS = [1, 7, 20, 150]
FOUR = GenerationOptions.parse({"max_new_tokens": 4})


@pytest.fixture(scope="module")
def model():
    """The model that the engine starts with."""
    return make_model(0)


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    """The engine: one for all tests, since a second one would end the first."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return LLM(
        model=str(folder),
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )


@pytest.fixture
def wrapper(llm, model):
    """A wrapper of the engine with the first model's weights."""
    made = vLLMWrapper(llm, input_mode="tokens", pad_output=True, generate_kwargs={"max_new_tokens": 16})
    made.push(causal_lm(model)[1], version="first")
    return made


def prompts(seed=0):
    """Rows of several lengths, one longer than a block of the cache."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 320, (length,), generator=generator) for length in LENGTHS]


def test_greedy_is_that_of_transformers(wrapper, model):
    """Before any change, and after pushes of other tests and back."""
    check_equal(wrapper, model, prompts(), eos_token_ids=1)


@pytest.mark.parametrize("version", [1, 2])
def test_greedy_is_that_of_the_pushed_weights(wrapper, version):
    """The engine is the model that was pushed last."""
    other = make_model(version)

    done = wrapper.push(causal_lm(other)[1], version=version)

    assert done.difference < CLOSE
    check_equal(wrapper, other, prompts(), eos_token_ids=1)


@pytest.mark.parametrize("version", [1, 2])
def test_a_push_sets_the_version(wrapper, version):
    """The wrapper and each response have it."""
    wrapper.push(causal_lm(make_model(version))[1], version=version)

    assert wrapper.version == str(version)
    assert {each.version for each in wrapper.generate_tokens(prompts(), FOUR)} == {str(version)}


def test_trees_of_modules_are_pushed(wrapper, model):
    """A tree with buffers, and the same numbers again; torch's default generator is not drawn from."""
    state = torch.get_rng_state()
    digests = wrapper.push(tdf.from_module(model), version="a").digests
    assert digests == wrapper.push(causal_lm(model)[1], version="b").digests
    wrapper._own = None
    assert wrapper.push(causal_lm(model)[1], version="c", proof="full").unread == {}
    assert torch.equal(torch.get_rng_state(), state)


def test_results_are_trees(wrapper, model):
    """A padded tree in; tokens, masks and log-probs out, which agree with scoring by the tree."""
    lm, params, buffers = causal_lm(model)
    rows = prompts()[:3]
    ids = torch.zeros(3, 20, dtype=torch.int64)
    mask = torch.zeros(3, 20, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, 20 - len(row) :], mask[i, 20 - len(row) :] = row, True
    td = TensorDict({"tokens": Tokens(prompt=ids, batch_size=[3]), "m": mask}, [3])
    sampler = wrapper.get_new_version(
        attention_mask_key="m", prompt_log_probs=True, generate_kwargs={"max_new_tokens": 16, "temperature": 1.0}
    )
    out = sampler(td, key=5)

    full, valid = out["tokens"].full, out["masks"].all_attention_mask
    own = tdf.llm.score_ids(lm, params, full, valid, buffers=buffers)
    torch.testing.assert_close(out["log_probs"].full, own.log_probs, rtol=0, atol=CLOSE)
    assert torch.equal(out["log_probs"].mask, own.mask)
    assert compare(own.log_probs, out["log_probs"].full, own.mask)["ratio"] <= 1.0001


TWELVE = GenerationOptions.parse({"max_new_tokens": 12, "temperature": 1.0})
COLDER = GenerationOptions.parse({"max_new_tokens": 12, "temperature": 0.5, "top_k": 4})


def keys_of(number):
    """A key for each prompt."""
    return tdf.random.split(tdf.random.key(number), len(LENGTHS))


def test_draws_follow_the_key(wrapper):
    """The same key gives the same response in another batch."""
    keys = keys_of(4)
    rows = prompts()
    together = wrapper.generate_tokens(rows, TWELVE, keys=keys)

    # The order differs from the order in the batch.
    alone = {i: wrapper.generate_tokens([rows[i]], TWELVE, keys=keys[i : i + 1]) for i in (3, 0, 2, 1)}

    assert {i: made[0].tokens.tolist() for i, made in alone.items()} == {
        i: made.tokens.tolist() for i, made in enumerate(together)
    }
    assert [len(made) for made in alone.values()] == [1] * len(LENGTHS)


def test_other_keys_give_other_draws(wrapper):
    """At least one of the responses differs."""
    first = wrapper.generate_tokens(prompts(), TWELVE, keys=keys_of(4))
    other = wrapper.generate_tokens(prompts(), TWELVE, keys=keys_of(5))

    assert [made.tokens.tolist() for made in first] != [made.tokens.tolist() for made in other]


def test_the_behaviour_at_temperature_1_is_the_raw_log_prob(wrapper):
    """To the last bit."""
    made = wrapper.generate_tokens(prompts(), TWELVE, keys=keys_of(4))

    assert [each.behaviour.tolist() for each in made] == [each.log_probs.tolist() for each in made]


def test_colder_draws_have_raw_log_probs_and_no_behaviour(wrapper):
    """The scorer returns the same log-probs."""
    row = prompts()[0]

    (made,) = wrapper.generate_tokens([row], COLDER, keys=keys_of(4)[:1])

    assert made.behaviour is None
    (scores,) = wrapper.score_tokens([torch.cat([row, made.tokens])])
    torch.testing.assert_close(scores[1:], made.log_probs, rtol=0, atol=CLOSE)


def test_no_new_tokens(wrapper):
    """Only the prompt has log-probs."""
    row = prompts()[1]
    nothing = GenerationOptions.parse({"max_new_tokens": 0})

    (made,) = wrapper.generate_tokens([row], nothing, prompt_log_probs=True)

    assert made.tokens.shape == (0,)
    assert made.log_probs.shape == (0,)
    assert made.prompt_log_probs.shape == row.shape


def test_a_stop_token_ends_a_response(wrapper, model):
    """It is the last token of the response."""
    row = prompts()[1]
    plain = model.generate(row[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 7:]
    options = GenerationOptions.parse({"max_new_tokens": 8, "stop_token_ids": int(plain[3])})

    (made,) = wrapper.generate_tokens([row], options)

    first = plain.tolist().index(int(plain[3]))
    assert made.tokens.tolist() == plain[: first + 1].tolist()
    assert made.finish_reason == "stop"


def test_several_samples_of_a_prompt(wrapper):
    """Each prompt has as many responses."""
    row = prompts()[1]
    several = GenerationOptions.parse({"max_new_tokens": 8, "temperature": 1.0, "n": 3})

    made = wrapper.generate_tokens([row, row[:2]], several, keys=tdf.random.split(tdf.random.key(0), 6))

    assert len(made) == 6


def test_beam_search_is_refused(wrapper):
    """The engine has none."""
    row = prompts()[1]

    with pytest.raises(UnsupportedError, match="beam search is not supported"):
        wrapper.generate_tokens([row], GenerationOptions.parse({"max_new_tokens": 2, "num_beams": 2}))


class Faulty(Engine):
    """The engine, whose loads or resets go wrong."""

    fault, chosen, factor = None, 0, 1.0

    def load(self, weights):
        """Hand over the weights, but for the fault."""
        if self.fault is None:
            return super().load(weights)
        given = list(weights)
        name, leaf = given[self.chosen]
        if self.fault == "killed":
            raise ConnectionError("the worker is gone")
        if self.fault == "dropped":
            del given[self.chosen]
        elif self.fault == "scaled":
            given[self.chosen] = name, leaf * self.factor
        elif self.fault == "swapped":
            at = next(i for i, (_, other) in enumerate(given) if i != self.chosen and other.shape == leaf.shape)
            given[self.chosen], given[at] = (name, given[at][1]), (given[at][0], leaf)
        return super().load(iter(given))

    def reset_cache(self):
        """Reset, but for the fault."""
        return True if self.fault == "stale cache" else super().reset_cache()


def test_faulty_pushes_are_caught(wrapper, seed):
    """Twenty of them on the real engine: each raises, nothing is generated until the next push, which mends it."""
    generator = torch.Generator().manual_seed(seed)
    faults = ["dropped", "scaled", "swapped", "stale cache", "killed"] * 4
    good = make_model(3)
    with torch.no_grad():
        for leaf in good.parameters():
            leaf.copy_(torch.randn(leaf.shape, generator=generator) * 0.3 + (leaf.ndim == 1))
    params = causal_lm(good)[1]
    wrapper.engine = Faulty(wrapper.engine.llm)
    for i, fault in enumerate(faults):
        # Away from the weights that are pushed, or a dropped leaf would be there already.
        wrapper.engine.fault = None
        wrapper.push(causal_lm(make_model(10 + i))[1], version="between")
        wrapper.engine.fault, wrapper.engine.factor = fault, [0.97, 1.03, 2.0, -1.0][i % 4]
        wrapper.engine.chosen = 1 + 2 * i % 18
        with pytest.raises((ValueError, ConcurrencyError, ConnectionError)):
            wrapper.push(params, version=i)
        for call in (lambda: wrapper.generate_tokens(prompts(), FOUR), lambda: wrapper.score_tokens(prompts())):
            with pytest.raises(ConcurrencyError, match="are not proven"):
                call()
        with pytest.raises(ConcurrencyError, match="are not proven"):
            _ = vLLMWrapper(wrapper.engine.llm, input_mode="tokens").version
    wrapper.engine.fault = None
    wrapper.push(params, version="good")
    check_equal(wrapper, good, prompts(), eos_token_ids=1)


MISNAMED = {
    "a leaf is missing": lambda params: params.delete(("model", "norm", "weight")),
    "a leaf of another model": lambda params: params.set("other", torch.ones(1)),
}


@pytest.mark.parametrize("name", MISNAMED)
def test_names_are_checked(wrapper, model, name):
    """A tree that lacks a leaf, or has another model's, is refused before the engine sees it."""
    tree = MISNAMED[name](causal_lm(model)[1])

    with pytest.raises(TreeStructureError, match="nothing was sent"):
        wrapper.push(tree, version="x")

    assert wrapper.version == "first"
