"""Scores of a model of transformers in all input modes, against each row alone; versions, keys."""

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc import TensorDict, lazy_stack
from tdfunc.llm import (
    ChatHistory,
    History,
    LogProbs,
    Masks,
    Text,
    Tokens,
    TransformersWrapper,
    causal_lm,
    chatml,
    distribution,
    logits,
    tokenize_text,
)
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


EACH_LAYOUT = pytest.mark.parametrize("options", OPTIONS, ids=["padded", "ragged", "packed"])
TEXTS = History.from_chats(CHATS).apply_chat_template(tokenizer=TOKENIZER, add_generation_prompt=False)


def inputs_of(mode):
    """The conversations as a tree of each mode."""
    if mode == "history":
        return chats_td()
    if mode == "text":
        return TensorDict({"text": Text(full=TEXTS, batch_size=[3])}, [3])
    batch = TOKENIZER(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    tokens = Tokens(full=batch["input_ids"], batch_size=[3])
    return TensorDict({"tokens": tokens, "attention_mask": batch["attention_mask"].bool()}, [3])


@EACH_LAYOUT
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_all_modes_score_each_row_alone(mode, options):
    """Conversations, their texts and their tokens have the log-probs of each row alone, padded, ragged and packed."""
    model = model_for()
    wrapper = TransformersWrapper(model, tokenizer=TOKENIZER, input_mode=mode, generate=False, **options)
    out = assert_pure(wrapper, inputs_of(mode))

    check_rows(model, out, [TOKENIZER(text)["input_ids"] for text in TEXTS])
    kinds = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}
    assert [key for key, kind in kinds.items() if not isinstance(out[key], kind)] == []


@EACH_LAYOUT
def test_conversations_have_their_texts_and_what_was_said(options):
    """The assistant mask is that of its replies, with their ends."""
    td = chats_td()
    out = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False, **options)(td)

    assert out["text"].full == TEXTS
    assert (out["history"].full == td["history"].full).all()
    said = [TOKENIZER.decode(ids[wrote]) for ids, _, _, wrote in rows_in(out)]
    assert said == ["the fox<|im_end|>", "<|im_end|>", ""]


@EACH_LAYOUT
def test_assistant_masks_that_are_given_stay(options):
    """Beside tokens."""
    td = inputs_of("tokens")
    ids, valid = td["tokens"].full, td["attention_mask"]
    wrote = ids % 2 == 0
    td = td.set("masks", Masks(all_attention_mask=valid, all_assistant_mask=wrote, batch_size=[3]))
    out = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="tokens", generate=False, **options)(td)

    expected = [row[at].tolist() for row, at in zip(wrote, valid, strict=True)]
    assert [each.tolist() for *_, each in rows_in(out)] == expected


@pytest.mark.parametrize(
    ("options", "padded", "packed"),
    [(OPTIONS[0], True, False), (OPTIONS[1], [False] * 3, False), (OPTIONS[2], True, True)],
    ids=["padded", "ragged", "packed"],
)
def test_layouts_of_results_and_of_inputs(options, padded, packed):
    """Rows may be packed for the model, and padded in the result."""
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False, **options)

    assert wrapper(chats_td())["tokens"].padded == padded
    assert wrapper.lm.packed == packed


def random_rows(test):
    """Run a test with lengths and a seed of rows."""
    drawn = given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 2**16))
    return settings(max_examples=3, deadline=None)(drawn(test))


def scorer():
    """A wrapper that scores padded tokens."""
    return TransformersWrapper(make("llama"), input_mode="tokens", generate=False, pad_output=True)


@random_rows
def test_get_dist_and_log_prob_agree_with_the_scores(lengths, seed):
    """Distributions and `log_prob` have the numbers of the scores and of `distribution`."""
    td, wrapper = tokens_td(lengths, seed), scorer()
    scores, ids = wrapper(td)["log_probs"], td["tokens"].full
    lm, params, buffers = causal_lm(make("llama"))
    expected = distribution(lm, params, td, buffers=buffers)

    dist = assert_pure(wrapper.get_dist, td)
    assert torch.equal(dist.mask, scores.mask)
    torch.testing.assert_close(dist.log_prob(ids), scores.full, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dist.entropy(), expected.entropy(), atol=1e-5, rtol=1e-5)
    assert torch.equal(wrapper.log_prob(td), scores.full)


