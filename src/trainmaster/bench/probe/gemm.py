"""How fast a GPU multiplies matrices, in each precision it trains in, and whether the products are right.

Square matrices of random numbers: zeros draw less power and run an eighth faster. 8192 is the size of the published
figures, which are taken in bursts: held for seconds, an H200 runs into its power limit and gives a sixth less. So bf16
is measured both ways, the burst first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainmaster.bench import nvml
from trainmaster.bench.probe._run import Run
from trainmaster.bench.probe._timing import rates, time_bursts, time_rounds

DEADLINE_S = 100.0
SIZES = ((8192, 6 << 30), (4096, 2 << 30), (2048, 1 << 29))  # size, and the free memory it takes for all precisions
ROWS = 32  # compared with a product in float64
FP8_SINCE = (8, 9)  # compute capability: Ada and Hopper were the first with 8-bit matrix units


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product to repeat, and the operands as they were after rounding, for the reference."""

    work: Callable[[], torch.Tensor]
    left: torch.Tensor
    right: torch.Tensor


def measure(run: Run) -> None:
    torch.set_float32_matmul_precision("high")  # float32 through the matrix units: tf32
    size = pick_size(run)
    generator = torch.Generator(device=run.device).manual_seed(1)
    draw = torch.randn(2, size, size, generator=generator, device=run.device)
    run.results["size"] = size
    # Here already, so that a probe that hangs later does not look as if a precision had never been thought of.
    precisions: dict[str, object] = {}
    run.results["precisions"] = precisions
    products: dict[str, Product] = {}
    for name, make in _MAKERS.items():
        run.step(f"{name} product of {size}")
        made = make(run, draw)
        if isinstance(made, str):
            precisions[name] = {"available": False, "why": made}
        else:
            products[name] = made
    errors = {}
    for name, product in products.items():
        run.step(f"{name} product against float64")
        errors[name] = relative_error(product)
    sensor = nvml.open_sensor(run.device)
    run.results["before"] = sensor.sample() if sensor else None
    if "bf16" in products:
        run.step("timing bf16 in bursts")
        run.results["burst"] = rates(time_bursts(run.device, products["bf16"].work), 2 * size**3 / 1e12)
    run.step("timing")
    timed = time_rounds(run.device, {name: product.work for name, product in products.items()})
    run.results["after"] = sensor.sample() if sensor else None
    for name, rounds in timed.items():
        precisions[name] = {"available": True, **rates(rounds, 2 * size**3 / 1e12), "relative_error": errors[name]}


def pick_size(run: Run) -> int:
    """The largest that fits; it does not grow with the GPU, so that a number can be compared with another's."""
    if not run.on_gpu:
        return 128
    free = run.free_bytes()
    for size, needed in SIZES:
        if free >= needed:
            return size
    raise RuntimeError(f"only {free >> 20} MiB of the GPU's memory are free; {SIZES[-1][1] >> 20} are needed")


def relative_error(product: Product) -> float:
    """‖product − exact‖ / ‖exact‖ over the last rows: their tiles are the last to be done."""
    out = product.work()[-ROWS:].double()
    exact = product.left[-ROWS:].double() @ product.right.double()
    return float(f"{(torch.linalg.norm(out - exact) / torch.linalg.norm(exact)).item():.3g}")


def _plain(dtype: torch.dtype) -> Callable[[Run, torch.Tensor], Product | str]:
    def make(_: Run, draw: torch.Tensor) -> Product | str:
        left, right = draw[0].to(dtype), draw[1].to(dtype)
        out = torch.empty_like(left)
        return Product(work=lambda: torch.mm(left, right, out=out), left=left, right=right)

    return make


def _fp8(run: Run, draw: torch.Tensor) -> Product | str:
    if run.on_gpu and torch.cuda.get_device_capability(run.device) < FP8_SINCE:
        return "this chip has no 8-bit matrix units"
    try:
        left = draw[0].to(torch.float8_e4m3fn)
        right = draw[1].to(torch.float8_e4m3fn).t()  # column-major, as the matrix units want it
        scale = torch.ones((), device=run.device)

        def work() -> torch.Tensor:
            return torch._scaled_mm(
                left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        work()
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        return f"this torch cannot: {str(error)[:200]}"
    except RuntimeError as error:
        if "CUDA error" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise  # the device failed, or another process has its memory; that is no matter of what it offers
        return f"this torch cannot: {str(error)[:200]}"
    return Product(work=work, left=left.float(), right=right.float())


_MAKERS: dict[str, Callable[[Run, torch.Tensor], Product | str]] = {
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "tf32": _plain(torch.float32),
    "fp8": _fp8,
}
