"""`History`: conversations as a typed tree; the last batch dimension counts the messages.

`chat.py` and `templates/` render and encode conversations; this file contains the messages.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Size

from tdfunc._lazystack import lazy_stack
from tdfunc._tensorclass import TensorClass
from tdfunc.core.errors import BatchSizeError, ImmutableError, error
from tdfunc.core.nontensor import NonTensorData, NonTensorStack
from tdfunc.core.shapes import dim_index
from tdfunc.core.types import PerRow
from tdfunc.llm.encoding.chat import apply_template, read_options
from tdfunc.llm.messages.columns import (
    column,
    conversation_of,
    messages_of,
    per_conversation,
    rows_of,
    stack_dense,
    tools_of,
)
from tdfunc.llm.messages.content import ContentBase, as_content
from tdfunc.llm.messages.html import chat_html
from tdfunc.llm.messages.message import (
    FIELDS,
    UNCOMPARED,
    as_compared,
    as_lists,
    is_message,
    messages_entry,
    read_messages,
    read_tools,
    show_message,
    with_system,
)
from tdfunc.llm.templates.base import AbstractTemplate
from tdfunc.llm.templates.find import find_template
from tdfunc.spec import Composite, NonTensor

if TYPE_CHECKING:
    from typing_extensions import Self

# The fields whose values are lists: a list of such lists, or None, is a value for each message.
# The entries of a conversation that are read beside its messages.
_KEPT = ("tools", "system")
_LISTS = ("tool_calls", "tool_responses", "tools", "token_ids")


class History(TensorClass, nocast=True):
    """Conversations: messages along the last batch dimension, conversations along the dimensions before it.

    `History(role="user", content="hi")` is one message. `from_chats` reads conversations. A list of conversations
    becomes a ragged history, in which each conversation has its own length. Every method returns a new history. A field
    is a value for each message, in lists nested as the batch, or None if it is empty. `tools` is one list for each
    conversation.

    `==` compares messages elementwise, without `is_complete`, `token_ids`, `finish_reason` and `parse_error`.

    Args:
        role: "system", "user", "assistant", "tool", ...
        content: Text, a list of OpenAI's parts or `ContentBase`; None for a message that only calls tools.
        is_complete: False for an incomplete message, for example one that reached the maximum length.
        tool_calls: Calls in OpenAI's form; `arguments` are a dict or JSON text.
        tool_responses: Results in the same message as the calls, as in torchrl.
        name: The name of the author, or of the function of a tool message.
        tool_call_id: The call that a tool message answers.
        reasoning_content: The thinking before the content.
        tools: The JSON schemas of the functions of the conversation, the same list at each message.
        finish_reason: "stop" (the end-of-turn token), "stop_string", "length", "tool_calls" or "abort".
        token_ids: The sampled ids of the message, including its end-of-turn token.
        parse_error: The reason for which a reply could not be parsed; its raw text is the content.

    Examples:
        >>> chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "?"}] * 3]
        >>> history = History.from_chats(chats)
        >>> history.batch_size, [len(chat) for chat in history.tolist()]
        (torch.Size([2, -1]), [1, 3])
        >>> reply = History(role="assistant", content=["hello", "!"], batch_size=[2])
        >>> history.append(reply)[0].content
        ['hi', 'hello']
    """

    role: PerRow[str]
    content: PerRow[str | ContentBase] | None = None
    is_complete: PerRow[bool] = True
    # Any: a batch has lists of these lists.
    tool_calls: list[Any] | None = None
    tool_responses: list[Any] | None = None
    name: PerRow[str] | None = None
    tool_call_id: PerRow[str] | None = None
    reasoning_content: PerRow[str] | None = None
    tools: list[Any] | None = None
    finish_reason: PerRow[str] | None = None
    token_ids: list[Any] | None = None
    parse_error: PerRow[str] | None = None

    def __post_init__(self) -> "Self":
        """Distribute lists of values over the messages, and store parts as dicts."""
        size = self._batch_size
        role = self._data.get("role")
        if isinstance(role, NonTensorData) and not isinstance(role.data, str):
            raise error(
                TypeError,
                "History.role is not a text, or a list of texts along the batch.",
                got=f"{role.data!r} with batch size {list(size)}"[:200],
                hint=f"batch_size=[{len(role.data)}] for a list." if isinstance(role.data, list) else None,
            )
        changes: dict[str, Any] = {}
        for name, node in self._data.items():
            stored = _stored(self, name, node)
            if stored is not node:
                changes[name] = stored
        if changes:
            return self._put(changes)
        return self

    # -- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_chats(cls, chats: Any) -> "Self":
        """Return the history of conversations, as OpenAI's servers, data sets and `tolist` write them.

        Args:
            chats: A conversation, or (nested) lists of conversations. A conversation is a list of messages, or a dict
                `{"messages": [...], "tools": [...]}`; a message is a dict with a role. Data sets of ShareGPT,
                `{"conversations": [{"from": "human", "value": ...}, ...]}`, are read as well. Tools and calls may be
                JSON text. Other entries of such a dict are left out with a warning.

        Shapes:
            A conversation of T messages becomes (T,). A list of B conversations becomes (B, -1), even if all have the
            same length.

        Raises:
            TypeError: A message is not a dict with a role; the error names its place.
            MissingKeyError: A message has an entry that is not a field.

        Examples:
            >>> call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            >>> History.from_chats([{"role": "assistant", "tool_calls": [call]}]).content
            [None]
        """
        return _read_chats(cls, as_lists(chats), "from_chats")

    @classmethod
    def from_text(
        cls,
        text: "str | Sequence[Any]",
        chat_template_name: str | None = None,
        chat_template: Any = None,
        tokenizer: Any = None,
    ) -> "Self":
        r"""Return the history of rendered conversations; a (nested) list of texts becomes a ragged history.

        Args:
            text: The text of a complete conversation, as a template renders it.
            chat_template_name: The name of one of `tdfunc.llm.TEMPLATES`.
            chat_template: A template.
            tokenizer: A tokenizer whose own template rendered the text, if no template is given.

        Raises:
            ValueError: The text is not a render of the template, or no template is given or found.

        Examples:
            >>> History.from_text("<|im_start|>user\nhi<|im_end|>\n", "chatml").tolist()
            [{'role': 'user', 'content': 'hi'}]
        """
        template = find_template(chat_template if chat_template_name is None else chat_template_name, tokenizer)
        return _parse_texts(cls, text, template)

    @classmethod
    def default_spec(cls, shape: Any = (-1,)) -> Composite:
        """Return the spec of a history: the fields that every message has.

        Args:
            shape: The batch size; -1 for a dimension of any length.

        Examples:
            >>> History.default_spec().zero().batch_size
            torch.Size([1])
        """
        size = Size(shape)
        cls = getattr(cls, "_stacked", cls)
        names = ("role", "content")
        return Composite({name: NonTensor(size, example_data="foo") for name in names}, size, data_cls=cls)

    # -- messages -----------------------------------------------------------------------------------------------

    def append(self, history: "History | Mapping[str, Any]", *, inplace: bool | None = None, dim: int = -1) -> "Self":
        """Return the history with one more element: a message, or along another dimension a conversation.

        Args:
            history: The element, without the dimension `dim`; or a message as a dict in OpenAI's form.
            inplace: None or False, for code that was written for torchrl.
            dim: The dimension; the last one is the dimension of messages.

        Raises:
            BatchSizeError: The element does not have the other dimensions.
            ImmutableError: `inplace` is true.

        Examples:
            >>> chat = History.from_chats([{"role": "user", "content": "hi"}])
            >>> chat.append(History(role="assistant", content="hello")).role
            ['user', 'assistant']
        """
        if isinstance(history, Mapping):
            history = type(self).from_chats([history])[0]
        n = len(self._batch_size)
        if not n:
            raise BatchSizeError(
                "append: the history has no dimension of messages.", got="one message", hint="unsqueeze(0) first."
            )
        if len(history._batch_size) != n - 1:
            raise BatchSizeError(
                "append: the element does not have one dimension less than the history.",
                expected=f"{n - 1} of the dimensions {list(self._batch_size)}",
                got=f"batch size {list(history._batch_size)}",
                hint="extend() takes several messages.",
            )
        return self.extend(history.unsqueeze(dim_index(dim, n, "append")), inplace=inplace, dim=dim)

    def extend(self, history: "History", *, inplace: bool | None = None, dim: int = -1) -> "Self":
        """Return the history followed by another history, along a dimension.

        Args:
            history: A history with the same number of dimensions.
            inplace: None or False, for code that was written for torchrl.
            dim: The dimension; the last one is the dimension of messages.

        Raises:
            BatchSizeError: The other dimensions differ.
            ImmutableError: `inplace` is true.

        Examples:
            >>> chat = History.from_chats([{"role": "user", "content": "hi"}])
            >>> chat.extend(chat).content
            ['hi', 'hi']
        """
        if inplace:
            raise ImmutableError("A History is immutable.", got="inplace=True", hint="history = history.append(reply).")
        n = len(self._batch_size)
        if n != len(history._batch_size) or not n:
            raise BatchSizeError(
                "extend: the histories differ in the number of dimensions, or have none.",
                expected=f"{n}: {list(self._batch_size)}",
                got=f"{len(history._batch_size)}: {list(history._batch_size)}",
            )
        is_ragged = n > 1 and (self._is_lazy or history._is_lazy)
        joined = _joined(self, history, dim_index(dim, n, "extend"), lazy=is_ragged)
        if self._device is not None:
            joined = joined.to(self._device)
        if self._names is None:
            return joined
        return joined.with_names(self._names)

    def reshape(self, *shape: Any) -> "Self":
        """Return the history in another shape; (-1,) joins ragged conversations to one conversation."""
        sizes: tuple[Any, ...] = shape
        if len(shape) == 1 and not isinstance(shape[0], int):
            sizes = tuple(shape[0])
        if self._is_lazy and sizes in ((-1,), (self.numel(),)):
            return conversation_of(type(self), messages_of(self))
        return super().reshape(*shape)

    # -- as plain values ----------------------------------------------------------------------------------------

    def tolist(self, *, convert_tensors: bool = False) -> Any:
        """Return each message as a dict in OpenAI's form, in lists nested as the batch; empty fields are left out.

        Tools belong to a conversation and not to a message: use `to_chats` to get them.

        Args:
            convert_tensors: An option of other trees without effect here, since a history has no tensors.

        Examples:
            >>> History(role="user", content=["a", "b"], batch_size=[2]).tolist()
            [{'role': 'user', 'content': 'a'}, {'role': 'user', 'content': 'b'}]
        """
        if not self._batch_size:
            return show_message(rows_of(self)[0])
        return per_conversation(lambda h: [show_message(message) for message in messages_of(h)], self)

    def to_chats(self) -> Any:
        """Return the conversations as `from_chats` reads them: lists of messages, or dicts with messages and tools.

        Examples:
            >>> chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "now"}]}
            >>> History.from_chats(chat).to_chats() == chat
            True
        """
        return per_conversation(_to_chat, self)

    def apply_chat_template(
        self,
        *,
        tokenizer: Any = None,
        add_generation_prompt: bool = True,
        chat_template: Any = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the conversations as a model reads them: as text, ids, or a tree with masks.

        The template receives the tools of each conversation. A control string of the tokenizer inside a content (such
        as `<|im_end|>` in a user's text) is encoded as ordinary text. If the result is text, it raises an error.

        Args:
            tokenizer: A tokenizer or processor of transformers; its own template is the default.
            add_generation_prompt: End with the generation prompt.
            chat_template: A template of `tdfunc.llm`, or a Jinja text.
            chat_template_name: The name of one of `tdfunc.llm.TEMPLATES`.
            continue_final_message: Leave the last message open, without a generation prompt.
            tokenize: Return ids; the default is True if `return_tensors` or `return_dict` is set.
            padding: True or "longest", "max_length", or False.
            truncation: Cut rows to `max_length`.
            return_tensors: "pt" for tensors instead of lists of ids.
            return_dict: Return a `TensorDict` with `input_ids` and the bool `attention_mask`.
            return_assistant_tokens_mask: Add `assistant_masks`, True on the tokens of assistant messages, their
                end-of-turn token included; implies `return_dict`.
            **kwargs: `max_length`, `padding_side`, `truncation_side`, `unsafe` (allow control strings in the contents
                of a text), and `tools`, for conversations without their own. Others are variables of the tokenizer's
                template; one that it does not read is an error.

        Returns:
            For one conversation a text, a list or tensor of ids, or a tree without batch. For several conversations a
            list, a padded tensor, or a tree with their batch; without padding the tree is a lazy stack.

        Raises:
            ValueError: An option is unknown, a content has a control string and the result is text, or a mask would be
                empty although there is an assistant message.
            TypeError: Neither a tokenizer nor a template is given.
            UnsupportedError: The template cannot render a message, or leaves out a field; the error names the field.
        """
        if return_tensors not in (None, "pt"):
            raise error(
                ValueError, "apply_chat_template: return_tensors must be None or 'pt'.", got=repr(return_tensors)
            )
        if return_dict is None:
            return_dict = return_assistant_tokens_mask
        if return_assistant_tokens_mask and not return_dict:
            raise error(ValueError, "apply_chat_template: return_dict=False excludes masks, which are in a tree.")
        if tokenize is None:
            tokenize = bool(return_dict or return_tensors)
        given = {
            "generation_prompt": add_generation_prompt and not continue_final_message,
            "open_end": continue_final_message,
            "tokenize": tokenize,
            "tensors": return_tensors == "pt",
            "as_tree": bool(return_dict),
            "masks": return_assistant_tokens_mask,
        }
        tools = read_tools(kwargs.pop("tools", None), "apply_chat_template")
        template = chat_template if chat_template_name is None else chat_template_name
        rest = {**kwargs, "padding": padding, "truncation": truncation}
        options = read_options(template, tokenizer, given, rest)
        return apply_template(self, options, tools)

    def __eq__(self, other: object) -> Any:
        """Compare message by message, without the fields about the origin of a message."""
        if not isinstance(other, History):
            return super().__eq__(other)
        return TensorClass.__eq__(*_aligned(self, other))

    def __hash__(self) -> int:
        return object.__hash__(self)

    def _repr_html_(self) -> str:
        if not self._batch_size:
            return chat_html([[self.tolist()]])
        found: list[Any] = []
        per_conversation(lambda chat: found.append(_to_chat(chat)), self)
        return chat_html(found)