@random_rows
def test_nested_distributions_agree_with_the_scores(lengths, seed):
    """For padded tokens and for nested ones."""
    td, wrapper = tokens_td(lengths, seed), scorer()
    ids, masks = td["tokens"].full, td["attention_mask"]
    expected = [row[valid] for row, valid in zip(wrapper(td)["log_probs"].full, masks, strict=True)]
    jagged = torch.nested.as_nested_tensor(
        [row[valid] for row, valid in zip(ids, masks, strict=True)], layout=torch.jagged
    )

    nested = wrapper.get_dist(td, as_nested_tensor=True)
    torch.testing.assert_close(list(nested.log_prob(ids).unbind()), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(list(nested.log_prob(jagged).unbind()), expected, atol=1e-5, rtol=1e-5)
    assert [len(row) for row in nested.entropy().unbind()] == lengths


@random_rows
def test_distributions_are_those_of_logits(lengths, seed):
    """Of logits that are in the tree, or of those that are computed where they are not."""
    td, wrapper = tokens_td(lengths, seed), scorer()
    ids = td["tokens"].full
    wide = wrapper(td, logits_only=True)
    again = wrapper.get_dist(wide, logits_key="logits", mask_key="attention_mask")
    computed = wrapper.get_dist(td, logits_key="logits", padding_value=0.0)

    assert "log_probs" not in wide
    torch.testing.assert_close(again.log_prob(ids), wrapper(td)["log_probs"].full, atol=1e-5, rtol=1e-5)
    assert torch.equal(computed.log_prob(ids), wrapper.get_dist(td).log_prob(ids))


@pytest.mark.parametrize("is_padded", [False, True])
@random_rows
def test_a_padded_distribution_of_a_nested_layout_is_not_nested(is_padded, lengths, seed):
    """`as_padded_tensor` counts for more than `layout`."""
    dist = scorer().get_dist(tokens_td(lengths, seed), layout=torch.jagged, as_padded_tensor=is_padded)

    assert dist.entropy().is_nested is not is_padded


@random_rows
def test_a_mask_without_tokens_has_log_probs_of_zero(lengths, seed):
    """By its key."""
    td = tokens_td(lengths, seed)
    dist = scorer().get_dist(td.set("none", torch.zeros_like(td["attention_mask"])), mask_key="none")

    assert (dist.log_prob(td["tokens"].full) == 0).all()


def test_distributions_of_texts_are_padded_at_a_side():
    """Ragged inputs are padded at the left, or at the right."""
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="text", generate=False)
    td = TensorDict({"text": Text(full=["the fox", "a"], batch_size=[2])}, [2])

    left, right = (wrapper.get_dist(td, padding_side=side).mask.tolist() for side in ("left", "right"))
    n = len(left[0])
    lengths = [len(TOKENIZER(text)["input_ids"]) for text in ("the fox", "a")]
    assert left == [[i > n - k for i in range(n)] for k in lengths]
    assert right == [[0 < i < k for i in range(n)] for k in lengths]


@pytest.mark.parametrize("side", ["left", "right"])
def test_stored_logits_of_texts_are_moved_to_the_side(side):
    """`logits_only=True` pads at the left, whatever the side of the distributions."""
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="text", generate=False)
    td = TensorDict({"text": Text(full=["the fox", "a", "and a fox"], batch_size=[3])}, [3])

    stored = wrapper.get_dist(wrapper(td, logits_only=True), logits_key="logits", padding_side=side)

    torch.testing.assert_close(stored.entropy(), wrapper.get_dist(td, padding_side=side).entropy())


def logits_of_function(td):
    """The tree with logits of `tdfunc.llm.logits`, which pads ragged rows at the right."""
    lm, params, buffers = causal_lm(model_for())
    return logits(lm, params, td, buffers=buffers)


