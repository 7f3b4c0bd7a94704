"""Whether a GPU computes the same bits every time: matrix products, attention and training steps, repeated.

A GPU that silently computes wrong spoils a run without an error. Three comparisons find it: each result with its own
repeats (a fault that comes and goes), with the same result on the node's other GPUs (a fault that stays; the judge
does that, from the digests), and for the exact product with the CPU (a fault that all of them share).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainmaster.bench.probe import _bits
from trainmaster.bench.probe._run import Run

DEADLINE_S = 110.0
REPEATS = {"gemm": 60, "gemm_exact": 20, "attention": 40, "training": 6}
EXACT_ROWS = 32  # compared with the CPU; a row is a sum over all of the other matrix
STEPS = 4  # of one training
RATE = 0.0625


def measure(run: Run) -> None:
    run.results["settings"] = _bits.settle()
    size = 4096 if run.on_gpu and run.free_bytes() > 2 << 30 else 1024 if run.on_gpu else 128
    run.results["size"] = size
    results: dict[str, Any] = {}
    run.results["work"] = results
    for name, make in _WORKS.items():
        run.step(f"{name}: data")
        work, about = make(run, size)
        repeats = REPEATS[name] if run.on_gpu else 2
        run.step(f"{name}: first")
        first = work()
        results[name] = {"digest": _bits.digest(*first), "repeats": 0, "different_repeats": 0, "different": 0, **about}
        for number in range(repeats):
            run.step(f"{name}: repeat {number + 1} of {repeats}")
            again = work()
            different = sum(
                _bits.count_different(expected, other) for expected, other in zip(first, again, strict=True)
            )
            results[name]["repeats"] += 1
            results[name]["different_repeats"] += different > 0
            results[name]["different"] += different
        results[name]["finite"] = all(bool(torch.isfinite(tensor).all().item()) for tensor in first)
    run.step("exact product against the CPU")
    results["gemm_exact"]["wrong"] = _against_cpu(run, size)


Work = Callable[[], list[torch.Tensor]]


def _gemm(run: Run, size: int) -> tuple[Work, dict[str, Any]]:
    left, right = (_bits.draw((size, size), seed=seed, levels=_bits.FULL, device=run.device) for seed in (1, 2))
    return lambda: [torch.mm(left, right)], {}


def _gemm_exact(run: Run, size: int) -> tuple[Work, dict[str, Any]]:
    left, right = _exact(run, size)
    return lambda: [torch.mm(left, right)], {}


def _exact(run: Run, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(_bits.draw((size, size), seed=seed, levels=8, device=run.device) for seed in (3, 4))  # type: ignore[return-value]


def _against_cpu(run: Run, size: int) -> int:
    """How many numbers of the exact product's last rows differ from the CPU's, which adds in float64."""
    left, right = _exact(run, size)
    there = torch.mm(left, right)[-EXACT_ROWS:].cpu()
    here = (left[-EXACT_ROWS:].cpu().double() @ right.cpu().double()).to(torch.bfloat16)
    return _bits.count_different(there, here)


def _attention(run: Run, size: int) -> tuple[Work, dict[str, Any]]:
    shape = (2, 16, size // 2, 128) if run.on_gpu else (1, 2, 16, 32)
    query, key, value = (_bits.draw(shape, seed=seed, levels=_bits.FULL, device=run.device) for seed in (5, 6, 7))

    def attend(backend: SDPBackend) -> list[torch.Tensor]:
        with sdpa_kernel([backend]):
            return [functional.scaled_dot_product_attention(query, key, value, is_causal=True)]

    backend = _first_that_works(attend)
    return lambda: attend(backend), {"backend": backend.name.lower()}


def _first_that_works(attend: Callable[[SDPBackend], object]) -> SDPBackend:
    """The fastest kernel that this chip and this torch have; the digest is only compared with others of the same."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            attend(backend)
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise
            continue
        return backend
    return SDPBackend.MATH


def _training(run: Run, size: int) -> tuple[Work, dict[str, Any]]:
    """A block of a transformer, forward, backward and update, from the same start each time."""
    width = size // 4
    scale = 4.0 / width**0.5
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    start = [
        _bits.draw(shape, seed=10 + i, levels=_bits.FULL, device=run.device).mul_(scale)
        for i, shape in enumerate(shapes)
    ]
    inputs, wanted = (
        _bits.draw((4, 512 if run.on_gpu else 16, width), seed=s, levels=_bits.FULL, device=run.device)
        for s in (20, 21)
    )

    def train() -> list[torch.Tensor]:
        weights = [weight.clone().requires_grad_() for weight in start]
        losses = []
        for _ in range(STEPS):
            loss = functional.mse_loss(_block(inputs, weights).float(), wanted.float())
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight.sub_(weight.grad, alpha=RATE)
                    weight.grad = None
            losses.append(loss.detach())
        return [*(weight.detach() for weight in weights), torch.stack(losses)]

    return train, {"steps": STEPS}


def _block(inputs: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    into, out_of, up, down = weights
    batch, length, width = inputs.shape
    heads = (batch, length, max(1, width // 64), min(64, width))
    query, key, value = (part.reshape(heads).transpose(1, 2) for part in (inputs @ into).chunk(3, dim=-1))
    with sdpa_kernel([SDPBackend.MATH]):  # its backward is plain products, which are deterministic everywhere
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = inputs + seen.transpose(1, 2).reshape(batch, length, width) @ out_of
    return hidden + functional.gelu(hidden @ up) @ down


_WORKS: dict[str, Callable[[Run, int], tuple[Work, dict[str, Any]]]] = {
    "gemm": _gemm,
    "gemm_exact": _gemm_exact,
    "attention": _attention,
    "training": _training,
}
