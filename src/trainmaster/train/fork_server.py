"""Fork server of the ranks of a node: imports what a rank needs once, then forks a rank for each request.

`python -m trainmaster.train.fork_server CONFIG`, started by the agent with a socket as standard input. A request is one
packet of JSON: the rank's own variables, those to remove, its log. The answer is the process number of the rank.

A rank is forked twice, so that the kernel hands it to the agent: the agent waits for it, signals it and is watched by
it as if it had started it, and the fork server may die without harm. A forked rank is as good as a new process because
nothing has happened here but imports: one thread, no device, no random numbers drawn, no file of the run open. The
variables that differ between ranks (RANK, LOCAL_RANK, MASTER_PORT) are read after the fork; all others were set before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.files import open_plain
from trainmaster.core.plan import ROOM_VARIABLE
from trainmaster.node.owner import die_with
from trainmaster.train import __main__ as entry
from trainmaster.train.run_log import flush_output, print_traceback

PACKET_BYTES = 1 << 16
# torch imports the first at the first use of a meta tensor.
_ALWAYS = (
    "torch._dynamo", "trainmaster.train.loop", "trainmaster.train.parallel.shard", "trainmaster.train.evaluate",
    "trainmaster.train.watch.flight_recorder", "trainmaster.train.checkpoint.tiers.tiered",
)  # fmt: skip
# Of a run that compiles. They open no device.
_COMPILER = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
    "torch._inductor.runtime.triton_heuristics",
    "torch._dynamo.backends.inductor",  # these the compiler imports at its first use
    "torch._inductor.choices",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.hooks",
    "torch._dynamo.dce_extra_outputs",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "torch.utils._cpp_embed_headers",
    "triton.tools.tensor_descriptor",
    "torch.export._trace",
    "torch.distributed.tensor.experimental._attention",
)
# What the compiler does once in a process and needs no device for: hashes of torch's and Triton's files for the keys of
# its cache (0.1 and 0.3 s), imports of all code generators and of all backends.
_COMPILER_CALLS = (
    ("torch._inductor.codecache", "torch_key"),
    ("torch._inductor.runtime.triton_compat", "triton_key"),
    ("torch._inductor.codegen.common", "init_backend_registration"),
    ("torch._dynamo.backends.registry", "_lazy_import"),
)
# Files whose functions the tracer looks up by line. It reads a whole file for the first of them, with the interpreter
# held: 0.35 s of a warm start beside its load.
_TRACED = ("torch.nn.functional", "torch.nn.modules.linear", "trainmaster.models")
_DRIVER = Path("/dev/nvidiactl")
_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def serve(config: str) -> int:
    """Answer requests until the agent closes its end."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    agent = os.getppid()
    gc.disable()  # imports make few objects that die: collections are an eighth of their time (docs/LOG.md)
    import_all(config)
    gc.enable()
    fault = find_fault()
    if fault is not None:
        sys.stderr.write(f"ranks cannot be forked and are started as new processes: {fault}\n")
        return 1
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page
    while packet := connection.recv(PACKET_BYTES):
        request = json.loads(packet)
        pid = _fork(request, config, agent=agent, ours=connection.fileno())
        connection.send(json.dumps({"rank": request["rank"], "pid": pid}).encode())
    return 0


def import_all(config: str) -> None:
    """Import what a run of this config will. What cannot be imported is left to the rank, which says why."""
    names: Sequence[str] = _ALWAYS
    try:
        wanted: TrainConfig | None = entry.read_config([config])
    except TrainmasterError:
        wanted = None
    if wanted is not None:
        names = (*names, f"trainmaster.datasets.{wanted.data.source}")
        names = (*names, f"trainmaster.models.{wanted.model.family_name}.model")
    compiles = wanted is not None and (
        wanted.parallel.compile == "on"
        or (wanted.parallel.compile != "off" and wanted.device != "cpu" and _DRIVER.exists())
    )
    with _without_driver():
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                sys.stderr.write(f"{name} is not imported ahead: {error}\n")
        if compiles:
            _prepare_compiler()


def _prepare_compiler() -> None:
    """Import and call ahead what the compiler of this torch has of the names above; others have other names."""
    for name in _COMPILER:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name, function in _COMPILER_CALLS:
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(name), function)()
    with contextlib.suppress(Exception):
        names = importlib.import_module("torch._dynamo.funcname_cache")
        for name, module in sorted(sys.modules.items()):
            if name.startswith(_TRACED) and module.__file__:
                names.get_funcname(module.__file__, 1)


@contextlib.contextmanager
def _without_driver() -> Iterator[None]:
    """Answer the compiler, which asks at its import for GPUs, from the device files: CUDA and NVML start a thread."""
    try:
        from torch import cuda
    except ImportError:
        yield
        return
    given, name = os.environ.get(_COUNT_BY_NVML), "device_count"
    real = getattr(cuda, name)
    os.environ[_COUNT_BY_NVML] = "1"  # `is_available` asks `device_count` then, and not CUDA
    if _DRIVER.exists():
        setattr(cuda, name, _count_devices)
    try:
        yield
    finally:
        setattr(cuda, name, real)
        os.environ.pop(_COUNT_BY_NVML)
        if given is not None:
            os.environ[_COUNT_BY_NVML] = given


def _count_devices() -> int:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return 0
    return len(list(_DRIVER.parent.glob("nvidia[0-9]*")))


def find_fault() -> str | None:
    """Why a fork of this process would not be as good as a new process; None if it is."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"{threads} threads: a rank could inherit a lock that nobody opens"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised by an import"
    return None


def _fork(request: Mapping[str, Any], config: str, *, agent: int, ours: int) -> int:
    """Fork a rank that is the agent's child once this returns; its process number. `ours` is not for ranks."""
    numbers, answer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            me, rank = os.getpid(), os.fork()
            if rank == 0:
                for descriptor in (numbers, answer, ours):
                    os.close(descriptor)
                _become_rank(request, config, agent=agent, middle=me)
            os.write(answer, str(rank).encode())
        finally:
            os._exit(0)
    os.close(answer)
    with os.fdopen(numbers, "rb") as pipe:
        number = pipe.read(32)
    os.waitpid(middle, 0)  # from now on the rank is the agent's
    return int(number)


def _become_rank(request: Mapping[str, Any], config: str, *, agent: int, middle: int) -> None:
    """Run the rank in this process, as `python -m trainmaster.train CONFIG` would, and end it."""
    code = 1
    try:
        while os.getppid() == middle:
            time.sleep(0.0005)
        die_with(agent)()
        os.setsid()  # its own group: a signal reaches its children, and none of the agent's
        log = open_plain(Path(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _show(request["env"])
        for name in request["remove"]:
            os.environ.pop(name, None)
        os.environ.update(request["env"])
        sys.argv = [str(entry.__file__), config]
        code = entry.main([config], os.environ)
    except BaseException:
        print_traceback()
    finally:
        flush_output()
        os._exit(code)


def _show(variables: Mapping[str, str]) -> None:
    """Have /proc and `ps eww` show this rank's own variables: they show the memory that the program was started with.

    The agent has left room there in a variable of no other use. What does not fit is not shown.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        block = Path("/proc/self/environ").read_bytes()
        start = block.index(f"{ROOM_VARIABLE}=".encode())
        room = block.index(b"\0", start) - start
        text = b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
        text = text[: text.rindex(b"\0", 0, room) + 1] if len(text) > room else text
        # "pid (name) state …": env_start is the 50th field of the line.
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
        os.environ.pop(ROOM_VARIABLE, None)  # nothing refers to it any more
        ctypes.memmove(began + start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
