"""The fork server: what the compiler needs of a process is there before the first fork, and a fork is still as good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
import sys
from trainmaster.train import fork_server
fork_server.import_all(sys.argv[1])
print("torch._dynamo.backends.tvm" in sys.modules, "torch._inductor.codegen.halide" in sys.modules,
      fork_server.find_fault())
"""


def _ask(folder: Path, compile_: str) -> tuple[list[str], str]:
    config = folder / "config.json"
    config.write_text(json.dumps({"model": {"preset": "tiny-llama"}, "steps": 1, "parallel": {"compile": compile_}}))
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(config)],
        capture_output=True, text=True, check=True, env={**os.environ, **one_thread},
    )  # fmt: skip
    return done.stdout.split(), done.stderr


@pytest.mark.proof
def test_a_run_that_compiles_finds_the_compiler_ready(tmp_path: Path) -> None:
    # Triton is missing on a machine without a GPU: that is no reason for a word, and none to leave the rest out.
    assert _ask(tmp_path, "on") == (["True", "True", "None"], "")


def test_a_run_that_does_not_compile_does_not_wait_for_the_compiler(tmp_path: Path) -> None:
    assert _ask(tmp_path, "off") == (["False", "False", "None"], "")
