"""A sample of `make chaos-lambda`: jobs on a faulty cloud, the server killed again and again, nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from sshd import needs_sshd

from .rented_chaos.chaos import Chaos, Plan
from .rented_chaos.verdict import judge

pytestmark = [pytest.mark.spawns, pytest.mark.slow, needs_sshd, pytest.mark.timeout(600)]


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
def test_no_instance_is_leaked_and_no_event_lost_under_kills_and_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMBDA_PACE", "1")  # restored afterwards, with all that the run sets
    for name in ("API_URL", "API_KEY_FILE", "SSH_PORT", "SSH_USER", "SSH_KEY_FILE", "LOST_AFTER_S"):
        monkeypatch.setenv(f"LAMBDA_{name}", "")
    with Chaos(tmp_path, Plan(jobs=4, seed=1, limit_s=400.0, pace=40.0, kill_s=(2.0, 6.0))) as chaos:
        chaos.run()
        verdict = judge(chaos)
    assert verdict.wrong == [], "\n".join(verdict.lines)
    assert chaos.kills > 1
