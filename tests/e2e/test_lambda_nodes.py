"""Several simulated instances of Lambda Cloud for one job: rented together, one lost, all replaced, the run resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lambda_sim import drive, lambda_cloud, live, submit
from sshd import needs_sshd
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.states import Reason, Status
from trainmaster.store import attempts, costs, events, instances
from trainmaster.store.database import Database

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

STEPS = 40
# Rank 0 trains and saves each step on the file system of the account; every rank states where the ranks meet. The first
# attempt comes as far as half of the steps and waits there for its end, however long that takes on a busy machine; each
# of its ranks begins at 0, also one that starts after the other has saved.
SCRIPT = f"""
say() {{ printf '{{"v":1,"phase":"STEP","event":"metrics","data":%s}}\\n' "$1" >> "$TRAINMASTER_EVENTS"; }}
echo "$RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"
step=$(cat "$HOME/data/step" 2>/dev/null || echo 0)
last={STEPS}; [ -e "$HOME/data/began-$RANK" ] || {{ last={STEPS // 2}; step=0; }}
touch "$HOME/data/began-$RANK"
while [ "$step" -lt {STEPS} ]; do
  sleep 0.1
  [ "$step" -lt "$last" ] || continue
  step=$((step + 1))
  [ "$RANK" = 0 ] && echo $step > "$HOME/data/step"
  say "{{\\"step\\":$step,\\"rank\\":$RANK}}"
done
"""


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_instances_of_a_job_are_rented_together_and_replaced_when_one_is_lost(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lambda_cloud(tmp_path / "lambda", monkeypatch) as cloud:
        cloud.cloud.file_systems.create("data", "us-east-1")
        cloud.inject("capacity-flicker", times=1)  # the second machine is refused, or the first: both move on together
        job = submit(
            db, SCRIPT, resources={"nodes": 2}, rent={"file_systems": ["data"]}, limits={"attempts": 2},
        )  # fmt: skip
        struck: list[str] = []

        def strike() -> None:
            seen = events.list_events(db, job.id, phase="STEP", stream=node_file(EVENTS_FILE, 1))
            if not struck and len(seen) >= 5:
                (attempt,) = attempts.list_attempts(db, job.id)
                assert attempt.handle is not None
                struck.append(attempt.handle["instances"][1]["id"])
                cloud.inject("preempted", instance_id=struck[0])

        (ended,) = drive(db, tmp_path, job, also=strike)
        assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
        assert live(cloud) == [] and len(cloud.instances()) == 4, "two machines for each attempt"
    first, second = attempts.list_attempts(db, job.id)
    assert (first.reason, second.reason) == (Reason.PREEMPTED, None)
    for attempt in (first, second):
        assert attempt.handle is not None and len(attempt.handle["nodes"]) == 2
        rows = [row for row in instances.list_of_attempt(db, attempt.id) if row.provider_id]
        gpus = [gpu for row in rows for gpu in (row.detail or {})["gpus"]]
        assert len(gpus) == len(set(gpus)) == 2, "each machine has its own GPU: a bad one does not discredit the other"
        assert len({(row.kind, row.region) for row in rows}) == 1 and {row.state for row in rows} == {"gone"}
    with db.read() as conn:
        charges = costs.list_charges(conn, jobs=[job.id])
    priced = [row.price_cents_per_hour for row in instances.list_of_attempt(db, second.id)]
    assert [span.cents_per_hour for span in charges[-1].spans] == priced and len(priced) == 2
    steps: dict[str, list[int]] = {}
    for row in events.list_events(db, job.id, phase="STEP", limit=10_000):
        steps.setdefault(row.attempt, []).append(int(row.data["step"]))
    before, after = steps[first.id], steps[second.id]
    # A step is saved before its event is written: what the first attempt reported is not done again.
    assert before == list(range(1, before[-1] + 1)) and after == list(range(after[0], STEPS + 1))
    assert before[-1] < after[0] <= before[-1] + 20, "no more steps unseen than were done until the loss was noticed"
