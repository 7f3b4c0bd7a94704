"""Expected mounts are there, answer and can be written. A hung network file system hangs every process that touches it.

The kernel makes a file system read-only after errors of its disk. The mount itself then still says `rw`, and only the
options of the file system say `ro`; a mount that somebody made read-only says `ro` in both.

This process touches no network mount: a dead NFS server would block it for ever. Each one is tried by a `stat` process
of its own that can be abandoned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.core.errors import CommandTimedOut, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("mounts",)
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = 150.0
ASK_TIMEOUT_S = 5.0  # a server across the data centre answers in milliseconds
MOST_QUERIED = 16  # each that hangs costs its timeout; the rest are errors, not passes
_NETWORK = re.compile(
    r"nfs\d?|lustre|ceph|cifs|smb3|gpfs|beegfs\w*|wekafs|panfs|glusterfs|9p|afs|vastnfs|fuse\.(?!lxcfs|gvfsd|portal).*"
)
_DISK = re.compile(r"ext[234]|xfs|btrfs|f2fs|lustre|gpfs")
_READ_ONLY = re.compile(r"squashfs|iso9660|erofs|cramfs|romfs|udf")  # by their nature


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    path: str
    kind: str  # ext4, nfs4, lustre
    source: str
    trouble: str | None = None  # why it does not answer
    queried: bool = True  # False: a network mount beyond the number that is queried
    unclear: str | None = None  # an answer that names no file system
    frozen: bool = False  # mounted to be written, and made read-only by the kernel


def read(host: Host) -> list[Mount]:
    mounts = parse(host.read("/proc/self/mountinfo"))
    queried = 0
    for number, mount in enumerate(mounts):
        if _NETWORK.fullmatch(mount.kind):
            queried += 1
            mounts[number] = _query(host, mount) if queried <= MOST_QUERIED else replace(mount, queried=False)
    return mounts


def judge(mounts: list[Mount], expect: Expect) -> list[Finding]:
    there = {mount.path: mount for mount in mounts}
    wanted = dict(_wanted(word) for word in expect.mounts or ())
    findings = [_judge_wanted(path, kind, there.get(path)) for path, kind in wanted.items()]
    findings += [_frozen(mount) for mount in mounts if mount.frozen and mount.path not in wanted]
    for mount in mounts:
        if mount.path in wanted or mount.frozen or not _NETWORK.fullmatch(mount.kind):
            continue
        if mount.trouble is not None:
            action = f"bring its server back, or take it away (`umount -f -l {mount.path}`)"
            findings.append(warn(_told(mount), action=action, device=mount.path, **_values(mount)))
        elif mount.unclear is not None:
            findings.append(_judge_unclear(mount))
        elif mount.queried:
            findings.append(ok(f"{mount.kind} answers", device=mount.path, **_values(mount)))
        else:
            findings.append(_judge_unqueried(mount))
    proof = f"none of {len(mounts)} mounts is a network file system"
    return findings or [skip("no network file system is mounted and no mount is expected", proof=proof)]


def parse(text: str) -> list[Mount]:
    """/proc/self/mountinfo: one mount per path, the one on top where several are stacked."""
    mounts: dict[str, Mount] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or len(kind) < 2 or not fields[0].isdigit() or not re.fullmatch(r"[\w.+-]+", kind[0]):
            raise HostError(f"/proc/self/mountinfo cannot be understood: {line[:80]!r}")
        options, disk_options = fields[5].partition(",")[0], "".join(kind[2:3]).partition(",")[0]
        if not {options, disk_options} <= {"rw", "ro"}:  # the kernel writes one of them first (fs/proc_namespace.c)
            raise HostError(f"/proc/self/mountinfo cannot be understood: {line[:80]!r}")
        disk = _DISK.fullmatch(kind[0]) or (kind[1].startswith("/dev/") and not _READ_ONLY.fullmatch(kind[0]))
        frozen = bool(disk) and options == "rw" and disk_options == "ro"
        path = _plain(fields[4])
        mounts[path] = Mount(path=path, kind=kind[0], source=_plain(kind[1]), frozen=frozen)
    if not mounts or not text.endswith("\n"):
        raise HostError("/proc/self/mountinfo shows no mount, or was cut short")
    return list(mounts.values())


def _judge_wanted(path: str, kind: str | None, mount: Mount | None) -> Finding:
    if mount is None:
        of = f" ({kind})" if kind else ""
        action = f"mount it (`mount {path}`) and see that it is in /etc/fstab or in the pod's volumes"
        return fail(f"{path}{of} is not mounted", action=action, device=path)
    if kind is not None and mount.kind != kind:
        reason = f"{path} is {mount.kind} from {mount.source}, not {kind}"
        return fail(reason, action="mount the right file system there", device=path, **_values(mount))
    if mount.trouble is not None:
        action = f"bring its server back, then mount it again (`umount -f -l {path} && mount {path}`)"
        return fail(_told(mount), action=action, device=path, **_values(mount))
    if mount.frozen:
        return _frozen(mount)
    if mount.unclear is not None:
        return _judge_unclear(mount)
    if not mount.queried:
        return _judge_unqueried(mount)
    return ok(f"{mount.kind} from {mount.source}", device=path, **_values(mount))


def _frozen(mount: Mount) -> Finding:
    reason = f"{mount.path} ({mount.kind} on {mount.source}) was made read-only by the kernel"
    action = "see dmesg for errors of its disk, replace the disk or run fsck, then mount it again"
    return fail(reason, action=action, device=mount.path, **_values(mount))


def _query(host: Host, mount: Mount) -> Mount:
    trouble = None
    try:
        result = host.run("stat", "-f", "-c", "%T", mount.path, timeout_s=ASK_TIMEOUT_S)
        if not result.exit_code and not re.fullmatch(r"[\w./+-]+(?: \(0x[0-9a-f]+\))?\s*", result.stdout):
            return replace(mount, unclear=result.stdout.strip()[:40])
        if result.exit_code:
            trouble = f"gives an error: {result.stderr.strip()[:200] or result.exit_code}"
    except CommandTimedOut:
        trouble = f"does not answer in {ASK_TIMEOUT_S:g} s"
    return replace(mount, trouble=trouble)


def _judge_unclear(mount: Mount) -> Finding:
    reason = f"whether {mount.path} answers is unknown: `stat -f` printed {mount.unclear!r}"
    return error(reason, action=f"ask it by hand: `stat -f {mount.path}`", device=mount.path)


def _judge_unqueried(mount: Mount) -> Finding:
    reason = f"{mount.path} is one of more than {MOST_QUERIED} network mounts, and was not asked"
    return error(reason, action=f"ask it by hand: `stat -f {mount.path}`", device=mount.path)


def _wanted(word: str) -> tuple[str, str | None]:
    """`/fsx:lustre` is a path and its file system; `/fsx` any file system."""
    path, _, kind = word.partition(":")
    return path.rstrip("/") or "/", kind or None


def _told(mount: Mount) -> str:
    return f"{mount.path} ({mount.kind} from {mount.source}) {mount.trouble}"


def _values(mount: Mount) -> dict[str, Any]:
    return {"kind": mount.kind, "source": mount.source}


def _plain(text: str) -> str:
    """The kernel writes blanks in paths as octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
