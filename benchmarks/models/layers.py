"""The rows of torch.nn: each class with a usual forward, and some forms in which people write it.

A layer stands in a `Scaled` or another small module, so that also members of layers without weights differ, and their
gradients reach the input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.models.rows import Example, Row


class Scaled(nn.Module):
    """A layer whose first input is scaled by a weight, and then mapped by `before`."""

    def __init__(self, layer: nn.Module, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = layer
        self.before = before

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = x * self.scale
        if self.before is not None:
            x = self.before(x)
        return self.layer(x, *rest)


class Unpooled(nn.Module):
    """A pool that returns places, and the layer that undoes it."""

    def __init__(self, pool: nn.Module, unpool: nn.Module) -> None:
        super().__init__()
        self.pool = pool
        self.unpool = unpool

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


class Itself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        return self.attention(x, x, x, key_padding_mask=padding)


class Masked(nn.Module):
    """An encoder whose outputs at padding are zero: torch's fast path writes zeros there, its other path does not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(_encoder_layer(), 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)


class Product(nn.Module):
    """Attention by torch's function."""

    def __init__(self, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = dropout
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)


class Cells(nn.Module):
    """A cell that is called for each time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        state = None
        for now in x.unbind(1):
            state = self.cell(now, state)
        return state


class Packed(nn.Module):
    """A recurrent layer that reads a packed sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.layer(packed)
        return out.data, state


class Tagger(nn.Module):
    """Packed words, and a padded output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layer = nn.GRU(4, 6, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Sampled(nn.Module):
    """An image that is sampled at places of an affine grid."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.8, 0.1]]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(3, 2))


def floats(*shapes: tuple[int, ...]) -> Callable[[], Example]:
    """Return the maker of examples of normal numbers."""
    return lambda: Example(tuple([torch.randn(shape) for shape in shapes]))


def row(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...], draws: bool = False) -> Row:
    return Row(name, make, floats(*shapes), draws)


def around(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...], draws: bool = False) -> Row:
    """Return the row of a layer that stands in a `Scaled`."""
    return Row(name, lambda: Scaled(make()), floats(*shapes), draws)


def loss(name: str, make: Callable[[], nn.Module], example: Callable[[], Example], before: Any = None) -> Row:
    return Row(name, lambda: Scaled(make(), before), example)


