"""Write docs/WHO_RESUMES.md from the evidence in docs/who-resumes/: python tools/write_who_resumes.py [--check]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainmaster.cli._views.command_proof import DOES

DOCS = Path(__file__).parents[1] / "docs"
PAGE, EVIDENCE = DOCS / "WHO_RESUMES.md", DOCS / "who-resumes"
HEAD = """# Who resumes

Small models of each trainer, drilled by `trainmaster drill` on CPUs: once with the settings that the project's own
pages give, once with our recipe. Every file of evidence is in [who-resumes/](who-resumes); `make who-resumes` makes
them anew, and this page; that of torchtitan is made on a GPU by `benchmarks/drill_gpu.py`. The file that is damaged is
the largest of the checkpoint: of so small a model it may be the random state. A FAIL of documented settings is no bug
of the trainer where its pages promise no more; what to change stands below.

`fail`: not restored, or a damaged checkpoint was loaded or ended the run at step 0. `warn`: somebody must step in.
`skip`: does not apply. `error`: could not be seen, often because an earlier strike ended the run.
SIGTERM, SIGSTOP, the kill of a launcher and half as many ranks are strikes of the command, and not in this table but
for torchtitan; an empty cell was not tried. A full and a read-only disk are EFBIG and EACCES here: programs are forked
by a process from before.
"""
NOT_DRILLED = """
## Not drilled here

Megatron-Bridge and NeMo need GPUs and NVIDIA's containers: `trainmaster examples drill-megatron-bridge` and
`drill-nemo` print specs for them.
"""


def render() -> str:
    """The whole page."""
    runs = sorted((json.loads(path.read_text()) for path in EVIDENCE.glob("*.json")), key=_order)
    lines = [
        HEAD,
        _bars("claim", *(f"{run['trainer']}, {run['kind']}" for run in runs)),
        "|---" * (len(runs) + 1) + "|",
    ]
    lines.append(_bars("**whole**", *(f"**{run['overall']}**" for run in runs)))
    for claim, words in DOES.items():
        cells = [_verdict(run, claim) for run in runs]
        if any(cells):
            lines.append(_bars(words, *cells))
    for run in runs:
        lines += ["", *_about(run)]
    return "\n".join(lines) + "\n" + NOT_DRILLED


def _order(run: dict[str, Any]) -> tuple[str, str]:
    return run["trainer"], run["kind"]


def _verdict(run: dict[str, Any], claim: str) -> str:
    return next((one["verdict"] for one in run["claims"] if one["claim"] == claim), "")


def _about(run: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if name != "python")
    reached = [one["name"] for one in run["strikes"] if one["reached"]]
    lines = [
        f"## {run['trainer']}, {run['kind']}: {run['overall']}",
        "",
        f"{run['settings']}. {versions}, Python {run['python']}; {run['date']}, seed {run['seed']}, "
        f"{run['steps']} steps; strikes: {', '.join(reached) or 'none'}.",
    ]
    bad = [
        one
        for one in run["claims"]
        if one["verdict"] in ("fail", "warn") or (one["claim"], one["verdict"]) == ("strikes", "error")
    ]
    if bad:
        lines += ["", "| claim | what was seen | what to change |", "|---|---|---|"]
        lines += [_bars(DOES[one["claim"]], one["reason"], one.get("action") or "") for one in bad]
        if run["kind"] == "documented" and run["trainer"] != "torchtitan":  # its recipe is a spec of the same settings
            lines += ["", f"A script with all of it: `trainmaster examples {run['recipe']}`."]
    return lines


def _bars(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == render() else "docs/WHO_RESUMES.md is old; run tools/write_who_resumes.py")
    PAGE.write_text(render())
