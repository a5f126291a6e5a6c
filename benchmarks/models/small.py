"""The models that are measured: small enough that a library's own time shows."""

import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers += [nn.Linear(a, b)] if i == len(sizes) - 2 else [nn.Linear(a, b), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout and i < len(sizes) - 2 else []
    return nn.Sequential(*layers)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """The structure of ResNet-18, narrow: 62 parameters and 60 buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        widths = [width, width * 2, width * 4, width * 8]
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs, layers = width, []
        for i, outputs in enumerate(widths):
            layers.append(nn.Sequential(Block(inputs, outputs, 1 if i == 0 else 2), Block(outputs, outputs, 1)))
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1))
        return self.fc(y.mean((2, 3)))


class Still(nn.Module):
    """A module around another whose forward returns its input: what is left is the swap."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def norm_cnn(dropout: float = 0.0, width: int = 8) -> nn.Module:
    """Return two convolutions of 8x8 images with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, 2 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, 10))


class Encoder(nn.Module):
    """A transformer encoder of two layers."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def leaves_of(module: nn.Module) -> int:
    return len(list(module.parameters())) + len(list(module.buffers()))
