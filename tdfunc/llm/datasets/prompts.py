"""`PromptData`: rows of tokens that begin with a prompt; and `tokenize_prompts`, which makes them from texts.

B rows, T positions, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdfunc._tensorclass import TensorClass
from tdfunc._tensordict import TensorDict
from tdfunc.core.errors import error, refuse_text
from tdfunc.llm.encoding.following import Following
from tdfunc.llm.encoding.padding import EncodedRow, Layout, pad_id_of
from tdfunc.llm.encoding.text import Around, text_rows, with_eos
from tdfunc.llm.encoding.trained import check_rows
from tdfunc.llm.templates.base import text_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self


class PromptData(TensorClass):
    """Rows of tokens that begin with a prompt.

    Args:
        input_ids: The token ids, shape (B, T).
        attention_mask: True at tokens, False at pads, shape (B, T).
        prompt_rindex: The position in its row of the last token of each prompt, shape (B,).
        labels: The ids that a model learns to predict, shape (B, T).
        logits: The logits of the model, shape (B, T, V).
        loss: The loss, in any shape that begins with the batch size.

    Raises:
        TypeError: A required field is missing.

    Source:
        `torchrl.data.PromptData`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: TensorDict) -> "Self":
        """Return padded rows of prompts and responses, with their ids as labels.

        Args:
            rows: A tree with `input_ids`, `attention_mask`, and `assistant_masks`, which is True on the responses. The
                prompt of a conversation ends before its first response. A row without a response is only a prompt.

        Shapes:
            Entries are (B, T), and `prompt_rindex` is (B,). For an empty prompt it is the position before the first
            token, or -1.

        Examples:
            >>> rows = tdf.TensorDict({"input_ids": torch.tensor([[0, 5, 6, 7]])}, [1])
            >>> rows = rows.set("attention_mask", rows["input_ids"] > 0)
            >>> PromptData.from_rows(rows.set("assistant_masks", rows["input_ids"] > 5)).prompt_rindex
            tensor([1])
        """
        real = rows["attention_mask"]
        ids = rows["input_ids"]
        pads = (real.cumsum(-1) == 0).sum(-1)
        size = (real & (rows["assistant_masks"].cumsum(-1) == 0)).sum(-1)
        return cls(ids, real, pads + size - 1, labels=ids, batch_size=rows.batch_size)

    def mask_label(self, pad_token_id: int) -> "Self":
        """Return the rows with pads after their prompts, without labels and logits.

        Args:
            pad_token_id: The id to put there.

        Examples:
            >>> ids = torch.tensor([[0, 5, 6, 7], [1, 2, 3, 4]])
            >>> data = PromptData(ids, ids > 0, torch.tensor([2, 0]), labels=ids, batch_size=[2])
            >>> data.mask_label(pad_token_id=9).input_ids
            tensor([[0, 5, 6, 9],
                    [1, 9, 9, 9]])
        """
        positions = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        inside = positions <= self.prompt_rindex.unsqueeze(-1)
        return self.replace(
            input_ids=torch.where(inside, self.input_ids, pad_token_id),
            attention_mask=torch.where(inside, self.attention_mask, 0).to(self.attention_mask.dtype),
            labels=None,
            logits=None,
        )


def prompt_rows(
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    add_special_tokens: bool = True,
    add_eos_token: bool = False,
) -> list[EncodedRow]:
    """Return the complete row of each prompt with its response; `assistant_masks` is True on the response.

    A prompt has the ids that it has without a response, and the response those that it has behind the prompt: no token
    belongs to both. Tokens that the tokenizer adds after a text follow the response, with its end token.
    """
    own = text_tokenizer(tokenizer)
    around = Around(own)
    before = text_rows(own, prompts, add_special_tokens=add_special_tokens)
    after = Following(own).text_ids(prompts, responses)
    rows: list[EncodedRow] = []
    for row, prompt, response_ids in zip(before, prompts, after, strict=True):
        ids: list[int] = row["input_ids"].tolist()
        added = 0
        if add_special_tokens and around.adds_to(prompt):
            added = around.counts[1]
        first = len(ids) - added
        ids[first:first] = response_ids
        if add_eos_token:
            ids = with_eos(own, ids, added)
        masks = torch.arange(len(ids)) >= first
        rows.append({"input_ids": torch.tensor(ids, dtype=torch.int64), "assistant_masks": masks})
    return rows


def tokenize_prompts(
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    add_special_tokens: bool = True,
    add_eos_token: bool = False,
    truncation: bool | str = False,
    max_length: int | None = None,
    padding_side: str = "left",
) -> PromptData:
    """Return prompts followed by their responses, padded to one length, with the last positions of the prompts.

    A prompt has the ids that it has without a response, as a model reads it: no token belongs to both.

    Args:
        tokenizer: A tokenizer or processor of transformers.
        prompts: The texts of N prompts.
        responses: The texts of N responses.
        add_special_tokens: Add the tokens that the tokenizer puts around a text.
        add_eos_token: End each response with the tokenizer's `eos_token`, unless it already ends with it.
        truncation: Truncate rows to `max_length`, at their ends.
        max_length: The maximum number of tokens in a row.
        padding_side: "left" or "right".

    Shapes:
        `input_ids`, `attention_mask` and `labels`, which are the ids, are (N, T), and `prompt_rindex` is (N,).

    Raises:
        ValueError: The numbers of prompts and responses differ, truncation removes a whole response, an option has
            an invalid value, or the tokenizer has no `eos_token` to add.

    Source:
        `torchrl.data.PromptTensorDictTokenizer`.
    """
    refuse_text("tokenize_prompts: prompts", prompts)
    refuse_text("tokenize_prompts: responses", responses)
    if len(prompts) != len(responses):
        raise error(
            ValueError,
            "tokenize_prompts: there is not one response for each prompt.",
            expected=f"{len(prompts)} responses",
            got=str(len(responses)),
        )
    layout = Layout(True, truncation, max_length, padding_side)
    layout.check("tokenize_prompts")
    rows = prompt_rows(
        tokenizer, prompts, responses, add_special_tokens=add_special_tokens, add_eos_token=add_eos_token
    )
    check_rows("tokenize_prompts", rows, layout)
    padded = layout.pad([layout.cut(row) for row in rows], pad_id_of(text_tokenizer(tokenizer)))
    return PromptData.from_rows(padded)
