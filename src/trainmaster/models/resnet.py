"""ResNet-18 and ResNet-50 (He et al., 2015), with the stride of a bottleneck in its 3x3 convolution (version 1.5).

Parameters with 1,000 classes: 11,689,512 and 25,557,032, as in torchvision. Parameters have the names that they have
there; the normalisations do not count their batches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from trainmaster.models.stem import halving_conv, halving_max_pool, stem_fits

_WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu_(y.add_(x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and the shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = torch.relu_(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu_(y.add_(x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, classes)."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], *, classes: int, channels: int = 3
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for number, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True), start=1):
            strides = [1 if number == 1 else 2, *[1] * (depth - 1)]
            blocks = []
            for stride in strides:
                blocks.append(block(inputs, width, stride))
                inputs = width * block.expansion
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and images.is_cuda and stem_fits(images):
            x = halving_max_pool(torch.relu_(self.bn1(halving_conv(images, self.conv1.weight))))
        else:
            x = self.maxpool(torch.relu_(self.bn1(self.conv1(images))))
        for number in range(1, len(_WIDTHS) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return cast(Tensor, self.fc(x.mean((2, 3))))


def resnet18(*, classes: int = 1000, channels: int = 3) -> ResNet:
    """ResNet-18: 11,689,512 parameters with 1,000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, channels=channels)


def resnet50(*, classes: int = 1000, channels: int = 3) -> ResNet:
    """ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        # A count of batches that only a momentum of None reads, and one kernel for each of 53 layers in every step.
        module.num_batches_tracked = None
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
