"""What lies in one GPU's memory when a step needs most of it, tensor by tensor.

A step has five moments that can be the fullest: the loss at the end of the forward pass, the backward pass of the last
block (every activation is there), that of the first (most gradients are), the root's gradients, and the update. Each is
added up by itself, and the fullest is the peak: what torch.cuda.max_memory_allocated will say. What FSDP holds when is
read from torch's fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainmaster.core.config.train import ModelConfig
from trainmaster.estimate.calibration import MemoryFacts
from trainmaster.estimate.layout import Setting
from trainmaster.estimate.shapes import Counts, count
from trainmaster.models import family

_FLOAT32 = 4
# Of models/loss.py: logits of one chunk, at most; chunks are whole multiples of this many tokens.
_CHUNK_BYTES, _CHUNK_STEP = 1 << 30, 256
PARTS = ("weights", "optimizer", "gradients", "activations", "loss", "gathered", "workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one GPU, in bytes, at the fullest moment of a step; and what the host keeps beside it."""

    moment: str
    parts: Mapping[str, int]
    reserve: int  # CUDA's context, NCCL's buffers, what the allocator cannot use
    host_pinned: int  # of one node, to stage checkpoints off its GPUs; with cpu_offload the weights too
    checkpoint: int  # tensors of one checkpoint, over all ranks

    @property
    def peak(self) -> int:
        """What torch's allocator hands out at most."""
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """What the GPU must have."""
        return self.peak + self.reserve


def measure(model: ModelConfig, setting: Setting, facts: MemoryFacts) -> Memory:
    """The memory of one GPU in a run of this model, laid out so."""
    counts = count(model)
    moments = _moments(model, setting, counts, facts)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: moments[moment].get(name, 0) for name in PARTS}
    states = 3 * setting.master_bytes * counts.all  # weights and two moments
    reserve = facts.context_bytes + round(facts.fragmentation_share * sum(parts.values()))
    if setting.ranks > 1:
        reserve += facts.nccl_bytes
    here = setting.ranks_per_node / setting.shard_ranks
    staged = round(states * min(1.0, here)) if setting.shard_ranks >= setting.ranks_per_node else states
    offloaded = round((states + setting.master_bytes * counts.all) * min(1.0, here)) if setting.cpu_offload else 0
    return Memory(
        moment=moment,
        parts=parts,
        reserve=reserve,
        host_pinned=staged + offloaded,
        checkpoint=checkpoint_bytes(model, setting.master_bytes),
    )


def checkpoint_bytes(model: ModelConfig, master_bytes: int) -> int:
    """The tensors of a checkpoint: every weight with its two moments, and its float32 step count."""
    counts = count(model)
    return 3 * master_bytes * counts.all + _FLOAT32 * counts.tensors


