"""Target `local`: attempts run on the machine of the control plane, under an agent that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.core.attempt import Handle
from trainmaster.core.errors import NodeUnavailable, TargetError, UsageError
from trainmaster.core.plan import CHECKPOINTS_FOLDER, WORK_FOLDER, Plan
from trainmaster.queueing.state import Device, DeviceListing, Kind
from trainmaster.remote import confine, devices, job_user, memory_limit, pull
from trainmaster.remote.attempt_host import AttemptHost, submission
from trainmaster.targets import Account, NodeAccess, Placement, Submission, split
from trainmaster.targets._answers import deadline, encode_order, find_answer, make_order, parse_results
from trainmaster.targets._devices import find_gpus, to_device
from trainmaster.targets._nodes import Node, Program, Result, Transfer
from trainmaster.targets._queueing import DRAIN_HERE, NO_NAME, OWN_QUEUE
from trainmaster.targets._traits import Traits

_HERE = "this machine"
SLOTS_VARIABLE = "TRAINMASTER_SLOTS"
PRICE_VARIABLE = "TRAINMASTER_GPU_HOUR_PRICE"
_MOST_SLOTS = 4096
_MOST_PRICE = 1e6  # dollars
_EXTRA_S = 10.0  # for the start of Python, beside its programs
TRAITS = Traits(
    title="this machine",
    option="none",
    here=True,
    paid=False,
    nodes=True,
    instead={
        "isolate": "pairs need several nodes: use --on ssh:hosts.yaml, --on slurm or --on kubernetes",
        "remedy": DRAIN_HERE,
    },
    accounts="UNIX-USER",
    queue=OWN_QUEUE,
    no_queue=NO_NAME,
    no_spares="it is one machine; a rank that dies is started again on it, in the same attempt",
)


def create(options: str, *, user: str | None = None) -> Local:
    """The target `local`; it has no options. `user` is the Unix user of its jobs, in place of that of `--job-user`."""
    if options:
        raise UsageError(f"target: local takes no options, got {options!r}; write `local`")
    return Local(user)


def charges(options: str, user: str | None = None) -> bool:  # noqa: ARG001 (the contract of targets)
    """Whether `serve --gpu-hour-price` states a price."""
    return bool(read_price())


def runs_as(options: str, user: str | None) -> Account:
    """The Unix user of jobs on this machine."""
    create(options)
    entry = job_user.find_user(user)
    name = entry.pw_name if entry is not None else str(os.geteuid())
    server = "its jobs run as the user of the server and can read its files" if entry is None else ""
    common = job_user.find_user()
    if entry is not None and user is not None and common is not None and entry.pw_uid == common.pw_uid:
        server = f"{name} is the user of --job-user, who runs the jobs of every project without one"
    return Account(name=name, places=frozenset({_HERE}), server=server, note=_find_note() if entry else "")


@functools.cache
def _find_note() -> str:
    faults = [("jobs are not confined", confine.find_fault()), ("memory is not limited", memory_limit.find_fault())]
    return "; ".join(f"{what}: {why}" for what, why in faults if why)


async def identify(options: str, user: str | None) -> dict[str, str]:
    """This machine and the user's number; UsageError where that user cannot run our Python."""
    create(options)
    entry = job_user.find_user(user)
    if entry is None:
        return {}
    if fault := await asyncio.to_thread(job_user.find_python_fault, entry):
        raise UsageError(f"local: {entry.pw_name} cannot run {sys.executable}: {fault}")
    return {_HERE: f"{machine_id() or _HERE}/{entry.pw_uid}"}