# Any: a node of a tree.
def _stored(history: Any, name: str, node: Any) -> Any:
    """Return the node with which a field is stored: a value for each message, with parts as dicts."""
    size = history._batch_size
    if not isinstance(node, NonTensorData):
        # Contents that have parts; other fields have a value for each message.
        return NonTensorStack._wrap(column(history, name)) if name == "content" else node
    if not size:
        return NonTensorData(as_content(node.data)) if name == "content" else node
    if name in _LISTS and _is_rows(node.data, size):
        return NonTensorStack.from_nested(node.data, len(size))
    # Tools are one list for the conversation.
    if name == "tools":
        return node
    return NonTensorStack._wrap(column(history, name))


def _is_rows(value: Any, size: Sequence[int]) -> bool:
    """Return whether a list holds a list, or None, for each element of the batch."""
    if size:
        return isinstance(value, list) and len(value) == size[0] and all([_is_rows(item, size[1:]) for item in value])
    if value is None:
        return True
    return isinstance(value, list) and not any([isinstance(item, list) for item in value])


def _read_chats(cls: Any, chats: Any, where: str) -> Any:
    if isinstance(chats, Mapping):
        entry = messages_entry(chats)
        messages = None if entry is None else chats[entry]
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise error(TypeError, f"{where}: a conversation has no list of messages.", got=repr(chats)[:200])
        _warn_of_entries({name: value for name, value in chats.items() if name != entry}, where)
        read = with_system(read_messages(messages, where), chats, where)
        tools = read_tools(chats.get("tools"), where)
        if tools:
            read = [{**message, "tools": tools} for message in read]
        return conversation_of(cls, read)
    if not isinstance(chats, Sequence) or isinstance(chats, str):
        raise error(
            TypeError,
            f"{where}: this is not a list of messages, nor of such lists.",
            expected="a list of dicts",
            got=repr(chats)[:200],
        )
    if all([is_message(item) for item in chats]):
        return _read_chats(cls, {"messages": chats}, where)
    return lazy_stack([_read_chats(cls, chat, f"{where}, conversation {i}") for i, chat in enumerate(chats)])