def logits_of_wrapper(td):
    """The tree with logits of a wrapper, which pads ragged rows at the left."""
    return TransformersWrapper(model_for(), input_mode="tokens", generate=False)(td, logits_only=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("add", [logits_of_function, logits_of_wrapper])
@pytest.mark.parametrize("lengths", [(3, 6, 4), (5, 6), (1, 2), (4, 4)], ids=str)
def test_stored_logits_of_ragged_tokens_are_moved_to_the_side(lengths, add, side):
    """A lazy stack has them as a tuple."""
    rows = [torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    td = lazy_stack([TensorDict({"tokens": Tokens(full=row)}) for row in rows])
    wrapper = TransformersWrapper(model_for(), input_mode="tokens", generate=False)

    stored = wrapper.get_dist(add(td), logits_key="logits", padding_side=side)

    torch.testing.assert_close(
        stored.entropy(), wrapper.get_dist(td, padding_side=side).entropy(), atol=1e-5, rtol=1e-5
    )


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


def tokenizer_with_bos():
    """A tokenizer that adds a token at the beginning."""
    tokenizer = make_tokenizer(bos_token="<s>", add_bos_token=True)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def ids_with(tokenizer, text, kwargs):
    """The ids of a text by the wrapper."""
    wrapper = TransformersWrapper(
        model_for(tokenizer), tokenizer=tokenizer, input_mode="text", generate=False, tokenizer_kwargs=kwargs
    )
    return wrapper(TensorDict({"text": text}))["tokens"].full.tolist()


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [("<s>the fox", {}), ("<s>the fox", {"add_special_tokens": True}), ("<s>the fox", {"add_special_tokens": False})]
    + [("the fox", {}), ("the fox", {"add_special_tokens": True})],
)
def test_a_text_gets_one_bos(text, kwargs):
    """It is added but where the text begins with one."""
    tokenizer = tokenizer_with_bos()
    ids = ids_with(tokenizer, text, kwargs)

    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


def test_a_text_gets_no_bos_where_the_option_says_no():
    """`add_special_tokens` is that of the tokenizer."""
    tokenizer = tokenizer_with_bos()

    assert tokenizer.bos_token_id not in ids_with(tokenizer, "the fox", {"add_special_tokens": False})


def test_options_of_templates():
    """A template by name or itself, and options of Jinja reach the conversations."""
    td = chats_td()
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False)
    named = wrapper.get_new_version(chat_template_name="chatml")(td)
    own = wrapper.get_new_version(chat_template=chatml)(td)
    source = "{{ mood }}" + GENERATION
    moody = wrapper.get_new_version(chat_template=source, tokenizer_kwargs={"mood": "gay"})(td)

    assert named["text"].full == chatml.render(td["history"].full)
    assert own["text"].full == chatml.render(td["history"].full)
    assert moody["text"].full == ["gay" + text for text in wrapper(td)["text"].full]


@pytest.mark.parametrize(("side", "part"), [("left", slice(-5, None)), ("right", slice(5))])
def test_conversations_are_cut_at_a_side(side, part):
    """Truncation as for texts."""
    td, kwargs = chats_td(), {"truncation": True, "max_length": 5, "truncation_side": side}
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False)
    cut = wrapper.get_new_version(tokenizer_kwargs=kwargs)(td)

    expected = [row[part].tolist() for row in wrapper(td)["tokens"].full]
    assert [row.tolist() for row in cut["tokens"].full] == expected


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


ANSWERS = ("b", "cd", "e f", "g")
ANSWERED = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in ANSWERS]
RECORDS = [
    pytest.param("history", [ChatHistory(full=History.from_chats(chat)) for chat in ANSWERED], id="history"),
    pytest.param("text", [Text(full=text + "!") for text in ANSWERS], id="text"),
    pytest.param("tokens", [Tokens(full=torch.arange(2, 4 + i)) for i in range(4)], id="tokens"),
    pytest.param("text", [text + "!" for text in ANSWERS], id="bare text"),
    pytest.param("tokens", [torch.arange(2, 4 + i) for i in range(4)], id="bare tokens"),
]


@pytest.mark.parametrize(("mode", "records"), RECORDS)
def test_rows_of_stacks_along_any_dimension_keep_their_places(mode, records):
    """In a stack of stacks along the second dimension each element has the scores of its own input."""
    trees = [TensorDict({mode: record}) for record in records]
    wrapper = TransformersWrapper(model_for(), tokenizer=TOKENIZER, input_mode=mode, generate=False)
    alone = [wrapper(tree) for tree in trees]

    out = wrapper(lazy_stack([lazy_stack(trees[:2]), lazy_stack(trees[2:])], 1))
    found = [out[0, 0], out[1, 0], out[0, 1], out[1, 1]]
    assert [each["tokens"].full.tolist() for each in found] == [each["tokens"].full.tolist() for each in alone]
    scores = [each["log_probs"].full for each in alone]
    torch.testing.assert_close([each["log_probs"].full for each in found], scores, atol=1e-5, rtol=1e-5)


