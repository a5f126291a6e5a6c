"""`History`: making, appending and extending, dense and ragged; shapes, storage and lists."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import LazyStack, TensorDict, lazy_stack
from tdfunc.llm import ContentBase, History, chatml, load_jsonl, save_jsonl
from tests.helpers import assert_trees_equal
from tests.llm.tokens import messages

RAGGED = [[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


def drop_empty(chat):
    """The messages as `tolist` gives them: without entries that are None."""
    return [{key: value for key, value in message.items() if value is not None} for message in chat]


@given(st.lists(messages(), max_size=4))
def test_from_chats_and_tolist_are_inverse(chats):
    """Dicts come back as they were, arguments in the form in which they came."""
    history = History.from_chats(chats)

    assert history.tolist() == [drop_empty(chat) for chat in chats]
    assert (History.from_chats(history.to_chats()) == history).all()


@given(st.lists(messages(), min_size=1, max_size=4))
def test_a_list_of_chats_is_always_ragged(chats):
    """Also when all chats have one length."""
    history = History.from_chats(chats)

    assert isinstance(history, History)
    assert isinstance(history, LazyStack)


@given(messages(), messages())
def test_extend_is_concatenation_of_lists(a, b):
    """Of one conversation and of ragged ones; neither history changes."""
    one, other = History.from_chats(a), History.from_chats(b)
    batch, others = History.from_chats([a, b]), History.from_chats([b, a])

    assert one.extend(other).tolist() == one.tolist() + other.tolist()
    assert batch.extend(others).tolist() == [drop_empty(a + b), drop_empty(b + a)]
    assert batch.extend(others, dim=0).tolist() == batch.tolist() + others.tolist()
    assert batch.tolist() == [drop_empty(a), drop_empty(b)]


A, B = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
REPLY = {"role": "assistant", "tool_calls": [CALL]}
CUT, FLAT = {**A, "is_complete": False}, {"id": "c1", **CALL["function"]}
FLATS = {**REPLY, "tool_calls": [CALL, {"type": "function", "function": {"name": "f", "arguments": {}}}]}
EXAMPLES = {
    "a dict is appended": (lambda: History.from_chats([A]).append({**REPLY, "content": None}), [A, REPLY]),
    "a conversation is": (lambda: History.from_chats([[A]]).append(History.from_chats([B, B]), dim=0), [[A], [B, B]]),
    "stacked messages": (lambda: lazy_stack([History(**A), History(**REPLY)]), [A, REPLY]),
    "and one more": (lambda: lazy_stack([History(**A), History(**REPLY)]).append(History(**B)), [A, REPLY, B]),
    "no chats": (lambda: History.from_chats([]), []),
    "no messages": (lambda: History.from_chats([[], [A]]), [[], [A]]),
    "its own for each": (lambda: History.from_chats([[A], [B, A]]).append(OWN), [[A, A], [B, A, B]]),
    "one for each": (lambda: History.from_chats([[], [A]]).append(History(**B, batch_size=[2])), [[B], [A, B]]),
    "calls without a type": (lambda: History.from_chats([{**REPLY, "tool_calls": [FLAT, {"name": "f"}]}]), [FLATS]),
    "empty entries": (lambda: History.from_chats([{**A, "tool_calls": [], "refusal": "", "audio": {}}]), [A]),
    "a tensor": (lambda: History(**A, is_complete=torch.tensor([True, False]), batch_size=[2]), [A, CUT]),
    "more dimensions": (lambda: History.from_chats([[[A], []], [[B]]]).extend(NESTED), [[[A, B], []], [[B, B]]]),
}
OWN = History(role="user", content=["a", "b"], batch_size=[2])
NESTED = History.from_chats([[[B], []], [[B]]])


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_of(name):
    """Conversations of all depths and lengths, none included."""
    made, expected = EXAMPLES[name]

    assert made().tolist() == expected


@pytest.fixture
def dense():
    """Two questions as one tree, with names of dimensions and a device."""
    dims = {"names": ["chat", "message"], "device": "cpu"}
    return History(role=[["user"], ["user"]], content=[["a"], ["b"]], batch_size=[2, 1], **dims)


@pytest.fixture
def replies():
    """A reply for each question: a call, and a text."""
    return History(role="assistant", tool_calls=[[CALL], None], content=[None, "b"], batch_size=[2])


def test_dense_histories_stay_dense(dense, replies):
    """One tree stays one tree, with its names and device."""
    longer = dense.append(replies)

    assert type(longer) is History
    assert longer.batch_size == (2, 2)
    assert longer.names == ["chat", "message"]
    assert longer.device == torch.device("cpu")


def test_dense_histories_have_the_messages_of_both_parts(dense, replies):
    """Whether or not fields are in both."""
    longer = dense.append(replies)

    assert longer.flatten().role == ["user", "assistant"] * 2
    assert longer.tolist() == [
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "b"}],
    ]


def test_a_part_of_a_dense_history_is_appended_alone(dense, replies):
    """A slice of the result is the result of slices."""
    assert dense[:1].append(replies[:1]).tolist() == dense.append(replies)[:1].tolist()


def test_dense_histories_are_extended_along_chats(dense):
    """The dimension of messages keeps its size."""
    assert dense.extend(dense, dim=0).batch_size == (4, 1)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([[[1], None], [None, [2, 3]]], [[[1], None], [None, [2, 3]]]),
        ([[1], [2]], [[[[1], [2]]] * 2] * 2),
        ([[[1], [2]], [[3], 4]], [[[[[1], [2]], [[3], 4]]] * 2] * 2),
    ],
)
def test_lists_are_values_of_messages_or_rows(values, read):
    """Of two dimensions: a list of other lengths or depths is one value for all."""
    assert History(role="user", token_ids=values, batch_size=[2, 2]).token_ids == read


def test_a_list_is_one_value_of_one_message():
    """A list of calls, or of ids."""
    assert History(role="assistant", tool_calls=[CALL]).tool_calls == [CALL]
    assert History(role="user", token_ids=[5, 6]).token_ids == [5, 6]


def test_a_list_of_lists_or_none_is_a_value_for_each_message():
    """Each message has its own."""
    rows = History(role=["user", "assistant"], tool_calls=[None, [CALL]], token_ids=[[1], [2, 3]], batch_size=[2])

    assert rows.tool_calls == [None, [CALL]]
    assert rows[1].token_ids == [2, 3]


TEXT, IMAGE = ContentBase(type="text", text="x"), ContentBase(type="image_url", url="u")
PARTS = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        pytest.param(TEXT, PARTS[:1], id="a part"),
        pytest.param(PARTS[0], PARTS[:1], id="a dict"),
        pytest.param([TEXT, IMAGE], PARTS, id="a list"),
        pytest.param(torch.stack([TEXT, TEXT]), PARTS[:1] * 2, id="a stack"),
    ],
)
def test_content_base_becomes_parts(content, kept):
    """Typed parts, alone, in lists and stacked, are kept as OpenAI's dicts."""
    assert History(role="user", content=content).content == kept


