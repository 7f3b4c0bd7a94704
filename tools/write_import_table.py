"""Write the import table of tests/test_layers.py into docs/ARCHITECTURE.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from test_docs import import_table  # noqa: E402 (needs the path above)

page = ROOT / "docs" / "ARCHITECTURE.md"
page.write_text(
    re.sub(r"^\| folder \| ours \|.*?(?=\n\n)", lambda _: import_table(), page.read_text(), count=1, flags=re.M | re.S)
)
