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


EACH = pytest.mark.parametrize(
    ("cls", "name", "pool"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name, _ in FIELDS]
)


def rows_with(cls, name, lists):
    """Rows of single trees with the values of a field."""
    rest = {field: "text" for field in cls._required if field != name}
    return [[cls(**rest, **{name: value}) for value in part] for part in lists]


def nested(pool):
    """Lists of lists of values."""
    return st.lists(st.lists(st.sampled_from(pool), min_size=1, max_size=3), min_size=1, max_size=3)


@EACH
@given(st.data())
def test_a_field_reads_with_one_nesting(cls, name, pool, data):
    """Oracle: nested lists. Of rows, of stacks of rows and of stacks of these; None where all of them are empty."""
    lists = data.draw(nested(pool))
    rows = rows_with(cls, name, lists)
    stack = lazy_stack([lazy_stack(part) for part in rows])

    assert getattr(stack, name) == (None if all(value is None for part in lists for value in part) else lists)
    read = [getattr(part, name) for part in stack.unbind(0)]
    assert read == [None if all(value is None for value in values) else values for values in lists]
    assert [[getattr(each, name) for each in row] for row in rows] == lists


@EACH
@given(st.data())
def test_a_field_of_dense_stacks_reads_with_one_nesting(cls, name, pool, data):
    """Of stacks of rows without None, of dense and lazy stacks of these, and of their rows."""
    lists = data.draw(nested([value for value in pool if value is not None]))
    stacks = [torch.stack(row) for row in rows_with(cls, name, lists)]

    assert [getattr(each, name) for each in stacks] == lists
    twice = [[values, values] for values in lists]
    assert [getattr(torch.stack([each, each]), name) for each in stacks] == twice
    assert [getattr(lazy_stack([each, each]), name) for each in stacks] == twice
    assert [[getattr(row, name) for row in each.unbind(0)] for each in stacks] == lists


@given(st.lists(messages(), min_size=1, max_size=3))
def test_fields_of_conversations(chats):
    """Each message has its value, also where all are equal, or only some conversations have any."""
    history = History.from_chats(chats)
    names = set(history._fields) - {"tools"}
    defaults = dict.fromkeys(names) | {"is_complete": True}
    values = {name: [[message.get(name, defaults[name]) for message in chat] for chat in chats] for name in names}
    empty = {name for name in names if all(value is None for chat in values[name] for value in chat)}

    assert {name: getattr(history, name) for name in names} == values | dict.fromkeys(empty)
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