def test_an_empty_batch_has_empty_results():
    """No rows give no rows, of the same types."""
    wrapper, td = scorer(), tokens_td([2], 0)
    out, some = wrapper(td[:0]), wrapper(td)

    kinds = [{path: tree[path].dtype for path in tree.paths()} for tree in (out, some)]
    assert kinds[0] == kinds[1]
    assert out["log_probs"].full.shape == torch.Size([0, 6])


ENDS = torch.tensor([True, False])


@pytest.fixture(scope="module")
def whole():
    """Rows of tokens, the same in prompts and responses, and their log-probs."""
    td = tokens_td([6, 3], 1)
    full = td["tokens"].full
    parts = td.set("tokens", Tokens(prompt=full[:, :4], response=full[:, 4:], batch_size=[2]))
    return td, parts, scorer()(td)["log_probs"].full


def test_parts_of_known_prompts_are_scored_apart(whole):
    """With prompt and response among the tokens, the log-probs have both."""
    _, parts, expected = whole
    found = scorer()(parts)["log_probs"]

    assert torch.equal(found.full, expected)
    assert torch.equal(torch.cat([found.prompt, found.response], -1), expected)


def test_ragged_parts_are_scored_apart(whole):
    """Without pads."""
    td, parts, expected = whole
    found = scorer().get_new_version(pad_output=False)(parts)["log_probs"]

    prompts = [row[:4][mask[:4]].tolist() for row, mask in zip(expected, td["attention_mask"], strict=True)]
    assert [row.tolist() for row in found.prompt] == prompts
    assert [row.tolist() for row in found.response] == [row[4:].tolist() for row in expected]


def test_scored_tokens_keep_their_ends(whole):
    """Of whole rows, of parts, and in a ragged result."""
    td, parts, _ = (
        each.set(("tokens", "is_complete"), ENDS) if isinstance(each, TensorDict) else each for each in whole
    )
    wrapper = scorer()

    assert torch.equal(wrapper(td)["tokens"].is_complete, ENDS)
    assert torch.equal(wrapper(parts)["tokens"].is_complete, ENDS)
    ragged = wrapper.get_new_version(pad_output=False)(parts)
    assert torch.equal(torch.stack(ragged["tokens"].is_complete), ENDS)


