"""Driver, GPU and the CUDA of torch fit together. Where they do not, the first kernel fails."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.checks import nvidia, profiles
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip
from trainmaster.node.host import Host

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Finds torch and prints the file that names its CUDA, without importing it: an import takes seconds and may crash.
SCRIPT = (
    "import importlib.util as u, pathlib as p; s = u.find_spec('torch'); "
    "print(p.Path(s.origin).with_name('version.py').read_text() if s and s.origin else 'no torch')"
)
# torch/version.py says `cuda: Optional[str] = '13.0'`, or None.
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:['\"](\d+\.\d+)['\"]|None\b)", re.MULTILINE | re.ASCII)
# The first driver of each CUDA family (NVIDIA, CUDA Compatibility, minor version compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions that must fit. `torch` is the text of its version file; None: it could not be read."""

    gpus: nvidia.Gpus
    torch: str | None
    trouble: str = ""


def read(host: Host) -> Versions:
    gpus = nvidia.read(host)
    try:
        result = host.run("python3", "-c", SCRIPT)
    except CommandMissing:
        return Versions(gpus=gpus, torch="no torch")
    except HostError as error:
        return Versions(gpus=gpus, torch=None, trouble=str(error))
    if result.exit_code:
        return Versions(
            gpus=gpus, torch=None, trouble=f"python3 ended with {result.exit_code}: {result.stderr.strip()[-200:]}"
        )
    return Versions(gpus=gpus, torch=result.stdout)


def judge(versions: Versions, expect: Expect) -> list[Finding]:
    gpus = versions.gpus
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return [refused]
    return [
        _judge_torch(versions, gpus),
        *nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_chip(gpu, device, versions)),
    ]


def _judge_torch(versions: Versions, gpus: nvidia.Gpus) -> Finding:
    assert gpus.smi is not None
    if versions.torch is None:
        return error(
            f"the version of torch cannot be read: {versions.trouble}", action="make python3 work on this node"
        )
    if not versions.torch.strip():
        return error("the version file of torch is empty", action="make python3 work on this node")
    if versions.torch.strip() == "no torch":
        return skip("python3 has no torch", proof="`python3` finds no module torch")
    cuda, driver = _torch_cuda(versions.torch), _numbers(gpus.smi.driver)
    if cuda is None and not _CUDA.search(versions.torch):
        reason = f"the version file of torch names no CUDA: {versions.torch.strip()[:40]!r}"
        return error(reason, action="reinstall torch")
    if cuda is None:
        reason = "torch is built without CUDA: it would train on the CPU"
        return fail(reason, action="install the CUDA build of torch")
    if not driver:
        return error("nvidia-smi reports no driver version", action="reinstall the NVIDIA driver")
    values = {"torch_cuda": _text(cuda), "driver": gpus.smi.driver, "driver_cuda": gpus.smi.cuda}
    # A library for forward compatibility raises the CUDA that nvidia-smi shows without changing the driver.
    if _numbers(gpus.smi.cuda) >= cuda:
        return ok(f"torch's CUDA {_text(cuda)} runs on driver {gpus.smi.driver}", **values)
    least = DRIVERS.get(cuda[0])
    if least is None or driver[0] < least:
        reason = f"torch's CUDA {_text(cuda)} needs a newer driver than {gpus.smi.driver}"
        action = f"install driver {least} or later, or a torch built for CUDA {gpus.smi.cuda or 'of this driver'}"
        return fail(reason, action=action if least else "install the newest driver", **values)
    return ok(f"torch's CUDA {_text(cuda)} runs on driver {gpus.smi.driver} (same family)", **values)


def _judge_chip(gpu: nvidia.Gpu, device: str, versions: Versions) -> Finding:
    if gpu.name is None:
        return error("it reports no product name", action=nvidia.RESET_OR_REBOOT, device=device)
    model = profiles.of_gpu(gpu.name)
    smi = versions.gpus.smi
    assert smi is not None
    if model is None or model.cuda_min is None:
        return skip(
            "the CUDA that it needs at least is not in the table of GPU models",
            proof=f"its name is {gpu.name}",
            device=device,
        )
    least, torch = _numbers(model.cuda_min), _torch_cuda(versions.torch or "")
    if not smi.cuda:
        return error("nvidia-smi reports no CUDA version", action="reinstall the NVIDIA driver", device=device)
    values = {"cuda_min": model.cuda_min, "driver_cuda": smi.cuda, "torch_cuda": _text(torch) if torch else None}
    if _numbers(smi.cuda) < least:
        reason = f"a {model.name} needs CUDA {model.cuda_min}; the driver has {smi.cuda}"
        return fail(reason, action="install a newer NVIDIA driver", device=device, **values)
    if torch is not None and torch < least:
        reason = f"a {model.name} needs CUDA {model.cuda_min}; torch has {_text(torch)}"
        action = f"install a torch built for CUDA {model.cuda_min} or later"
        return fail(reason, action=action, device=device, **values)
    return ok(f"a {model.name} needs CUDA {model.cuda_min}", device=device, **values)


def _torch_cuda(text: str) -> tuple[int, ...] | None:
    """None: torch was built without CUDA, or the text is no version file."""
    match = _CUDA.search(text)
    return _numbers(match[1]) if match and match[1] else None


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version or "", flags=re.ASCII))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
