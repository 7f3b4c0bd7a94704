#!/usr/bin/env python3
"""Validate the testing framework of this clone: files, scripts, kubectl, make targets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from test_hyperpod_cluster import VERB, find_python

if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    os.execv(find_python(), [find_python(), *VERB, "--action", "validate-framework", *sys.argv[1:]])  # noqa: S606 (no shell is wanted)