def test_content_base_along_a_batch():
    """A text for one message, parts for the other; they come back from dicts."""
    mixed = History(role="user", content=["plain", [TEXT, IMAGE]], batch_size=[2])

    assert mixed.content == ["plain", PARTS]
    assert (History.from_chats(mixed.tolist()) == mixed).all()


def test_parts_of_dicts_are_kept():
    """Of a conversation in OpenAI's form."""
    assert History.from_chats([{"role": "user", "content": PARTS}]).content == [PARTS]


@pytest.mark.parametrize("shape", [(-1,), ([-1],)], ids=["numbers", "a list"])
def test_flattening_gives_all_messages_in_order(shape):
    """Of conversations of different lengths."""
    flat = [message for chat in RAGGED for message in chat]

    assert History.from_chats(RAGGED).reshape(*shape).tolist() == flat


def test_shapes_of_ragged_histories():
    """Other shapes move whole conversations."""
    history = History.from_chats(RAGGED)

    assert history.reshape(2, 1, -1).tolist() == [[RAGGED[0]], [RAGGED[1]]]
    assert history[1].tolist() == RAGGED[1]
    assert history[:, :1].dense().batch_size == torch.Size([2, 1])
    assert [part.tolist() for part in history.unbind(0)] == RAGGED


def test_texts_of_nested_histories_are_parsed():
    """Texts are nested as the conversations are."""
    nested = History.from_text(chatml.render(NESTED), "chatml_format")

    assert nested.tolist() == NESTED.tolist()
    assert nested.batch_size == NESTED.batch_size


