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
    """Dicts come back as they were, arguments in the form in which they came; a list of chats is always ragged."""
    history = History.from_chats(chats)

    if chats:
        assert [isinstance(history, each) for each in (History, LazyStack)] == [True, True]
    assert history.tolist() == [drop_empty(chat) for chat in chats]
    assert (History.from_chats(history.to_chats()) == history).all()


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


def test_dense_histories_stay_dense():
    """One tree stays one tree, with its names and device, whether or not fields are in both parts."""
    dims = {"names": ["chat", "message"], "device": "cpu"}
    history = History(role=[["user"], ["user"]], content=[["a"], ["b"]], batch_size=[2, 1], **dims)
    replies = History(role="assistant", tool_calls=[[CALL], None], content=[None, "b"], batch_size=[2])

    longer = history.append(replies)

    assert type(longer) is History
    assert longer.batch_size == (2, 2)
    assert longer.flatten().role == ["user", "assistant"] * 2
    assert history.extend(history, dim=0).batch_size == (4, 1)
    assert history[:1].append(replies[:1]).tolist() == longer[:1].tolist()
    assert longer.tolist()[0][1] == {"role": "assistant", "tool_calls": [CALL]}
    assert longer.tolist()[1] == [{"role": "user", "content": "b"}, {"role": "assistant", "content": "b"}]
    assert longer.names == ["chat", "message"]
    assert longer.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([[[1], None], [None, [2, 3]]], [[[1], None], [None, [2, 3]]]),
        ([[1], [2]], [[[[1], [2]]] * 2] * 2),
        ([[[1], [2]], [[3], 4]], [[[[[1], [2]], [[3], 4]]] * 2] * 2),
    ],
)
def test_lists_are_values_of_messages_or_rows(values, read):
    """A list of lists (or None) is a value for each message; a list of calls is one value."""
    assert History(role="assistant", tool_calls=[CALL]).tool_calls == [CALL]
    rows = History(role=["user", "assistant"], tool_calls=[None, [CALL]], token_ids=[[1], [2, 3]], batch_size=[2])
    assert rows.tool_calls == [None, [CALL]]
    assert rows[1].token_ids == [2, 3]
    assert History(role="user", token_ids=[5, 6]).token_ids == [5, 6]
    # Of two dimensions, against one value for all: a list of other lengths or depths.
    assert History(role="user", token_ids=values, batch_size=[2, 2]).token_ids == read


def test_content_base_becomes_parts():
    """Typed parts, alone, in lists and along a batch, are kept as OpenAI's dicts."""
    text, image = ContentBase(type="text", text="x"), ContentBase(type="image_url", url="u")
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]

    assert History(role="user", content=text).content == History(role="user", content=parts[0]).content == parts[:1]
    assert History(role="user", content=[text, image]).content == parts
    assert History(role="user", content=torch.stack([text, text])).content == parts[:1] * 2
    mixed = History(role="user", content=["plain", [text, image]], batch_size=[2])
    assert mixed.content == ["plain", parts]
    assert History.from_chats([{"role": "user", "content": parts}]).content == [parts]
    assert (History.from_chats(mixed.tolist()) == mixed).all()


def test_shapes_of_ragged_histories():
    """Flattening gives all messages in order; other shapes move conversations."""
    history = History.from_chats(RAGGED)

    flat = [message for chat in RAGGED for message in chat]
    assert history.reshape(-1).tolist() == history.reshape([-1]).tolist() == flat
    assert history.reshape(2, 1, -1).tolist() == [[RAGGED[0]], [RAGGED[1]]]
    assert history[1].tolist() == RAGGED[1]
    assert history[:, :1].dense().batch_size == torch.Size([2, 1])
    assert [part.tolist() for part in history.unbind(0)] == RAGGED
    nested = History.from_text(chatml.render(NESTED), "chatml_format")
    assert nested.tolist() == NESTED.tolist()
    assert nested.batch_size == NESTED.batch_size


def test_equality_is_of_messages():
    """Ids, completeness and reasons do not count, nor the form of a content or of arguments."""
    plain = History(role="assistant", content="x", tool_calls=[CALL])
    other = plain.replace(token_ids=[1], is_complete=False, finish_reason="length")
    other = other.replace(content=["", {"type": "text", "text": "x"}])
    other = other.replace(tool_calls=[{**CALL, "function": {"name": "now", "arguments": {}}}])

    assert (plain == other).all()
    assert (History(role="a") == History(role="a", content="")).all()
    named = plain.replace(name="n")
    assert not any([(plain == named).all(), (named == plain).all()])
    first, same, last = (plain.replace(tool_calls=[{"function": {"name": "f", "arguments": text}}]) for text in "{{[")
    assert [(first == each).all() for each in (same, last)] == [True, False]
    assert (History.from_chats(RAGGED) == History.from_chats(RAGGED)).all()
    assert not (History.from_chats(RAGGED) == History.from_chats([RAGGED[0], [{"role": "user", "content": "c"}]])).all()
    assert (plain == "x") is False
    for a, b in ((plain, other), (other, plain)):
        dense, ragged = a.expand(2, 1), lazy_stack([b.unsqueeze(0)] * 2)
        assert all([(dense == ragged).all(), (ragged == dense).all()])
    assert len({plain, plain}) == 1


@pytest.mark.parametrize("chats", [RAGGED, RAGGED[0], [{"messages": RAGGED[0], "tools": TOOLS}]])
def test_round_trips(chats, tmp_path):
    """Files of every format, pickle and copies give the history back."""
    history = History.from_chats(chats)
    if history.batch_dims > 1:
        reply = History(role="assistant", tool_calls=[CALL], token_ids=[1, 2], is_complete=False)
        history = history.append(lazy_stack([reply] * len(chats)))

    tdf.save(history, tmp_path / "h.safetensors")
    history.memmap(tmp_path / "mapped")

    for back in (
        tdf.load(tmp_path / "h.safetensors"),
        tdf.load(tmp_path / "mapped"),
        History.load_memmap(tmp_path / "mapped"),
        pickle.loads(pickle.dumps(history)),
        copy.deepcopy(history),
        History.from_chats(json.loads(json.dumps(history.to_chats()))),
    ):
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


def test_json_lines_reads_lists_and_skips_empty_lines(tmp_path):
    """A line may be the list of messages, or have the tools of the conversation, which stay when it grows."""
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(RAGGED[0])}\n\n{json.dumps({'messages': RAGGED[1]})}\n")

    assert load_jsonl(path).tolist() == RAGGED
    path.write_text("")
    assert load_jsonl(path).tolist() == []
    save_jsonl(History.from_chats([{"messages": RAGGED[0], "tools": TOOLS}, {"messages": RAGGED[1]}]), path)
    longer = load_jsonl(path).append(History(**A, batch_size=[2]))
    assert longer.to_chats() == [{"messages": [*RAGGED[0], A], "tools": TOOLS}, [*RAGGED[1], A]]
    assert longer.tolist() == [[*RAGGED[0], A], [*RAGGED[1], A]]
    for text in ("3", "{}", json.dumps(A), f"[[]]\n{json.dumps(RAGGED)}"):
        path.write_text(text)
        with pytest.raises(TypeError, match="conversation 0"):
            load_jsonl(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_jsonl(History.from_chats([{**A, "content": [{"type": "x", "x": float("nan")}]}]), path)


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
