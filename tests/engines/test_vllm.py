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
    """Before any change, and after pushes of other weights and back."""
    check_equal(wrapper, model, prompts(), eos_token_ids=1)
    for seed in (1, 2):
        other = make_model(seed)
        done = wrapper.push(causal_lm(other)[1], version=seed)
        assert done.difference < CLOSE
        assert wrapper.version == str(seed)
        check_equal(wrapper, other, prompts(), eos_token_ids=1)
        assert {each.version for each in wrapper.generate_tokens(prompts(), FOUR)} == {str(seed)}


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


def test_draws_follow_the_key(wrapper):
    """The same key gives the same response in another batch; at temperature 1 the behaviour is the raw log-prob."""
    options = GenerationOptions.parse({"max_new_tokens": 12, "temperature": 1.0})
    keys = tdf.random.split(tdf.random.key(4), len(LENGTHS))
    rows = prompts()
    together = wrapper.generate_tokens(rows, options, keys=keys)
    for i in (3, 0, 2, 1):
        (alone,) = wrapper.generate_tokens([rows[i]], options, keys=keys[i : i + 1])
        assert torch.equal(alone.tokens, together[i].tokens)
        assert torch.equal(together[i].behaviour, together[i].log_probs)
    other = wrapper.generate_tokens(rows, options, keys=tdf.random.split(tdf.random.key(5), len(LENGTHS)))
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(together, other, strict=True))
    colder = GenerationOptions.parse({"max_new_tokens": 12, "temperature": 0.5, "top_k": 4})
    (made,) = wrapper.generate_tokens(rows[:1], colder, keys=keys[:1])
    assert made.behaviour is None
    torch.testing.assert_close(
        wrapper.score_tokens([torch.cat([rows[0], made.tokens])])[0][1:], made.log_probs, rtol=0, atol=CLOSE
    )


def test_ends_of_responses(wrapper, model):
    """Nothing new, a stop token, a stop sequence, several samples."""
    row = prompts()[1]
    nothing = GenerationOptions.parse({"max_new_tokens": 0})
    (made,) = wrapper.generate_tokens([row], nothing, prompt_log_probs=True)
    assert made.tokens.shape == made.log_probs.shape == (0,)
    assert made.prompt_log_probs.shape == row.shape
    plain = model.generate(row[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 7:]
    options = GenerationOptions.parse({"max_new_tokens": 8, "stop_token_ids": int(plain[3])})
    (made,) = wrapper.generate_tokens([row], options)
    first = plain.tolist().index(int(plain[3]))
    assert made.tokens.tolist() == plain[: first + 1].tolist()
    assert made.finish_reason == "stop"
    several = GenerationOptions.parse({"max_new_tokens": 8, "temperature": 1.0, "n": 3})
    made = wrapper.generate_tokens([row, row[:2]], several, keys=tdf.random.split(tdf.random.key(0), 6))
    assert len(made) == 6
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


def test_names_are_checked(wrapper, model):
    """A tree that lacks a leaf, or has another model's, is refused before the engine sees it."""
    params = causal_lm(model)[1]
    for tree in (params.delete(("model", "norm", "weight")), params.set("other", torch.ones(1))):
        with pytest.raises(TreeStructureError, match="nothing was sent"):
            wrapper.push(tree, version="x")
    assert wrapper.version == "first"