@pytest.fixture
def dropping():
    """A wrapper of a model with dropout, in training mode, a tree of tokens, and their log-probs."""
    model = copy.deepcopy(make("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)).train()
    wrapper, td = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True), tokens_td([5], 0)
    return wrapper, td, wrapper(td)["log_probs"].full


def test_no_dropout_by_the_mode_of_the_module(dropping):
    """It does not count."""
    wrapper, td, still = dropping

    assert wrapper.model.training
    assert torch.equal(wrapper.log_prob(td), still)
    torch.testing.assert_close(wrapper.get_dist(td).log_prob(td["tokens"].full), still, atol=1e-5, rtol=1e-5)
    assert torch.equal(wrapper.eval()(td)["log_probs"].full, still)


def test_dropout_only_where_it_is_asked_for(dropping):
    """With `training=True` a key draws, also for logits."""
    wrapper, td, still = dropping
    first, again, other = (wrapper(td, training=True, key=seed)["log_probs"].full for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, still)
    wide = [wrapper(td, logits_only=True, training=mode, key=0)["logits"] for mode in (True, False)]
    assert not torch.allclose(*wide)


# -- versions -----------------------------------------------------------------------------------------------------


class Collector:
    """What a wrapper may be registered with."""


@pytest.fixture
def versions():
    """A wrapper with options, hooks, selected keys and a collector, a new version of it, and the calls of the hook."""
    seen = []
    kwargs = {"max_new_tokens": 3, "temperature": 0.5}
    wrapper = TransformersWrapper(
        model_for(), tokenizer=TOKENIZER, input_mode="text", generate_kwargs=kwargs, pad_output=True,
        pad_model_input=False, num_samples=2, log_probs_key=("a", "lp"), tokenizer_kwargs={"add_special_tokens": False},
    )  # fmt: skip
    wrapper.register_forward_hook(lambda *args: seen.append(args))
    wrapper = wrapper.select_out_keys("tokens", ("a", "lp"))
    return wrapper, wrapper.get_new_version(generate=False), seen


def test_new_versions_keep_the_rest(versions):
    """Options that are not changed stay, also those of generation."""
    wrapper, new, _ = versions

    assert new.generate is False
    assert {**vars(new._options), "generate": True} == vars(wrapper._options)
    assert new.get_new_version(generate=True)._generation == wrapper._generation


def test_a_new_version_leaves_the_first_as_it_was(versions):
    """It has the same options."""
    wrapper, *_ = versions
    options = wrapper._options
    wrapper.get_new_version(generate=False)

    assert wrapper.generate is True
    assert wrapper._options is options


def test_new_versions_keep_selected_keys_and_hooks(versions):
    """The keys may be reset."""
    _, new, seen = versions
    out = new(TensorDict({"text": Text(full=["a fox"], batch_size=[1])}, [1]))

    assert new.out_keys == ["tokens", ("a", "lp")]
    assert set(out.keys()) == {"text", "tokens", "a"}
    assert len(seen) == 1
    assert new.reset_out_keys().out_keys == ["text", "tokens", "masks", ("a", "lp")]


def test_new_versions_keep_the_collector_while_it_lives(versions):
    """It is held by a weak reference."""
    wrapper, *_ = versions
    assert wrapper.collector is None
    collector = Collector()
    wrapper.register_collector(collector)
    new = wrapper.get_new_version(generate=False)

    assert wrapper.collector is collector
    assert new.collector is collector
    gone = weakref.ref(collector)
    del collector
    assert gone() is None
    assert new.collector is None


@pytest.fixture(scope="module")
def renamed():
    """A wrapper with keys of its own, and a tree of conversations for it."""
    td = TensorDict({"mine": ChatHistory(full=History.from_chats(CHATS), batch_size=[3])}, [3])
    wrapper = TransformersWrapper(
        model_for(), tokenizer=TOKENIZER, input_mode="history", generate=False, history_key="mine",
        text_key=None, tokens_key=("t", "ids"), masks_key="m", log_probs_key="lp",
    )  # fmt: skip
    return wrapper, td


def test_keys_of_the_outputs(renamed):
    """Each output has its key, and None leaves it out."""
    wrapper, td = renamed

    assert wrapper.out_keys == ["mine", ("t", "ids"), "m", "lp"]
    assert set(wrapper(td).keys()) == {"mine", "t", "m", "lp"}
    assert set(wrapper(td, tensordict_out=TensorDict({}, [3])).keys()) == {"mine", "t", "m", "lp"}
    assert set(wrapper.get_new_version(log_probs_key=None)(td).keys()) == {"mine", "t", "m"}


def test_the_input_follows_its_own_key(renamed):
    """It is that of its record, unless there is an `input_key`; None leaves out an output alone."""
    wrapper, td = renamed
    assert wrapper.in_keys == ["mine"]
    assert FakeWrapper(input_mode="tokens", tokens_key=None).in_keys == ["tokens"]

    out = wrapper.get_new_version(input_key="in")(TensorDict({"in": td["mine"]}, [3]))
    assert (out["mine"].full == td["mine"].full).all()
    text = wrapper.get_new_version(input_mode="text", input_key="in", text_key="out")
    assert text(TensorDict({"in": Text(full=["a"], batch_size=[1])}, [1]))["out"].full == ["a"]


@pytest.mark.parametrize("kwargs", [{}, {"truncation": True, "max_length": 3}])
def test_the_tokenizer_and_the_model_are_left_alone(kwargs):
    """Neither is changed: a missing pad token, and settings of truncation and padding stay."""
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    model = copy.deepcopy(model_for(tokenizer))
    backend, settings_of, config = (
        tokenizer.backend_tokenizer.to_str(), tokenizer.init_kwargs.copy(), vars(model.config).copy(),
    )  # fmt: skip
    options = {"tokenizer": tokenizer, "generate": False, "pad_output": True, "tokenizer_kwargs": kwargs}
    assert_pure(TransformersWrapper(model, input_mode="history", **options), chats_td())
    TransformersWrapper(model, input_mode="text", **options)(TensorDict({"text": "the quick brown fox jumps"}))

    assert tokenizer.pad_token is None
    assert tokenizer.backend_tokenizer.to_str() == backend
    assert tokenizer.init_kwargs == settings_of
    assert vars(model.config) == config
