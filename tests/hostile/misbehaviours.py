"""Misbehaviours of jobs, drawn by a seed: bytes, sizes, names, signals, forks, floods, truncations, clocks.

Each is a shell script that a job runs as its only rank. None of them may hold up another job, stay for ever or leave a
process behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVENTS = '"$TRAINMASTER_EVENTS"'
OUTPUTS = '"$TRAINMASTER_OUTPUTS"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaviour:
    """One script and the limits of its job."""

    number: int
    kind: str
    script: str
    limits: dict[str, Any] = field(default_factory=dict)
    cancel_after_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.number:03d}-{self.kind}"


def draw(count: int, *, seed: int) -> list[Misbehaviour]:
    """`count` misbehaviours, every kind equally often."""
    chance = random.Random(seed)
    kinds = list(_KINDS.items())
    return [
        _draw(number, *kinds[number % len(kinds)], chance=random.Random(chance.getrandbits(64)))
        for number in range(count)
    ]


def _draw(number: int, kind: str, make: Callable[[random.Random], Any], *, chance: random.Random) -> Misbehaviour:
    made = make(chance)
    script, more = made if isinstance(made, tuple) else (made, {})
    return Misbehaviour(number=number, kind=kind, script=script, **more)


def _bytes(chance: random.Random) -> str:
    size, code = chance.choice([1, 100, 5_000, 200_000]), chance.choice([0, 1, 3, 255])
    where = chance.choice(["", f">> {EVENTS}", f"| tee -a {EVENTS}"])
    return f"head -c {size} /dev/urandom {where}; exit {code}"


def _nul(chance: random.Random) -> str:
    text = chance.choice(
        [r"a\000b\n", r"\355\240\200\n", r"\033[2J\n", r"\302", r"\377\376\n", r"{\"phase\":\"\\u0000"]
    )
    return f"printf '{text}' {chance.choice(['', f'>> {EVENTS}'])}; exit {chance.choice([0, 3])}"


def _json(chance: random.Random) -> str:
    size = chance.choice([300, 4_000, 90_000])
    line = chance.choice(
        [
            '{"phase":"ITERATION","event":"start","iteration":99999999999999999999}',
            '{"phase":"EVAL_MODEL","event":"metrics","data":{"model_id":"' + "m" * size + '"}}',
            '{"phase":"PREFLIGHT","event":"check","data":{"check":"x","verdict":"pass","node":"' + "n" * 5_000 + '"}}',
            '{"phase":"A","event":"b","data":' + "[" * chance.choice([50, 150, 3_000]) + "]" * 3_000 + "}",
            '{"phase":"A","event":"b","seq":' + "9" * chance.choice([20, 4_500]) + "}",
            '{"phase":"A","event":"b","ts":' + chance.choice(["1e999", "-1e18", '"9999-99-99"', "true"]) + "}",
            '{"phase":"TRAINING","event":"epoch_complete","epoch":1e400,"data":{"avg_loss":NaN}}',
            '{"phase":"\\ud800","event":"b","data":{"\\ud800":"\\u0000"}}',
            "[]", "null", '"text"', "{",
        ]
    )  # fmt: skip
    times = chance.choice([1, 20, 300])
    return f"cat > line <<'END'\n{line}\nEND\nfor i in $(seq {times}); do cat line >> {EVENTS}; done"


def _flood(chance: random.Random) -> str:
    lines, phase = chance.choice([2_000, 20_000]), chance.choice(["STEP", "ITERATION", "TRAINING", "PREFLIGHT"])
    data = chance.choice(['{"iteration":%d}', '{"config":{"a":%d}}', '{"step":%d}'])
    event = chance.choice(["start", "end", "metrics"])
    line = '{"phase":"' + phase + '","event":"' + event + '","data":' + data + "}\\n"
    return f"""seq {lines} | while read i; do printf '{line}' $i; done >> {EVENTS}"""


def _log_flood(chance: random.Random) -> str:
    return f"head -c {chance.choice([1, 20]) * 1_000_000} /dev/zero | tr '\\0' {chance.choice(['x', 'y'])}; exit 1"


def _long_line(chance: random.Random) -> str:
    head, size = """printf '{"phase":"A","event":"b","data":"'""", chance.choice([100_000, 9_000_000])
    return f"""({head}; head -c {size} /dev/zero | tr '\\0' z; echo '"}}') >> {EVENTS}"""


def _truncate(chance: random.Random) -> str:
    how = chance.choice(
        [f": > {EVENTS}", f"rm {EVENTS}", f"rm {EVENTS}; echo '{{}}' > {EVENTS}", f"truncate -s 10 {EVENTS}",
         f"rm {EVENTS}; mkdir {EVENTS}", f"rm {EVENTS}; mkfifo {EVENTS}", f"rm {EVENTS}; ln -s /etc/passwd {EVENTS}",
         f"truncate -s 1G {EVENTS}", f"chmod 000 {EVENTS}"]
    )  # fmt: skip
    return f'sleep 0.5; {how}; sleep {chance.choice([0.2, 1])}; echo \'{{"phase":"A","event":"b"}}\' >> {EVENTS}'


def _record(chance: random.Random) -> str:
    text = chance.choice(["rubbish", "[]", '{"ok": true}', '{"attempt":"x","ok":"yes"}', ""])
    how = chance.choice([f"echo '{text}' > exit.json", "mkdir exit.json", "ln -s /etc/passwd exit.json"])
    return f'cd "$(dirname {EVENTS})"; {how}; {chance.choice(["true", "sleep 30"])}'


def _folder(chance: random.Random) -> str:
    how = chance.choice(["rm -rf *", "rm -f plan.json", "chmod 000 .", "rm -f agent.lock agent.log", "mv outputs o"])
    return f'cd "$(dirname {EVENTS})"; {how}; sleep {chance.choice([0.1, 1])}; exit {chance.choice([0, 1])}'


def _names(chance: random.Random) -> str:
    make = chance.choice(
        [r"""printf x > "$(printf 'a\377')" """, r"""printf x > "$(printf 'a\nb')" """, r"printf x > 'a\b'",
         """printf x > "$(printf '%0255d' 0)" """, "for i in $(seq 90); do mkdir d; cd d; done; echo > x",
         "for i in $(seq 20); do mkdir $(printf '%0250d' $i); cd $(printf '%0250d' $i); done; echo > x",
         "for i in $(seq 300); do echo $i > f$i; done", "mkfifo p; ln -s / l; mkdir e; touch e/.hidden",
         "truncate -s 3G sparse; rm sparse", "printf x > '%41'; printf x > 'a?b*c'", "mkdir x; chmod 000 x"]
    )  # fmt: skip
    return f"cd {OUTPUTS}; {make}"


def _signal(chance: random.Random) -> str:
    number = chance.choice(["9", "11", "6", "15", "2", "1", "8", "4", "7", "STOP", "USR1", "PIPE", "ALRM", "34"])
    whom = chance.choice(["$$", "$$", "$PPID", "0"])
    if number == "STOP":
        return "kill -STOP $$; sleep 1", {"cancel_after_s": 4.0, "limits": {"grace_s": 1}}  # type: ignore[return-value]
    return f"sleep 0.3; kill -{number} {whom}; sleep 5"


def _fork(chance: random.Random) -> str:
    deaf = """setsid sh -c 'trap "" TERM; sleep 300'"""
    orphan = chance.choice(["setsid sleep 300", "nohup sleep 300", "(sleep 300 &)", deaf])
    return f"for i in 1 2 3 4 5; do {orphan} & done; sleep 0.2; exit {chance.choice([0, 1])}"


def _deaf(chance: random.Random) -> Any:
    script = "trap '' TERM INT HUP; while :; do sleep 1; done"
    return script, {"cancel_after_s": chance.choice([1.0, 3.0]), "limits": {"grace_s": chance.choice([0, 1, 2])}}


def _timeout(chance: random.Random) -> Any:
    return "trap '' TERM; sleep 600", {"limits": {"timeout_s": chance.choice([1, 2]), "grace_s": 1}}


def _clock(chance: random.Random) -> str:
    ts = chance.choice(["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2500-01-01T00:00:00"])
    phase = chance.choice(["STEP", "ITERATION", "PROJECT"])
    line = f'{{"ts":"{ts}","phase":"{phase}","event":"start","data":{{"step":1}}}}'
    return f"for i in 1 2 3; do echo '{line}' >> {EVENTS}; touch -d '2099-01-01' {EVENTS}; done; sleep 0.3"


def _exit(chance: random.Random) -> str:
    return f"exit {chance.choice([0, 1, 2, 65, 66, 75, 126, 127, 137, 139, 255])}"


def _program(chance: random.Random) -> str:
    return chance.choice(
        ["exec /nonexistent", "exec /etc/passwd", "ulimit -v 1000; python3", "cd /; exit 4", "ulimit -n 3; cat"]
    )


_KINDS: dict[str, Callable[[random.Random], Any]] = {
    "bytes": _bytes, "nul": _nul, "json": _json, "flood": _flood, "log-flood": _log_flood, "long-line": _long_line,
    "truncate": _truncate, "record": _record, "folder": _folder, "names": _names, "signal": _signal, "fork": _fork,
    "deaf": _deaf, "timeout": _timeout, "clock": _clock, "exit": _exit, "program": _program,
}  # fmt: skip
