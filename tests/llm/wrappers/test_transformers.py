"""Scores of a model of transformers in all input modes, against each row alone; modules, versions, keys."""

import copy
import dataclasses
import inspect
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import ImmutableError, TensorDict, UnsupportedError, lazy_stack
from tdfunc.llm import (
    ChatHistory,
    History,
    LLMWrapperBase,
    LogProbs,
    Masks,
    RemoteWrapper,
    Text,
    Tokens,
    TransformersWrapper,
    causal_lm,
    chatml,
    distribution,
    generate,
    score,
    tokenize_text,
    vLLMWrapper,
)
from tdfunc.llm.wrappers.options import WrapperOptions
from tests.helpers import assert_pure
from tests.llm.models import VOCAB, make, row_log_probs
from tests.llm.tokens import GENERATION, make_tokenizer
from tests.llm.wrappers.fake import FakeWrapper

pytestmark = pytest.mark.sample(2)

TOKENIZER = make_tokenizer()
CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the fox"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "and a longer question, is it not?"}],
]


def model_for(tokenizer=TOKENIZER, family="llama"):
    """A model with the tokens of a tokenizer."""
    return make(family, vocab_size=len(tokenizer))


def chats_td(chats=CHATS):
    """A tree with whole conversations."""
    return TensorDict({"history": ChatHistory(full=History.from_chats(chats), batch_size=[len(chats)])}, [len(chats)])


