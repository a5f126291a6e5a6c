"""The places of contents in a text: the first alignment, found without trying all of them."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import JinjaTemplate
from tdfunc.llm.templates.base import Conversation
from tdfunc.llm.templates.markers import _align
from tests.llm.tokens import make_tokenizer

WORDS = st.text("ab\n", max_size=2)
# It edits replies that are one text, and leaves parts as they are.
EDITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | upper }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


@st.composite
def puzzles(draw):
    """A text, the texts between its places, and what may be in each; often they fit."""
    choices = draw(st.lists(st.lists(WORDS, min_size=1, max_size=4, unique=True), max_size=4))
    between = draw(st.lists(WORDS, min_size=len(choices) + 1, max_size=len(choices) + 1))
    chosen = [draw(st.sampled_from(forms)) for forms in choices]
    fitting = between[0] + "".join([a + b for a, b in zip(chosen, between[1:], strict=True)])
    return draw(st.sampled_from([fitting, fitting + "a", fitting[1:]])), between, choices


@given(puzzles())
def test_an_alignment_is_that_of_a_regular_expression(puzzle):
    """`re` tries the choices in order, and so is the oracle for short texts."""
    text, between, choices = puzzle
    parts = [
        f"({'|'.join(map(re.escape, forms))}){re.escape(b)}" for forms, b in zip(choices, between[1:], strict=True)
    ]
    match = re.fullmatch(re.escape(between[0]) + "".join(parts), text)
    expected = None if match is None else [match.span(i + 1) for i in range(len(choices))]

    assert _align(text, between, choices) == expected


@pytest.mark.parametrize("blank", ["\n", " ", ""])
def test_many_blank_parts_in_a_template_that_edits(blank):
    """Each blank part may be written or trimmed: these ways are not tried one after the other."""
    parts = [{"type": "text", "text": blank}] * 60
    replies = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": "low"}]
    turns = [each for reply in replies for each in ({"role": "user", "content": "hi"}, reply)]
    began_s = time.process_time()

    marked = JinjaTemplate(make_tokenizer(EDITING)).marked(Conversation(turns))

    assert [span.message for span in marked.replies] == [1, 3]
    assert time.process_time() - began_s < 5
