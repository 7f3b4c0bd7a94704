"""The stem of a ResNet that GPUs run compiled computes what conv2d and max_pool2d compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv2d, max_pool2d

from trainmaster.models.stem import halving_conv, halving_max_pool, stem_fits


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (3, 12, 20), (5, 8, 4)])
def test_the_convolution_over_blocks_is_the_one_over_pixels(channels: int, height: int, width: int) -> None:
    images = torch.randn(2, channels, height, width, dtype=torch.float64)
    weight = torch.randn(6, channels, 7, 7, dtype=torch.float64, requires_grad=True)
    plain, ours = conv2d(images, weight, stride=2, padding=3), halving_conv(images, weight)
    torch.testing.assert_close(ours, plain)
    gradient = torch.randn_like(plain)
    by_plain, by_ours = (torch.autograd.grad(one, weight, gradient)[0] for one in (plain, ours))
    torch.testing.assert_close(by_ours, by_plain)


@pytest.mark.parametrize("kind", ["normal", "many equal", "all below zero"])
def test_the_pooling_takes_the_pixel_that_torch_takes(kind: str) -> None:
    x = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    x = {"normal": x, "many equal": x.round().relu(), "all below zero": -x.abs() - 1}[kind].requires_grad_()
    plain, ours = max_pool2d(x, 3, stride=2, padding=1), halving_max_pool(x)
    assert torch.equal(ours, plain)
    gradient = torch.randn_like(plain)
    by_plain, by_ours = (torch.autograd.grad(one, x, gradient)[0] for one in (plain, ours))
    torch.testing.assert_close(by_ours, by_plain)


def test_a_pixel_that_is_no_number_is_not_lost() -> None:
    x = torch.randn(1, 1, 8, 8)
    x[0, 0, 3, 5] = float("nan")
    plain, ours = max_pool2d(x, 3, stride=2, padding=1), halving_max_pool(x)
    assert torch.equal(ours.isnan(), plain.isnan())
    assert ours.isnan().sum() == 4


def test_sides_that_cannot_be_halved_twice_do_not_fit() -> None:
    assert stem_fits(torch.empty(1, 3, 224, 224))
    assert not stem_fits(torch.empty(1, 3, 224, 222))
    assert not stem_fits(torch.empty(1, 3, 225, 224))