PLAIN = History(role="assistant", content="x", tool_calls=[CALL])
SAME = PLAIN.replace(
    token_ids=[1],
    is_complete=False,
    finish_reason="length",
    content=["", {"type": "text", "text": "x"}],
    tool_calls=[{**CALL, "function": {"name": "now", "arguments": {}}}],
)


def called(arguments):
    """The message with a call whose arguments are this text."""
    return PLAIN.replace(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(PLAIN, SAME, id="ids, completeness, reasons and forms do not count"),
        pytest.param(History(role="a"), History(role="a", content=""), id="an empty content is none"),
        pytest.param(called("{"), called("{"), id="arguments that are not JSON"),
        pytest.param(History.from_chats(RAGGED), History.from_chats(RAGGED), id="ragged"),
        pytest.param(PLAIN.expand(2, 1), lazy_stack([SAME.unsqueeze(0)] * 2), id="dense and ragged"),
        pytest.param(lazy_stack([SAME.unsqueeze(0)] * 2), PLAIN.expand(2, 1), id="ragged and dense"),
        pytest.param(SAME.expand(2, 1), lazy_stack([PLAIN.unsqueeze(0)] * 2), id="other forms, dense and ragged"),
        pytest.param(lazy_stack([PLAIN.unsqueeze(0)] * 2), SAME.expand(2, 1), id="other forms, ragged and dense"),
    ],
)
def test_equality_is_of_messages(first, second):
    """Ids, completeness and reasons do not count, nor the form of a content or of arguments."""
    assert (first == second).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(PLAIN, PLAIN.replace(name="n"), id="a name"),
        pytest.param(PLAIN.replace(name="n"), PLAIN, id="no name"),
        pytest.param(called("{"), called("["), id="arguments that are not JSON"),
        pytest.param(
            History.from_chats(RAGGED),
            History.from_chats([RAGGED[0], [{"role": "user", "content": "c"}]]),
            id="one content",
        ),
    ],
)
def test_other_messages_are_unequal(first, second):
    """At least one of the messages."""
    assert not (first == second).all()


def test_a_history_is_not_equal_to_a_text():
    """There is one answer, not one for each message."""
    assert (PLAIN == "x") is False


def test_a_history_is_hashed_by_its_identity():
    """It is in a set once."""
    assert len({PLAIN, PLAIN}) == 1


def with_reply(history):
    """Each conversation with a reply that has calls and ids."""
    reply = History(role="assistant", tool_calls=[CALL], token_ids=[1, 2], is_complete=False)
    return history.append(lazy_stack([reply] * len(history)))


def by_file(history, folder):
    """The history through a file of safetensors."""
    tdf.save(history, folder / "h.safetensors")
    return tdf.load(folder / "h.safetensors")


def by_map(load):
    """The history through a mapped folder, which `load` reads."""

    def back(history, folder):
        history.memmap(folder / "mapped")
        return load(folder / "mapped")

    return back


