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

    def parts(self, count: int) -> list[Batch]:
        """Equal parts, as views."""
        pairs = zip(self.inputs.chunk(count), self.labels.chunk(count), strict=True)
        return [Batch(inputs=inputs, labels=labels) for inputs, labels in pairs]


def build_model(options: Options, device: torch.device) -> nn.Module:
    """The model with the same first values on every rank."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(_SEED)
    model = _create(options)
    torch.random.set_rng_state(generator)
    model = model.to(device)
    if _channels_last(options, device):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _create(options: Options) -> nn.Module:
    if options.model == "transformer":
        return Transformer(_size(options), classes=options.num_classes)
    kind = resnet18 if options.model == "resnet18" else resnet50
    return kind(classes=options.num_classes, channels=options.channels)


def _channels_last(options: Options, device: torch.device) -> bool:
    """Whether images lie with their channels together, as the convolutions of modern GPUs want them."""
    wanted = options.channels_last == "on" or (options.channels_last == "auto" and device.type == "cuda")
    return wanted and options.model != "transformer"


def synthetic_batch(options: Options, device: torch.device, *, rank: int) -> Batch:
    """A batch that is made on the device; every rank has its own, and `rank` 0's is the same everywhere."""
    generator = torch.Generator(device).manual_seed(_SEED + 1 + rank)
    count = options.samples_per_step
    labels = torch.randint(options.num_classes, (count,), device=device, generator=generator)
    if options.model == "transformer":
        tokens = torch.randint(options.num_classes, (count, options.sequence), device=device, generator=generator)
        return Batch(inputs=tokens, labels=labels)
    shape = (count, options.channels, options.pixels, options.pixels)
    images = torch.randn(shape, device=device, generator=generator)
    if _channels_last(options, device):
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
        model = _create(options)
        if options.model == "transformer":
            inputs = torch.zeros((1, options.sequence), dtype=torch.long)
        else:
            inputs = torch.zeros((1, options.channels, options.pixels, options.pixels))
    model.eval()  # a batch of one has no variance to normalise by
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    return 3 * int(counter.get_total_flops())


def _size(options: Options) -> TransformerSize:
    return TransformerSize(layers=options.layers, width=options.width, heads=options.heads, sequence=options.sequence)
