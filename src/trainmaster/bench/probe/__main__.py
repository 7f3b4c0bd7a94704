"""`python -m trainmaster.bench.probe NAME --gpu N`: run one probe, print one JSON object.

    {"v": 1, "probe": "gemm", "device": {…}, "results": {…}, "error": null, "took_s": 4.1}

`error` is {"kind", "message", "step"}; `results` then holds what was found before it. Ends with 0, or 1 on an error, or
4 if it hung: a thread watches the deadline and tells the step, since whoever kills the process from outside cannot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from trainmaster.bench import probe

HUNG = 4
IMPORT_S = 90.0  # of torch, from a cold shared disk, by eight processes at once


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    # torch, CUDA and their plug-ins write what they like to standard output; it must hold our one object alone.
    out = os.dup(1)
    os.dup2(2, 1)
    if options.device == "cuda":
        # Before torch is there. In the order of the bus, as nvidia-smi counts; by UUID where one is given, because
        # CUDA leaves out a GPU that it cannot use and then numbers the rest anew.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    return _Report(options.probe, out).fill(options)


class _Report:
    """What is printed, exactly once: by the probe when it ends, or by the watching thread when it does not."""

    def __init__(self, name: str, out: int) -> None:
        self._name = name
        self._out = out
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._at = "import torch"
        self._run: Any = None
        self._device: dict[str, Any] | None = None

    def fill(self, options: argparse.Namespace) -> int:
        error = None
        slow_import = self._watch(options.deadline or IMPORT_S)
        try:
            module = importlib.import_module(f"trainmaster.bench.probe.{self._name}")
            slow_import()
            deadline = options.deadline or module.DEADLINE_S + (options.seconds or 0.0)
            self._watch(max(0.0, deadline - (time.monotonic() - self._started)))
            self._measure(module, options)
        except Exception as exc:
            traceback.print_exc()
            error = _error(exc, self._step())
        self._print(error)
        return 1 if error else 0

    def _measure(self, module: Any, options: argparse.Namespace) -> None:
        import torch

        from trainmaster.bench.probe._run import Run, describe

        count = len(options.gpu.split(","))
        self._at = "start CUDA"
        if options.device == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # raises with CUDA's own words; `is_available` would only say no
            if torch.cuda.device_count() != count:
                raise RuntimeError(f"CUDA shows {torch.cuda.device_count()} of the {count} GPUs named {options.gpu}")
        devices = [torch.device(f"cuda:{i}" if options.device == "cuda" else "cpu") for i in range(count)]
        self._device = describe(devices[0])
        self._run = Run(devices=devices, whole=options.whole, seconds=options.seconds, watch=self._watch)
        module.measure(self._run)

    def _step(self) -> str:
        return self._run.at if self._run is not None else self._at

    def _watch(self, seconds: float) -> Callable[[], None]:
        """Print what there is and end the process in so many seconds, unless the returned function is called."""

        def expire() -> None:
            self._print({"kind": "Hung", "message": f"no end in {seconds:g} s", "step": self._step()})
            os._exit(HUNG)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        return timer.cancel

    def _print(self, error: dict[str, Any] | None) -> None:
        with self._lock:
            if self._out < 0:
                return
            document = {
                "v": 1,
                "probe": self._name,
                "device": self._device,
                "results": dict(self._run.results) if self._run is not None else {},
                "error": error,
                "took_s": round(time.monotonic() - self._started, 2),
            }
            text = json.dumps(_finite(document), allow_nan=False) + "\n"
            with os.fdopen(self._out, "w", encoding="utf-8") as file:
                file.write(text)
            self._out = -1


def _finite(value: Any) -> Any:
    """JSON has no NaN. Text in its place is no number to whoever judges, and shows what was there."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in list(value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _error(failure: Exception, step: str) -> dict[str, Any]:
    details = {"kind": type(failure).__name__, "message": str(failure)[:2000], "step": step}
    code = getattr(failure, "error_code", None)  # of torch.AcceleratorError: CUDA's number
    return {**details, "code": code} if isinstance(code, int) else details


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.bench.probe", description="Test one GPU actively.")
    parser.add_argument("probe", choices=probe.names())
    parser.add_argument("--gpu", default="0", metavar="N", help="number by bus address, or UUID; p2p: several, a,b,c")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny run that needs no GPU")
    parser.add_argument("--whole", action="store_true", help="memory_pattern: all of the free memory, more patterns")
    parser.add_argument("--seconds", type=float, metavar="S", help="burn: how long")
    parser.add_argument("--deadline", type=float, metavar="S", help="give up then; not stated: as the probe thinks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