def _warn_of_entries(chat: Mapping[str, Any], where: str) -> None:
    """Warn of entries of a conversation beside its messages that a history does not keep, such as `functions`."""
    others = [name for name, value in chat.items() if name not in _KEPT and value is not None]
    if others:
        # Without the number of the conversation, so that Python shows it once.
        warnings.warn(
            f"{where.partition(',')[0]}: the entries {others} of a conversation are left out, because a History keeps "
            "its messages and tools.",
            stacklevel=2,
        )


def _parse_texts(cls: Any, text: Any, template: AbstractTemplate) -> Any:
    if isinstance(text, str):
        return _read_chats(cls, template.parse_chat(text)._asdict(), "from_text")
    return lazy_stack([_parse_texts(cls, each, template) for each in text])


def _joined(a: Any, b: Any, dim: int, *, lazy: bool) -> Any:
    if len(a._batch_size) == 1:
        return conversation_of(type(a), messages_of(a) + messages_of(b))
    rows = a.unbind(0)
    others = b.unbind(0)
    if not dim:
        rows = [*rows, *others]
    elif len(rows) == len(others):
        rows = [_joined(*pair, dim - 1, lazy=lazy) for pair in zip(rows, others, strict=True)]
    else:
        raise BatchSizeError(
            "extend: the histories differ in the other dimensions.",
            expected=str(list(a._batch_size)),
            got=str(list(b._batch_size)),
        )
    if lazy:
        return lazy_stack(rows)
    return stack_dense(rows)