def tokens_td(lengths, seed, width=6):
    """A tree with random rows, padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(-1)
    return TensorDict({"tokens": Tokens(full=ids, batch_size=[len(lengths)]), "attention_mask": mask}, [len(lengths)])


def rows_in(out):
    """The ids, log-probs, masks of log-probs and assistant masks of each row of a result."""
    names = [("tokens", "full"), ("log_probs", "full"), ("log_probs", "mask"), ("masks", "all_assistant_mask")]
    columns = [out[key] if out.get(key, None) is not None else [None] * len(out) for key in names]
    for *row, valid in zip(*columns, out["masks", "all_attention_mask"], strict=True):
        yield [None if each is None else each[valid] for each in row]


def check_rows(model, out, rows):
    """Assert that each row has these ids, and the log-probs of the row alone."""
    found = list(rows_in(out))
    assert [ids.tolist() for ids, *_ in found] == [list(row) for row in rows]
    for ids, values, known, _ in found:
        assert known.tolist() == [i > 0 for i in range(len(ids))]
        assert torch.equal(values[:1], torch.zeros(len(ids[:1])))
        if len(ids) > 1:
            torch.testing.assert_close(values[1:], row_log_probs(model, ids), atol=1e-5, rtol=1e-5)


OPTIONS = [{"pad_output": True}, {"pad_output": False}, {"pad_output": True, "pad_model_input": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=["padded", "ragged", "packed"])
def test_all_modes_score_each_row_alone(options):
    """Conversations, their texts and their tokens have the log-probs of each row alone, padded, ragged and packed."""
    model, td = model_for(), chats_td()
    texts = td["history"].full.apply_chat_template(tokenizer=TOKENIZER, add_generation_prompt=False)
    rows = [TOKENIZER(text)["input_ids"] for text in texts]
    batch = TOKENIZER(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens = TensorDict(
        {"tokens": Tokens(full=batch["input_ids"], batch_size=[3]), "attention_mask": batch["attention_mask"].bool()},
        [3],
    )
    wrapper = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="history", generate=False, **options)

    out = assert_pure(wrapper, td)
    check_rows(model, out, rows)
    assert out["text"].full == texts
    assert (out["history"].full == td["history"].full).all()
    said = [TOKENIZER.decode(ids[wrote]) for ids, _, _, wrote in rows_in(out)]
    assert said == ["the fox<|im_end|>", "<|im_end|>", ""]
    in_text = wrapper.get_new_version(input_mode="text")
    in_text = assert_pure(in_text, TensorDict({"text": Text(full=texts, batch_size=[3])}, [3]))
    check_rows(model, in_text, rows)
    check_rows(model, in_tokens := assert_pure(wrapper.get_new_version(input_mode="tokens"), tokens), rows)
    wrote, valid = batch["input_ids"] % 2 == 0, batch["attention_mask"].bool()
    masks = Masks(all_attention_mask=valid, all_assistant_mask=wrote, batch_size=[3])
    masked = wrapper.get_new_version(input_mode="tokens")(tokens.set("masks", masks))
    assert [each.tolist() for *_, each in rows_in(masked)] == [
        each[at].tolist() for each, at in zip(wrote, valid, strict=True)
    ]
    kinds = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}
    assert all(isinstance(each[key], kind) for each in (out, in_text, in_tokens) for key, kind in kinds.items())
    padded = [False] * 3 if options["pad_output"] is False else True
    assert out["tokens"].padded == padded
    assert wrapper.lm.packed == (options is OPTIONS[2])


@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_get_dist_and_log_prob_agree_with_the_scores(lengths, seed):
    """Distributions, their nested form, and `log_prob` have the numbers of the scores and of `distribution`."""
    model, td = make("llama"), tokens_td(lengths, seed)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    lp, ids = wrapper(td)["log_probs"], td["tokens"].full

    dist = assert_pure(wrapper.get_dist, td)
    lm, params, buffers = causal_lm(model)
    expected = distribution(lm, params, td, buffers=buffers)
    assert torch.equal(dist.mask, lp.mask)
    torch.testing.assert_close(dist.log_prob(ids), lp.full, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dist.entropy(), expected.entropy(), atol=1e-5, rtol=1e-5)
    assert torch.equal(wrapper.log_prob(td), lp.full)
    nested = wrapper.get_dist(td, as_nested_tensor=True)
    rows = [row[valid] for row, valid in zip(ids, td["attention_mask"], strict=True)]
    for value in (ids, torch.nested.as_nested_tensor(rows, layout=torch.jagged)):
        each = nested.log_prob(value).unbind()
        for row, (full, valid) in zip(each, zip(lp.full, td["attention_mask"], strict=True), strict=True):
            torch.testing.assert_close(row, full[valid], atol=1e-5, rtol=1e-5)
    assert [len(row) for row in nested.entropy().unbind()] == lengths
    wide = wrapper(td, logits_only=True)
    assert "log_probs" not in wide
    again = wrapper.get_dist(wide, logits_key="logits", mask_key="attention_mask")
    torch.testing.assert_close(again.log_prob(ids), lp.full, atol=1e-5, rtol=1e-5)
    kinds = [wrapper.get_dist(td, layout=torch.jagged, as_padded_tensor=each).entropy().is_nested for each in (0, 1)]
    assert kinds == [True, False]
    computed = wrapper.get_dist(td, logits_key="logits", padding_value=0.0)
    assert torch.equal(computed.log_prob(ids), dist.log_prob(ids))
    assert (wrapper.get_dist(td.set("none", lp.mask & False), mask_key="none").log_prob(ids) == 0).all()


def test_distributions_of_texts_are_padded_at_a_side():
    """Ragged inputs are padded at the left, or at the right."""
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="text", generate=False)
    td = TensorDict({"text": Text(full=["the fox", "a"], batch_size=[2])}, [2])

    left, right = (wrapper.get_dist(td, padding_side=side).mask.tolist() for side in ("left", "right"))
    n = len(left[0])
    lengths = [len(TOKENIZER(text)["input_ids"]) for text in ("the fox", "a")]
    assert left == [[i > n - k for i in range(n)] for k in lengths]
    assert right == [[0 < i < k for i in range(n)] for k in lengths]


def test_replies_keep_the_ids_they_were_sampled_as():
    """A reply with token ids is scored as these; its assistant mask is theirs."""
    model = model_for()
    sampled = [TOKENIZER(char)["input_ids"][0] for char in "the fox"] + [TOKENIZER.eos_token_id]
    prompt = History.from_chats([CHATS[0][:1]])
    reply = History(role="assistant", content="the fox", token_ids=sampled)
    td = TensorDict({"history": ChatHistory(full=prompt.append(reply.unsqueeze(0)), batch_size=[1])}, [1])
    wrapper = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="history", generate=False)

    before = TOKENIZER(prompt.apply_chat_template(tokenizer=TOKENIZER)[0])["input_ids"]
    out = wrapper(td)
    check_rows(model, out, [[*before, *sampled]])
    assert out["masks"].all_assistant_mask[0].tolist() == [False] * len(before) + [True] * len(sampled)


@pytest.mark.parametrize("text", ["<s>the fox", "the fox"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_a_text_gets_one_bos(text, adds):
    """Special tokens are added but where the text begins with one, or where the option says no."""
    tokenizer = make_tokenizer(bos_token="<s>", add_bos_token=True)
    backend = tokenizer.backend_tokenizer
    tokenizers = pytest.importorskip("tokenizers")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    kwargs = {} if adds is None else {"add_special_tokens": adds}
    wrapper = TransformersWrapper(
        model_for(tokenizer), tokenizer=tokenizer, input_mode="text", generate=False, tokenizer_kwargs=kwargs
    )

    ids = wrapper(TensorDict({"text": text}))["tokens"].full.tolist()
    has_one = text.startswith("<s>") or adds is not False
    assert ids.count(tokenizer.bos_token_id) == int(has_one)
    assert (ids[0] == tokenizer.bos_token_id) == has_one


@pytest.mark.parametrize("side", ["left", "right"])
def test_options_of_templates_and_of_truncation(side):
    """A template by name, options of Jinja, and truncation reach the conversations."""
    td, model = chats_td(), model_for()
    wrapper = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="history", generate=False)

    named = wrapper.get_new_version(chat_template_name="chatml")(td)
    own = wrapper.get_new_version(chat_template=chatml)(td)
    assert named["text"].full == own["text"].full == chatml.render(td["history"].full)
    source = "{{ mood }}" + GENERATION
    moody = wrapper.get_new_version(chat_template=source, tokenizer_kwargs={"mood": "gay"})(td)
    assert moody["text"].full == ["gay" + text for text in wrapper(td)["text"].full]
    kwargs = {"truncation": True, "max_length": 5, "truncation_side": side}
    cut = wrapper.get_new_version(tokenizer_kwargs=kwargs)(td)
    whole = wrapper(td)["tokens"].full
    part = slice(5) if side == "right" else slice(-5, None)
    assert [row.tolist() for row in cut["tokens"].full] == [row[part].tolist() for row in whole]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [3, 4, 6, 40])
@pytest.mark.parametrize("adds", [True, False])
def test_texts_are_cut_as_by_tokenize_text(side, length, adds):
    """A cut text keeps the special tokens around it if it has any, as in `tokenize_text` and transformers."""
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>", truncation_side=side)
    tokenizer.backend_tokenizer.post_processor = pytest.importorskip("tokenizers").processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")],
    )
    text = "the quick brown fox jumps over the lazy dog"
    kwargs = {"truncation": True, "max_length": length, "add_special_tokens": adds}
    wrapper = TransformersWrapper(
        model_for(tokenizer), tokenizer=tokenizer, input_mode="text", generate=False, tokenizer_kwargs=kwargs
    )

    found = wrapper(TensorDict({"text": text}))["tokens"].full.tolist()
    assert found == tokenize_text(tokenizer, text, truncation_side=side, **kwargs)["input_ids"].tolist()
    assert found == copy.deepcopy(tokenizer)(text, **kwargs)["input_ids"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_are_those_of_score():
    """Backward through the module, and grad and vmap over its parameters, agree with the pure function."""
    model, td = copy.deepcopy(make("llama")), tokens_td([4, 2], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    wrapper(td)["log_probs"].full.sum().backward()
    lm, params, buffers = causal_lm(model)
    expected = torch.func.grad(lambda params: score(lm, params, td, buffers=buffers)["log_probs"].full.sum())(params)
    apply, own, rest = tdf.functional(wrapper)

    torch.testing.assert_close(model.lm_head.weight.grad, expected["lm_head", "weight"])
    found = torch.func.grad(lambda params: apply(params, td, buffers=rest)["log_probs"].full.sum())(own)
    torch.testing.assert_close(found["model", "lm_head", "weight"], expected["lm_head", "weight"])
    members = torch.stack([own.detach(), 2 * own.detach()])
    names = {f"model.{name}": value for name, value in members["model"].flatten_keys().items()}
    for both in (
        torch.vmap(lambda tree: apply(tree, td, buffers=rest)["log_probs"].full)(members),
        torch.vmap(lambda values: torch.func.functional_call(wrapper, values, (td,))["log_probs"].full)(names),
    ):
        torch.testing.assert_close(both[0], wrapper(td)["log_probs"].full.detach(), atol=1e-5, rtol=1e-5)
        expected = apply(members[1], td, buffers=rest)["log_probs"].full
        torch.testing.assert_close(both[1], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(both[0], both[1])


def test_ragged_and_lazy_inputs():
    """Ragged tokens, lazy stacks of trees, nested tensors, and bare tensors are read as their rows."""
    wrapper = TransformersWrapper(make("llama"), input_mode="tokens", generate=False)
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    each = [Tokens(full=row, batch_size=[]) for row in rows]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    inputs = [
        TensorDict({"tokens": lazy_stack(each)}, [2]),
        lazy_stack([TensorDict({"tokens": one}) for one in each]),
        TensorDict({"tokens": Tokens(full=nested, batch_size=[2])}, [2]),
        TensorDict({"tokens": nested}, [2]),
    ]
    padded, kept = torch.tensor([7, 1, 7, 2, 3]), torch.tensor([0, 1, 0, 1, 1]).bool()
    of_first = TensorDict({"tokens": Tokens(full=padded), "attention_mask": kept})
    inputs.append(lazy_stack([of_first, TensorDict({"tokens": each[1], "attention_mask": torch.ones(2).bool()})]))

    for td in inputs:
        check_rows(wrapper.model, wrapper(td), [row.tolist() for row in rows])
    asked = lazy_stack([TensorDict({"tokens": Tokens(prompt=padded), "attention_mask": kept})])
    answered = wrapper.get_new_version(generate=True, generate_kwargs={"max_new_tokens": 2, "eos_token_ids": ()})(asked)
    assert [row[:-2].tolist() for row in answered["tokens"].full] == [rows[0].tolist()]
    one = wrapper.get_new_version(input_key="ids")(TensorDict({"ids": rows[0]}))
    torch.testing.assert_close(one["log_probs"].full[1:], row_log_probs(wrapper.model, rows[0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["history", "text", "tokens", "bare text", "bare tokens"])
def test_rows_of_stacks_along_any_dimension_keep_their_places(mode):
    """In a stack of stacks along the second dimension each element has the scores of its own input."""
    answers = ("b", "cd", "e f", "g")
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in answers]
    records = {
        "history": [ChatHistory(full=History.from_chats(chat)) for chat in chats],
        "text": [Text(full=chat[1]["content"] + "!") for chat in chats],
        "tokens": [Tokens(full=torch.arange(2, 4 + i)) for i in range(4)],
        "bare text": [chat[1]["content"] + "!" for chat in chats],
        "bare tokens": [torch.arange(2, 4 + i) for i in range(4)],
    }[mode]
    mode = mode.removeprefix("bare ")
    trees = [TensorDict({mode: record}) for record in records]
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode=mode, generate=False)

    out = wrapper(lazy_stack([lazy_stack(trees[:2]), lazy_stack(trees[2:])], 1))
    for i, tree in enumerate(trees):
        found, alone = out[i % 2, i // 2], wrapper(tree)
        assert torch.equal(found["tokens"].full, alone["tokens"].full)
        torch.testing.assert_close(found["log_probs"].full, alone["log_probs"].full, atol=1e-5, rtol=1e-5)


def test_an_empty_batch_has_empty_results():
    """No rows give no rows, of the same types."""
    wrapper = TransformersWrapper(make("llama"), input_mode="tokens", generate=False, pad_output=True)
    td = tokens_td([2], 0)
    out, some = wrapper(td[:0]), wrapper(td)

    kinds = [[(path, tree[path].dtype) for path in tree.paths()] for tree in (out, some)]
    assert kinds[0] == kinds[1]
    assert out["log_probs"].full.shape == (0, 6)


def test_parts_of_known_prompts_are_scored_apart():
    """With prompt and response among the tokens, the log-probs have both, in each layout."""
    wrapper = TransformersWrapper(make("llama"), input_mode="tokens", generate=False, pad_output=True)
    td = tokens_td([6, 3], 1)
    full, mask = td["tokens"].full, td["attention_mask"]
    parts = td.set("tokens", Tokens(prompt=full[:, :4], response=full[:, 4:], batch_size=[2]))
    expected = wrapper(td)["log_probs"].full

    lp = wrapper(parts)["log_probs"]
    assert torch.equal(lp.full, expected)
    assert torch.equal(torch.cat([lp.prompt, lp.response], -1), expected)
    ends = torch.tensor([True, False])
    parts = parts.set(("tokens", "is_complete"), ends)
    assert torch.equal(wrapper(parts)["tokens"].is_complete, ends)
    whole = td.set(("tokens", "is_complete"), ends)
    assert torch.equal(wrapper(whole)["tokens"].is_complete, ends)
    scored = wrapper.get_new_version(pad_output=False)(parts)
    assert torch.equal(torch.stack(scored["tokens"].is_complete), ends)
    ragged = scored["log_probs"]
    prompts = [row[:4][m[:4]].tolist() for row, m in zip(expected, mask, strict=True)]
    assert [row.tolist() for row in ragged.prompt] == prompts
    assert [row.tolist() for row in ragged.response] == [row[4:].tolist() for row in expected]


def test_dropout_only_where_it_is_asked_for():
    """The module's own mode does not count; with `training=True` a key draws."""
    model = copy.deepcopy(make("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)).train()
    wrapper, td = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True), tokens_td([5], 0)
    still = wrapper(td)["log_probs"].full

    assert model.training
    for same in (wrapper.eval()(td)["log_probs"].full, wrapper.log_prob(td)):
        assert torch.equal(still, same)
    torch.testing.assert_close(wrapper.get_dist(td).log_prob(td["tokens"].full), still, atol=1e-5, rtol=1e-5)
    first, again, other = (wrapper(td, training=True, key=seed)["log_probs"].full for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, still)
    wide = [wrapper(td, logits_only=True, training=mode, key=0)["logits"] for mode in (True, False)]
    assert not torch.allclose(*wide)


# -- modules and versions -----------------------------------------------------------------------------------------


def test_it_is_a_module_over_its_model():
    """State, casts and copies are those of the model; what trains it trains the wrapper."""
    model, td = copy.deepcopy(make("llama")), tokens_td([4, 3], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    before = wrapper(td)["log_probs"].full

    assert set(wrapper.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    wide = copy.deepcopy(wrapper).double()(td)["log_probs"].full
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), before, atol=1e-5, rtol=1e-5)
    assert torch.equal(pickle.loads(pickle.dumps(wrapper))(td)["log_probs"].full, before)
    new = wrapper.get_new_version(pad_output=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert not torch.allclose(wrapper(td)["log_probs"].full, before)
    assert torch.equal(new(td)["log_probs"].full[0], wrapper(td)["log_probs"].full[0][2:])
    with pytest.warns(UserWarning, match="keep their values"):
        wrapper.reset_parameters_recursive()
    assert not torch.allclose(wrapper(td)["log_probs"].full, before)


def test_new_versions_keep_the_rest():
    """What is not changed stays: options, hooks, selected keys, collector; the first wrapper is as it was."""

    class Collector:
        pass

    collector, seen = Collector(), []
    kwargs = {"max_new_tokens": 3, "temperature": 0.5}
    wrapper = TransformersWrapper(
        model_for(), tokenizer=TOKENIZER, input_mode="text", generate_kwargs=kwargs, pad_output=True,
        pad_model_input=False, num_samples=2, log_probs_key=("a", "lp"), tokenizer_kwargs={"add_special_tokens": False},
    )  # fmt: skip
    assert wrapper.collector is None
    wrapper.register_forward_hook(lambda *args: seen.append(args))
    wrapper.register_collector(collector)
    wrapper = wrapper.select_out_keys("tokens", ("a", "lp"))
    options = wrapper._options
    new = wrapper.get_new_version(generate=False)

    assert new.generate is False
    assert wrapper.generate is True
    assert wrapper._options is options
    assert {**vars(new._options), "generate": True} == vars(options)
    assert new.out_keys == ["tokens", ("a", "lp")]
    assert new.reset_out_keys().out_keys == ["text", "tokens", "masks", ("a", "lp")]
    assert new.collector is wrapper.collector is collector
    out = new(TensorDict({"text": Text(full=["a fox"], batch_size=[1])}, [1]))
    assert set(out.keys()) == {"text", "tokens", "a"}
    assert len(seen) == 1
    assert new.get_new_version(generate=True)._generation == wrapper._generation
    gone = weakref.ref(collector)
    del collector
    assert gone() is new.collector is None


def test_a_tree_takes_the_place_of_the_parameters():
    """`params=` runs a tree, with the model's buffers or its own, and leaves the model and the wrapper as they are."""
    model, td = make("llama"), tokens_td([4, 3], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True, batching=True)
    lm, params, buffers = causal_lm(model)
    other = params.apply(lambda leaf: leaf * 1.5)
    before = wrapper(td)["log_probs"].full

    expected = score(lm, other, td, buffers=buffers)["log_probs"].full
    for tree in (other, tdf.combine(other, buffers)):
        torch.testing.assert_close(wrapper(td, params=tree)["log_probs"].full, expected)
    torch.testing.assert_close(wrapper(td)["log_probs"].full, before)
    grads = torch.func.grad(lambda tree: wrapper(td, params=tree)["log_probs"].full.sum())(other)
    each = torch.func.grad(lambda tree: score(lm, tree, td, buffers=buffers)["log_probs"].full.sum())(other)
    tdf.assert_close(grads, each)
    sampler = wrapper.get_new_version(generate=True, generate_kwargs={"max_new_tokens": 3, "temperature": 1.0})
    asked = TensorDict({"tokens": Tokens(prompt=td["tokens"].full, batch_size=[2])}, [2])
    drawn = generate(lm, other, asked, key=0, buffers=buffers, max_new_tokens=3, temperature=1.0)
    assert (sampler(asked, key=0, params=other)["tokens"] == drawn["tokens"]).all()
    assert not (sampler(asked, key=0)["tokens"].response == drawn["tokens"].response).all()
    with pytest.raises(UnsupportedError, match="params= is not supported"):
        FakeWrapper(input_mode="tokens")(asked, params=other)


def test_options_have_their_names_in_signatures():
    """`help` shows the arguments of each wrapper, and each option once."""
    for cls in (LLMWrapperBase, TransformersWrapper, vLLMWrapper, RemoteWrapper, FakeWrapper):
        names = list(inspect.signature(cls).parameters)
        assert names[0] == "model"
        assert set(names) > {field.name for field in dataclasses.fields(WrapperOptions)}
        assert "options" not in names
        assert cls.generate is vars(LLMWrapperBase)["generate"]

    class Plain(FakeWrapper):
        def __init__(self, model):
            super().__init__(model, input_mode="tokens")

    assert list(inspect.signature(Plain).parameters) == ["model"]
    defaults = {name: each.default for name, each in inspect.signature(RemoteWrapper).parameters.items()}
    expected = {"timeout_s": 600.0, "max_retries": 5, "backoff_s": 0.5, "max_concurrency": 64, "stream": False}
    assert defaults | expected == defaults


def test_a_model_that_changes_is_prepared_anew():
    """A new layer, a hook, an attribute and an entry of the configuration count; the model is not assigned."""
    model, td = copy.deepcopy(make("llama")), tokens_td([6, 6], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    other = make("llama", rms_norm_eps=0.5)

    def double(module, args, out):
        return out * 2

    def alter_layer():
        model.model.norm = torch.nn.Identity()

    changes = [
        lambda: model.lm_head.register_forward_hook(double),
        lambda: model.register_forward_hook(lambda module, args, out: out.__class__(logits=out.logits.sin())),
        lambda: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.7),
        lambda: model.model.layers[0].mlp.__dict__.__setitem__("act_fn", torch.sin),
        lambda: model.model.layers[0].mlp.__dict__.__setitem__("act_fn", torch.cos),
        lambda: model.config.update({"attn_implementation": "eager"}),
        alter_layer,
    ]
    for change in [lambda: None, *changes]:
        change()
        with torch.no_grad():
            logits = model(td["tokens"].full).logits.log_softmax(-1)
        expected = logits[:, :-1].gather(-1, td["tokens"].full[:, 1:, None]).squeeze(-1)
        torch.testing.assert_close(wrapper(td)["log_probs"].full[:, 1:], expected, atol=1e-4, rtol=1e-4)
    for ends, found in (([7, 8], (7, 8)), (None, ()), (5, (5,))):
        model.generation_config.eos_token_id = ends
        assert wrapper.lm.eos_ids == found
        assert wrapper.lm.apply is wrapper.lm.apply
    with pytest.raises(ImmutableError, match="get_new_version"):
        wrapper.model = other
    new = wrapper.get_new_version(model=other)
    assert torch.equal(
        new(td)["log_probs"].full,
        TransformersWrapper(other, input_mode="tokens", generate=False, pad_output=True)(td)["log_probs"].full,
    )
    assert wrapper.model is model


def test_keys_of_the_outputs():
    """Each output has its key, None leaves it out, and the input follows its own key."""
    td = TensorDict({"mine": ChatHistory(full=History.from_chats(CHATS), batch_size=[3])}, [3])
    wrapper = TransformersWrapper(
        model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False, history_key="mine",
        text_key=None, tokens_key=("t", "ids"), masks_key="m", log_probs_key="lp",
    )  # fmt: skip

    assert wrapper.in_keys == ["mine"]
    assert wrapper.out_keys == ["mine", ("t", "ids"), "m", "lp"]
    assert set(wrapper(td).keys()) == {"mine", "t", "m", "lp"}
    other = TensorDict({"in": td["mine"]}, [3])
    out = wrapper.get_new_version(input_key="in")(other)
    assert (out["mine"].full == td["mine"].full).all()
    text = wrapper.get_new_version(input_mode="text", input_key="in", text_key="out")
    assert text(TensorDict({"in": Text(full=["a"], batch_size=[1])}, [1]))["out"].full == ["a"]
    assert FakeWrapper(input_mode="tokens", tokens_key=None).in_keys == ["tokens"]
    assert set(wrapper(td, tensordict_out=TensorDict({}, [3])).keys()) == {"mine", "t", "m", "lp"}
    assert set(wrapper.get_new_version(log_probs_key=None)(td).keys()) == {"mine", "t", "m"}


@pytest.mark.parametrize("kwargs", [{}, {"truncation": True, "max_length": 3}])
def test_the_tokenizer_and_the_model_are_left_alone(kwargs):
    """Neither is changed: a missing pad token, and settings of truncation and padding stay."""
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    model = copy.deepcopy(model_for(tokenizer))
    state = tokenizer.backend_tokenizer.to_str(), tokenizer.init_kwargs.copy(), vars(model.config).copy()
    options = {"tokenizer": tokenizer, "generate": False, "pad_output": True, "tokenizer_kwargs": kwargs}
    assert_pure(TransformersWrapper(model, input_mode="history", **options), chats_td())
    TransformersWrapper(model, input_mode="text", **options)(TensorDict({"text": "the quick brown fox jumps"}))

    assert tokenizer.pad_token is None
    assert state == (tokenizer.backend_tokenizer.to_str(), tokenizer.init_kwargs, vars(model.config))
