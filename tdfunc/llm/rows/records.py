"""The typed trees that language models read and give: texts, tokens, masks and log-probs.

Prompts are padded at the left and responses at the right; `full` is the prompt and then the response. Masks alone tell
tokens from pads. All fields may be empty. B conversations, P, R and P + R positions.
"""

from torch import Tensor

from tdfunc._tensorclass import TensorClass


class Text(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments, reportUntypedBaseClass]
    """Texts, one for each conversation.

    Args:
        prompt: The text that the model reads.
        response: The text that the model wrote.
        full: Both.
        finish_reason: The end of each response: "stop" for an end-of-sequence token, a stop token or a stop sequence,
            else "length".

    Examples:
        >>> Text(prompt=["Hello", "Hi"], batch_size=[2])[1].prompt
        'Hi'
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None
    finish_reason: str | None = None


class Tokens(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments, reportUntypedBaseClass]
    """Token ids.

    Args:
        prompt: (B, P), padded at the left.
        response: (B, R), padded at the right.
        full: (B, P + R).
        padded: True for rows of one length, False for a ragged stack.
        is_complete: (B,), False where the response was cut off at its greatest length.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None
    is_complete: Tensor | None = None


class Masks(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments, reportUntypedBaseClass]
    """Masks of the shape of `Tokens.full`.

    Args:
        all_attention_mask: True at tokens, False at pads.
        all_assistant_mask: True at tokens of the assistant, its end-of-turn tokens included.
        padded: As in `Tokens`.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None
    padded: bool | None = None


class LogProbs(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments, reportUntypedBaseClass]
    """The log-prob, in nats, of each token given those before it.

    Args:
        prompt: (B, P).
        response: (B, R).
        full: (B, P + R); 0 where `mask` is False.
        mask: True where `full` is a log-prob: not at pads, at a row's first token, or at prompts without scores.
        behaviour: (B, R), under the distribution that the tokens were drawn from; None for greedy and beam search.
        support: (B, R, K), for each token of the response the ids that top-k, top-p or min-p had left, then -1; None
            where they cut nothing.
        adjusted: (B,), True where temperature and `support` do not give the distribution that was drawn from: a
            penalty or a least length changed it, or cuts that an engine does not report; None where they do.
        padded: As in `Tokens`.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    mask: Tensor | None = None
    behaviour: Tensor | None = None
    support: Tensor | None = None
    adjusted: Tensor | None = None
    version: str | int | None = None
    padded: bool | None = None
