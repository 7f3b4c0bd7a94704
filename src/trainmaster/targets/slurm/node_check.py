"""Checks of one node inside a Slurm job: `python -m trainmaster.targets.slurm.node_check WORDS`, started by srun.

Prints one line: MARK and a JSON object with the health document and everything that was read. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MARK = "trainmaster-answer "  # prologs of a site may print before it
MAX_ANSWER_BYTES = 32 << 20


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="trainmaster-") as work:
        capture = Path(work) / "capture"
        command = [sys.executable, "-m", "trainmaster.checks", *words, "--json", "--capture", str(capture)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
        files = {
            path.relative_to(capture).as_posix(): path.read_text(errors="replace")
            for path in sorted(capture.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    answer = {"code": ran.returncode, "health": ran.stdout, "files": files, "error": ran.stderr[-400:]}
    text = json.dumps(answer)
    if len(text) > MAX_ANSWER_BYTES:
        text = json.dumps({**answer, "files": {}, "error": f"its capture is over {MAX_ANSWER_BYTES >> 20} MiB"})
    sys.stdout.write(f"{MARK}{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
