"""A real file system that does not answer: a FUSE mount whose server never speaks, in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, json, os, sys
from trainmaster.checks.system import mounts
from trainmaster.core.expect import Expect
from trainmaster.node.host import Host
folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
silent = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={silent},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"silent", folder.encode(), b"fuse.silent", 0, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
mounts.ASK_TIMEOUT_S = 0.5
found = mounts.judge(mounts.read(Host()), Expect(mounts=(folder,)))
print(json.dumps([[str(f.verdict), f.device, f.reason] for f in found]))
libc.umount2(folder.encode(), 2)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="mounting needs root and FUSE")
def test_a_hung_mount_costs_its_timeout_and_is_named(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare:" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"no mount of our own here: {ran.stderr.strip()[:100]}")
    assert ran.returncode == 0, ran.stderr
    found = {device: (verdict, reason) for verdict, device, reason in json.loads(ran.stdout)}
    verdict, reason = found[str(tmp_path)]
    assert verdict == "fail"
    assert "does not answer in 0.5 s" in reason
