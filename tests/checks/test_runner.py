"""Whatever a check does, it yields exactly one result, and only a real finding can pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainmaster import checks
from trainmaster.checks import active, fabric, gpu, system
from trainmaster.core.errors import UsageError
from trainmaster.core.expect import Expect
from trainmaster.core.results import CheckResult, Overall, Verdict, judge_overall
from trainmaster.node.host import Host

Add = Callable[[str, str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Put a check into the registry, which is its folders: here four others, all but one empty."""
    for folder in (active, fabric, gpu, system):
        monkeypatch.setattr(folder, "__path__", [str(tmp_path / folder.__name__.rpartition(".")[2])])
    (tmp_path / "system").mkdir()

    def write(name: str, text: str) -> None:
        head = "from trainmaster.core.results import *\nfrom trainmaster.core.errors import *\nLEVEL = 1\n"
        head += "GPU, EXPECTS, COMPARES, METRICS = False, (), (), {}\n"
        (tmp_path / "system" / f"{name}.py").write_text(head + text)
        monkeypatch.delitem(__import__("sys").modules, f"trainmaster.checks.system.{name}", raising=False)

    return write


GOOD = "def read(host): return 1\ndef judge(data, expect): return ok('fine')\n"


def run(**options: object) -> list[CheckResult]:
    return checks.run(Host(), Expect(), level=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("t_raises", "def read(host): raise OSError('boom')\ndef judge(d, expect): return ok('x')", "OSError: boom"),
        ("t_judge_raises", "def read(host): return 1\ndef judge(d, expect): return 1 / 0", "ZeroDivisionError"),
        ("t_exits", "def read(host): raise SystemExit(0)\ndef judge(d, expect): return ok('x')", "SystemExit"),
        ("t_host", "def read(host): raise FileMissing('/x is gone')\ndef judge(d, e): return ok('x')", "/x is gone"),
        ("t_none", "def read(host): return 1\ndef judge(d, expect): return None", "no finding"),
        ("t_empty", "def read(host): return 1\ndef judge(d, expect): return []", "no finding"),
        ("t_rubbish", "def read(host): return 1\ndef judge(d, expect): return 'pass'", "'pass'"),
        ("t_true", "def read(host): return 1\ndef judge(d, expect): return [ok('x'), True]", "True"),
        ("t_verdict", "def read(host): return 1\ndef judge(d, e): return Finding(verdict='pass', reason='x')", "no f"),
        ("t_silent", "def read(host): return 1\ndef judge(d, expect): return ok('')", "no finding"),
        ("t_no_read", "def judge(d, expect): return ok('x')", "AttributeError"),
        ("t_import", "import no_such_module_anywhere", "ModuleNotFoundError"),
        ("t_syntax", "def (", "SyntaxError"),
    ],
)  # fmt: skip
def test_a_broken_check_is_an_error_and_the_next_still_runs(add: Add, name: str, body: str, reason: str) -> None:
    add(name, body)
    add("z_good", GOOD)
    broken, good = run()
    (finding,) = broken.findings
    assert (broken.check, finding.verdict) == (name, Verdict.ERROR)
    assert reason in finding.reason
    assert finding.action
    assert good.verdict is Verdict.PASS
    assert judge_overall([broken, good], planned=[name, "z_good"]) is Overall.INCOMPLETE


def test_a_check_that_hangs_is_left_behind(add: Add) -> None:
    add(
        "t_hangs",
        "import threading\nTIMEOUT_S = 0.2\nLATCH = threading.Event()\n"
        "def read(host): LATCH.wait()\ndef judge(d, expect): return ok('late')\n",
    )
    add("z_good", GOOD)
    try:
        hung, good = run()
        assert "no answer within 0.2 s" in hung.findings[0].reason
        assert hung.verdict is Verdict.ERROR
        assert good.verdict is Verdict.PASS
    finally:
        checks.load("t_hangs").LATCH.set()  # type: ignore[attr-defined]
        for thread in threading.enumerate():
            if thread.name == "check-t_hangs":
                thread.join()


def test_a_question_that_hangs_does_not_block_the_other_checks(add: Add) -> None:
    """The left-behind thread still holds its question; others must be able to ask theirs."""
    latch = threading.Event()

    class Machine(Host):
        def read(self, path: str) -> str:
            return str(latch.wait()) if path == "/dead" else "alive"

    add("t_dead", "TIMEOUT_S = 0.2\ndef read(host): return host.read('/dead')\ndef judge(d, expect): return ok(d)")
    add("z_good", "def read(host): return host.read('/other')\ndef judge(d, expect): return ok(d)")
    try:
        dead, good = checks.run(Machine(), Expect(), level=1)
    finally:
        latch.set()
    assert (dead.verdict, good.verdict) == (Verdict.ERROR, Verdict.PASS)


@pytest.mark.spawns
def test_a_command_that_hangs_costs_its_timeout_once(add: Add) -> None:
    asked: list[tuple[str, ...]] = []

    class Machine(Host):
        def run(self, *argv: str, timeout_s: float = 30.0):  # type: ignore[no-untyped-def]
            asked.append(argv)
            return super().run("sleep", "600", timeout_s=0.2)

    for name in ("t_one", "t_two"):
        add(name, "def read(host): return host.run('nvidia-smi')\ndef judge(d, expect): return ok('x')")
    results = checks.run(Machine(), Expect(), level=1)
    assert [result.verdict for result in results] == [Verdict.ERROR] * 2
    assert asked == [("nvidia-smi",)]


def test_results_are_told_one_by_one(add: Add) -> None:
    add("a_good", GOOD)
    add("b_good", GOOD)
    told: list[str] = []
    results = run(on_result=lambda result: told.append(result.check))
    assert told == [result.check for result in results] == ["a_good", "b_good"]


def test_plan_names_what_will_run(add: Add) -> None:
    add("a_one", GOOD)
    add("b_two", GOOD + "LEVEL = 2\n")
    add("_shared", GOOD)
    assert checks.plan(0) == []
    assert checks.plan(1) == ["a_one"]
    assert checks.plan(3) == ["a_one", "b_two"]
    assert checks.plan(3, only=["b_two"]) == ["b_two"]
    assert checks.plan(3, skip=["b_two"]) == ["a_one"]


def test_wrong_names_are_refused_with_the_right_one() -> None:
    with pytest.raises(UsageError, match=r"no check gpu_cont; did you mean gpu_count\?"):
        checks.plan(1, only=["gpu_cont"])
    with pytest.raises(UsageError, match="no check _nvidia"):
        checks.plan(1, skip=["_nvidia"])


def test_a_plan_of_nothing_is_refused(add: Add) -> None:
    add("a_one", GOOD)
    add("b_two", GOOD + "LEVEL = 2\n")
    with pytest.raises(UsageError, match="no check is left"):
        checks.plan(1, skip=["a_one"])
    with pytest.raises(UsageError, match="b_two needs --level 2"):
        checks.plan(1, only=["b_two"])