def _aligned(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two histories with the fields that are compared, which both have."""
    if a._is_lazy or b._is_lazy:
        dim = a._dim if a._is_lazy else b._dim
        if a._batch_size[dim : dim + 1] != b._batch_size[dim : dim + 1]:
            return a, b
        pairs = [_aligned(*pair) for pair in zip(a.unbind(dim), b.unbind(dim), strict=True)]
        return lazy_stack([x for x, _ in pairs], dim), lazy_stack([y for _, y in pairs], dim)
    known = {*a._keys(), *b._keys()}
    names = [name for name in FIELDS if name in known and name not in UNCOMPARED]
    return _with_compared(a, names), _with_compared(b, names)


def _with_compared(history: Any, names: Sequence[str]) -> Any:
    """Return a history with some fields, in the form in which they are compared."""
    rows = [as_compared(message) for message in rows_of(history)]
    size = history._batch_size
    data: dict[str, Any] = {}
    for name in names:
        stack = NonTensorStack(*[row.get(name) for row in rows])
        data[name] = stack.reshape(size)
    return type(history)._make(data, size)


def _to_chat(history: Any) -> Any:
    messages = messages_of(history)
    shown = [show_message(message) for message in messages]
    tools = tools_of(messages)
    if tools:
        return {"messages": shown, "tools": tools}
    return shown


# Templates, which are a lower layer, return their results as histories.
AbstractTemplate._history = History


class ChatHistory(TensorClass, nocast=True):
    """Conversations, one for each element of the batch; the histories have a further dimension of messages.

    Args:
        prompt: The conversations that the model reads.
        response: The replies of the model.
        full: The prompts followed by the replies.

    Examples:
        >>> prompt = History.from_chats([[{"role": "user", "content": "hi"}]])
        >>> reply = History.from_chats([[{"role": "assistant", "content": "hello"}]])
        >>> chats = ChatHistory(prompt=prompt, response=reply, full=prompt.extend(reply), batch_size=[1])
        >>> chats[0].full.content
        ['hi', 'hello']
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None