WAYS = {
    "a file": by_file,
    "a mapped folder": by_map(tdf.load),
    "a mapped folder of its class": by_map(History.load_memmap),
    "pickle": lambda history, _: pickle.loads(pickle.dumps(history)),
    "a copy": lambda history, _: copy.deepcopy(history),
    "JSON": lambda history, _: History.from_chats(json.loads(json.dumps(history.to_chats()))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "history",
    [
        pytest.param(with_reply(History.from_chats(RAGGED)), id="conversations"),
        pytest.param(History.from_chats(RAGGED[0]), id="one conversation"),
        pytest.param(with_reply(History.from_chats([{"messages": RAGGED[0], "tools": TOOLS}])), id="tools"),
    ],
)
def test_round_trips(history, way, tmp_path):
    """Files of every format, pickle and copies give the history back."""
    back = WAYS[way](history, tmp_path)

    assert isinstance(back, History)
    assert back.to_chats() == history.to_chats()
    assert_trees_equal(back, history)


@given(st.lists(messages(), min_size=1, max_size=3))
def test_json_lines(tmp_path_factory, chats):
    """A line a conversation, in the form of data sets of chats; every field comes back."""
    path = tmp_path_factory.mktemp("lines") / "chats.jsonl"
    reply = History(role="assistant", content="x", token_ids=[3], finish_reason="length", is_complete=False)
    history = History.from_chats(chats).append(reply.expand(len(chats)))
    save_jsonl(history, path)

    assert load_jsonl(path).to_chats() == history.to_chats()
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [["messages"]] * len(chats)


@pytest.mark.parametrize(
    ("text", "chats"),
    [
        pytest.param(f"{json.dumps(RAGGED[0])}\n\n{json.dumps({'messages': RAGGED[1]})}\n", RAGGED, id="an empty line"),
        pytest.param("", [], id="an empty file"),
    ],
)
def test_json_lines_reads_lists_and_skips_empty_lines(text, chats, tmp_path):
    """A line may be the list of messages."""
    path = tmp_path / "chats.jsonl"
    path.write_text(text)

    assert load_jsonl(path).tolist() == chats


def test_tools_of_json_lines_stay_when_a_conversation_grows(tmp_path):
    """A conversation without tools beside it has none."""
    path = tmp_path / "chats.jsonl"
    save_jsonl(History.from_chats([{"messages": RAGGED[0], "tools": TOOLS}, {"messages": RAGGED[1]}]), path)

    longer = load_jsonl(path).append(History(**A, batch_size=[2]))

    assert longer.to_chats() == [{"messages": [*RAGGED[0], A], "tools": TOOLS}, [*RAGGED[1], A]]
    assert longer.tolist() == [[*RAGGED[0], A], [*RAGGED[1], A]]


@pytest.mark.parametrize(
    "text",
    ["3", "{}", json.dumps(A), f"[[]]\n{json.dumps(RAGGED)}"],
    ids=["a number", "no messages", "a message", "nested chats"],
)
def test_a_line_that_is_not_a_conversation_is_named(text, tmp_path):
    """By its number."""
    path = tmp_path / "chats.jsonl"
    path.write_text(text)

    with pytest.raises(TypeError, match="conversation 0"):
        load_jsonl(path)


def test_what_is_not_json_is_not_saved(tmp_path):
    """JSON has no NaN."""
    history = History.from_chats([{**A, "content": [{"type": "x", "x": float("nan")}]}])

    with pytest.raises(ValueError, match="JSON compliant"):
        save_jsonl(history, tmp_path / "chats.jsonl")


def test_default_spec():
    """The spec of a history has its fields, and takes histories, ragged ones too."""
    history = History.from_chats(RAGGED)
    spec = history.default_spec()

    assert spec.zero().tolist() == [{"role": "foo", "content": "foo"}]
    assert [spec.is_in(each) for each in (history[0], history, TensorDict({}, [3]))] == [True, False, False]
    assert History.default_spec((2, -1)).is_in(history)
    assert str(spec).startswith(
        "Composite(\n    role: NonTensor(\n        shape=torch.Size([-1]),\n        space=None,"
    )
    assert "example_data=foo)" in str(spec)


def test_padding_is_not_a_message():
    """Padded conversations are the same ones: elements without a role do not count."""
    history = History.from_chats(RAGGED)
    padded = history.pad()

    assert padded.batch_size == (2, 2)
    assert padded.tolist() == RAGGED
    assert chatml.render(padded) == chatml.render(history)
    assert (padded == padded).all()
    assert history.pad(side="left").tolist() == RAGGED
