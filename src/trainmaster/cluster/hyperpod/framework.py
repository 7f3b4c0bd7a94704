"""The testing framework of a clone: its files, scripts, programs and make targets."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from trainmaster.core.results import CheckResult, Finding, fail, ok

MANIFEST = "FSDP/kubernetes/fsdp-hpto.yaml"
SCRIPTS = ("tools/test_hyperpod_cluster.py", "tools/validate_test_setup.py")
TARGETS = "targets.mk"
FILES = (*SCRIPTS, MANIFEST, "Makefile", TARGETS)
PLACE = "compat/fsdp-hyperpod"  # of these files in a clone
_WHOLE_CLONE = f"work in {PLACE} of a whole clone"
MAKE_TARGETS = (
    "validate-framework", "validate-setup", "test-quick", "test-cluster", "perf-test", "run", "check-job",
    "logs-follow", "stop", "monitor-pods", "logs-all", "debug-describe", "debug-events", "test-status",
)  # fmt: skip


def check_framework(root: Path) -> list[CheckResult]:
    """Files, executable scripts, kubectl and make targets, in the folder of a clone or in PLACE below it."""
    root = root / PLACE if (root / PLACE).is_dir() else root
    findings = {
        "files": _none_of(
            [name for name in FILES if not (root / name).is_file()], "missing", f"{len(FILES)} files", _WHOLE_CLONE
        ),
        "scripts": _none_of(
            [name for name in SCRIPTS if not os.access(root / name, os.X_OK)],
            "not executable",
            f"{len(SCRIPTS)} scripts",
            f"chmod +x {' '.join(str(root / name) for name in SCRIPTS)}",
        ),
        "programs": _none_of(
            [name for name in ("kubectl", "make") if shutil.which(name) is None],
            "not installed",
            "kubectl, make",
            "install it, or put its folder into PATH",
        ),
        "make_targets": _none_of(
            _missing_targets(root / TARGETS), "no rule", f"{len(MAKE_TARGETS)} targets", _WHOLE_CLONE
        ),
    }
    return [CheckResult.of(name, [finding]) for name, finding in findings.items()]


def _missing_targets(makefile: Path) -> list[str]:
    text = makefile.read_text() if makefile.is_file() else ""
    return [target for target in MAKE_TARGETS if not re.search(rf"^{target}( [a-z -]+)?:", text, re.MULTILINE)]


def _none_of(names: list[str], word: str, fine: str, action: str) -> Finding:
    if names:
        return fail(f"{word}: {', '.join(names)}", action=action)
    return ok(fine)
