"""`nvidia-smi --query-gpu=… --format=…` of a simulated instance: python -I -S smi_query.py ROWS.json ARGUMENT…"""

from __future__ import annotations

import json
import sys


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 (run as a file, without the package)
        rows = json.load(file)
    options = dict(word.partition("=")[::2] for word in sys.argv[2:])
    names = [name.strip() for name in options["--query-gpu"].split(",")]
    if unknown := [name for name in names if rows and name not in rows[0]]:
        sys.exit(f'Field "{unknown[0]}" is not a valid field to query.')
    form = options.get("--format", "").split(",")
    lines = [] if "noheader" in form else [", ".join(names)]
    for row in rows:
        values = [_without_unit(row[name]) if "nounits" in form else row[name] for name in names]
        lines.append(", ".join(values))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _without_unit(value: str) -> str:
    number, _, unit = value.rpartition(" ")
    return number if unit in ("MiB", "W", "%") else value


if __name__ == "__main__":
    main()
