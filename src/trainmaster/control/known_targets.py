"""Which target a project's job runs on, as which account, and who may say so.

An administrator of the server makes targets known by name and grants them to projects, each with an account of its own
there. Tokens of projects name only what was granted to theirs: a path from them is never opened, and a target whose
jobs would have the server's own rights, or the account of another project, is refused. Which account that is, the
target says (`targets.runs_as`); one that does not say is refused.
"""

from __future__ import annotations

import logging
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.api.targets import KnownTarget, TargetGrant
from trainmaster.core.errors import AccessRefused, TrainmasterError, UsageError
from trainmaster.core.secret.shapes import recognise
from trainmaster.core.spec import JobSpec
from trainmaster.store import audit, known_targets
from trainmaster.store.database import Connection, Database
from trainmaster.store.known_targets import Grant
from trainmaster.targets import Account
from trainmaster.targets.local import machine_id

NAME = r"[a-z][a-z0-9_-]{0,62}"
TARGET = rf"{NAME}(:[A-Za-z0-9][A-Za-z0-9_-]{{0,62}})?"  # a known name, or a word that names no file
USER = r"[A-Za-z0-9_][A-Za-z0-9._@+/-]{0,127}"
_PROJECT = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
# Folders of the home that jobs write to: what lies there is theirs, and never a setting of the server.
_OF_JOBS = ("jobs", "storage", "reconcilers")
# The installation lies where that account may not read, most often in a home folder.
_ADVICE_ON_PYTHON = (
    "; use an account that can read this installation, or install it where every account can, as /opt; for a test on "
    "your own machine: `trainmaster serve --trust-jobs` needs no grant"
)
log = logging.getLogger(__name__)


def find_word(conn: Connection, spec: JobSpec) -> str:
    """What `targets.load` takes for a spec: the known target behind its name, as the account of its project."""
    known = known_targets.find_target(conn, spec.target)
    grants = {grant.project: grant for grant in known_targets.list_grants(conn, target=spec.target)}
    mine = grants.get(spec.project)
    return targets.spell(known.word if known is not None else spec.target, mine.user if mine is not None else None)


def admit(db: Database, spec: JobSpec, *, trust_jobs: bool = False) -> None:
    """AccessRefused unless the project's tokens may submit this. Asked for every caller but an admin of the server.

    With `trust_jobs` a target that names no file needs no grant: the operator lets jobs run as the server.
    """
    with db.read() as conn:
        known = known_targets.find_target(conn, spec.target)
        grants = {grant.project: grant for grant in known_targets.list_grants(conn, target=spec.target)}
        word = find_word(conn, spec)
    stated = targets.find_traits(spec.target)
    if known is None and stated is not None and stated.names_file(spec.target):
        raise AccessRefused(
            "file_of_server",
            "only an admin of the server may name a file of the server; name a target that it made known: "
            "trainmaster target add NAME --as …",
        )
    if spec.project not in grants:
        if trust_jobs and stated is not None:
            return
        raise _not_granted(db, spec)
    account = _ask(word, spec.target)
    if account is None or account.server:
        why = account.server if account is not None else "it does not say which account its jobs have"
        raise AccessRefused("untrusted_jobs", f"{spec.target}: {why}; {_advice(spec.target, spec.project)}")
    if why := _find_unasked(word, account, grants[spec.project]):
        raise AccessRefused("untrusted_jobs", f"{spec.target}: {why}; {_advice(spec.target, spec.project)}")
    if spec.rent.file_systems and len(grants) > 1:
        message = f"{spec.target}: rent.file_systems are of the whole account, which other projects use too"
        raise AccessRefused("untrusted_jobs", message)


def require_settings(db: Database, spec: JobSpec) -> None:
    """UsageError, without a word of the file, where the settings of a target cannot be used: a plan would quote it."""
    with db.read() as conn:
        word = find_word(conn, spec)
    if targets.find_traits(word) is not None:
        _ask(word, spec.target)


def refuse_job_file(target: str, home: Path, storage: str | None = None) -> None:
    """AccessRefused where the file of a target lies where jobs write: below jobs, storage and work folders."""
    stated = targets.find_traits(target)
    if stated is None or not stated.names_file(target):
        return
    try:
        path = Path(targets.split(target)[2]).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        raise UsageError("target: its path cannot be followed") from None
    folders = [home / name for name in _OF_JOBS]
    folders += [Path(storage)] if storage is not None and "://" not in storage else []
    if any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise AccessRefused("file_of_job", "target: a file that a job may have written is never a setting; move it")


