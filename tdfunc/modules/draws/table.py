"""The table of the random functions of torch that a key serves."""

from typing import Any

import torch
import torch.nn.functional as F

from tdfunc.modules.batching import recurrent
from tdfunc.modules.batching.pooling import RANDOM_POOLS
from tdfunc.modules.batching.rule import by_body
from tdfunc.modules.draws import by_tensors, dropping, factories, in_place
from tdfunc.modules.draws.draw import Server

SERVERS: dict[Any, Server] = {
    **dropping.SERVERS,
    **factories.SERVERS,
    **by_tensors.SERVERS,
    **in_place.SERVERS,
    **RANDOM_POOLS,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), recurrent.by_layers),
    **{func: by_body(func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)},
}
