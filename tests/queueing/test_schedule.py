"""Rules of our own queue: each by itself, and all of them against a brute-force model over seeded traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from queueing import traces
from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Decisions, Machine, Need, Rules, Running, Share, State, Waiting

_EIGHT = (Machine(name="m0", gpus=tuple(f"GPU-{k}" for k in range(8))),)
_DAY_S = 86_400.0


def _wait(job: str, each: int = 1, *, priority: int = 1, nodes: int = 1, since_s: float = 0.0, **more: Any) -> Waiting:
    need = Need(nodes=nodes, each=each, kind="gpu")
    return Waiting(**{"project": "lab", "job": job, "priority": priority, "need": need, "since_s": since_s} | more)


def _run(job: str, *numbers: int, **more: Any) -> Running:
    devices = {"m0": tuple(f"GPU-{number}" for number in numbers)}
    stated = {"project": "lab", "priority": 1, "kind": "gpu", "since_s": -_DAY_S, "devices": devices}
    return Running(**{"job": job} | stated | more)


def _decide(*waiting: Waiting, running: tuple[Running, ...] = (), now_s: float = 0.0, **more: Any) -> Decisions:
    stated = {"machines": _EIGHT, "rules": Rules()}
    return schedule(State(**{"now_s": now_s, "waiting": waiting, "running": running} | stated | more))


def _started(decided: Decisions) -> list[str]:
    return [start.job for start in decided.starts]


def test_small_jobs_do_not_pass_the_first_large_one_unless_they_end_in_time() -> None:
    running = (_run("r", 0, 1, 2, 3, end_s=100.0),)
    waiting = (_wait("large", 8), _wait("endless", 1, since_s=1.0), _wait("short", 1, since_s=2.0, longest_s=90.0))
    decided = _decide(*waiting, running=running, now_s=5.0)
    assert _started(decided) == ["short"]
    assert [(wait.job, wait.why, wait.start_s) for wait in decided.waits] == [
        ("large", "first", 100.0),
        ("endless", "behind", None),
    ]
    # Where nobody knows when the running job ends, nothing may promise to end before it.
    unknown = _decide(*waiting, running=(_run("r", 0, 1, 2, 3),), now_s=5.0)
    assert _started(unknown) == []


def test_a_start_that_waits_for_a_time_limit_is_one_at_the_latest() -> None:
    def find(*running: Running, each: int = 8, now_s: float = 5.0) -> list[tuple[float | None, bool]]:
        decided = _decide(_wait("large", each), _wait("next", each, since_s=1.0), running=running, now_s=now_s)
        return [(wait.start_s, wait.latest) for wait in decided.waits]

    limited, measured = _run("a", 0, 1, end_s=100.0, end_latest=True), _run("b", 2, 3, end_s=200.0)
    assert find(limited) == [(100.0, True), (None, False)]
    assert find(limited, measured) == [(200.0, False), (None, False)], "the one that decides says when it ends"
    assert find(limited, replace(measured, end_s=50.0)) == [(100.0, True), (None, False)]
    assert find(limited, replace(measured, end_s=100.0)) == [(100.0, True), (None, False)]
    assert find(limited, _run("b", 2, 3)) == [(None, False)] * 2, "nobody knows"
    assert find(replace(limited, stopping=True)) == [(5.0, False), (None, False)]
    # What starts in this pass is known by its limit alone.
    decided = _decide(_wait("short", 8, longest_s=60.0), _wait("large", 8, since_s=1.0), now_s=5.0)
    assert [(wait.start_s, wait.latest) for wait in decided.waits] == [(65.0, True)]


def test_a_gang_gets_all_its_machines_or_none() -> None:
    pair = tuple(Machine(name=f"m{n}", gpus=tuple(f"GPU-{n}{k}" for k in range(2))) for n in range(2))
    held = Running(job="r", project="lab", priority=1, kind="gpu", devices={"m0": ("GPU-00",)}, since_s=0.0, end_s=50.0)
    assert _started(_decide(_wait("gang", 2, nodes=2), machines=pair, running=(held,))) == []
    (start,) = _decide(_wait("gang", 2, nodes=2), machines=pair).starts
    assert start.devices == {"m0": ("GPU-00", "GPU-01"), "m1": ("GPU-10", "GPU-11")}


def test_a_job_goes_back_to_the_machine_that_it_ran_on() -> None:
    pair = tuple(Machine(name=f"m{n}", gpus=tuple(f"GPU-{n}{k}" for k in range(1 + n))) for n in range(2))
    assert [list(start.devices) for start in _decide(_wait("new", 1), machines=pair).starts] == [["m0"]]
    assert [list(start.devices) for start in _decide(_wait("back", 1, prefers=("m1",)), machines=pair).starts] == [
        ["m1"]
    ]
    both = _decide(_wait("two", 1, nodes=2, prefers=("gone", "m1")), machines=pair)
    assert [list(start.devices) for start in both.starts] == [["m1", "m0"]]


def test_age_lifts_a_low_job_over_urgent_ones_that_came_later() -> None:
    rules = Rules(age_s=100.0)
    low, urgent = _wait("low", 8, priority=0), _wait("urgent", 8, priority=3, since_s=350.0)
    assert _started(_decide(low, urgent, now_s=351.0, rules=rules)) == ["low"]  # 3 + 0 against 3: who came first
    assert _started(_decide(low, urgent, now_s=299.0, rules=rules)) == ["urgent"]


def test_the_project_with_less_of_its_share_is_next() -> None:
    running = (_run("r", 0, 1, 2, 3), _run("s", 4, 5, project="other"))
    waiting = (
        _wait("mine", 1),
        _wait("theirs", 1, project="other", since_s=9.0),
        _wait("new", 1, project="third", since_s=9.5),
    )
    assert _started(_decide(*waiting, running=running, now_s=10.0)) == ["new", "theirs"]
    heavy = {"lab": Share(weight=4.0)}  # 4 of 8 GPUs with weight 4 are less than 2 of 8 with weight 1
    assert _started(_decide(*waiting[:2], running=running, now_s=10.0, shares=heavy)) == ["mine", "theirs"]


def test_quota_holds_and_smaller_jobs_do_not_keep_a_large_one_of_their_project_from_it() -> None:
    shares = {"lab": Share(quota=4)}
    waiting = (_wait("four", 4), _wait("one", 1, since_s=1.0), _wait("other", 2, project="x", since_s=2.0))
    decided = _decide(*waiting, running=(_run("r", 0),), now_s=3.0, shares=shares)
    assert _started(decided) == ["other"]
    assert [(wait.job, wait.why) for wait in decided.waits] == [("four", "quota"), ("one", "quota")]
    text, _, missing = decided.waits[0].text.partition("; ")
    assert text == "project lab has 1 of its quota of 4 GPUs, and this job needs 4" and "limits.timeout_s" in missing


def test_a_start_behind_a_quota_is_known_where_the_jobs_before_it_have_limits() -> None:
    def find(*running: Running, each: int = 2) -> tuple[float | None, bool, str]:
        waiting = (_wait("a", each), _wait("b", 1, since_s=1.0))
        first, second = _decide(*waiting, running=running, now_s=5.0, shares={"lab": Share(quota=4)}).waits
        assert (first.why, second.why, second.start_s) == ("quota", "quota", None)
        assert second.text == "project lab may hold 4 GPUs at once, and an earlier job of it waits for them"
        return first.start_s, first.latest, first.text.partition("; ")[2]

    limited, measured = _run("r", 0, 1, end_s=100.0, end_latest=True), _run("s", 2, 3, end_s=200.0)
    assert find(limited, measured) == (100.0, True, "")
    assert find(limited, measured, each=4) == (200.0, False, "")
    assert find(replace(limited, stopping=True), measured) == (5.0, False, "")
    unlimited, other = replace(measured, end_s=None), _run("x", 4, 5, 6, 7, project="x")
    assert find(limited, unlimited) == (100.0, True, "")
    missing = "its start is not known: 1 running job has no limits.timeout_s"
    assert find(limited, unlimited, each=4) == (None, False, missing)
    assert find(limited, measured, other) == (100.0, True, ""), "it gets what its own project gives back"
    lent = (replace(limited, devices={"m0": ("GPU-0",)}), _run("s", 1, 2, 3), *(_run("x", 4, 5, 6, 7, project="x"),))
    assert find(*lent, each=3)[0] is None


def test_a_start_that_is_not_known_says_what_is_missing() -> None:
    (wait,) = _decide(_wait("a", 8), running=(_run("r", 0), _run("s", 1), _run("t", 2, end_s=9.0))).waits
    assert wait.start_s is None
    assert wait.text.endswith("; its start is not known: 2 running jobs have no limits.timeout_s")


def test_the_job_that_loses_least_is_preempted_and_no_more_than_needed() -> None:
    running = (
        _run("mute", 0, 1, preemptible=True),
        _run("cheap", 2, 3, preemptible=True, loss=4.0),
        _run("dear", 4, 5, preemptible=True, loss=80.0),
        _run("fixed", 6, 7, loss=0.0),
    )
    urgent = _wait("urgent", 4, priority=3)
    stopped = [preempt.job for preempt in _decide(urgent, running=running).preempts]
    assert stopped == ["cheap", "dear"]
    assert [p.job for p in _decide(_wait("urgent", 6, priority=3), running=running).preempts] == [
        "cheap",
        "dear",
        "mute",
    ]
    assert _decide(_wait("urgent", 8, priority=3), running=running).preempts == ()  # one may not be stopped
    assert _decide(_wait("equal", 4, priority=1), running=running).preempts == ()
    young = tuple(_run(f"y{k}", k, preemptible=True, loss=0.0, since_s=-599.0) for k in range(8))
    assert _decide(urgent, running=young).preempts == ()
    # What is stopping already is enough: nobody else is stopped at the next pass.
    stopping = tuple(replace(job, stopping=job.job in ("cheap", "dear")) for job in running)
    assert _decide(urgent, running=stopping).preempts == ()


def test_a_device_in_use_by_another_program_is_waited_for_and_keeps_nobody_else_waiting() -> None:
    used = (Machine(name="m0", gpus=("GPU-0", "GPU-1"), used={"GPU-0": "process 77"}),)
    decided = _decide(_wait("both", 2), _wait("one", 1, since_s=1.0), machines=used)
    assert [(start.job, start.devices) for start in decided.starts] == [("one", {"m0": ("GPU-1",)})]
    assert [(wait.job, wait.why) for wait in decided.waits] == [("both", "used")]
    assert "process 77" in decided.waits[0].text


def test_what_can_never_fit_is_said() -> None:
    decided = _decide(_wait("nine", 9), _wait("one", 1, since_s=1.0))
    assert _started(decided) == ["one"]
    assert decided.waits[0].text == "it needs 9 GPUs on one machine, and the largest has 8: it can never start"


def test_no_trace_breaks_a_rule_of_the_model() -> None:
    broken = {seed: faults for seed in range(60) if (faults := traces.run(seed).faults)}
    assert broken == {}


def test_a_job_behind_the_first_reads_what_is_free_and_what_is_kept() -> None:
    """Where nothing is free nothing is kept, and of what is free only a part may be."""
    full = _decide(_wait("first", 8), _wait("next"), running=(_run("r", *range(8), end_s=9.0),))
    assert [wait.text for wait in full.waits][1] == "it needs 1 GPU, and none is free"
    half = _decide(_wait("first", 8), _wait("next"), running=(_run("r", 0, 1, 2, 3, end_s=9.0),))
    assert [wait.text for wait in half.waits][1] == (
        "it needs 1 GPU, none is free besides the 4 kept for the first in the queue"
    )
    part = _decide(_wait("first", 6), _wait("next", 3), running=(_run("r", 0, 1, 2, 3, end_s=9.0),))
    assert [wait.text for wait in part.waits][1] == (
        "it needs 3 GPUs, 2 free besides the 2 kept for the first in the queue"
    )