def add(db: Database, name: str, word: str, *, home: Path, storage: str | None = None, by: str) -> None:
    """Make a target known under a name. UsageError where it is none, or its settings cannot be read."""
    if not re.fullmatch(NAME, name) or recognise(name):
        raise UsageError(f"{name!r:.80}: a name has lower-case letters, digits, dashes and underscores, at most 63")
    if targets.find_traits(name) is not None:
        raise UsageError(f"{name}: a target is called so itself; grant it as it is, or choose another name")
    stated = targets.traits(word)
    if targets.split(word)[0] is not None or not stated.names_file(word):
        raise UsageError(
            f"--as {word}: a known target stands for a file, as ssh:/etc/trainmaster/lab.yaml; what names none is "
            "granted as it is: trainmaster target grant local --project P --user U"
        )
    if not Path(targets.split(word)[2]).is_absolute():
        raise UsageError(f"--as {word}: write the whole path of the file")
    refuse_job_file(word, home, storage)
    if _ask(word, name) is None:
        raise UsageError(f"--as {word}: this target does not say which account its jobs have")
    with db.write() as conn:
        if not known_targets.insert_target(conn, name, word, at=datetime.now(UTC)):
            raise UsageError(f"{name}: there is a target of that name; remove it first, or choose another")
        audit.record(conn, who=by, action="target.add", subject=f"target:{name}", detail={"word": word})


def remove(db: Database, name: str, *, by: str) -> None:
    """Forget a target. UsageError where jobs still run there, or there is none."""
    with db.write() as conn:
        if (open_jobs := known_targets.count_open_jobs(conn, name)) > 0:
            raise UsageError(f"{name}: {open_jobs} open jobs run there; wait for their end, or cancel them")
        if not known_targets.remove_target(conn, name):
            raise _unknown(name)
        audit.record(conn, who=by, action="target.remove", subject=f"target:{name}")


def grant(db: Database, name: str, project: str, *, user: str | None, by: str) -> None:
    """Let the jobs of a project run on a target as this user. UsageError where that is the server, or another's."""
    if not re.fullmatch(_PROJECT, project) or recognise(project):
        raise UsageError(f"{project!r:.80}: not the name of a project")
    if user is not None and not re.fullmatch(USER, user):
        raise UsageError(f"--user {user!r:.80}: not the name of an account")
    word = _word(db, name)
    mine = _ask(targets.spell(word, user), name)
    if mine is None:
        raise UsageError(f"{name}: this target does not say which account its jobs have; it cannot be granted")
    if mine.server:
        own = "a project's jobs never have the server's own rights. Name another account of its machines"
        raise UsageError(f"{name}: {mine.server}, and {own}: {_grant_command(name, project)}")
    identity = _identify(targets.spell(word, user), name)
    for other, account in _accounts(db):
        same = account is not None and mine.is_shared_with(account)
        same = same or bool({*identity.values()} & {*(other.identity or {}).values()})
        if other.project != project and same:
            raise UsageError(
                f"{name}: {mine.name} is the account of project {other.project} on {other.target}; two projects with "
                "one account could read and end each other's jobs: give each its own"
            )
    with db.write() as conn:
        known_targets.put_grant(conn, name, project, user=user, identity=identity, at=datetime.now(UTC))
        detail = {"project": project, "user": user}
        audit.record(conn, who=by, action="target.grant", subject=f"target:{name}", detail=detail)


def revoke(db: Database, name: str, project: str, *, by: str) -> None:
    """Take a target away from a project. Jobs that run go on; a new one is refused."""
    with db.write() as conn:
        if not known_targets.remove_grant(conn, name, project):
            raise UsageError(f"{name}: it is not granted to project {project}")
        detail = {"project": project}
        audit.record(conn, who=by, action="target.revoke", subject=f"target:{name}", detail=detail)


def show(db: Database, name: str | None = None) -> list[KnownTarget]:
    """Targets that are known or granted, by name: all, or one. UsageError where there is no such one."""
    with db.read() as conn:
        words = {known.name: known.word for known in known_targets.list_targets(conn)}
        grants = known_targets.list_grants(conn)
    words = {**{grant.target: grant.target for grant in grants}, **words}
    if name is not None and name not in words:
        raise _unknown(name)
    return [
        KnownTarget(name=each, word=word, granted=tuple(_describe(word, one) for one in grants if one.target == each))
        for each, word in sorted(words.items())
        if name in (None, each)
    ]


