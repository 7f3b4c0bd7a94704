"""Every planted bug of every trainer with several seeds, and healthy runs: `make drill-matrix`.

Programs are forked from a process that has imported their packages: a start costs a tenth. `--real` uses new
interpreters. Ends with 1 where a bug was not named by its cause, or a healthy run was not passed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from drill import recipes
from trainmaster.core.results import Overall, Verdict
from trainmaster.drill.record import Proof, References

TRAINERS = ("torchrun", "hf-trainer", "lightning")
HEALTHY = (
    "before-save", "after-save", "one", "twice", "saving", "power", "full", "readonly", "truncated", "flipped",
    "missing", "unfinished",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", action="append", choices=TRAINERS)
    parser.add_argument("--bug", action="append", choices=[*recipes.CLAIMS, "none"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=7, help="healthy runs of each trainer")
    parser.add_argument("--real", action="store_true", help="new interpreters")
    parser.add_argument("--json", type=Path, help="append one line per drill to this file")
    options = parser.parse_args()
    wrong = 0
    for trainer in options.trainer or TRAINERS:
        if missing := recipes.missing(trainer):
            print(f"{trainer}: not installed: {', '.join(missing)}")
            wrong += 1
            continue
        print(f"# {trainer}: {', '.join(f'{name} {version(name)}' for name in recipes.NEEDS[trainer])}", flush=True)
        with recipes.warm_python(trainer) as warm:
            for bug in options.bug or ("none", *recipes.CLAIMS):
                wrong += drill_all(trainer, bug, options, sys.executable if options.real else warm)
    print(f"{wrong} wrong")
    return int(wrong > 0)


def drill_all(trainer: str, bug: str, options: argparse.Namespace, python: str) -> int:
    """One bug of a trainer with every seed; undisturbed runs are shared. Returns how many came out wrong."""
    references: References | None = None
    wrong = 0
    changes = () if bug == "none" else recipes.PLANTS[trainer][bug]
    strikes = HEALTHY if bug == "none" else ("one", "saving") if bug == "latest" else ("one",)
    for seed in range(options.healthy if bug == "none" else options.seeds):
        folder = Path(tempfile.mkdtemp(prefix="tm-matrix-"))
        began = time.monotonic()
        proof = recipes.drill(
            folder,
            trainer,
            strikes=strikes,
            changes=changes,
            python=(python, "-m"),
            ranks=2 if bug == "rank0" else 1,
            seed=seed,
            references=references,
        )
        references = proof.references or references
        fault = judge(proof, bug)
        wrong += fault is not None
        verdict = "as it should be" if fault is None else f"WRONG: {fault}; kept in {folder}"
        print(f"{trainer:<11} {bug:<13} seed {seed} {proof.overall:<11} {verdict}", flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(_line(trainer, bug, seed, proof, fault, time.monotonic() - began)) + "\n")
        if fault is None:
            shutil.rmtree(folder)
    return wrong


def judge(proof: Proof, bug: str) -> str | None:
    """Why a drill did not come out as it should."""
    findings = {result.check: result.findings[0] for result in proof.results}
    failed = {name: finding.reason for name, finding in findings.items() if finding.verdict is Verdict.FAIL}
    if bug == "none":
        return (
            None
            if proof.overall is Overall.PASS
            else "; ".join(
                f"{name}: {finding.reason}"
                for name, finding in findings.items()
                if finding.verdict not in (Verdict.PASS, Verdict.SKIP)
            )
        )
    claim, words = recipes.CLAIMS[bug]
    if words not in failed.get(claim, ""):
        return f"{claim} should fail with {words!r}; failed: {failed}, {findings[claim].reason}"
    others = set(failed) - {claim, "losses", "end"}
    return f"failed too: { {name: failed[name] for name in others} }" if others else None


def _line(trainer: str, bug: str, seed: int, proof: Proof, fault: str | None, took_s: float) -> dict[str, object]:
    failed = {r.check: r.findings[0].reason for r in proof.results if r.findings[0].verdict is Verdict.FAIL}
    return {
        "trainer": trainer, "bug": bug, "seed": seed, "overall": str(proof.overall), "failed": failed, "fault": fault,
        "took_s": round(took_s, 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
