"""Bootstrap on a node where nothing is installed: sent as text, run by the node's own Python.

It finds the node half in a content-addressed cache or requests it; runs the given programs in a temporary
folder; and prints one answer. It ends, with all its descendants, at its deadline and when the connection
closes. With `serve` it becomes the node's end of the ssh target instead (node_server.py), whose agents outlive it.
Standard library only: it cannot import the package that it brings.

srun and Kubernetes start it as a module: `package` of its order names the node half, or is null where it is installed.
Standard input, which a step of srun does not have, is watched only with `watch`; Slurm's SIGTERM ends it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gzip
import hashlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ADDRESS_VARIABLE = "TRAINMASTER_NODE_ADDRESS"  # where the one who starts programs reaches this node
MAX_ANSWER_BYTES = 64 << 20  # a capture of 8 GPUs is under 1 MiB; a kernel log may be several
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 2.0  # a process that survives this hangs in the kernel
_STOPPED_S = 8.0  # a program stopped this long (SIGSTOP, a debugger) will not continue by itself
_OUT_BYTES, _ERR_BYTES = 16 << 20, 8 << 10  # kept of one program's output


def tree_digest(files: Mapping[str, bytes]) -> str:
    """Hash of names and contents: the cache key of the node half."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> None:
    order: dict[str, Any] = json.loads(base64.b64decode(sys.argv[1]))
    until = time.monotonic() + float(order["deadline_s"])
    if "serve" in order:
        _serve(order, until)
    # Orphaned descendants become children of this process, so they can be found and killed.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("terminated by a signal"))
    work = Path(tempfile.mkdtemp(prefix="trainmaster-"))
    try:
        answer = _run_programs(_node_half(order, work, until), order, work, until)
        text = json.dumps(answer).encode()
        if len(text) > MAX_ANSWER_BYTES:
            text = json.dumps({"wrong": f"its answer of {len(text) >> 20} MiB is over the limit"}).encode()
        _kill_all()  # before the answer: its reader may kill this process
        _say(order, f"answer {len(text)} {hashlib.sha256(text).hexdigest()}\n".encode() + text)
    finally:
        _kill_all()
        shutil.rmtree(work, ignore_errors=True)


def _serve(order: Mapping[str, Any], until: float) -> NoReturn:
    """Become the server of this node, in the same process. Its agents import the package: it must be cached."""
    package = _cache(order)
    if not order.get("verified") or not package.is_dir():  # a further channel of a connection that has verified it
        work = Path(tempfile.mkdtemp(prefix="trainmaster-"))
        try:
            _node_half(order, work, until)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    if not (package / "trainmaster").is_dir():
        raise SystemExit(f"{package.parent} cannot be written; free space there, or set XDG_CACHE_HOME")
    _say(order, b"serving\n")
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-m", "trainmaster.remote.node_server", *order["serve"]]
    os.execve(sys.executable, words, environment)  # noqa: S606 (no shell wanted)


def _cache(order: Mapping[str, Any]) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster" / str(order["digest"])


def _node_half(order: Mapping[str, Any], work: Path, until: float) -> Path | None:
    """Folder of the package: from the cache if complete, else received and cached. None: it is installed."""
    if "package" in order:
        return Path(order["package"]) if order["package"] is not None else None
    cache = _cache(order)
    if _digest_of(cache) == order["digest"]:
        return cache
    _say(order, b"need\n")
    data = _receive(int(order["size"]), until)
    unpacked = work / "package"
    zipfile.ZipFile(io.BytesIO(gzip.decompress(data))).extractall(unpacked)
    if _digest_of(unpacked) != order["digest"]:
        raise SystemExit("the package was damaged in transit")
    # Renamed in one step, on the same file system: many machines may share this home folder and do so at once. A full
    # or read-only home does not prevent the check.
    part = cache.with_name(f".{order['nonce']}")
    with contextlib.suppress(OSError):
        shutil.copytree(unpacked, part)
        # Damaged: moved aside, so that no process sees a mixture. A whole one is of a machine that was first: kept.
        if cache.exists() and _digest_of(cache) != order["digest"]:
            cache.rename(cache.with_name(f".old-{order['nonce']}"))
            shutil.rmtree(cache.with_name(f".old-{order['nonce']}"), ignore_errors=True)
        part.rename(cache)
    shutil.rmtree(part, ignore_errors=True)
    return unpacked


