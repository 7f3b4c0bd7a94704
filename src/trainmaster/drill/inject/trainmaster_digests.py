"""Digests of what a process holds: of some elements of each tensor, copied off the device at once.

Beside the witness in a stranger's program, and under the same rules: nothing here draws a random number or changes a
tensor.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import sys
from array import array
from typing import Any

_NAMED = (
    "torch", "numpy", "safetensors", "transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed",
    "torchtitan", "megatron.core", "nemo", "torchdata", "datasets",
)  # fmt: skip
# Its rates, and how a step is computed, which moves nothing.
_NOT_SETTINGS = frozenset({"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
_TEXT, _LIST = 64, 8  # characters and values of a hyperparameter
_MOST_NODES, _NODES_IN_ALL = 20_000, 100_000  # values of one entry of a checkpoint that are looked at, and of all
_making: list[bool] = []  # one for each call under way


def versions() -> dict[str, str]:
    """Of Python, and of what the program has imported by now."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _NAMED}
    known = {name: str(version)[:64] for name, version in found.items() if isinstance(version, str)}
    return {"python": sys.version.split()[0], **known}


def rank() -> tuple[int, int]:
    """Of this process, and how many there are."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def random_states(torch: Any) -> dict[str, str]:
    _, numbers, gauss = random.getstate()
    states = {"python": array("Q", numbers).tobytes() + repr(gauss).encode(), "torch": _bytes(torch.get_rng_state())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = repr((kind, rest)).encode() + keys.tobytes()
    if torch.cuda.is_initialized():
        states["cuda"] = _bytes(torch.cuda.get_rng_state())
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def state(of_one: dict[str, Any]) -> list[Any]:
    return [of_one[name] for name in sorted(of_one, key=str)]


def spread(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else [items[index * len(items) // most] for index in range(most)]


def flatten(data: Any, leaves: list[Any], depth: int) -> None:
    if depth > 6 or len(leaves) > 256:
        return
    if isinstance(data, dict) or (hasattr(data, "keys") and hasattr(data, "values")):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        for item in data[:256]:
            flatten(item, leaves, depth + 1)
    else:
        leaves.append(data)


def entries(content: Any) -> dict[str, str]:
    """Digests of the entries of a checkpoint that hold tensors of real numbers: no counters and no random states.

    Tensors that stand in it by themselves, as in a state_dict, are one entry without a name. An entry of very many
    values, as a list of the samples that were seen, is left out: looking at them would take longer than the save.
    """
    import torch

    left = [0]

    def tensors(data: Any, depth: int) -> list[Any] | None:
        if isinstance(data, torch.Tensor):
            left[0] -= 1
            return [data] if data.is_floating_point() and data.numel() > 1 else []
        many = len(data) if isinstance(data, (dict, list, tuple)) else 0
        left[0] -= 1 + (many if many > left[0] else 0)
        if left[0] <= 0:
            return None
        if depth > 6 or not many:
            return []
        if isinstance(data, dict):
            data = [data[key] for key in sorted(data, key=str)]
        found: list[Any] = []
        for one in data:
            some = tensors(one, depth + 1)
            if some is None:
                return None
            found += some
        return found

    if not isinstance(content, dict) or len(content) > _MOST_NODES:
        return {}
    found: dict[str, list[Any]] = {}
    in_all = _NODES_IN_ALL
    for key in sorted(content, key=str):
        alone = isinstance(content[key], torch.Tensor)
        left[0] = most = min(_MOST_NODES, in_all)
        some = tensors(content[key], 0)
        in_all -= most - max(0, left[0])
        if some:
            found.setdefault("" if alone else str(key)[:64], []).extend(some)
    return {name: digest(spread(some, 64), 8) for name, some in list(found.items())[:64]}


def digest(values: list[Any], elements: int, more: bytes = b"") -> str:
    """Digest of some elements of each tensor, gathered on its device and copied to the host at once."""
    return _hash([more, *pieces(values, elements)])


def pieces(values: list[Any], elements: int) -> list[bytes]:
    """Some elements of each tensor and its type; of another value its text."""
    import torch

    found = [b"" if isinstance(value, torch.Tensor) else repr(value)[:64].encode() for value in values]
    parts: dict[tuple[Any, Any], list[tuple[int, Any]]] = {}
    with torch.no_grad():
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensor = getattr(value, "_local_tensor", value)  # this rank's shard of a DTensor
                if tensor.numel():
                    parts.setdefault((tensor.device, tensor.dtype), []).append((place, _some(tensor, elements)))
        for (_, dtype), some in parts.items():
            gathered = torch.cat([tensor for _, tensor in some]).cpu()
            raw = _bytes(gathered.to(torch.uint8) if dtype is torch.bool else gathered.view(torch.uint8))
            size, at, name = len(raw) // gathered.numel(), 0, str(dtype).encode()
            for place, tensor in some:
                found[place] = name + raw[at : at + size * tensor.numel()]
                at += size * tensor.numel()
    return found


def choose(groups: list[list[Any]], most: int) -> list[list[Any]]:
    """Some parameters of each group: the same ones, in whatever order the groups stand."""
    return [spread(group, max(1, most // len(groups))) for group in spread(groups, most)]


def digest_groups(groups: list[list[Any]], elements: int) -> tuple[str, list[str]]:
    """Digest of the parameters in whatever order they stand, and one of each group that tells of its order."""
    found = pieces([parameter for group in groups for parameter in group], elements)
    following = iter(found)
    return _hash(sorted(found)), [_hash(list(itertools.islice(following, len(group))), 4) for group in groups]


def digest_states(states: list[list[Any]], elements: int) -> tuple[str, str]:
    """Digest of the states of parameters, and one that is the same where parameters have exchanged them."""
    following = iter(pieces([tensor for state in states for tensor in state], elements))
    each = [b"".join(itertools.islice(following, len(state))) for state in states]
    return _hash(each), _hash(sorted(each))


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a parameter group but its learning rate, which has a place of its own."""
    return {str(name): _plain(group[name]) for name in list(group)[:48] if name not in _NOT_SETTINGS}


