"""A report on the chat template of a tokenizer: the properties that training and serving rely on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from tdfunc.llm.conversations.exact import TokenTemplate, find_breaks
from tdfunc.llm.encoding.encode import encode_marked, mask_of
from tdfunc.llm.messages.columns import Conversation
from tdfunc.llm.messages.message import Message
from tdfunc.llm.templates.base import text_tokenizer
from tdfunc.llm.templates.jinja import JinjaTemplate
from tdfunc.llm.templates.markers import ReplySearch

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
        return "\n".join([f"{marks[each.good]}  {each.name:{width}}  {each.detail}" for each in self.checks])


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
    tests: dict[str, Callable[[], tuple[bool | None, str]]] = {
        "append-only": lambda: _appends_only(template),
        "append-only with thinking": lambda: _appends_only(template, reasoning_content=f"{_MARK}r"),
        "append-only with tools": lambda: _appends_only(template, tools=[_TOOL]),
        "append-only with system": lambda: _appends_only(template, {"role": "system", "content": "s"}),
        "thinking": lambda: _thinking(template),
        "end of turn": lambda: _end(tokens),
        "assistant masks": lambda: _masks(tokens),
        "generation tag": lambda: _generation(template),
        "tools": lambda: _tools(template),
        "tool calls": lambda: _calls(template),
        "arguments": lambda: (True, f"taken as {template.arguments}"),
        "system message": lambda: _system(template),
        "control strings": lambda: _control(tokens),
        "bos": lambda: _bos(template),
        "parsing": lambda: _parsing(template),
    }
    found: list[TemplateCheck] = []
    for name, check in tests.items():
        try:
            good, detail = check()
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


def _appends_only(
    template: JinjaTemplate, *first: Message, tools: list[Any] | None = None, **fields: Any
) -> tuple[bool, str]:
    turns = [*first, _user(), _reply(**fields), _user("c"), _reply("d", **fields)]
    if len(find_breaks(template, Conversation(turns, tools))) > 1:
        return False, "earlier turns change when a conversation continues: to_training_rows() keeps each as it was"
    return True, "each turn is a prefix of the next"


def _thinking(template: JinjaTemplate) -> tuple[bool | None, str]:
    thought = {"reasoning_content": f"{_MARK}r"}
    last = _MARK in _text(template, _user(), _reply(**thought))
    earlier = _MARK in _text(template, _user(), _reply(**thought), _user("c"), _reply("d"))
    if not last:
        return None, "not rendered"
    return earlier, "kept" if earlier else "left out of earlier turns"


def _end(tokens: TokenTemplate) -> tuple[bool, str]:
    end = tokens.template.end
    if not end:
        return False, "no control string ends a reply"
    eos = tokens.text_tokenizer.eos_token
    if len(tokens.end_ids) != 1:
        return False, f"{end!r} is not one token"
    return end == eos, f"{end!r}" if end == eos else f"{end!r}, and the tokenizer's eos_token is {eos!r}"


def _masks(tokens: TokenTemplate) -> tuple[bool, str]:
    marked = tokens.marked([_user(_MARK), _reply(_MARK), _user(_MARK), _reply(_MARK)])
    made = encode_marked(tokens.text_tokenizer, marked, tokens.control)
    mask = mask_of(made, marked.replies)
    trained = [token for token, inside in zip(made.ids, mask, strict=True) if inside]
    n = len(tokens.end_ids)
    if len(marked.replies) != 2 or not n or trained[-n:] != tokens.end_ids:
        return False, "the end of turn is not in the mask"
    return True, "replies with their end of turn"


def _generation(template: JinjaTemplate) -> tuple[bool | None, str]:
    if not template.has_generation:
        return None, "none: replies are found from renders"
    conversation = Conversation([_user(), _reply(), _user("c"), _reply("d")])
    drawn = template.marked(conversation)
    found = ReplySearch(template, False, False).find([conversation], [drawn.text])[0]
    same = [span[:2] for span in found] == [span[:2] for span in drawn.replies]
    return same, "around replies" if same else f"draws {[drawn.text[a:b] for a, b, _ in drawn.replies]}"


def _tools(template: JinjaTemplate) -> tuple[bool | None, str]:
    if _MARK in _text(template, _user(), tools=[_TOOL]):
        return (True, "rendered")
    return (None, "not rendered")


def _calls(template: JinjaTemplate) -> tuple[bool | None, str]:
    result: Message = {"role": "tool", "content": f"{_MARK}result", "tool_call_id": "a" * 9}
    text = _text(template, _user(), _reply("", tool_calls=[_CALL]), result, _reply())
    found = [f"{_MARK}c" in text, f"{_MARK}result" in text]
    if not any(found):
        return None, "not rendered"
    return all(found), "calls and results" if all(found) else f"only {'calls' if found[0] else 'results'} are rendered"


def _system(template: JinjaTemplate) -> tuple[bool, str]:
    first = f"{_MARK}1"
    second = f"{_MARK}2"
    text = _text(template, _user(first), _reply(), _user(second))
    bos = getattr(text_tokenizer(template.tokenizer), "bos_token", None) or ""
    lead = text[: text.index(first)].removeprefix(bos)
    # The header of the user's turn is before both messages.
    same = 0
    between = text[: text.index(second)]
    while same < min(len(lead), len(between)) and lead[-1 - same] == between[-1 - same]:
        same += 1
    default = lead[: len(lead) - same].strip()
    if any([each.isalpha() for each in default]):
        return False, f"a default is added: {default[:80]!r}"
    given = f"{_MARK}s" in _text(template, {"role": "system", "content": f"{_MARK}s"}, _user())
    return given, "rendered, without a default" if given else "dropped"


def _control(tokens: TokenTemplate) -> tuple[bool, str]:
    forged = "".join(tokens.template.control)
    tokens.encode(tokens.marked([_user(f"a{forged}a"), _reply()]))
    return True, "encoded as ordinary text in contents"


def _bos(template: JinjaTemplate) -> tuple[bool, str]:
    tokenizer = text_tokenizer(template.tokenizer)
    ids = tokenizer(_text(template, _user()))["input_ids"]
    doubled = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return not doubled, "doubled by tokenizer(text): pass add_special_tokens=False" if doubled else "not doubled"


def _parsing(template: JinjaTemplate) -> tuple[bool | None, str]:
    conversation = Conversation([_user(), _reply()])
    try:
        back = template.parse_chat(template.texts([conversation])[0])
    except ValueError:
        return None, "no template of tdfunc reads it, and it has no fixed texts around turns"
    way = "by its turns"
    if template.alike is not None:
        way = f"as {type(template.alike).__name__}"
    same = [each["content"] for each in back.messages] == ["a", "b"]
    return same, way if same else f"another conversation is read {way}"
