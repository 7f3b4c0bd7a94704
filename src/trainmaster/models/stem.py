"""The first layers of a ResNet in a form that compiles to fast GPU kernels: same results, another order of sums.

A convolution over three channels leaves most of a tensor core idle, and the compiler has no fast backward pass of a max
pooling with the channels last. Both took a tenth of a step of ResNet-50 at a batch of 64 on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

_ALIGNED = 8  # channels: what a tensor core loads at once


def stem_fits(images: Tensor) -> bool:
    """Whether both functions take these images: their sides can be halved twice."""
    return images.shape[2] % 4 == 0 and images.shape[3] % 4 == 0


def halving_conv(images: Tensor, weight: Tensor) -> Tensor:
    """A convolution of 7x7 with stride 2 and padding 3, as one of 4x4 over blocks of 2x2 pixels.

    The pixels of a block become channels. The kernel gets a first row and column of zeros, so that its blocks are the
    image's, and the channels are filled up with zeros.
    """
    channels = 4 * images.shape[1]
    missing = -channels % _ALIGNED
    kernel = pad(_blocks(pad(weight, (1, 0, 1, 0))), (0, 0, 0, 0, 0, missing))
    blocks = pad(_blocks(images), (2, 1, 2, 1, 0, missing))
    last = torch.channels_last
    return conv2d(blocks.contiguous(memory_format=last), kernel.contiguous(memory_format=last))


def _blocks(x: Tensor) -> Tensor:
    """(n, c, h, w) to (n, 4c, h/2, w/2)."""
    count, channels, height, width = x.shape
    x = x.reshape(count, channels, height // 2, 2, width // 2, 2).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(count, 4 * channels, height // 2, width // 2)


def halving_max_pool(x: Tensor) -> Tensor:
    """Max pooling of 3x3 with stride 2 and padding 1; of equal values the first in its window gets the gradient."""
    return _HalvingMaxPool.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class _HalvingMaxPool(torch.autograd.Function):
    """Keeps which of its nine pixels each window took, and gathers the gradients of each pixel from its windows.

    Window i has the rows 2i-1, 2i and 2i+1: an even row lies in one window, an odd row in two. Columns likewise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2], x.shape[3]
        padded = pad(x, (1, 1, 1, 1), value=float("-inf"))
        best = padded[:, :, 0:height:2, 0:width:2]
        taken = torch.zeros_like(best, dtype=torch.int8)
        for number in range(1, 9):
            row, column = divmod(number, 3)
            window = padded[:, :, row : row + height : 2, column : column + width : 2]
            better = (window > best) | window.isnan()
            best = torch.where(better, window, best)
            taken = torch.where(better, number, taken)
        ctx.save_for_backward(taken.to(torch.int8))
        return best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (taken,) = ctx.saved_tensors
        gradient = gradients[0]

        def of(number: int) -> Tensor:
            return torch.where(taken == number, gradient, 0)

        input_gradient = gradient.new_empty((*gradient.shape[:2], 2 * gradient.shape[2], 2 * gradient.shape[3]))
        input_gradient = input_gradient.contiguous(memory_format=torch.channels_last)
        input_gradient[:, :, 0::2, 0::2] = of(4)
        input_gradient[:, :, 0::2, 1::2] = of(5) + _from_right(of(3))
        input_gradient[:, :, 1::2, 0::2] = of(7) + _from_below(of(1))
        input_gradient[:, :, 1::2, 1::2] = of(8) + _from_right(of(6)) + _from_below(of(2) + _from_right(of(0)))
        return input_gradient


def _from_right(x: Tensor) -> Tensor:
    return pad(x[:, :, :, 1:], (0, 1))


def _from_below(x: Tensor) -> Tensor:
    return pad(x[:, :, 1:], (0, 0, 0, 1))