def _plain(value: Any) -> Any:
    """Of a tensor or a number of numpy its value; of what is no number, or too long, its type alone."""
    if isinstance(value, str):
        return value[:_TEXT]
    if isinstance(value, (list, tuple)):
        some = [_plain(one) for one in value[:_LIST]]
        return some if len(value) <= _LIST else [*some, len(value)]
    if not isinstance(value, (int, float, type(None))) and hasattr(value, "item"):
        try:
            value = value.item()
        except Exception:  # a tensor of several elements, or one that is nowhere
            return type(value).__name__
    return value if isinstance(value, (int, float, type(None))) else type(value).__name__


def _hash(parts: list[bytes], size: int = 8) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=size).hexdigest()


def _bytes(tensor: Any) -> bytes:
    """Of a tensor of bytes on the host; torch may be there without numpy."""
    return bytes(tensor.numpy().tobytes() if "numpy" in sys.modules else tensor.tolist())


def _some(tensor: Any, most: int) -> Any:
    """Views of the tensor: nothing large is copied."""
    if tensor.is_contiguous():
        step = max(1, tensor.numel() // most)
        count = min(most, -(-tensor.numel() // step))
        return tensor.as_strided((count,), (step,), tensor.storage_offset())
    while tensor.dim() > 1:
        tensor = tensor[tensor.shape[0] // 2]
    return tensor.reshape(-1)[:most]


def buffers(modules: dict[int, Any], optimizer: Any) -> list[Any]:
    """Buffers that a checkpoint holds, of modules that own a parameter of this optimizer: BatchNorm's statistics."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = []
    for module in [reference() for reference in list(modules.values())]:
        if module is not None and any(id(p) in trained for p in module._parameters.values()):
            kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
            found += [module._buffers[name] for name in kept if module._buffers[name] is not None]
    return found


def unseen(make: Any) -> Any:
    """What torch's distributed checkpoint makes an optimizer's state with, before it loads into that: a step with
    gradients and rates of 0. It moves nothing, and is no step of the run."""

    @functools.wraps(make)
    def make_unseen(*args: Any, **options: Any) -> Any:
        _making.append(True)
        try:
            return make(*args, **options)
        finally:
            _making.pop()

    return make_unseen


def is_making() -> bool:
    return bool(_making)
