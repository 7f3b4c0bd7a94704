"""What a check leaves: the evidence bundle with its reports, and a line in the history of each GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli._home import locate
from trainmaster.core.errors import UsageError, install_command

if TYPE_CHECKING:
    from trainmaster.core.health import ClusterHealth


def keep(out: Path, health: ClusterHealth, *, price: float | None, upload: str | None) -> str:
    """Save the bundle with its reports, and upload it where a store is named; the digest of its evidence."""
    from trainmaster.cli import _console
    from trainmaster.cluster.health import evidence

    evidence.save(out, health)
    digest = evidence.digest(out)
    _write_reports(out, health, price, digest)
    _console.err.print(f"evidence sha256:{digest}", style="dim", soft_wrap=True)
    if upload is not None:
        from trainmaster import storage

        sent = storage.upload_bundle(out, upload)
        _console.note(f"{len(sent)} files sent to {_console.plain(upload)}")
    return digest


def _write_reports(out: Path, health: ClusterHealth, price: float | None, digest: str) -> None:
    """report.html and its siblings, beside the evidence; without their packages the evidence is still whole."""
    from trainmaster.cli import _console
    from trainmaster.cluster.health import evidence, prices
    from trainmaster.report.health import FILES, write_bundle

    written = [path.name for path in write_bundle(health, out, cost=prices.find(health, price), digest=digest)]
    names = ", ".join([evidence.HEALTH, evidence.VERDICT, *written])
    _console.note(f"wrote {_console.plain(str(out))}: {names}, nodes/")
    if missing := [name for name in FILES if name not in written]:
        _console.note(f"no {', '.join(missing)}: run: {_console.plain(install_command('server'))}")


def remember(home: Path | None, health: ClusterHealth, digest: str, *, on: str | None) -> None:
    """Each GPU's verdict joins its history. A verdict is not lost because a history cannot be written."""
    from trainmaster import targets
    from trainmaster.cli import _console
    from trainmaster.cluster.health import journal

    word = on or next(name for name in targets.names() if targets.traits(name).here)
    try:
        journal.record(locate(home), health, bundle_sha256=digest, target=targets.traits(word).make_absolute(word))
    except UsageError as error:
        _console.note(f"not added to the history of GPUs: {_console.plain(str(error))}")