def _moments(model: ModelConfig, setting: Setting, counts: Counts, facts: MemoryFacts) -> dict[str, dict[str, int]]:
    size, master, ranks = setting.compute_bytes, setting.master_bytes, setting.shard_ranks
    held = 0 if setting.cpu_offload else master * -(-counts.all // ranks)
    always = {"weights": held, "optimizer": 2 * held, "workspace": facts.workspace_bytes}
    early = 0  # gradients of the passes before: summed over the ranks and cut up, or whole until the last
    if setting.passes > 1:
        early = _FLOAT32 * counts.all if setting.reduce_once and not setting.alone else held
    stream = size * model.width * setting.tokens
    activations, block_activations = kept_bytes(model, setting), block_bytes(model, setting)
    working = _backward_bytes(model, setting) + (block_activations if setting.recompute != "none" else 0)
    head = model.vocab * model.width
    root, block = _gathered(setting, counts)
    share = -(-counts.root // ranks)  # of the root's gradients
    blocks = max(early, held - master * share)
    # A block's gradients as they are computed, while those of the block before are summed in float32.
    reducing = size * counts.block if setting.alone else (size + _FLOAT32) * counts.block
    return {
        "loss": always
        | {
            "gradients": early,
            "activations": activations + 2 * stream,  # of the last norm, in and out
            "loss": loss_bytes(model, setting) + stream + _FLOAT32 * head,
            "gathered": root + (block if ranks > 1 else 0),
        },
        "backward of the last block": always
        | {
            "gradients": early + size * head + reducing,
            "activations": activations + working + stream,
            "gathered": root + block,
        },
        "backward of the first block": always
        | {
            "gradients": blocks + size * head + (0 if setting.alone else reducing),
            "activations": block_activations + working + stream,
            "gathered": root + block,
        },
        "gradients of the root": always | {"gradients": blocks + _root_gradients(model, setting, counts, share)},
        "update": always | {"gradients": held},
    }


def _gathered(setting: Setting, counts: Counts) -> tuple[int, int]:
    """Whole weights. The root stays gathered from the first block to the last. Of the blocks one is computed; among
    several ranks the next is on its way, and the buffer of the one before is let go when that has come."""
    if setting.alone:
        return 0, 0
    many = 1 if setting.shard_ranks == 1 else 3
    return setting.compute_bytes * counts.root, setting.compute_bytes * counts.block * many


def _root_gradients(model: ModelConfig, setting: Setting, counts: Counts, share: int) -> int:
    """When the last of the root's gradients are there: computed, then in float32 before and after the sum, then in the
    weights' own type. One matrix that is both embedding and head has two gradients, which are added."""
    size = setting.compute_bytes
    if setting.alone:
        return size * (counts.root + (model.vocab * model.width if model.tied else 0))
    own = 0 if setting.master_bytes == _FLOAT32 else setting.master_bytes * share
    return max((size + _FLOAT32) * counts.root, _FLOAT32 * (counts.root + share) + own)


def kept_bytes(model: ModelConfig, setting: Setting) -> int:
    """Activations of all blocks between forward and backward."""
    whole, bare = block_bytes(model, setting), setting.compute_bytes * model.width * setting.tokens
    if setting.recompute == "full":
        return model.layers * bare
    if setting.recompute == "layers":
        again = -(-model.layers // setting.recompute_every)
        return again * bare + (model.layers - again) * whole
    if setting.recompute == "ops":
        return model.layers * _ops_bytes(model, setting)
    return model.layers * whole


def block_bytes(model: ModelConfig, setting: Setting) -> int:
    """What one block keeps for its backward pass when nothing is computed again."""
    if setting.float8 and setting.compiled:
        # A float8 product reads casts, which fuse with what they are of: so that need not be kept.
        return _ops_bytes(model, setting) + 2 * _FLOAT32 * setting.tokens
    cost = family.of(model).block_cost(model)
    numbers = cost.kept.of(compiled=setting.compiled)
    return (setting.compute_bytes * numbers + _FLOAT32 * cost.kept_float32) * setting.tokens


def _ops_bytes(model: ModelConfig, setting: Setting) -> int:
    """With recompute: ops, the outputs of the products and of attention stay; norms, turns and gates come again."""
    cost = family.of(model).block_cost(model)
    numbers = cost.kept_ops.of(compiled=setting.compiled)
    return (setting.compute_bytes * numbers + _FLOAT32 * cost.kept_ops_float32) * setting.tokens


def _backward_bytes(model: ModelConfig, setting: Setting) -> int:
    """Gradients inside one block."""
    cost = family.of(model).block_cost(model)
    numbers = cost.gradients.of(compiled=setting.compiled)
    return setting.compute_bytes * numbers * setting.tokens


def loss_bytes(model: ModelConfig, setting: Setting) -> int:
    """A chunk's logits and their gradient, and the gradient of the chunk before; eager code has float32 copies too."""
    size = setting.compute_bytes
    chunk = max(_CHUNK_STEP, _CHUNK_BYTES // (model.vocab * size) // _CHUNK_STEP * _CHUNK_STEP)
    copies = (3 if setting.tokens > chunk else 2) * size + (0 if setting.compiled else 4 * _FLOAT32)
    return min(setting.tokens, chunk) * model.vocab * copies
