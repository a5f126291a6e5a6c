"""The Jinja template of a tokenizer, rendered by transformers.

Jinja returns only text. The places of contents and replies are therefore found from further renders (`markers.py`).
Texts are parsed by the template of `TEMPLATES` that renders the same text, if there is one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from tdfunc.core.errors import brief, error
from tdfunc.core.keys import did_you_mean
from tdfunc.llm.messages.content import text_of, texts_of
from tdfunc.llm.messages.message import Message, read_json
from tdfunc.llm.templates.base import (
    AbstractTemplate,
    Conversation,
    Marked,
    Span,
    find_forged,
    from_tokenizer,
    is_forged,
    skip,
    special_strings,
    text_tokenizer,
    to_json,
)
from tdfunc.llm.templates.fields import Coverage, known_kinds, lost_error
from tdfunc.llm.templates.markers import MARKS, Alignment, ReplySearch, find_contents, has_reply
from tdfunc.llm.templates.named import TEMPLATES
from tdfunc.llm.templates.thinking import closing_tag, continue_thinking
from tdfunc.llm.templates.turns import Turns, learn_turns

# Conversations by which a template of ours is recognised: one that renders all of them alike also parses the rest.
_PROBES = (
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
)
# A value of an argument, or a content.
_SHOWN = "qzxwv"
# The messages before a message of each role.
_BEFORE: dict[str, list[Message]] = {
    "system": [],
    "user": [],
    "assistant": [{"role": "user", "content": "a"}],
    "tool": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}
# A part that was printed as a dict of Python, in small letters.
_PRINTED = re.compile(r"'type': 'text'")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = re.compile(r"\w+")
# Words of Jinja itself, such as "for", are no longer than this.
_SHORT = 4
# Options that are not of the template.
_LAYOUT = ("max_length", "padding_side", "truncation_side", "unsafe")
# Fields that a template may read.
_RENDERED = frozenset(("role", "content", "tool_calls", "tool_responses", "name", "tool_call_id", "reasoning_content"))


@final
@dataclass(frozen=True)
class JinjaTemplate(AbstractTemplate):
    """The template of a tokenizer of transformers, or another Jinja template.

    Args:
        tokenizer: The tokenizer or processor; it is not changed.
        chat_template: A Jinja text, or the name of a template of the tokenizer. The default is the tokenizer's default.
        options: Variables of the template, such as `enable_thinking`.
        lossy: Render messages although the template leaves out some of their fields; otherwise they are refused.

    Raises:
        ValueError: The template has no such variable, so that the option would be ignored.
    """

    tokenizer: Any
    chat_template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lossy: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.options and not renders_itself(self.tokenizer):
            _check_options(self.options, self._all_sources())

    def _all_sources(self) -> str:
        """Return the Jinja texts of which one is rendered: tokenizers may have another one for tools."""
        if not isinstance(self.tokenizer.chat_template, dict):
            return self.source
        # Not `source`: there may be none for conversations without tools.
        named: dict[str, str] = self.tokenizer.chat_template
        return "\n".join([self.chat_template or "", *named.values()])

    @from_tokenizer
    def _own(self) -> Any:
        """The tokenizer of texts: of a processor, its own."""
        return text_tokenizer(self.tokenizer)

    @from_tokenizer
    def source(self) -> str:
        """The Jinja text."""
        return self.tokenizer.get_chat_template(self.chat_template)

    @from_tokenizer
    def control(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The special tokens of the tokenizer."""
        return special_strings(self.tokenizer)

    @from_tokenizer
    def has_generation(self) -> bool:
        """True if the template marks replies with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    @from_tokenizer
    def header(self) -> str:
        """The generation prompt; empty if the template has none."""
        chat = Conversation([{"role": "user", "content": "a"}])
        without = self._texts([chat])[0]
        with_prompt = self._texts([chat], generation_prompt=True)[0]
        if with_prompt.startswith(without):
            return with_prompt[len(without) :]
        return ""

    @from_tokenizer
    def end(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The first control string after a reply; empty if there is none."""
        mark = MARKS[0]
        try:
            chat = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}])
            after = self._texts([chat])[0].rpartition(mark)[2]
        # A template in Jinja may raise any error.
        except Exception:
            after = ""
        places = [after.find(each) for each in self.control if each in after]
        if not places:
            return ""
        first = min(places)
        return max([each for each in self.control if after.startswith(each, first)], key=len)

    @from_tokenizer
    def inner_end(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The control string between a reply and the next turn, if it differs from `end`."""
        if self._turns is None:
            return self.end
        start = next((each for each in self.control if self.header.startswith(each)), None)
        if start is None:
            return self.end
        before = self._turns.to_user.partition(start)[0]
        end = before.strip()
        return end if end in self.control else self.end

    @from_tokenizer
    def arguments(self) -> str:
        """The form of call arguments that the template expects: "dict", "text" (JSON) or "any"."""
        if not self._writes_call({"k": "v"}, "{'k': 'v'}"):
            return "text"
        if not self._writes_call('{"k": "v"}', r"\"k\""):
            return "dict"
        # A template may ignore a dict, and write only text.
        if not self._shows_call({"k": _SHOWN}) and self._shows_call(to_json({"k": _SHOWN})):
            return "text"
        return "any"

    def _writes_call(self, arguments: Any, mistake: str) -> bool:
        text = self._render_call(arguments)
        return text is not None and mistake not in text

    def _shows_call(self, arguments: Any) -> bool:
        text = self._render_call(arguments)
        return text is not None and _SHOWN in text

    def _render_call(self, arguments: Any) -> str | None:
        call = {"type": "function", "id": "a" * 9, "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return self._try_to_render(chat)

    # Any: messages of probes, whose contents may be parts.
    def _try_to_render(self, chat: list[Any]) -> str | None:
        """Return a conversation as text; None if it cannot be rendered."""
        try:
            return self._render([chat], None)[0]
        # A template in Jinja may raise any error.
        except Exception:
            return None

    @from_tokenizer
    def _text_roles(self) -> frozenset[str]:
        """The roles whose contents must be text: of a list of parts, Jinja would print the dicts, or it fails."""
        return frozenset([role for role in _BEFORE if self._needs_text(role)])

    def _needs_text(self, role: str) -> bool:
        text = self._render_content(role, _SHOWN)
        if text is None or _SHOWN not in text:
            return False
        of_parts = self._render_content(role, [{"type": "text", "text": _SHOWN}])
        return of_parts is None or _PRINTED.search(of_parts) is not None

    # Any: a text, or parts.
    def _render_content(self, role: str, content: Any) -> str | None:
        """Return a conversation with a content, in small letters; None if it cannot be rendered."""
        chat = [*_BEFORE[role], {"role": role, "content": content}]
        if role == "system":
            chat.append({"role": "user", "content": "a"})
        text = self._try_to_render(chat)
        if text is None:
            return None
        return text.lower()

    @from_tokenizer
    def alike(self) -> AbstractTemplate | None:
        """The template of `TEMPLATES` that renders probes like this one, else one that parses them, else None."""
        texts = self._probe_texts
        if all([text is None for text in texts]):
            return None
        pairs = list(zip(_PROBES, texts, strict=True))
        for fits in (self._renders_alike, self._reads):
            for template in TEMPLATES.values():
                if all([text is None or fits(template, probe, text) for probe, text in pairs]):
                    return template
        return None

    @from_tokenizer
    def _probe_texts(self) -> list[str | None]:
        found: list[str | None] = []
        for probe in _PROBES:
            try:
                found.append(self._without_bos(self._render([probe], None)[0]))
            # A template in Jinja may raise any error.
            except Exception:
                found.append(None)
        return found

    def _without_bos(self, text: str) -> str:
        return text.removeprefix(getattr(self._own, "bos_token", None) or "")

    def _renders_alike(self, template: AbstractTemplate, probe: list[Message], text: str) -> bool:
        return self._without_bos(template.texts([Conversation(probe)])[0]) == text

    def _reads(self, template: AbstractTemplate, probe: list[Message], text: str) -> bool:
        try:
            messages = template.parse_chat(text).messages
        except ValueError:
            return False
        # A default system message may come first.
        before = [each["role"] for each in messages[: -len(probe)]]
        return messages[-len(probe) :] == probe and before in ([], ["system"])

    @from_tokenizer
    def _turns(self) -> Turns | None:
        def render(chat: list[Message], header: bool) -> str:
            return self._without_bos(self._render([chat], None, add_generation_prompt=header)[0])

        return learn_turns(render)

    def _render(self, chats: list[list[Message]], tools: list[Any] | None, **options: Any) -> list[str]:
        if not renders_itself(self.tokenizer):
            return self._render_jinja(chats, tools, **options)[0]
        return self.tokenizer.apply_chat_template(
            chats, tools=tools, chat_template=self.chat_template, tokenize=False, **{**self.options, **options}
        )

    def _render_jinja(self, chats: list[list[Message]], tools: list[Any] | None, **options: Any) -> Any:
        """Return texts, and for each the characters of `{% generation %}`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template(
            conversations=chats,
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(self.chat_template, tools),
            **{**self._own.special_tokens_map, **self.options, **options},
        )

    def _as_dicts(self, conversations: Sequence[Conversation]) -> list[list[Message]]:
        chats = [each.messages for each in conversations]
        messages = [message for chat in chats for message in chat]
        names = set[str]().union(*messages)
        has_parts = any([isinstance(message.get("content"), list) for message in messages])
        if names <= _RENDERED and "tool_calls" not in names and not has_parts:
            return chats
        found: list[list[Message]] = []
        for chat in chats:
            found.append([self._as_dict(i, message) for i, message in enumerate(chat)])
        return found

    def _as_dict(self, i: int, message: Message) -> Message:
        """Return the fields of a message that a template may read, in the form that it expects; `i` is its place."""
        shown = {name: value for name, value in message.items() if name in _RENDERED}
        if isinstance(shown.get("content"), list) and self._role_of_probe(message) in self._text_roles:
            shown["content"] = self._as_text(i, message)
        if shown.get("tool_calls"):
            shown["tool_calls"] = [self._as_call(call) for call in shown["tool_calls"]]
        return shown

    def _role_of_probe(self, message: Message) -> str:
        """Return the role of a message, or "user" for a role that was not tried."""
        role = message["role"]
        return role if role in _BEFORE else "user"

    def _as_text(self, i: int, message: Message) -> str:
        """Return the parts of a content as one text.

        Raises:
            UnsupportedError: A part, such as an image, has no text.
        """
        text = text_of(message["content"])
        if text is not None:
            return text
        if not self.lossy:
            raise lost_error(i, message, "content")
        return "".join([each for each in texts_of(message["content"]) if isinstance(each, str)])

    def _as_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments == "dict":
            arguments = read_json(arguments)
        elif self.arguments == "text" and not isinstance(arguments, str):
            arguments = to_json(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def texts(  # noqa: D102 - as the interface
        self, conversations: Sequence[Conversation], *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[str]:
        self._check_fields(conversations, is_prompt=generation_prompt)
        return self._texts(conversations, generation_prompt=generation_prompt, open_end=open_end)

    def _check_fields(self, conversations: Sequence[Conversation], *, is_prompt: bool) -> None:
        if not self.lossy:
            self._coverage.check(conversations, is_prompt=is_prompt)

    @from_tokenizer
    def _coverage(self) -> Coverage:
        def render(conversation: Conversation) -> str:
            return self._texts([conversation])[0]

        # The text that a tokenizer renders itself may depend on anything in it.
        if renders_itself(self.tokenizer):
            return Coverage(render, set())
        sources = self.chat_template, self.tokenizer.chat_template, sorted(self.options.items())
        return Coverage(render, known_kinds(repr(sources)))

    def _texts(
        self, conversations: Sequence[Conversation], *, generation_prompt: bool = False, open_end: bool = False
    ) -> list[str]:
        """Return the texts of conversations, without a check of their fields."""
        options = {"add_generation_prompt": generation_prompt, "continue_final_message": open_end}
        chats = self._as_dicts(conversations)
        if not chats:
            return []
        if not any([each.tools for each in conversations]):
            return self._render(chats, None, **options)
        return [self._render([chat], each.tools, **options)[0] for chat, each in zip(chats, conversations, strict=True)]

    def marked_all(  # noqa: D102 - as the interface
        self,
        conversations: Sequence[Conversation],
        *,
        generation_prompt: bool = False,
        open_end: bool = False,
        replies: bool = True,
    ) -> list[Marked]:
        self._check_fields(conversations, is_prompt=generation_prompt)

        def render_all(chats: Sequence[Conversation]) -> list[str]:
            return self._texts(chats, generation_prompt=generation_prompt, open_end=open_end)

        texts = render_all(conversations)
        # By the place of the conversation.
        contents_of: dict[int, list[Span]] = {}
        replies_of: dict[int, list[Span]] = {}
        forged = find_forged(conversations, self.control)
        if forged:
            alignments = [Alignment(conversations[i], self.control, everything=True) for i in forged]
            marked = render_all([alignment.marked for alignment in alignments])
            for i, alignment, other in zip(forged, alignments, marked, strict=True):
                contents_of[i] = find_contents(texts[i], other, alignment)
        if replies:
            asked = [i for i, each in enumerate(conversations) if has_reply(each)]
            if self.has_generation:
                found = [self._drawn(conversations[i], texts[i], generation_prompt, open_end) for i in asked]
            else:
                search = ReplySearch(self, generation_prompt, open_end)
                found = search.find([conversations[i] for i in asked], [texts[i] for i in asked])
            replies_of = dict(zip(asked, found, strict=True))
        return [Marked(text, contents_of.get(i, []), replies_of.get(i, [])) for i, text in enumerate(texts)]

    def _drawn(self, conversation: Conversation, text: str, prompt: bool, open_end: bool) -> list[Span]:
        """Return the spans that the template marks with `{% generation %}`, each with its end of turn."""
        texts, indices = self._render_jinja(
            self._as_dicts([conversation]),
            conversation.tools or None,
            return_assistant_tokens_mask=True,
            add_generation_prompt=prompt,
            continue_final_message=open_end,
        )
        if texts[0] != text:
            raise error(
                ValueError,
                "apply_chat_template: {% generation %} changes the render, which it may only mark.",
                expected=repr(text[:200]),
                got=repr(texts[0][:200]),
            )
        spans: list[Span] = []
        for start, stop in indices[0]:
            ended = max(skip(text, stop, self.end), skip(text, stop, self.inner_end))
            if ended > start:
                spans.append(Span(start, ended))
        return spans

    def parse_chat(self, text: str) -> Conversation:  # noqa: D102 - as the interface
        text = self._without_bos(text)
        if self.alike is not None:
            return self._parse_chat_alike(self.alike, text)
        if self._turns is not None:
            for messages in self._turns.readings(text):
                found = Conversation(messages)
                if not is_forged(found, self.control) and self._gives(found, text):
                    return found
        raise error(
            ValueError,
            "parse: no template reads this text, and it has no turns of this tokenizer's template.",
            expected=f"a text of one of {list(TEMPLATES)}, or contents of users and assistants in turn",
            got=repr(text[:200]),
            hint="keep the messages and use from_chats, or pass your own chat_template=.",
        )

    def _parse_chat_alike(self, alike: AbstractTemplate, text: str) -> Conversation:
        found = alike.parse_chat(text)
        if found.messages and found.messages[0]["role"] == "system":
            rest = found._replace(messages=found.messages[1:])
            # A default system message is not part of the conversation: the template writes it by itself.
            if self._gives(rest, text):
                return rest
        return found

    def _gives(self, conversation: Conversation, text: str) -> bool:
        """Return whether this template renders a text, whose end may be missing."""
        for prompt in (False, True):
            try:
                made = self._texts([conversation], generation_prompt=prompt)[0]
            # A template in Jinja may raise any error.
            except Exception:
                return False
            if self._without_bos(made).startswith(text.rstrip()):
                return True
        return False

    def parse_reply(self, text: str) -> Message:  # noqa: D102 - as the interface
        if self._closing is None:
            return self._parse_reply_alike(text)
        return continue_thinking(text, self._closing, self._parse_reply_alike)

    def _parse_reply_alike(self, text: str) -> Message:
        if self.alike is None:
            return {"role": "assistant", "content": text}
        return self.alike.parse_reply(text)

    @from_tokenizer
    def _closing(self) -> str | None:
        """The tag that ends the thinking which the generation prompt opens, if it does."""
        chat = Conversation([{"role": "user", "content": "a"}])
        # A template in Jinja may raise any error.
        try:
            return closing_tag(self._texts([chat], generation_prompt=True)[0])
        except Exception:
            return None


# Any: a value of a variable.
def _check_options(options: Mapping[str, Any], source: str) -> None:
    """Raise if a Jinja text does not have the name of an option: Jinja ignores a variable that is not read."""
    words = set(_WORD.findall(source))
    for name, value in options.items():
        if name in words:
            continue
        hint = did_you_mean(name, sorted({*_LAYOUT, *[word for word in words if len(word) > _SHORT]}))
        if isinstance(value, Mapping):
            hint = f"pass its entries one by one: **{name}."
        raise error(
            ValueError,
            f"apply_chat_template: {name!r} is not an option, and the chat template has no such variable.",
            got=f"{name}={brief(value)}",
            hint=hint or "leave it out, because the template would ignore it.",
        )


# Any: transformers is optional.
def renders_itself(tokenizer: Any) -> bool:
    """Return whether this is a processor, or a tokenizer that renders in another way than transformers' own do."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
