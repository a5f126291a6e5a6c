"""The HTML of a history: readable, escaped, bounded."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import History
from tests.llm.tokens import messages


def read(page):
    """The tags and the text of a page whose tags are closed in order."""
    root = ElementTree.fromstring(f"<div>{page.replace('<details open>', '<details>')}</div>")
    return {each.tag for each in root.iter()}, "".join(root.itertext())


@given(st.lists(messages(), max_size=3), st.sampled_from(["<script>alert(1)</script>", "</div>", '"><img src=x>']))
def test_every_text_is_shown_and_escaped(chats, evil):
    """Whatever the contents, the page has our tags only, and the texts of all messages."""
    chats = [*chats, [{"role": evil, "content": evil, "name": evil, "reasoning_content": evil, "parse_error": evil}]]

    tags, text = read(History.from_chats(chats)._repr_html_())

    assert tags <= {"style", "div", "details", "summary", "small", "b", "i", "code"}
    assert text.count(evil) >= 5
    contents = [message["content"] or "" for chat in chats for message in chat]
    assert [content for content in contents if content not in text] == []


def test_one_message_and_parts():
    """A message alone, and one of parts, tools and notes; what is too large is counted."""
    assert "hi" in read(History(role="user", content="hi")._repr_html_())[1]
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert "look" in read(History(role="user", content=parts)._repr_html_())[1]
    cut = {"role": "assistant", "content": "", "is_complete": False, "tool_responses": ["found"]}
    cut["tool_calls"] = [{"function": {"name": "now", "arguments": {"zone": "<utc>"}}}]
    page = read(History.from_chats({"messages": [cut], "tools": [{"name": "nöw"}]})._repr_html_())[1]
    assert all(each in page for each in ("1 tools", "nöw", "cut off", "found", 'now({"zone": "<utc>"})'))
    assert "conversation" not in page
    full, long = (
        History.from_chats([[{"role": "user", "content": "x" * length}] * messages] * chats)._repr_html_()
        for length, messages, chats in ((4000, 200, 20), (9000, 300, 30))
    )
    assert not any(each in full for each in (" more ", "characters)"))
    assert all(each in long for each in ("10 more conversations", "19, 300 messages", "100 more messages", "(9000 ch"))
