"""A report on the chat template of a tokenizer: the properties that training and serving rely on."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

from tdfunc.llm.conversations.exact import TokenTemplate, find_breaks
from tdfunc.llm.encoding.encode import encode_marked, mask_of
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.message import Message
from tdfunc.llm.templates.base import text_tokenizer
from tdfunc.llm.templates.jinja import JinjaTemplate
from tdfunc.llm.templates.markers import ReplySearch

# The value of a check, as in `TemplateCheck`, and its detail.
_Outcome = tuple[bool | None, str]
_MARK = "qzxwv"
_TOOL = {"type": "function", "function": {"name": f"{_MARK}t", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "a" * 9, "type": "function", "function": {"name": f"{_MARK}c", "arguments": {"k": "v"}}}


class TemplateCheck(NamedTuple):
    """A property of a template."""

    name: str
    # False if training or serving may go wrong; None if the template has no such part.
    good: bool | None
    detail: str


@final
@dataclass(frozen=True)
class TemplateReport:
    """The properties of a chat template; it prints as a table."""

    checks: tuple[TemplateCheck, ...]

    def __getitem__(self, name: str) -> TemplateCheck:
        """Return the check of a name."""
        return {each.name: each for each in self.checks}[name]

    def __str__(self) -> str:
        width = max([len(each.name) for each in self.checks])
        marks = {True: "ok", False: "!!", None: "--"}
        lines = [f"{marks[each.good]}  {each.name:{width}}  {each.detail}" for each in self.checks]
        return "\n".join(lines)


def template_report(tokenizer: Any, *, chat_template: str | None = None) -> TemplateReport:
    """Report the treatment of turns, thinking, tools, masks and control strings by a tokenizer's chat template.

    Args:
        tokenizer: A tokenizer of transformers; it is not changed.
        chat_template: A Jinja template to test instead of the tokenizer's own.

    Returns:
        A report with the checks `append-only`, `append-only with thinking`, `append-only with tools`,
        `append-only with system`, `thinking`, `end of turn`, `assistant masks`, `generation tag`, `tools`,
        `tool calls`, `arguments`, `system message`, `control strings`, `bos`, `parsing`.
    """
    template = JinjaTemplate(tokenizer, chat_template, lossy=True)
    tokens = TokenTemplate(tokenizer, template)
    found: list[TemplateCheck] = []
    for name, check in _CHECKS.items():
        try:
            good, detail = check(template, tokens)
        # A template in Jinja may raise any error, which is reported.
        except Exception as err:
            good = False
            detail = f"{type(err).__name__}: {err}".split("\n")[0]
        found.append(TemplateCheck(name, good, detail))
    return TemplateReport(tuple(found))


def _user(text: str = "a") -> Message:
    return {"role": "user", "content": text}


def _reply(text: str = "b", **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def _text(template: JinjaTemplate, *messages: Message, tools: list[Any] | None = None) -> str:
    return template.texts([Conversation(list(messages), tools)])[0]


# -- the checks, each with the value and the detail of its `TemplateCheck` ----------------------------------------


def _appends_only(
    template: JinjaTemplate,
    _: TokenTemplate,
    *,
    system: Sequence[Message] = (),
    tools: list[Any] | None = None,
    **fields: Any,
) -> _Outcome:
    turns = [*system, _user(), _reply(**fields), _user("c"), _reply("d", **fields)]
    if len(find_breaks(template, Conversation(turns, tools))) > 1:
        return False, "earlier turns change when a conversation continues: to_training_rows() keeps each as it was"
    return True, "each turn is a prefix of the next"


def _thinking(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    thought = _reply(reasoning_content=f"{_MARK}r")
    is_in_last = _MARK in _text(template, _user(), thought)
    is_in_earlier = _MARK in _text(template, _user(), thought, _user("c"), _reply("d"))
    if not is_in_last:
        return None, "not rendered"
    if not is_in_earlier:
        return False, "left out of earlier turns"
    return True, "kept"


def _end(_: JinjaTemplate, tokens: TokenTemplate) -> _Outcome:
    end = tokens.template.end
    if not end:
        return False, "no control string ends a reply"
    eos = tokens.text_tokenizer.eos_token
    if len(tokens.end_ids) != 1:
        return False, f"{end!r} is not one token"
    if end != eos:
        return False, f"{end!r}, and the tokenizer's eos_token is {eos!r}"
    return True, f"{end!r}"


def _masks(_: JinjaTemplate, tokens: TokenTemplate) -> _Outcome:
    marked = tokens.marked([_user(_MARK), _reply(_MARK), _user(_MARK), _reply(_MARK)])
    made = encode_marked(tokens.text_tokenizer, marked, tokens.control)
    mask = mask_of(made, marked.replies)
    trained = [token for token, inside in zip(made.ids, mask, strict=True) if inside]
    end = tokens.end_ids
    if len(marked.replies) != 2 or not end or trained[-len(end) :] != end:
        return False, "the end of turn is not in the mask"
    return True, "replies with their end of turn"


def _generation(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    if not template.has_generation:
        return None, "none: replies are found from renders"
    conversation = Conversation([_user(), _reply(), _user("c"), _reply("d")])
    drawn = template.marked(conversation)
    found = ReplySearch(template, False, False).find([conversation], [drawn.text])[0]
    if [span[:2] for span in found] != [span[:2] for span in drawn.replies]:
        return False, f"draws {[drawn.text[start:stop] for start, stop, _ in drawn.replies]}"
    return True, "around replies"


def _tools(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    if _MARK in _text(template, _user(), tools=[_TOOL]):
        return True, "rendered"
    return None, "not rendered"


def _calls(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    result: Message = {"role": "tool", "content": f"{_MARK}result", "tool_call_id": "a" * 9}
    text = _text(template, _user(), _reply("", tool_calls=[_CALL]), result, _reply())
    has_call = f"{_MARK}c" in text
    has_result = f"{_MARK}result" in text
    if has_call and has_result:
        return True, "calls and results"
    if has_call:
        return False, "only calls are rendered"
    if has_result:
        return False, "only results are rendered"
    return None, "not rendered"


def _arguments(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    return True, f"taken as {template.arguments}"


def _system(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    default = _default_system(template)
    if any([each.isalpha() for each in default]):
        return False, f"a default is added: {default[:80]!r}"
    if f"{_MARK}s" not in _text(template, {"role": "system", "content": f"{_MARK}s"}, _user()):
        return False, "dropped"
    return True, "rendered, without a default"


def _default_system(template: JinjaTemplate) -> str:
    """Return the text before the first message of a user, without the header that each message of a user has."""
    first = f"{_MARK}1"
    second = f"{_MARK}2"
    text = _text(template, _user(first), _reply(), _user(second))
    bos = getattr(text_tokenizer(template.tokenizer), "bos_token", None) or ""
    before_first = text[: text.index(first)].removeprefix(bos)
    before_second = text[: text.index(second)]
    # Their common end, by a comparison of the reversed texts.
    header = os.path.commonprefix([before_first[::-1], before_second[::-1]])
    return before_first[: len(before_first) - len(header)].strip()


def _control(_: JinjaTemplate, tokens: TokenTemplate) -> _Outcome:
    forged = "".join(tokens.template.control)
    tokens.encode(tokens.marked([_user(f"a{forged}a"), _reply()]))
    return True, "encoded as ordinary text in contents"


def _bos(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    tokenizer = text_tokenizer(template.tokenizer)
    ids = tokenizer(_text(template, _user()))["input_ids"]
    bos_id = tokenizer.bos_token_id
    if bos_id is not None and ids[:2] == [bos_id, bos_id]:
        return False, "doubled by tokenizer(text): pass add_special_tokens=False"
    return True, "not doubled"


def _parsing(template: JinjaTemplate, _: TokenTemplate) -> _Outcome:
    conversation = Conversation([_user(), _reply()])
    try:
        back = template.parse_chat(template.texts([conversation])[0])
    except ValueError:
        return None, "no template of tdfunc reads it, and it has no fixed texts around turns"
    way = "by its turns"
    if template.alike is not None:
        way = f"as {type(template.alike).__name__}"
    if [each["content"] for each in back.messages] != ["a", "b"]:
        return False, f"another conversation is read {way}"
    return True, way


_CHECKS: "dict[str, Callable[[JinjaTemplate, TokenTemplate], _Outcome]]" = {
    "append-only": _appends_only,
    "append-only with thinking": partial(_appends_only, reasoning_content=f"{_MARK}r"),
    "append-only with tools": partial(_appends_only, tools=[_TOOL]),
    "append-only with system": partial(_appends_only, system=[{"role": "system", "content": "s"}]),
    "thinking": _thinking,
    "end of turn": _end,
    "assistant masks": _masks,
    "generation tag": _generation,
    "tools": _tools,
    "tool calls": _calls,
    "arguments": _arguments,
    "system message": _system,
    "control strings": _control,
    "bos": _bos,
    "parsing": _parsing,
}
