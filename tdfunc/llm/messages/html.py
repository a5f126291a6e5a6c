"""The HTML of conversations in a notebook: a readable chat, without scripts; every text is escaped."""

import json
from html import escape
from typing import Any

# Conversations, messages of one, and characters of a text that are shown.
CHATS = 20
MESSAGES = 200
CHARACTERS = 4000

_STYLE = (
    "<style>"
    "@{font-size:13px;line-height:1.45;max-width:60em}@ details{margin:.3em 0}@ summary{cursor:pointer}"
    "@ .tdf-msg{margin:.35em 0;padding:.3em .7em;border-left:3px solid rgba(128,128,128,.4);white-space:pre-wrap;"
    "overflow-wrap:anywhere}"
    "@ .tdf-user{border-color:#3b82f6}@ .tdf-assistant{border-color:#16a34a}@ .tdf-tool{border-color:#d97706}"
    "@ .tdf-system{border-color:#9333ea}@ small{opacity:.65}@ i{opacity:.75}"
    "@ code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;background:none}"
    "</style>"
).replace("@", ".tdf-chat")


def chat_html(chats: list[Any]) -> str:
    """Return the HTML of a list of conversations, each in the form of `History.to_chats`."""
    body = [_chat(chat, i, len(chats)) for i, chat in enumerate(chats[:CHATS])]
    if len(chats) > CHATS:
        body.append(f"<small>{len(chats) - CHATS} more conversations</small>")
    return f'{_STYLE}<div class="tdf-chat">{"".join(body)}</div>'


def _chat(chat: Any, i: int, count: int) -> str:
    messages: list[dict[str, Any]] = chat["messages"] if isinstance(chat, dict) else chat
    tools: list[Any] | None = chat.get("tools") if isinstance(chat, dict) else None
    body = "".join([_message(message) for message in messages[:MESSAGES]])
    if len(messages) > MESSAGES:
        body += f"<small>{len(messages) - MESSAGES} more messages</small>"
    if tools:
        body = f"<details><summary><small>{len(tools)} tools</small></summary>{_code(tools)}</details>{body}"
    if count == 1:
        return body
    return f"<details open><summary>conversation {i}, {len(messages)} messages</summary>{body}</details>"


def _message(message: dict[str, Any]) -> str:
    role = str(message.get("role"))
    style = role if role in ("system", "user", "assistant", "tool") else "other"
    return f'<div class="tdf-msg tdf-{style}">{_head(role, message)}\n{_body(message)}</div>'


def _head(role: str, message: dict[str, Any]) -> str:
    notes = [str(message[key]) for key in ("name", "tool_call_id", "finish_reason") if message.get(key)]
    if message.get("is_complete") is False:
        notes.append("cut off")
    shown = [f" <small>{escape(note)}</small>" for note in notes]
    return f"<b>{escape(role)}</b>{''.join(shown)}"


def _body(message: dict[str, Any]) -> str:
    parts: list[str] = []
    if message.get("reasoning_content"):
        parts.append(f"<i>{_text(message['reasoning_content'])}</i>\n")
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        parts.append(_text(text) if isinstance(text, str) else _code(part))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"\n<code>{escape(str(function['name']))}({_text(_json(function['arguments']))})</code>")
    if message.get("tool_responses"):
        parts.append(_code(message["tool_responses"]))
    if message.get("parse_error"):
        parts.append(f"\n<small>not parsed: {_text(message['parse_error'])}</small>")
    return "".join(parts)


def _text(value: Any) -> str:
    text = str(value)
    if len(text) > CHARACTERS:
        text = f"{text[:CHARACTERS]}... ({len(text)} characters)"
    return escape(text)


def _code(value: Any) -> str:
    if value is None:
        return ""
    return f"<code>{_text(_json(value))}</code>"


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=repr)
