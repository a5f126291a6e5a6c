"""The HTML of a history: readable, escaped, bounded."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import History
from tests.llm.tokens import messages


class Reader(HTMLParser):
    """Collects tags and text, and checks that tags are closed in order."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.seen, self.text = [], set(), ""
        self.feed(html)
        assert self.tags == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.tags.pop() == tag

    def handle_data(self, data):
        self.text += data


@given(st.lists(messages(), max_size=3), st.sampled_from(["<script>alert(1)</script>", "</div>", '"><img src=x>']))
def test_every_text_is_shown_and_escaped(chats, evil):
    """Whatever the contents, the page has our tags only, and the texts of all messages."""
    chats = [*chats, [{"role": evil, "content": evil, "name": evil, "reasoning_content": evil, "parse_error": evil}]]

    page = Reader(History.from_chats(chats)._repr_html_())

    assert page.seen <= {"style", "div", "details", "summary", "small", "b", "i", "code"}
    assert page.text.count(evil) >= 5
    for chat in chats:
        for message in chat:
            assert (message["content"] or "") in page.text


def test_one_message_and_parts():
    """A message alone, and one of parts; what is large is counted."""
    assert "hi" in Reader(History(role="user", content="hi")._repr_html_()).text
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert "look" in Reader(History(role="user", content=parts)._repr_html_()).text
    long = History.from_chats([[{"role": "user", "content": "x" * 9000}] * 300] * 30)
    page = long._repr_html_()
    assert "10 more conversations" in page
    assert "100 more messages" in page
    assert "(9000 characters)" in page
