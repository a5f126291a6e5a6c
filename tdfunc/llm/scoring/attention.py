"""`attention_inputs`: masks and positions of padded rows, for every attention of a model of transformers."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tdfunc.llm.rows.packing import as_mask


# Any: transformers is optional.
def attention_inputs(model: Any, mask: Tensor, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the `attention_mask` and `position_ids` of padded rows, for the forward of a model of transformers.

    The mask contains numbers that attention adds to its scores: 0 where a position may read another one, and the lowest
    number elsewhere. It is valid for eager and fused attention, including windows. Its values are not read again, so
    that it works inside `vmap`, `grad` and `jit`; make it outside of them.

    Args:
        model: A causal model of transformers.
        mask: True at tokens, False at pads on any side.
        dtype: The dtype of the model's computation; by default the dtype of its weights.

    Returns:
        The keyword arguments: `apply(params, ids, buffers=buffers, use_cache=False, **attention_inputs(model, mask))`.

    Shapes:
        `mask` and the positions are (B, T). The new mask is (B, 1, T, T), or a dict of one for each kind of layer.

    Raises:
        LeafMismatchError: The mask already has floating-point numbers.

    Source:
        `transformers.masking_utils`, which makes it as the model itself would for eager attention.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20))
        >>> made = attention_inputs(model, torch.tensor([[False, True, True]]))
        >>> made["attention_mask"].shape, made["position_ids"]
        (torch.Size([1, 1, 3, 3]), tensor([[0, 0, 1]]))
    """
    from transformers.masking_utils import create_masks_for_generate

    tokens = as_mask(mask, "attention_inputs")
    config = copy.copy(model.config.get_text_config())
    config._attn_implementation = "eager"
    positions = (tokens.cumsum(-1) - 1).clamp(min=0)
    # The batch size, the length, the dtype and the device are read from it.
    dtype = dtype or model.dtype
    # Families of transformers 5.23 compute the softmax in float32, where the lowest number of float64 is -inf, and a
    # row of pads nan.
    narrow = torch.float32 if dtype == torch.float64 else dtype
    states = torch.empty((*tokens.shape, 0), dtype=narrow, device=tokens.device)
    made = create_masks_for_generate(config, states, tokens.to(torch.int64), None, positions)
    inputs = {"attention_mask": tree_map(lambda x: x.to(dtype), made), "position_ids": positions}
    # Not every family has positions as an argument.
    known = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in inputs.items() if name in known}
