"""Default learning rate and warm-up of a config that states none.

A rate that suits a toy makes a large model diverge: with 3e-3 the loss of the shape of Llama 3 8B rises from its first
steps on. Unstated, a preset's published rate is taken, else one by the width.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.core.config import presets

# 1.2288 / width is 3e-4, 1.5e-4 and 7.5e-5 at the widths of Llama 3 8B, 70B and 405B; published are 3e-4, 1.5e-4 and
# 8e-5 (arXiv 2407.21783, table 3).
_LR_WIDTH = 1.2288
_LARGEST_LR = 3e-3
_LONGEST_WARMUP, _SHORTEST_WARMUP, _WARMUP_SHARE = 2000, 10, 50
FAR_ABOVE = 3.0  # times the rule: `trainmaster plan` warns


def lr_of_width(width: int) -> float:
    """Peak learning rate of a model of this width."""
    return float(f"{min(_LARGEST_LR, _LR_WIDTH / width):.4g}")


def warmup_of_steps(steps: int) -> int:
    """Warm-up of a run of this length; always shorter than the run."""
    wanted = min(_LONGEST_WARMUP, max(_SHORTEST_WARMUP, steps // _WARMUP_SHARE))
    return wanted if wanted < steps else steps // 2


def with_rates(mapping: Mapping[str, object], *, width: int, steps: int) -> Mapping[str, object]:
    """A training config with `optimizer.lr` and `optimizer.warmup_steps` where it states none.

    `width` and `steps` are the defaults of their fields.
    """
    model, optimizer = mapping.get("model", {}), mapping.get("optimizer", {})
    if not isinstance(model, Mapping) or not isinstance(optimizer, Mapping):
        return mapping
    filled = dict(optimizer)
    if filled.get("lr") is None:
        filled["lr"] = _lr(model, width)
    length = mapping.get("steps", steps)
    if filled.get("warmup_steps") is None and isinstance(length, int) and length >= 1:
        filled["warmup_steps"] = warmup_of_steps(length)
    return {**mapping, "optimizer": filled}


def expected_lr(name: str | None, width: int) -> float:
    """Rate that a model would get unstated; `name` is its preset, if it has one."""
    published = presets.find(name).lr if name is not None else None
    return published if published is not None else lr_of_width(width)


def _lr(model: Mapping[str, object], width: int) -> float:
    name, stated = model.get("preset"), model.get("width")
    if isinstance(name, str) and name in presets.names():
        preset = presets.find(name)
        width = preset.model["width"]
        # With another width it is another model.
        if preset.lr is not None and stated in (None, width):
            return preset.lr
    return lr_of_width(stated if isinstance(stated, int) and stated > 0 else width)
