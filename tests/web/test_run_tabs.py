"""The page of a run, tab by tab, and its logs: what they show, to whom, and what hostile content does to them."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pages import samples
from report.test_hostile import HOSTILE, hostile_events
from trainmaster.control.log_view import grep as log_grep
from trainmaster.control.log_view import search as log_search
from trainmaster.core.roles import Role
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.store.database import Database
from trainmaster.web import ansi, beside, page_cache
from trainmaster.web.sections.run import FINAL, TABS
from web.furnished import NOBODY, issue, keep

from .conftest import TestClient

NAMES = [path for path, _ in TABS if path]
LOG = b"".join(b"2026-03-01 12:%02d:%02d INFO step %d\n" % (i // 60, i % 60, i) for i in range(2000))
FAILED = (
    b"2026-03-01 12:00:05 \x1b[33mWARNING\x1b[0m slow shard\n\xff\xfe no text\n" + LOG
    + b"Traceback (most recent call last):\n  File x\nRuntimeError: CUDA out of memory\n"
)  # fmt: skip


def held_back(started: list[Any]) -> SimpleNamespace:
    """In place of `threading`: what a thread would do is put into a list."""
    thread = lambda target, **_: SimpleNamespace(start=lambda: started.append(target))  # noqa: E731
    return SimpleNamespace(Thread=thread, Lock=threading.Lock)


@pytest.fixture
def failed(db: Database, tmp_path: Path) -> samples.Story:
    story = samples.failed_run(db)
    keep(
        db, tmp_path, story.id, {"attempts/1/rank-0.log": LOG, "attempts/1/rank-1.log": FAILED, "attempts/1/<b>": b"x"}
    )
    return story


def test_every_tab_of_every_run_is_a_page(client: TestClient, db: Database, failed: samples.Story) -> None:
    for story in (failed, samples.completed(db), samples.resumed(db), samples.failed_check(db), samples.pending(db)):
        overview = client.get(f"/jobs/{story.id}")
        assert overview.status_code == 200
        assert all(f'href="/jobs/{story.id}/{name}"' in overview.text for name in NAMES)
        for name in NAMES if story.spec.target == "local" else NAMES[1:]:  # no Slurm has this log
            answer = client.get(f"/jobs/{story.id}/{name}")
            assert answer.status_code == 200, name
            assert f'id="tab-{name}" href="/jobs/{story.id}/{name}" aria-current="page"' in answer.text
    assert client.get(f"/jobs/{failed.id}/nonsense").status_code == 404
    assert "trainmaster check --on local" in client.get(f"/jobs/{samples.pending(db).id}/preflight").text


def test_a_run_of_another_project_does_not_exist(client: TestClient, db: Database, failed: samples.Story) -> None:
    stranger = issue(db, "eve", Role.ADMIN, project="other")
    viewer = issue(db, "vic", Role.VIEWER, project="research")
    more = ("curves.csv", "logs/follow", "logs/download?stream=rank-0.log", "logs/first-error", "part")
    for name in (*NAMES, *more):
        if name == "logs/first-error":
            continue  # starts a search: test_search_…
        assert client.get(f"/jobs/{failed.id}/{name}", headers=stranger).status_code == 404, name
        assert client.get(f"/jobs/{NOBODY}/{name}").status_code == 404, name
        assert client.get(f"/jobs/{failed.id}/{name}", headers=viewer).status_code == 200, name
    assert 'id="rerun"' in client.get(f"/jobs/{failed.id}/logs").text
    assert 'id="rerun"' not in client.get(f"/jobs/{failed.id}/logs", headers=viewer).text


def test_hostile_text_is_text_on_every_tab(client: TestClient, db: Database, tmp_path: Path) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING).tell(hostile_events())
    story.end_attempt(Reason.SCRIPT_FAILED, HOSTILE, evidence={"last_lines": [HOSTILE]})
    story.finish(Status.FAILED, Reason.SCRIPT_FAILED, HOSTILE)
    line = HOSTILE.encode(errors="replace").replace(b"\n", b" ") + b"\x1b]0;title\x07\x1b[31m<script>x</script>\n"
    keep(db, tmp_path, story.id, {"attempts/1/rank-0.log": line, f"out/{HOSTILE[:80]}": b"x"})
    query = {"find": "", "phase": HOSTILE, "after": HOSTILE}
    for name in ("", *NAMES):
        text = client.get(f"/jobs/{story.id}/{name}".rstrip("/"), params=query if name == "events" else {}).text
        assert not re.search(r"<(img|script>x|svg onload)", text), name
        assert "\x1b" not in text and "\u202e" not in text


def test_a_fault_of_32_devices_is_one_row_and_passes_are_folded(client: TestClient, db: Database) -> None:
    findings = [
        {"verdict": "fail", "reason": f"gpu{i}: ECC errors", "device": f"gpu{i}", "action": "replace it", "values": {}}
        for i in range(32)
    ]
    story = samples.Story(db).start()
    rows = list(samples.preflight())
    rows[-1].data.update(check="ecc", findings=findings)  # type: ignore[attr-defined]
    story.tell(rows).end_attempt(Reason.CHECK_FAILED, "ecc").finish(Status.FAILED, Reason.CHECK_FAILED, "ecc")
    text = client.get(f"/jobs/{story.id}/preflight").text
    assert text.count("replace it") == 1 and "(32)" in text
    assert re.search(r'<details id="preflight-passed">', text)


def test_a_long_run_opens_before_it_is_read(client: TestClient, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    story = samples.completed(db)
    started: list[Any] = []
    monkeypatch.setattr(page_cache, "_SMALL", 0)
    monkeypatch.setattr(beside, "threading", held_back(started))
    first = client.get(f"/jobs/{story.id}/part")
    assert first.status_code == 200 and FINAL not in first.headers, "it must ask again"
    assert "200 of 200 steps" in first.text and "4 saved" in client.get(f"/jobs/{story.id}/checkpoints").text
    assert 'data-from="' in client.get(f"/jobs/{story.id}").text
    assert len(started) == 1
    started[0]()
    assert client.get(f"/jobs/{story.id}/part").headers[FINAL] == "1"


def test_curves_as_csv_have_every_step_and_no_formula(client: TestClient, db: Database) -> None:
    story = samples.completed(db)
    lines = client.get(f"/jobs/{story.id}/curves.csv").text.splitlines()
    assert lines[0] == "attempt,time,kind,step,metric,value"
    assert sum(",step," in line and ",loss," in line for line in lines) == 200
    answer = client.get(f"/v1/training/jobs/{story.id}/curves", params={"metric": ["loss"], "points": 50}).json()
    assert 40 < len(answer["segments"][0]["curves"]["loss"]) <= 52


def lines_of(text: str) -> list[int]:
    return [int(offset) for offset in re.findall(r'class="line [a-z]*" id="(?:[\w.-]+-)?L(\d+)"', text)]


def test_a_log_is_paged_by_bytes_and_a_link_names_a_line(client: TestClient, failed: samples.Story) -> None:
    where = f"/jobs/{failed.id}/logs?stream=rank-1.log"
    end = client.get(where).text
    shown = lines_of(end)
    assert len(shown) == 200 and "CUDA out of memory" in end and 'class="line bad"' in end
    earlier = lines_of(client.get(f"{where}&before={shown[0]}").text)
    assert len(earlier) == 200 and earlier[-1] < shown[0]
    assert FAILED[earlier[-1] : shown[0]].count(b"\n") == 1, "no line is missing between two pages"
    at = FAILED.index(b"INFO step 1000") - len("2026-03-01 12:16:40 ")
    middle = client.get(f"{where}&at={at}").text
    assert at in lines_of(middle) and f'id="L{at}"' in middle and "step 1000" in middle
    first = client.get(f"{where}&at=0").text
    assert lines_of(first)[0] == 0 and '<span class="a-3">WARNING</span>' in first and "\ufffd no text" in first
    assert lines_of(client.get(f"{where}&at=999999999").text) == []
    merged = client.get(f"/jobs/{failed.id}/logs").text
    assert 'class="from">rank-0<' in merged and 'class="from">rank-1<' in merged
    whole = client.get(f"/jobs/{failed.id}/logs/download?stream=rank-1.log")
    assert whole.content == FAILED and "attachment" in whole.headers["content-disposition"]
    assert client.get(f"/jobs/{failed.id}/logs/download?stream=../../x").status_code == 404


def test_a_log_says_what_the_numbers_before_its_lines_are(client: TestClient, failed: samples.Story) -> None:
    text = client.get(f"/jobs/{failed.id}/logs").text
    assert "The number before a line is the byte at which it begins, and a link to it." in text


@pytest.mark.proof
@pytest.mark.spawns
def test_search_in_a_log_is_bounded_and_finds_the_first_error(client: TestClient, failed: samples.Story) -> None:
    def found(**query: str) -> str:
        return client.get(f"/jobs/{failed.id}/logs", params=query).text

    assert len(lines_of(found(stream="rank-1.log", find=r"step 19\d\d$", regex="true"))) == 100
    assert len(lines_of(found(find="CUDA OUT of"))) == 1
    assert lines_of(found(find="CUDA OUT of", case="true")) == []
    assert len(lines_of(found(stream="rank-1.log", level="error"))) == 2
    many = found(stream="rank-0.log", find="INFO")
    (following,) = re.findall(r'id="search-on" href="[^"]*skip=(\d+)"', many)
    assert lines_of(found(stream="rank-0.log", find="INFO", skip=following))[0] == int(following)
    # A text is a text unless the box for an expression is checked; most messages of torch have brackets.
    assert len(lines_of(found(stream="rank-1.log", find="(most recent call last):"))) == 1
    assert lines_of(found(stream="rank-1.log", find="step 19..")) == []
    assert "Not searched: missing )" in found(find="(", regex="true")
    assert "No line matches." not in found(find="(", regex="true")
    assert "200 characters at most" in found(find="x" * 201)
    # The level is looked for beside the expression: 200 lines without it do not hide the one that has it.
    both = found(stream="rank-1.log", find="step|CUDA", regex="true", level="error")
    assert len(lines_of(both)) == len(lines_of(found(stream="rank-1.log", find="CUDA", level="error"))) > 0
    assert "not every log was searched to its end" in found(stream="all", find="INFO")
    assert "Not searched: the expression takes too long" in found(
        stream="rank-0.log", find=r"^(.|.)*(.|.)*[xy]$", regex="true"
    )
    jump = client.get(f"/jobs/{failed.id}/logs/first-error")
    at = FAILED.index(b"Traceback")
    assert jump.status_code == 303 and jump.headers["location"].endswith(f"stream=rank-1.log&at={at}#L{at}")


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("CUDA out of (memory|disk)", [(b"memory", b"disk"), (b"CUDA out of ",)]),
        (r"\d+ steps", [(b" steps",)]),
        ("a|b", []),
        ("(ab)*cd", [(b"cd",)]),
        (".", []),
        ("(?i)error", []),
        ("(?i:error)s", [(b"s",)]),
        (r"caf\xe9 au", [(b"caf",), (b" au",)]),
        ("café au", [(b"caf",), (b" au",)]),
        (r"step 9{3}\d", [(b"step 999",)]),
        ("ne+dle", [(b"ne",), (b"edle",)]),
        ("(oom|killed)+ at", [(b"oom", b"killed"), (b" at",)]),
        ("warn|x*", []),
        ("(Error|Exception):", [(b"rror", b"xception"), (b"Error", b"Exception"), (b":",)]),
        ("a\nb", [(b"a",), (b"b",)]),
        ("x{9000}y", [(b"y",)]),
    ],
)
def test_the_texts_that_every_match_has(pattern: str, literals: list[tuple[bytes, ...]]) -> None:
    assert log_grep.find_literals(pattern) == literals


def sought(pattern: str) -> log_grep.Sought:
    return log_grep.compile_sought(pattern, re.MULTILINE)


WORDS = ("error", "ERROR", "Error:", "oom", "OOM", "step 77", "step 7", "nan", "xyz", "needle", "Needle", "k", "")


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("rare", [1, 1024, 10**9])  # by a rare byte always, as it is, and by the whole text alone
def test_no_line_is_missed_by_what_is_looked_for_first(monkeypatch: pytest.MonkeyPatch, lower: bool, rare: int) -> None:
    """Against the expression on each line."""
    monkeypatch.setattr(log_grep, "_BLOCK", 4096)
    monkeypatch.setattr(log_grep, "_RARE", rare)
    dice = random.Random(7)
    log = "".join(f"{' '.join(dice.choices(WORDS, k=4))}\n" for _ in range(3000)).encode()
    flags = re.MULTILINE | (re.IGNORECASE if lower else 0)
    for pattern in ("needle", "e+rr?or", "oom|nan", r"(Error|OOM):?\s", "step 7{2}", r"\bk\b.*xyz", "^error", "OOM$"):
        expression = re.compile(pattern.encode(), flags)
        request = {"offset": 0, "limit": 10**6}
        answers = log_grep.search(io.BytesIO(log), log_grep.compile_sought(pattern, flags), request, until=float("inf"))
        want, at = [], 0
        for line in log.split(b"\n"):
            if expression.search(line):
                want.append(at)
            at += len(line) + 1
        assert [answer["at"] for answer in answers if "at" in answer] == want, pattern
        assert want


@pytest.mark.parametrize("each", [7_240, 7_250, 8_000])  # times four: below, at and above the size of a piece
def test_a_text_longer_than_a_piece_of_a_block_is_found(each: int) -> None:
    log = b"".join(b"a" * 40_000 + b"\n" for _ in range(20))
    request = {"offset": 0, "limit": 100}
    pattern = f"a{{{each}}}" * 4
    answers = list(log_grep.search(io.BytesIO(log), sought(pattern), request, until=float("inf")))
    assert [answer["at"] for answer in answers if "at" in answer] == [at * 40_001 for at in range(20)]


def test_lines_over_the_edge_of_a_block_are_found_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(log_grep, "_BLOCK", 64)
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d needle\n" % i for i in range(50)) + b"x" * 500 + b" needle")
    for pattern in ("needle", "n.?edle"):
        with path.open("rb", buffering=0) as log:
            request = {"offset": 0, "limit": 1000}
            answers = list(log_grep.search(log, sought(pattern), request, until=float("inf")))
        assert answers[-1] == {"next": path.stat().st_size, "done": True}
        assert len(answers) - 1 >= 51 and len({answer.get("at") for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("pattern", "found"), [("(?i)ERROR", [0]), ("caf[é] ", [6]), ("CAFÉ", []), (r"\xff", [17]), ("é au.*\\d", [6])]
)
def test_flags_and_letters_beyond_ascii_are_found(pattern: str, found: list[int]) -> None:
    log = io.BytesIO("error\ncafé au 1\n".encode() + b"\xff\n")
    answers = log_grep.search(log, sought(pattern), {"offset": 0, "limit": 9}, until=float("inf"))
    assert [answer["at"] for answer in answers if "at" in answer] == found


ODD = [
    "7",
    "a 7",
    "7, 8",
    "café",
    "äö",
    "ab",
    "x",
    "",
    "ék",
    "é\u212a",
    "\u017fo",
    "so",
    "word",
    "9 z",
    "naïve 7",
    "z9",
]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        r"\d\Z", r"\A\d", r"\d(?!\s)", r"\d(?![\s,])", r"(?<!\w)\d", r"^(?![\s\S]*x)", r"(?-m:\d$)", r"^$", r"^caf.$",
        r"^\w+$", r"^.{2}$", r"ék", r"s", r"so", r"\Bo", r"\b7\b", r"[^,]$", r"(a)?(?(1)b|z)", r"^\S+\s\S+$",
    ],
)  # fmt: skip
def test_each_line_is_found_as_if_it_were_alone(pattern: str, lower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_grep, "_BLOCK", 64)
    dice = random.Random(3)
    lines = [*ODD, *dice.choices(ODD, k=200), *(["7"] * 40), "last"]
    flags = re.MULTILINE | (re.IGNORECASE if lower else 0)
    log = io.BytesIO("\n".join(lines).encode())
    answers = log_grep.search(log, log_grep.compile_sought(pattern, flags), {"offset": 0, "limit": 999}, until=1e18)
    found = [answer["text"] for answer in answers if "at" in answer]
    assert found == [line for line in lines if re.search(pattern, line, flags)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="possessive")
def test_what_takes_more_than_a_line_is_looked_for_by_line() -> None:
    log = io.BytesIO(b"a,b\nc\n,\n")
    answers = log_grep.search(log, sought("[^,]++$"), {"offset": 0, "limit": 9}, until=1e18)
    assert [answer["at"] for answer in answers if "at" in answer] == [0, 4]


def test_an_end_is_never_behind_the_log() -> None:
    found, end = log_grep.search(io.BytesIO(b"abcde"), sought("c"), {"offset": 0, "limit": 1}, until=1e18)
    assert (found["at"], end) == (0, {"next": 5, "done": False})
    with pytest.raises((re.error, ValueError)):
        sought("(?L)foo")


@pytest.mark.parametrize("pattern", ["needle", "ne+dle", "nädel|needle"])
def test_a_long_line_is_searched_to_its_end(pattern: str) -> None:
    line = b"2026-03-01 ERROR tensor " + b"7 " * 50_000 + b"needle " + b"8 " * 9000
    log = io.BytesIO(b"short\n" + line + b"\n")
    found, end = log_grep.search(log, sought(pattern), {"offset": 0, "limit": 9}, until=float("inf"))
    assert found["at"] == 6 and end["done"]
    assert found["text"].startswith("2026-03-01 ERROR tensor 7") and " … " in found["text"]
    assert "needle" in found["text"][:2000] and len(found["text"]) < 9000, "the head of the line, and the match"


def test_one_caller_never_has_every_slot() -> None:
    async def go() -> None:
        slots, order = log_search.Slots(), list[str]()

        async def search(caller: str, name: str, gate: asyncio.Event) -> None:
            async with slots.take(caller):
                order.append(name)
                await gate.wait()

        gate = asyncio.Event()
        mine = [asyncio.create_task(search("mallory", f"mallory {n}", gate)) for n in range(8)]
        await asyncio.sleep(0)
        assert slots.count("mallory") == log_search.MOST_OF_ONE
        other = asyncio.create_task(search("ann", "ann", gate))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["mallory 0", "ann"]
        gate.set()
        await asyncio.gather(*mine, other)
        assert slots.count("mallory") == 0 and not slots._own

    asyncio.run(go())


def test_colours_are_classes_and_other_escapes_go() -> None:
    assert str(ansi.render("\x1b[1;31mred\x1b[0m plain")) == '<span class="a-bold a-1">red</span> plain'
    assert str(ansi.render("a\x1b[2K\x1b]0;t\x07\x1b[Hb\x1b(B")) == "ab"
    assert str(ansi.render("\x1b[38;5;1mx\x1b[38;2;1;2;3my\x1b[39mz")) == '<span class="a-1">x</span>yz'
    assert str(ansi.render("10%\r50%\r100%\r\n")) == "100%"
    assert str(ansi.render('\x1b[31m<b onclick="x">')) == '<span class="a-1">&lt;b onclick=&#34;x&#34;&gt;</span>'
    assert str(ansi.render("y" * 5000)).endswith("the line goes on</span>")


def test_following_sends_new_lines_and_ends_with_the_attempt(client: TestClient, failed: samples.Story) -> None:
    place = json.dumps({"rank-1.log": len(FAILED) - 35})
    text = client.get(f"/jobs/{failed.id}/logs/follow", params={"stream": "rank-1.log", "offsets": place}).text
    (news,) = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith('data: {"html')]
    assert news["offsets"] == {"rank-1.log": len(FAILED)} and "CUDA out of memory" in news["html"]
    assert text.endswith("event: end\ndata: {}\n\n")


def test_a_page_of_a_log_asks_for_no_file_of_a_template(
    client: TestClient, failed: samples.Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is an included template: with reloading on, a page of a long log took half as long again."""
    link = f"/jobs/{failed.id}/logs?stream=rank-1.log"
    assert client.get(link).text.count('class="line') > 100
    asked: list[str] = []
    monkeypatch.setattr("jinja2.loaders.os.path.getmtime", lambda path: asked.append(str(path)) or 0.0)
    assert client.get(link).status_code == 200 and asked == []


def test_a_spec_whose_folder_was_sent_says_what_submitting_it_again_runs(client: TestClient, db: Database) -> None:
    sent = samples.pending(db, name="sent", workdir=f"sha256:{'0a' * 32}")
    plain = samples.pending(db, name="plain")
    said = "Submitted as it is, this spec runs those files again"
    assert said in client.get(f"/jobs/{sent.id}/spec").text and said not in client.get(f"/jobs/{plain.id}/spec").text
