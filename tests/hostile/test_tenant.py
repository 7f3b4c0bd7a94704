"""A hostile tenant beside another project, on each target with its real parts: nothing of the table succeeds.

`make tenant` runs all four; `make test` draws one by the day.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from accounts import needs_accounts
from hostile.tenant_attempts import ALL, BY_CALLER, CANARY, IN_JOB, WORDS, write_program
from hostile.tenant_beds import Bed, open_bed
from sshd import needs_sshd
from trainmaster.client import Client
from trainmaster.core.errors import TrainmasterError
from trainmaster.remote.confine import may_hide_tmp

pytestmark = [pytest.mark.spawns, needs_accounts, needs_sshd, pytest.mark.timeout(600)]

VICTIM = f"""umask 022; echo {WORDS}
for place in "$TRAINMASTER_CHECKPOINTS/step.bin" "$TRAINMASTER_OUTPUTS/model.bin" input.bin /tmp/of-the-victim; do
    echo {WORDS} > "$place"; chmod 644 "$place"
done
echo WHERE "$PWD" "$TRAINMASTER_OUTPUTS" "$TRAINMASTER_CHECKPOINTS" "$TRAINMASTER_EVENTS" "${{SLURM_JOB_ID:-none}}"
echo up; exec sleep 600"""
LIMITS = {"limits": {"grace_s": 1}, "preflight": {"level": 0}}


def test_the_table_has_forty_attempts_on_every_target() -> None:
    for target in ALL:
        assert len([one for one in IN_JOB if target in one.on]) + len(BY_CALLER) >= 80
        compile(write_program(target), target, "exec")
    assert len({one.name for one in IN_JOB}) == len(IN_JOB)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.parametrize("kind", sorted(ALL))
def test_a_hostile_tenant_gains_nothing(kind: str) -> None:
    with open_bed(kind) as bed, bed.client() as root:
        tokens = [root.create_token(name, role="user", project=name) for name in ("lab", "evil")]
        with bed.client(tokens[0]) as lab, bed.client(tokens[1]) as evil:
            job = submit(bed, lab, "lab", ["sh", "-c", VICTIM])
            words = wait_for(lab, job, b"\nup\n").decode()
            work, outputs, checkpoints, events, slurm_job = words.partition("WHERE ")[2].splitlines()[0].split()
            facts = {
                "port": 22, **bed.facts, "target": kind, "words": WORDS, "canary": CANARY, "url": bed.url, "job": job,
                "work": work, "outputs": outputs, "checkpoints": checkpoints, "attempt": events.rpartition("/")[0],
                "uid": bed.uids[0], "user": bed.accounts[0], "home": str(bed.home), "slurm_job": slurm_job,
            }  # fmt: skip
            thief = submit(bed, evil, "evil", [bed.python, "-c", write_program(kind), json.dumps(facts)])
            evil.wait(thief)
            said = evil.logs(thief).decode()
            gained = json.loads(said.partition("GAINED ")[2].splitlines()[0]) if "GAINED" in said else said
            if kind == "local" and not may_hide_tmp(bed.home):
                # The package or its Python lies in /tmp itself, as in a clone there: jobs share it, as the docs say.
                gained.pop("read what it left in /tmp", None)
            gained |= {f"as a caller: {name}": got for name, got in ask_all(bed, tokens[1], job)}
            gained |= dict(look_after(bed, lab, evil, job, thief))
            assert gained == {}
            own = dict(ask_all(bed, tokens[0], job, method="GET"))
            assert len(own) >= 8, f"requests that nobody may make prove nothing: {own}"
            lab.cancel(job)
            assert lab.wait(job).status == "cancelled"


def submit(bed: Bed, client: Client, project: str, command: list[str]) -> str:
    spec: dict[str, Any] = {"name": project, "project": project, "target": bed.target, "command": command, **LIMITS}
    return client.submit({**spec, "env": {"OF_THE_JOB": WORDS if project == "lab" else "mine"}}).id


def wait_for(client: Client, job: str, text: bytes) -> bytes:
    deadline = time.monotonic() + 240
    while True:
        said = b""
        with contextlib.suppress(TrainmasterError):  # not begun
            said = client.logs(job)
        if text in said:
            return said
        page = client.job(job)
        assert time.monotonic() < deadline and page.status not in ("failed", "cancelled"), (page.message, said)
        time.sleep(0.3)


def ask_all(bed: Bed, token: str, job: str, *, method: str | None = None) -> Iterator[tuple[str, str]]:
    """Requests of the table that were answered with less than 400, and what was said."""
    known = {"ID": job, "TARGET": bed.target, "LAB-USER": bed.accounts[0], "HOME": str(bed.home)}

    def fill(text: str) -> str:
        for name, value in known.items():
            text = text.replace(name, value)
        return text

    for name, verb, path, body in BY_CALLER:
        if method not in (None, verb) or ("--" in name and bed.kind != "slurm"):
            continue
        data = None if body is None else fill(json.dumps(body)).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(bed.url + fill(path), data=data, method=verb, headers=headers)
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read(2000).decode(errors="replace")
            # A page of costs without a row of the other project, or the page to sign in, tells nothing.
            if "/login" not in answer.url and ("cost of the other" not in name or job in text):
                yield name, f"{answer.status} {text[:200]}"


def look_after(bed: Bed, lab: Client, evil: Client, job: str, thief: str) -> Iterator[tuple[str, str]]:
    """What became of links, forged events and daemons, and how the victim is."""
    secrets = (WORDS.encode(), CANARY.encode(), (bed.home / "local.token").read_bytes().strip())
    for artifact in evil.artifacts(thief):
        with contextlib.suppress(TrainmasterError):
            content = b"".join(evil.pieces(thief, artifact.path, 0))
            # The facts of the hostile job hold the victim's words, and its log may repeat them; tokens never.
            held = secrets if artifact.path.startswith("outputs/") else secrets[2:]
            if any(secret in content for secret in held):
                yield "a link among its outputs", artifact.path
    if "forged" in str(list(lab.events(job, follow=False))):
        yield "an event in the other's name", "forged"
    if (status := lab.job(job).status) != "running":
        yield "the end of the victim", str(status)
    if bed.kind != "kubernetes":
        left = subprocess.run(
            ["pgrep", "-u", str(bed.uids[1]), "-fa", "98765"], check=False, capture_output=True, text=True
        )
        if left.stdout:
            yield "a process that outlives its job", left.stdout
