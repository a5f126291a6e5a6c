"""The table of rules, by the function of torch that each serves; a file a family."""

from typing import Any

import torch.nn.functional as F

from tdfunc.modules.batching import recurrent
from tdfunc.modules.batching.rule import Rule, by_body

RULES: dict[Any, Rule] = {
    F.multi_head_attention_forward: by_body(F.multi_head_attention_forward),
    **recurrent.RULES,
}
