"""A `History` as the messages of its conversations, and back: the form that every method of histories uses.

A conversation is a history of one dimension. Its messages may be in one tree, or a lazy stack with a tree for each.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Size

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.nontensor import NonTensorData, NonTensorStack
from tdfunc.llm.messages.content import as_content
from tdfunc.llm.messages.message import FIELDS, Message, read_tools

_ALWAYS = ("role", "content", "is_complete")


class Conversation(NamedTuple):
    """The messages of one conversation, and the schemas of its tools."""

    messages: list[Message]
    tools: list[Any] | None = None


def column(tree: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the values of a field as an object array of the batch size; None where the field is empty."""
    size = tree._batch_size
    if name not in tree._keys():
        return np.broadcast_to(np.array(None, dtype=object), size)
    array = np.empty(prod(size), dtype=object)
    for i, value in enumerate(_values(tree._get(name), name, size)):
        array[i] = value
    return array.reshape(size)


# Any: a node of a tree.
def _values(node: Any, name: str, size: Size) -> list[Any]:
    """Return the values of a field for all elements of the batch, one after another."""
    if isinstance(node, (NonTensorStack, NonTensorData)):
        values: list[Any] = node._array.ravel().tolist()
        if name == "content" and not {str}.issuperset(map(type, values)):
            values = [as_content(value) for value in values]
        return values
    # A tree of parts, which `set` can put there, or a tensor, such as one of bools.
    parts = [node[at] if at else node for at in np.ndindex(*size)]
    return [as_content(part) if isinstance(part, TensorCollection) else part.tolist() for part in parts]


def rows_of(history: Any) -> list[Message]:
    """Return the fields of each element of a history, padding included."""
    if history._is_lazy:
        return [message for tree in history._trees for message in rows_of(tree)]
    data = history._data
    rows: list[Message] = [{} for _ in range(prod(history._batch_size))]
    for name, node in data.items():
        for row, value in zip(rows, _values(node, name, history._batch_size), strict=True):
            # True is the default.
            if value is not None and not (value is True and name == "is_complete"):
                row[name] = value
    return rows


def messages_of(history: Any) -> list[Message]:
    """Return the messages of a conversation, or the one message of a history without dimensions.

    An element without a role is padding: `pad()` of ragged conversations makes such.
    """
    return [message for message in rows_of(history) if "role" in message]


# Any: a History of one dimension, from a higher layer.
def conversation_in(history: Any) -> Conversation:
    """Return the messages and tools of a history of one dimension (or of one message)."""
    messages = messages_of(history)
    given = tools_of(messages)
    if not given:
        return Conversation(messages)
    # Records were read before: a null is one that was written.
    tools = read_tools(given, "History", is_filled=False)
    return Conversation([_without(message, "tools") for message in messages], tools)


def _without(message: Message, field: str) -> Message:
    return {name: value for name, value in message.items() if name != field}


def without_ids(conversation: Conversation) -> Conversation:
    """Return a conversation whose replies are rendered, not taken from the ids that they were sampled as."""
    messages = conversation.messages
    if not any(["token_ids" in message for message in messages]):
        return conversation
    return conversation._replace(messages=[_without(message, "token_ids") for message in messages])


def conversations_in(histories: Sequence[Any]) -> list[Conversation]:
    """Return the messages and tools of each history."""
    return [conversation_in(history) for history in histories]


def with_replies(histories: Sequence[Any], replies: Sequence[Message]) -> tuple[list[Any], list[Any]]:
    """Return each reply as a history of one message, and the histories with their replies."""
    own: list[Any] = []
    whole: list[Any] = []
    for history, reply in zip(histories, replies, strict=True):
        cls = type(history)
        own.append(conversation_of(cls, [reply]))
        whole.append(conversation_of(cls, [*messages_of(history), reply]))
    return own, whole


def conversation_of(cls: Any, messages: Sequence[Message]) -> Any:
    """Return messages as a history of one dimension, of a class or, for lazy stacks, of the class of their elements."""
    cls = getattr(cls, "_stacked", cls)
    size = Size((len(messages),))
    data: dict[str, Any] = {}
    for name in FIELDS:
        values = [message.get(name) for message in messages]
        if name == "is_complete":
            values = [value is not False for value in values]
        elif name not in _ALWAYS and all([value is None for value in values]):
            continue
        if name == "tools":
            data[name] = NonTensorData(tools_of(messages), size)
        else:
            data[name] = NonTensorStack(*values)
    return cls._make(data, size)


def tools_of(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation, from its last message that has any."""
    found = [message["tools"] for message in messages if message.get("tools")]
    if found:
        return found[-1]
    return None


def per_conversation(fn: Callable[..., Any], history: Any, *others: Any) -> Any:
    """Return the results for each conversation, in lists nested as the dimensions before the messages."""
    if len(history._batch_size) <= 1:
        return fn(history, *others)
    rows = zip(*[each.unbind(0) for each in (history, *others)], strict=True)
    return [per_conversation(fn, *row) for row in rows]


def stack_dense(parts: Sequence[Any]) -> Any:
    """Stack histories of one size; a field that is empty in some is None there."""
    first = parts[0]
    for i, part in enumerate(parts):
        if part._batch_size != first._batch_size:
            raise BatchSizeError(
                f"History: conversations 0 and {i} of one tree have different lengths.",
                expected=str(list(first._batch_size)),
                got=str(list(part._batch_size)),
                hint="use lazy_stack(history.unbind(0)), in which each conversation has its own length.",
            )
    data: dict[str, Any] = {}
    for name in FIELDS:
        if any([name in part._keys() for part in parts]):
            columns = [column(part, name) for part in parts]
            data[name] = NonTensorStack._wrap(np.stack(columns))
    return type(first)._make(data, Size((len(parts), *first._batch_size)))
