"""`Response`: one row of a generation, as every engine returns it."""

from typing import Literal, NamedTuple

from torch import Tensor


class Response(NamedTuple):
    """A response to one prompt.

    Attributes:
        tokens: The ids (R,), the one that ended the response included; None from an engine that gives texts alone.
        finish_reason: "stop" after an end-of-sequence token, a stop token or a stop sequence, else "length".
        log_probs: The log-probs of the tokens (R,), in nats; None where they were not computed.
        behaviour: The log-probs under the distribution that the tokens were drawn from (R,); None for greedy and beam
            search, and where an engine gives raw log-probs and drew from another distribution.
        support: For each token the ids that top-k, top-p or min-p had left, then -1 (R, K), all -1 where they had cut
            nothing; None where no token has any.
        prompt_log_probs: The log-probs of the prompt (P,), of which the first is 0; None where they were not computed.
        text: The text that an engine gave, or None.
        version: The version of the weights that an engine gave, or None.
    """

    tokens: Tensor | None
    finish_reason: Literal["stop", "length"]
    log_probs: Tensor | None = None
    behaviour: Tensor | None = None
    support: Tensor | None = None
    prompt_log_probs: Tensor | None = None
    text: str | None = None
    version: str | int | None = None