def _identify(word: str, name: str) -> dict[str, str]:
    """What the machines say they are; UsageError where that is root or the server itself, under whatever name."""
    try:
        found = targets.identify(word)
    except UsageError as error:
        told = f"{name}: {str(error).removeprefix(f'{name}: ')}"
        if targets.traits(word).here and "cannot run" in told:
            told += _ADVICE_ON_PYTHON
        raise UsageError(told) from None
    own = f"{machine_id()}/{os.geteuid()}"
    for place, answer in found.items():
        if answer.endswith("/0") or answer == own:
            raise UsageError(f"{name}: {place} is root there, or the user of the server itself; name another account")
    return found


def _find_unasked(word: str, account: Account, granted: Grant) -> str:
    """Why it is not known whose account this is: nobody asked, or the settings name other machines by now."""
    if account.alone or not targets.identifies(word):
        return ""
    if granted.identity is None:
        return "its machines were never asked whose account this is; grant it again"
    new = sorted(account.places - granted.identity.keys())
    return f"{', '.join(new[:3])} was not there when it was granted; grant it again" if new else ""


def _describe(word: str, granted: Grant) -> TargetGrant:
    account, fault, spelled = None, "", targets.spell(word, granted.user)
    try:
        account = _ask(spelled, granted.target)
        fault = "" if account is None else account.server or _find_unasked(spelled, account, granted)
    except UsageError as error:
        fault = str(error)
    name = account.name if account is not None else ""
    note = account.note if account is not None else ""
    return TargetGrant(project=granted.project, user=granted.user, account=name, fault=fault, note=note)


def _accounts(db: Database) -> list[tuple[Grant, Account | None]]:
    """Every grant with its account; None where it cannot be told now."""
    with db.read() as conn:
        words = {known.name: known.word for known in known_targets.list_targets(conn)}
        grants = known_targets.list_grants(conn)
    accounts: list[tuple[Grant, Account | None]] = []
    for one in grants:
        try:
            accounts.append((one, _ask(targets.spell(words.get(one.target, one.target), one.user), one.target)))
        except UsageError:
            accounts.append((one, None))
    return accounts


def _ask(word: str, name: str) -> Account | None:
    """The account of jobs there. Of settings that cannot be used an answer repeats nothing, neither text nor path."""
    try:
        return targets.runs_as(word)
    except TrainmasterError as error:
        stated = targets.find_traits(word)
        if stated is None or stated.option == "none" or not targets.split(word)[2]:
            raise
        log.warning("the settings of the target %s cannot be used: %s", name, error)
        raise UsageError(f"{name}: its settings cannot be used; the log of the server says why") from None


def _word(db: Database, name: str) -> str:
    """The word behind a name; a target that names no file stands for itself."""
    with db.read() as conn:
        known = known_targets.find_target(conn, name)
    if known is not None:
        return known.word
    stated = targets.find_traits(name)
    if stated is None:
        raise _unknown(name)
    if stated.names_file(name) or (stated.required and not targets.split(name)[2]):
        raise UsageError(f"{name}: make its file known first: trainmaster target add NAME --as {stated.spell(name)}")
    return name


def _unknown(name: str) -> UsageError:
    return UsageError(f"no target {name!r:.80}; `trainmaster target list` lists them")


def _not_granted(db: Database, spec: JobSpec) -> AccessRefused:
    with db.read() as conn:
        own = [grant.target for grant in known_targets.list_grants(conn) if grant.project == spec.project]
    text = f"project {spec.project} may not use the target {spec.target!r:.80}"
    text += f"; it may use {', '.join(own)}" if own else "; no target is granted to it"
    return AccessRefused("not_granted", f"{text}. {_advice(spec.target, spec.project)}")


def _advice(target: str, project: str) -> str:
    return f"an admin of the server allows it with: {_grant_command(target, project)}"


def _grant_command(target: str, project: str) -> str:
    stated = targets.find_traits(target)
    user = f" --user {stated.accounts}" if stated is not None and stated.accounts else ""
    return f"trainmaster target grant {target[:80]} --project {project}{user}"
