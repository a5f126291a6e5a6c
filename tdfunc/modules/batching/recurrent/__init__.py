"""Rules for recurrent layers and cells: LSTM, GRU and RNN of stacked members."""

from tdfunc.modules.batching.recurrent.dropping import by_layers as by_layers
from tdfunc.modules.batching.recurrent.rules import LAYERS as LAYERS
from tdfunc.modules.batching.recurrent.rules import RULES as RULES