def labels(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def signs(*shape: int) -> Tensor:
    return torch.randint(2, shape) * 2.0 - 1


LINE, PLANE, SPACE = (2, 4, 8), (2, 4, 8, 8), (2, 4, 4, 4, 4)

CONVOLUTIONS = [
    row("Conv1d", lambda: nn.Conv1d(4, 6, 3), LINE),
    row("Conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), PLANE),
    row("Conv2d, groups", lambda: nn.Conv2d(4, 8, 3, stride=2, groups=4), PLANE),
    row("Conv2d, padding of circles", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), PLANE),
    row("Conv3d", lambda: nn.Conv3d(4, 2, 3), SPACE),
    row("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 6, 3), LINE),
    row("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), PLANE),
    row("ConvTranspose3d", lambda: nn.ConvTranspose3d(4, 2, 3), SPACE),
    around("Unfold", lambda: nn.Unfold(3), PLANE),
    around("Fold", lambda: nn.Fold((4, 4), 2), (2, 12, 9)),
]

LINEAR = [
    row("Linear", lambda: nn.Linear(4, 3), (5, 4)),
    row("Bilinear", lambda: nn.Bilinear(4, 3, 2), (5, 4), (5, 3)),
    around("Identity", nn.Identity, (5, 4)),
    Row("Embedding", lambda: nn.Embedding(7, 4, padding_idx=0), lambda: Example((labels(7, 3, 5),))),
    Row("EmbeddingBag", lambda: nn.EmbeddingBag(7, 4), lambda: Example((labels(7, 3, 5),))),
    Row(
        "EmbeddingBag, offsets",
        lambda: nn.EmbeddingBag(7, 4, mode="sum"),
        lambda: Example((labels(7, 6), torch.tensor([0, 2, 2]))),
    ),
    row("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
    row("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), (5, 4)),
    row("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), (5, 4)),
    row("grid_sample", Sampled, PLANE),
    row("scripted module", scripted, (5, 3)),
]

POOLS = [
    around("AvgPool1d", lambda: nn.AvgPool1d(2), LINE),
    around("AvgPool2d", lambda: nn.AvgPool2d(2), PLANE),
    around("AvgPool3d", lambda: nn.AvgPool3d(2), SPACE),
    around("MaxPool1d", lambda: nn.MaxPool1d(2), LINE),
    around("MaxPool2d", lambda: nn.MaxPool2d(3, 2, padding=1), PLANE),
    around("MaxPool3d", lambda: nn.MaxPool3d(2), SPACE),
    around("LPPool1d", lambda: nn.LPPool1d(2, 2), LINE),
    around("LPPool2d", lambda: nn.LPPool2d(2, 2), PLANE),
    around("LPPool3d", lambda: nn.LPPool3d(2, 2), SPACE),
    around("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(3), LINE),
    around("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(3), PLANE),
    around("AdaptiveAvgPool3d", lambda: nn.AdaptiveAvgPool3d(3), SPACE),
    around("AdaptiveMaxPool1d", lambda: nn.AdaptiveMaxPool1d(3), LINE),
    around("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d(3), PLANE),
    around("AdaptiveMaxPool3d", lambda: nn.AdaptiveMaxPool3d(3), SPACE),
    around("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=4), PLANE, draws=True),
    around("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=2), SPACE, draws=True),
    around("MaxUnpool1d", lambda: Unpooled(nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)), LINE),
    around("MaxUnpool2d", lambda: Unpooled(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)), PLANE),
    around("MaxUnpool3d", lambda: Unpooled(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)), SPACE),
]

NORMS = [
    row("BatchNorm1d", lambda: nn.BatchNorm1d(4), (5, 4)),
    row("BatchNorm2d", lambda: nn.BatchNorm2d(4), PLANE),
    row("BatchNorm3d", lambda: nn.BatchNorm3d(4), SPACE),
    row("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), LINE),
    row("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), PLANE),
    row("InstanceNorm3d", lambda: nn.InstanceNorm3d(4, affine=True), SPACE),
    row("GroupNorm", lambda: nn.GroupNorm(2, 4), PLANE),
    row("LayerNorm", lambda: nn.LayerNorm(8), LINE),
    row("RMSNorm", lambda: nn.RMSNorm(8), LINE),
    around("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), PLANE),
    around("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(2), PLANE),
]

_POINTWISE = [
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink,
]  # fmt: skip
ACTIVATIONS = [
    *[around(kind.__name__, kind, (5, 4)) for kind in _POINTWISE],
    around("GLU", nn.GLU, (5, 4)),
    row("PReLU", lambda: nn.PReLU(4), (5, 4)),
    around("Threshold", lambda: nn.Threshold(0.1, 20.0), (5, 4)),
    around("Softmax", lambda: nn.Softmax(-1), (5, 4)),
    around("LogSoftmax", lambda: nn.LogSoftmax(-1), (5, 4)),
    around("Softmin", lambda: nn.Softmin(-1), (5, 4)),
    around("Softmax2d", nn.Softmax2d, PLANE),
]

DROPOUTS = [
    around("Dropout", nn.Dropout, (5, 4)),
    around("Dropout1d", nn.Dropout1d, LINE),
    around("Dropout2d", nn.Dropout2d, PLANE),
    around("Dropout3d", nn.Dropout3d, SPACE),
    around("AlphaDropout", nn.AlphaDropout, (5, 4)),
    around("FeatureAlphaDropout", nn.FeatureAlphaDropout, PLANE),
]

_PADS = ["CircularPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "ZeroPad"]


def _pad(kind: str, dims: int) -> Row:
    values = (1.5,) if kind == "ConstantPad" else ()
    shape = (LINE, PLANE, SPACE)[dims - 1]
    return around(f"{kind}{dims}d", lambda: getattr(nn, f"{kind}{dims}d")(1, *values), shape)


SHAPES = [
    *[_pad(kind, dims) for kind in _PADS for dims in (1, 2, 3)],
    around("Flatten", nn.Flatten, PLANE),
    around("Unflatten", lambda: nn.Unflatten(1, (2, 2)), PLANE),
    around("ChannelShuffle", lambda: nn.ChannelShuffle(2), PLANE),
    around("PixelShuffle", lambda: nn.PixelShuffle(2), PLANE),
    around("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), PLANE),
    around("Upsample", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), PLANE),
    around("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), PLANE),
    around("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), PLANE),
    around("CosineSimilarity", nn.CosineSimilarity, (5, 4), (5, 4)),
    around("PairwiseDistance", nn.PairwiseDistance, (5, 4), (5, 4)),
]

SEQUENCE = (3, 5, 4)


def _lengths() -> Example:
    return Example((torch.randn(SEQUENCE), torch.tensor([5, 2, 3])))


def _words() -> Example:
    return Example((torch.randint(9, SEQUENCE[:2]), torch.tensor([5, 2, 3])))


RECURRENT = [
    row("LSTM", lambda: nn.LSTM(4, 6, batch_first=True), SEQUENCE),
    row(
        "LSTM, two layers, both directions, projections",
        lambda: nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3),
        SEQUENCE,
    ),
    row("LSTM, dropout", lambda: nn.LSTM(4, 6, 2, dropout=0.3), SEQUENCE),
    Row("LSTM, packed sequence", lambda: Packed(nn.LSTM(4, 6, batch_first=True)), _lengths),
    row("GRU", lambda: nn.GRU(4, 6, batch_first=True), SEQUENCE),
    row("GRU, two layers, both directions", lambda: nn.GRU(4, 6, 2, bidirectional=True), SEQUENCE),
    Row("GRU, packed sequence", lambda: Packed(nn.GRU(4, 6, batch_first=True)), _lengths),
    Row("Embedding and GRU, packed and padded", Tagger, _words),
    row("RNN", lambda: nn.RNN(4, 6, batch_first=True), SEQUENCE),
    row("RNN, ReLU", lambda: nn.RNN(4, 6, nonlinearity="relu"), SEQUENCE),
    row("LSTMCell", lambda: Cells(nn.LSTMCell(4, 6)), SEQUENCE),
    row("GRUCell", lambda: Cells(nn.GRUCell(4, 6)), SEQUENCE),
    row("RNNCell", lambda: Cells(nn.RNNCell(4, 6)), SEQUENCE),
]


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def _decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)


def _padded() -> Example:
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    return Example((torch.randn(3, 5, 8), padding))


ATTENTION = [
    row("MultiheadAttention", Itself, (3, 5, 8)),
    Row("MultiheadAttention, padding", Itself, _padded),
    row("MultiheadAttention, dropout", lambda: Itself(dropout=0.3), (3, 5, 8)),
    row("scaled_dot_product_attention", Product, (3, 5, 8)),
    row("scaled_dot_product_attention, dropout", lambda: Product(0.3, causal=False), (3, 5, 8)),
    row("TransformerEncoderLayer", _encoder_layer, (3, 5, 8)),
    row("TransformerEncoder", lambda: nn.TransformerEncoder(_encoder_layer(), 2), (3, 5, 8)),
    Row("TransformerEncoder, padding", Masked, _padded),
    row("TransformerDecoderLayer", _decoder_layer, (3, 5, 8), (3, 4, 8)),
    row("TransformerDecoder", lambda: nn.TransformerDecoder(_decoder_layer(), 2), (3, 5, 8), (3, 4, 8)),
    row("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (3, 5, 8), (3, 4, 8)),
]


def _ctc() -> Example:
    return Example((torch.randn(8, 3, 5), labels(4, 3, 3) + 1, torch.tensor([8, 7, 8]), torch.tensor([3, 2, 3])))


def _targets(target: Callable[[], Tensor]) -> Callable[[], Example]:
    return lambda: Example((torch.randn(5, 4), target()))


def _normal() -> Tensor:
    return torch.randn(5, 4)


def _log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


LOSSES = [
    loss("L1Loss", nn.L1Loss, _targets(_normal)),
    loss("MSELoss", nn.MSELoss, _targets(_normal)),
    loss("SmoothL1Loss", nn.SmoothL1Loss, _targets(_normal)),
    loss("HuberLoss", nn.HuberLoss, _targets(_normal)),
    loss("CrossEntropyLoss", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), _targets(lambda: labels(4, 5))),
    loss("NLLLoss", nn.NLLLoss, _targets(lambda: labels(4, 5)), _log_softmax),
    loss(
        "KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), _targets(lambda: _normal().softmax(-1)), _log_softmax
    ),
    loss("BCELoss", nn.BCELoss, _targets(lambda: torch.rand(5, 4)), torch.sigmoid),
    loss("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, _targets(lambda: torch.rand(5, 4))),
    loss("PoissonNLLLoss", nn.PoissonNLLLoss, _targets(lambda: torch.rand(5, 4))),
    loss("GaussianNLLLoss", nn.GaussianNLLLoss, lambda: Example((_normal(), _normal(), torch.rand(5, 4) + 0.1))),
    loss("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, _targets(lambda: signs(5, 4))),
    loss("SoftMarginLoss", nn.SoftMarginLoss, _targets(lambda: signs(5, 4))),
    loss("MultiMarginLoss", nn.MultiMarginLoss, _targets(lambda: labels(4, 5))),
    loss("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, _targets(lambda: torch.tensor([[1, 3, -1, 0]] * 5))),
    loss("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, _targets(lambda: labels(2, 5, 4).float())),
    loss("MarginRankingLoss", nn.MarginRankingLoss, lambda: Example((_normal(), _normal(), signs(5, 4)))),
    loss("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, lambda: Example((_normal(), _normal(), signs(5)))),
    loss("TripletMarginLoss", nn.TripletMarginLoss, floats((5, 4), (5, 4), (5, 4))),
    loss("TripletMarginWithDistanceLoss", nn.TripletMarginWithDistanceLoss, floats((5, 4), (5, 4), (5, 4))),
    loss("CTCLoss", nn.CTCLoss, _ctc, _log_softmax),
    Row(
        "AdaptiveLogSoftmaxWithLoss",
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]),
        lambda: Example((torch.randn(6, 8), torch.tensor([0, 3, 5, 7, 9, 11]))),
    ),
    Row(
        "LinearCrossEntropyLoss",
        lambda: nn.LinearCrossEntropyLoss(4, 3),
        lambda: Example((torch.randn(5, 4), labels(3, 5))),
    ),
]

ROWS: list[Row] = [
    *LINEAR, *CONVOLUTIONS, *POOLS, *NORMS, *ACTIVATIONS, *DROPOUTS, *SHAPES, *RECURRENT, *ATTENTION, *LOSSES,
]  # fmt: skip

# Names of torch.nn that have no row, by the reason.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "has no forward": (
        "Container", "LinearCrossEntropyOptions", "Module", "ModuleDict", "ModuleList", "ParameterDict",
        "ParameterList", "RNNBase", "RNNCellBase",
    ),
    "is a container of other rows": ("Sequential",),
    "has no weights before its first call": (
        "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d", "LazyConv1d", "LazyConv2d", "LazyConv3d",
        "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d", "LazyInstanceNorm1d",
        "LazyInstanceNorm2d", "LazyInstanceNorm3d", "LazyLinear",
    ),
    "is another name of NLLLoss": ("NLLLoss2d",),
    "trains only in a group of processes on GPUs": ("SyncBatchNorm",),
}  # fmt: skip
