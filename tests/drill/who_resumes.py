"""Evidence for docs/WHO_RESUMES.md: trainers of others, drilled with their documented settings and with our recipe.

`make who-resumes`. One JSON file for each into docs/who-resumes/; programs are forked from a warmed process, so the
strikes that signal a process from outside (SIGTERM, SIGSTOP, the launcher) are left to `trainmaster drill` itself.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from drill import recipes
from drill.matrix import HEALTHY
from trainmaster.cli._views import command_proof
from trainmaster.core.schema import to_plain

FOLDER = Path(__file__).parents[2] / "docs" / "who-resumes"
NAMES = {
    "torchrun": "plain PyTorch", "hf-trainer": "Hugging Face Trainer", "lightning": "Lightning",
    "accelerate": "Accelerate", "nanochat": "single file, as nanochat",
}  # fmt: skip


def main() -> None:
    wanted = sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    for name in recipes.NEEDS:
        kinds = {"recipe": (f"`trainmaster examples drill-{name}`", ())}
        if name in recipes.DOCUMENTED:
            kinds["documented"] = recipes.DOCUMENTED[name]
        with recipes.warm_python(name) as python:
            for kind, (settings, changes) in kinds.items():
                if wanted and f"{name}-{kind}" not in wanted:
                    continue
                with tempfile.TemporaryDirectory(prefix="tm-who-") as folder:
                    proof = recipes.drill(
                        Path(folder), name, strikes=HEALTHY, changes=changes, python=(python, "-m"), seed=0
                    )
                    document = to_plain(command_proof.report(proof).document)
                text = json.dumps(document).replace(f"{folder}/drill/", "")
                text = text.replace(f"{sysconfig.get_path('purelib')}/", "")
                kept = {key: value for key, value in json.loads(text).items() if key not in ("losses", "command")}
                about = {
                    "trainer": NAMES[name], "recipe": f"drill-{name}", "kind": kind, "settings": settings,
                    "date": datetime.now(UTC).date().isoformat(), "python": platform.python_version(),
                }  # fmt: skip
                (FOLDER / f"{name}-{kind}.json").write_text(json.dumps({**about, **kept}, indent=1) + "\n")
                print(f"{name} {kind}: {proof.overall}", flush=True)


if __name__ == "__main__":
    main()