def _digest_of(folder: Path) -> str | None:
    try:
        paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        return tree_digest({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})
    except OSError:
        return None


def _receive(size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        if not select.select([0], [], [], max(0.0, until - time.monotonic()))[0]:
            raise SystemExit("the package did not arrive in time")
        chunk = os.read(0, 1 << 16)
        if not chunk:
            raise SystemExit("the connection closed")
        data += chunk
    return data


def _run_programs(package: Path | None, order: Mapping[str, Any], work: Path, until: float) -> dict[str, Any]:
    """Run several modules at once, each with its own environment; the output and end of each."""
    children = []
    for number, run in enumerate(order["runs"]):
        out, err, capture = (work / f"{number}.{end}" for end in ("out", "err", "capture"))
        # A killed program cannot clean up; the folder is removed here.
        env = {"TMPDIR": str(work), **order.get("env", {}), **run["env"]}
        words = [run["module"], *run["words"], *(["--capture", str(capture)] if run["captures"] else [])]
        children.append((_start(package, words, env, out, err), out, err, capture))
    stopped: float | None = None
    while any(child.poll() is None for child, *_ in children):
        now = time.monotonic()
        still = any(child.returncode is None and _state(child.pid) == "T" for child, *_ in children)
        stopped = (stopped or now) if still else None
        if now >= until or (stopped is not None and now - stopped > _STOPPED_S):
            break
        _breathe(order)
    results, left = [], MAX_ANSWER_BYTES
    for child, out, err, capture in children:
        files = _read_files(capture, left)
        if files is None:
            return {"wrong": f"its capture is over {MAX_ANSWER_BYTES >> 20} MiB"}
        left -= sum(map(len, files.values()))
        results.append(
            {
                "code": child.returncode,
                "state": _state(child.pid) if child.returncode is None else None,
                "out": _text(out, _OUT_BYTES),
                "err": _text(err)[-_ERR_BYTES:],
                "files": files,
            }
        )
    return {"runs": results}


def _read_files(folder: Path, most: int) -> dict[str, str] | None:
    """Plain files of a folder as texts; None where they are over the limit."""
    files, size = {}, 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            size += path.stat().st_size
            if size > most:
                return None
            files[path.relative_to(folder).as_posix()] = _text(path)
    return files


def _start(
    package: Path | None, words: list[str], env: Mapping[str, str], out: Path, err: Path
) -> subprocess.Popen[bytes]:
    paths = [*([str(package)] if package else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # In the home folder, where a job would start. Safe path: a clone of trainmaster there must not be imported.
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )


def _breathe(order: Mapping[str, Any]) -> None:
    """Wait a moment; exit if the connection closed."""
    if "package" in order and not order.get("watch"):
        time.sleep(0.05)
    elif select.select([0], [], [], 0.05)[0] and not os.read(0, 1 << 12):
        raise SystemExit("the connection closed")


def _state(pid: int) -> str | None:
    """The letter of /proc/PID/stat: T is stopped, D waits for a device."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def _text(path: Path, most: int = MAX_ANSWER_BYTES) -> str:
    with path.open("rb") as file:
        return file.read(most).decode("utf-8", errors="replace")


def _say(order: Mapping[str, Any], data: bytes) -> None:
    # The mark distinguishes protocol lines from a login shell's output.
    sys.stdout.buffer.write(f"\n{order['nonce']} ".encode() + data)
    sys.stdout.buffer.flush()


def _kill_all() -> None:
    """Kill every descendant, including those in sessions of their own, until none is left."""
    until = time.monotonic() + _KILL_S
    while (alive := _descendants()) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may contain spaces and parentheses; state and parent follow the last one.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    pids, ahead = [], [os.getpid()]
    while ahead:
        ahead = [pid for pid, parent in parents.items() if parent in ahead]
        pids += ahead
    return pids


if __name__ == "__main__":
    main()
