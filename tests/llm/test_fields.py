"""A field of a typed tree reads with one nesting, whatever its values are: that of the batch."""

import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc.llm
from tdfunc import TensorClass, lazy_stack
from tdfunc.llm import History, Text
from tests.llm.tokens import messages

POOLS = {str: ["", "a", "b"], bool: [True, False], int: [1, 2], list: [[], [1], [2, 3]], dict: [{}, {"a": 1}]}


def pool_of(hint):
    """Values of a field that is not of tensors or trees, None among them where it may be empty."""
    members = [typing.get_origin(each) or each for each in typing.get_args(hint) or (hint,)]
    found = next((POOLS[each] for each in members if each in POOLS), [])
    return [*found, None] if found and type(None) in members else found


CLASSES = [each for each in vars(tdfunc.llm).values() if isinstance(each, type) and issubclass(each, TensorClass)]
FIELDS = [(cls, name, pool_of(hint)) for cls in CLASSES for name, hint in cls._hints.items() if pool_of(hint)]


def test_all_typed_trees_are_here():
    """Those that have fields of plain values."""
    assert {cls.__name__ for cls, _, _ in FIELDS} == {"ContentBase", "History", "LogProbs", "Masks", "Text", "Tokens"}


@pytest.mark.parametrize(("cls", "name", "pool"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name, _ in FIELDS])
@given(st.data())
def test_a_field_reads_with_one_nesting(cls, name, pool, data):
    """Oracle: nested lists. Of rows, of stacks of rows and of stacks of these; None where all of them are empty."""
    lists = data.draw(st.lists(st.lists(st.sampled_from(pool), min_size=1, max_size=3), min_size=1, max_size=3))
    rest = {field: "text" for field in cls._required if field != name}
    rows = [[cls(**rest, **{name: value}) for value in part] for part in lists]
    stack = lazy_stack([lazy_stack(part) for part in rows])

    def read(tree):
        return getattr(tree, name)

    is_empty = all(value is None for part in lists for value in part)
    assert read(stack) == (None if is_empty else lists)
    for part, values, row in zip(stack.unbind(0), lists, rows, strict=True):
        assert read(part) == (None if all(value is None for value in values) else values)
        assert [read(each) for each in row] == values
        if None not in values:
            dense = torch.stack(row)
            assert read(dense) == values
            assert read(torch.stack([dense, dense])) == read(lazy_stack([dense, dense])) == [values, values]
            assert [read(each) for each in dense.unbind(0)] == values


@given(st.lists(messages(), min_size=1, max_size=3))
def test_fields_of_conversations(chats):
    """Each message has its value, also where all are equal, or only some conversations have any."""
    history = History.from_chats(chats)

    for name in set(history._fields) - {"tools"}:
        default = True if name == "is_complete" else None
        expected = [[message.get(name, default) for message in chat] for chat in chats]
        filled = any(value is not None for chat in expected for value in chat)
        assert getattr(history, name) == (expected if filled else None)
        assert [row.tolist() for row in history.unbind(0)] == history.tolist()


def test_one_value_for_messages_and_for_texts():
    """A history gives it to each message; elsewhere it is one value for the batch. An empty batch has no values."""
    history = History(role="user", content=["a", "b"], batch_size=[2])
    assert history.role == ["user", "user"]
    assert history.is_complete == [True, True]
    assert Text(prompt="a", batch_size=[2]).prompt == "a"
    mixed = lazy_stack([Text(prompt="a", batch_size=[2]), Text(prompt=["b", "c"], batch_size=[2])])
    assert mixed.prompt == [["a", "a"], ["b", "c"]]
    assert Text(prompt=[], batch_size=[0, 3]).batch_size == (0, 3)
    assert Text(prompt=[[], []], batch_size=[2, 0]).prompt == [[], []]
