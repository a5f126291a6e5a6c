"""Language models: public reports of other projects that no other test shows."""

import pytest
import torch

from tdfunc.llm import History, load_tokens
from tdfunc.llm.losses import distill
from tests.llm.tokens import CHATML, FORGETFUL, GENERATION, ZEPHYR, make_tokenizer

TEMPLATES = {"chatml": CHATML, "generation": GENERATION, "zephyr": ZEPHYR, "trimmed": FORGETFUL}


@pytest.mark.parametrize("response", ["yes", "the fox jumps"])
def test_a_response_gets_no_end_token(response):
    """The sequence ends with the response, whose text has no end of turn."""
    tokenizer = make_tokenizer()
    data = load_tokens(tokenizer, [{"prompt": "dog ", "response": response}], columns=("prompt", "response"))

    ids = data.batch([0])["input_ids"][0]

    assert int(ids[-1]) != tokenizer.eos_token_id


@pytest.mark.parametrize("response", ["yes", "the fox jumps", "yes<|im_end|>"])
def test_a_response_gets_an_end_token_on_request(response):
    """One, which is trained, also if its text has it already."""
    tokenizer = make_tokenizer()
    record = {"prompt": "dog ", "response": response}
    data = load_tokens(tokenizer, [record], columns=("prompt", "response"), add_eos_token=True)

    batch = data.batch([0])

    trained = batch["input_ids"][0][batch["assistant_masks"][0]].tolist()
    assert trained.index(tokenizer.eos_token_id) == len(trained) - 1


@pytest.mark.parametrize("response", ["yes", "the fox jumps"])
def test_a_response_keeps_the_end_token_of_its_text(response):
    """As one token, which is trained with the others."""
    tokenizer = make_tokenizer()
    record = {"prompt": "dog ", "response": response + tokenizer.eos_token}
    data = load_tokens(tokenizer, [record], columns=("prompt", "response"))

    batch = data.batch([0])

    trained = batch["input_ids"][0][batch["assistant_masks"][0]]
    assert int(trained[-1]) == tokenizer.eos_token_id


@pytest.mark.parametrize("content", ["yes", "  two words ", "line\nbreak", "hi", "hi hi", "the fox\n"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_continued_message_ends_as_in_transformers(template, content):
    """Also if it begins or ends with spaces, or repeats the user's text."""
    tokenizer = make_tokenizer(TEMPLATES[template])
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]

    text = History.from_chats(chat).apply_chat_template(tokenizer=tokenizer, continue_final_message=True)

    assert text == tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)


def two_models(seed):
    """Log-probs of a student and a teacher, and a mask of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 4, 9, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)
    return student, teacher, torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_near_its_ends_gkd_is_a_small_multiple_of_a_divergence(seed, end):
    """`beta` 0 and 1 are the two divergences; a distance of 1e-4 from them scales the divergence by 1e-4."""
    models = two_models(seed)
    distance = 1e-4

    near = distill(*models, beta=abs(end - distance)).loss

    assert near.item() == pytest.approx(distance * distill(*models, beta=end).loss.item(), rel=0.01)
