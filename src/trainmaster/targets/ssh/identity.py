"""Which machine and which user a login really is: asked of the machine, since a host has many names.

The answer is the machine's own id and the user's number, not how a hosts file spells them: 127.0.0.1, another name, an
alias of ~/.ssh/config and `local` may be one account. What cannot answer (no login, no shell, no Python, no home
folder) cannot run a job either.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import NodeUnavailable, UsageError
from trainmaster.targets._answers import clean
from trainmaster.targets.ssh.connect import CONNECT_TIMEOUT_S, connect
from trainmaster.targets.ssh.hosts import SshHost, place_of, read_known_hosts

_ANSWER_S = 30.0
_AT_ONCE = 32
_MARK = "trainmaster-identity "
# For any Python from 2 on: that it is too old is said by the first job's own check.
_PROBE = """
import json, os, subprocess, sys
asked, machine, said = json.loads(sys.argv[1]), "", ""
for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
    if not machine and os.path.exists(path):
        machine = open(path).read().strip()
if asked["words"]:
    env = dict(os.environ)
    env.update(asked["env"])
    said = subprocess.check_output(asked["words"], env=env).decode("utf-8", "replace")[:100000]
home = os.access(os.path.expanduser("~"), os.W_OK)
print("trainmaster-identity " + json.dumps({"machine": machine, "uid": os.getuid(), "home": home, "said": said}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What a machine says of itself and of the user that logged in."""

    machine: str
    uid: int
    said: str  # output of the command that was asked for

    @property
    def text(self) -> str:
        return f"{self.machine}/{self.uid}"


async def identify(hosts: Sequence[SshHost], known_hosts: Path) -> dict[str, str]:
    """Place → machine and user, of every host; UsageError where one does not answer, with its reason."""
    known, turn = read_known_hosts(known_hosts), asyncio.Semaphore(_AT_ONCE)

    async def ask_one(host: SshHost) -> Login | UsageError:
        async with turn:
            try:
                return await ask(host, known)
            except UsageError as error:
                return error

    answers = await asyncio.gather(*map(ask_one, hosts))
    if faults := [str(answer) for answer in answers if isinstance(answer, UsageError)]:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise UsageError("; ".join(faults[:3]) + more)
    return {place_of(host): answer.text for host, answer in zip(hosts, answers, strict=True)}  # type: ignore[union-attr]


async def ask(
    host: SshHost, known_hosts: bytes, *, words: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Login:
    """Log in, and let Python say where it is; UsageError where that account cannot do that."""
    order = json.dumps({"words": list(words), "env": dict(env or {})})
    line = f"exec {shlex.quote(host.python)} -c {shlex.quote(_PROBE)} {shlex.quote(order)}"
    try:
        async with connect(host, known_hosts, timeout_s=CONNECT_TIMEOUT_S) as connection:
            done = await asyncio.wait_for(connection.run(line), _ANSWER_S)
    except NodeUnavailable as error:
        raise UsageError(f"{host.name}: {error}") from None
    except (TimeoutError, OSError) as error:
        raise UsageError(f"{host.name}: no answer of its Python: {error or 'too late'}") from None
    marked = [text for text in str(done.stdout).splitlines() if text.startswith(_MARK)]
    try:
        found = json.loads(marked[-1].removeprefix(_MARK))
        login = Login(machine=str(found["machine"]), uid=int(found["uid"]), said=str(found["said"]))
    except (IndexError, ValueError, TypeError, KeyError):
        last = clean(f"{done.stdout!s}\n{done.stderr!s}").strip().splitlines()[-1:]
        why = f": {last[0][:200]}" if last else ""
        raise UsageError(f"{host.name}: {host.user} cannot run {host.python} there{why}") from None
    if found.get("home") is not True and host.folder.startswith("~"):
        raise UsageError(f"{host.name}: {host.user} has no home folder there that it may write to; its jobs need one")
    if not login.machine:
        raise UsageError(f"{host.name}: it has no /etc/machine-id, so it cannot be told from others; make one with "
                         "systemd-machine-id-setup")  # fmt: skip
    return login
