"""The typed trees that language models read and return: texts, tokens, masks and log-probs.

Prompts are padded at the left and responses at the right; `full` is the prompt followed by the response. Only masks
distinguish tokens from pads. All fields may be empty. B conversations, P, R and P + R positions.
"""

from torch import Tensor

from tdfunc._tensorclass import TensorClass
from tdfunc.core.types import PerRow


class Text(TensorClass, nocast=True):
    """Texts, one for each conversation.

    Args:
        prompt: The text that the model reads.
        response: The text that the model wrote.
        full: The prompt followed by the response.
        finish_reason: The end of each response: "stop" for an end-of-sequence token, a stop token or a stop sequence,
            else "length".

    Examples:
        >>> Text(prompt=["Hello", "Hi"], batch_size=[2])[1].prompt
        'Hi'
    """

    prompt: PerRow[str] | None = None
    response: PerRow[str] | None = None
    full: PerRow[str] | None = None
    finish_reason: PerRow[str] | None = None


class Tokens(TensorClass, nocast=True):
    """Token ids.

    Args:
        prompt: The prompts, padded at the left, shape (B, P).
        response: The responses, padded at the right, shape (B, R).
        full: The prompts followed by the responses, shape (B, P + R).
        padded: True for rows of one length, False for a ragged stack.
        is_complete: False for responses that reached the maximum length, shape (B,).
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None
    is_complete: Tensor | None = None


class Masks(TensorClass, nocast=True):
    """Masks of the shape of `Tokens.full`.

    Args:
        all_attention_mask: True at tokens, False at pads.
        all_assistant_mask: True at tokens of the assistant, including its end-of-turn tokens.
        padded: As in `Tokens`.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None
    padded: bool | None = None


class LogProbs(TensorClass, nocast=True):
    """The log-prob of each token given the tokens before it, in nats.

    Args:
        prompt: The log-probs of the prompts, shape (B, P).
        response: The log-probs of the responses, shape (B, R).
        full: The log-probs of both, 0 where `mask` is False, shape (B, P + R).
        mask: True where `full` is a log-prob. It is False at pads, at a row's first token, and at prompts without
            scores.
        behaviour: The log-probs of the responses under the sampler (the behavior policy), shape (B, R); None for greedy
            and beam search.
        support: The ids that top-k, top-p or min-p kept for each token of the response, padded with -1, shape
            (B, R, K); None without truncation.
        adjusted: True if temperature and `support` do not describe the sampling distribution, shape (B,). A penalty, a
            minimum length, or a truncation that an engine does not report can change it. None if they describe it.
        version: The version of the weights that sampled each response.
        entropy: The entropy of the distribution of each token of `full`, in nats, 0 where `mask` is False, shape
            (B, P + R); from `score(entropy=True)`.
        topk_log_probs: The log-probs of the likeliest tokens in the place of each token of `full`, the likeliest first,
            shape (B, P + R, K); from `score(topk=K)`.
        topk_ids: These tokens, 0 where `mask` is False, shape (B, P + R, K).
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
    entropy: Tensor | None = None
    topk_log_probs: Tensor | None = None
    topk_ids: Tensor | None = None
    padded: bool | None = None
    # 0 is an id.
    _pads = {"support": -1}
