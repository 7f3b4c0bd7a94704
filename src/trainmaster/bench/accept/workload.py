"""The model of an acceptance run, its batch and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainmaster.bench.accept.options import Options
from trainmaster.models.resnet import resnet18, resnet50
from trainmaster.models.transformer import Transformer, TransformerSize

_SEED = 1234
# The backward pass of max pooling and of an embedding adds in no fixed order; what comes before it repeats bit by bit.
_STEMS = {"resnet18": ("conv1.", "bn1."), "resnet50": ("conv1.", "bn1."), "transformer": ("embedding.", "position")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs and labels, on the device."""

    inputs: Tensor
    labels: Tensor


def build_model(options: Options, device: torch.device) -> nn.Module:
    """The model with the same first values on every rank."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(_SEED)
    model: nn.Module
    if options.model == "transformer":
        model = Transformer(_size(options), classes=options.num_classes)
    else:
        model = (resnet18 if options.model == "resnet18" else resnet50)(classes=options.num_classes)
    torch.random.set_rng_state(generator)
    model = model.to(device)
    if device.type == "cuda" and options.model != "transformer":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def synthetic_batch(options: Options, device: torch.device, *, rank: int) -> Batch:
    """A batch that is made on the device; every rank has its own, and `rank` 0's is the same everywhere."""
    generator = torch.Generator(device).manual_seed(_SEED + 1 + rank)
    count = options.batch_size
    labels = torch.randint(options.num_classes, (count,), device=device, generator=generator)
    if options.model == "transformer":
        shape = (count, options.sequence)
        return Batch(
            inputs=torch.randint(options.num_classes, shape, device=device, generator=generator), labels=labels
        )
    size = options.image_size
    images = torch.randn((count, 3, size, size), device=device, generator=generator)
    if device.type == "cuda":
        images = images.contiguous(memory_format=torch.channels_last)
    return Batch(inputs=images, labels=labels)


def loss_of(model: nn.Module, batch: Batch, *, autocast: bool) -> Tensor:
    """Mean cross entropy of a batch, in float32."""
    with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=autocast):
        logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits.float(), batch.labels)


def repeatable(options: Options, model: nn.Module) -> Sequence[nn.Parameter]:
    """Parameters whose gradients are the same bits whenever the inputs are."""
    stems = _STEMS[options.model]
    return [parameter for name, parameter in model.named_parameters() if not name.startswith(stems)]


def flops_per_sample(options: Options) -> int:
    """Floating-point operations of one sample in one step: a forward pass, and a backward pass of twice as many."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        if options.model == "transformer":
            model: nn.Module = Transformer(_size(options), classes=options.num_classes)
            inputs = torch.zeros((1, options.sequence), dtype=torch.long)
        else:
            model = (resnet18 if options.model == "resnet18" else resnet50)(classes=options.num_classes)
            inputs = torch.zeros((1, 3, options.image_size, options.image_size))
    model.eval()  # a batch of one has no variance to normalise by
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    return 3 * int(counter.get_total_flops())


def _size(options: Options) -> TransformerSize:
    return TransformerSize(layers=options.layers, width=options.width, heads=options.heads, sequence=options.sequence)