def machine_id() -> str:
    """The id of this machine, as its other names lead to it; "" where it has none."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        with contextlib.suppress(OSError):
            if text := path.read_text().strip():
                return text
    return ""


def local_jobs_are_isolated() -> bool:
    """Whether local jobs run as another Unix user than the control plane; UsageError where that user cannot be used."""
    return job_user.find_user() is not None


def find_job_uid(word: str) -> int | None:
    """User of the jobs of a word; None where they run as the user of the control plane."""
    user = job_user.find_user(split(word)[0])
    return None if user is None else user.pw_uid


class Local(AttemptHost):
    """Runs attempts on this machine."""

    fetches_inputs = True

    async def submit(self, submission: Submission) -> Handle:
        await asyncio.to_thread(_bring, submission)
        return await super().submit(_assign(submission))

    async def list_devices(self) -> DeviceListing:
        """GPUs of this machine, and the slots of `serve --slots`."""
        machine = socket.gethostname()
        listed: dict[Kind, Sequence[Device]] = {}
        if (slots := read_slots()) is not None:
            listed["slot"] = [Device(id=f"{machine}/slot-{number}", machine=machine) for number in range(slots)]
        try:
            gpus = await devices.ask_gpus()
        except devices.DevicesUnknown as error:
            return DeviceListing(devices={"gpu": [], **listed}, silent={machine: str(error)})
        listed["gpu"] = [to_device(machine, gpu) for gpu in gpus]
        return DeviceListing(devices=listed, answered=[machine])

    def list_machines(self) -> list[str]:
        return [socket.gethostname()]

    def plan(self, placement: Placement) -> Submission:
        spec, job = placement.spec, placement.job_folder.absolute()
        if spec.resources.nodes != 1:
            raise TargetError(f"local runs one node, the spec asks for {spec.resources.nodes}; set resources.nodes: 1")
        folder = job / "attempts" / placement.attempt.rpartition(".")[2]
        checkpoints = job.with_name(spec.resume_from or job.name) / CHECKPOINTS_FOLDER
        plan = Plan(attempt=placement.attempt, spec=spec, folder=str(folder), checkpoints=str(checkpoints))
        planned, price = submission(plan), read_price()
        if price is None:
            return planned
        cents = round(price * 100 * spec.resources.ranks, 6)
        return replace(planned, handle={**planned.handle, "price_cents_per_hour": cents})

    def open_nodes(self, *, limit_s: float, home: Path, retest: bool = False) -> NodeAccess:  # noqa: ARG002 (no marks)
        return LocalNodes()


def read_price() -> float | None:
    """Dollars for a GPU and an hour on this machine, as the operator states them; None: not stated."""
    text = os.environ.get(PRICE_VARIABLE)
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price <= _MOST_PRICE:  # also of nan
        raise UsageError(f"{PRICE_VARIABLE}: {text!r} is no price; write dollars for a GPU and an hour, as 2.50")
    return price


def read_slots() -> int | None:
    """Ranks without a GPU that may run on this machine at once; None: not stated. 0 lifts the limit."""
    text = os.environ.get(SLOTS_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) > _MOST_SLOTS:
        raise UsageError(f"{SLOTS_VARIABLE}: {text!r} is no number of slots; write 0 to {_MOST_SLOTS}")
    return int(text)


def _assign(submission: Submission) -> Submission:
    """The submission with the GPUs that the handle names in its plan."""
    gpus = find_gpus(submission.handle, socket.gethostname())
    if not gpus:
        return submission
    files = {path: replace(Plan.from_json(text), gpus=gpus).to_json() + "\n" for path, text in submission.files.items()}
    return replace(submission, files=files)


def _bring(submission: Submission) -> None:
    """Put inputs into the working folder of the job, once: afterwards it is the property of the user of jobs."""
    work = Path(str(submission.handle["folder"])).parent.parent / WORK_FOLDER
    if not submission.pulls or (work.exists() and work.stat().st_uid != os.geteuid()):
        return
    work.mkdir(parents=True, exist_ok=True)
    for wanted in submission.pulls:
        place = work.parent / wanted.to
        # An uploaded folder may hold links, and they may lead anywhere.
        if not place.parent.resolve().is_relative_to(work.resolve()) or place.is_symlink():
            raise TargetError(f"local: {wanted.to} leads out of the working folder; remove the link from it")
        described = pull.Object(
            name=wanted.name, url=wanted.url, place=str(place), size_bytes=wanted.size_bytes,
            version=wanted.version, md5=wanted.md5, sha256=wanted.sha256, mode=wanted.mode,
        )  # fmt: skip
        try:
            pull.pull(described, source=wanted.source)
        except OSError as error:
            raise TargetError(f"local: {error}") from error


class LocalNodes:
    """This machine as any other node: the bootstrap is a process of its own, which ends with this one."""

    def __init__(self) -> None:
        self.transfer = Transfer()

    async def nodes(self) -> list[Node]:
        return [Node(name=socket.gethostname(), address="127.0.0.1")]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:  # noqa: ARG002 (one)
        order = make_order(programs, deadline_s=deadline(timeout_s), package=None, watch=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trainmaster.remote.bootstrap", encode_order(order),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s + _EXTRA_S):
                body, stderr = await asyncio.gather(process.stdout.read(), process.stderr.read())
                code = await process.wait()
        except TimeoutError:
            reason = f"it gave no answer in {timeout_s:g} s"
            raise NodeUnavailable(reason, action="see what its Python or file system waits for") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # it ends its programs first
                await process.wait()
        data = find_answer(body, order["nonce"])
        if data is None:
            end = " ".join(stderr.decode(errors="replace").split())[-300:] or "nothing was printed"
            raise NodeUnavailable(f"{sys.executable} ended with {code}: {end}", action="run `trainmaster check` here")
        self.transfer.received_bytes += len(data)
        return parse_results(data, len(programs))

    async def close(self) -> None:
        """Nothing is held between two programs."""
