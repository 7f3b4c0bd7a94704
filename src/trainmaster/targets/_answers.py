"""Order and answer of the bootstrap that runs programs on a node, whatever carries them.

The answer is untrusted: its size is bounded, its framing is checked, and its files are names and texts, never links,
modes or devices.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets._nodes import Program, Result


def make_order(programs: Sequence[Program], *, deadline_s: float, **more: Any) -> dict[str, Any]:
    """The order for these programs, with a mark of its own for the answer."""
    runs = [
        {"module": one.module, "words": list(one.words), "env": dict(one.env), "captures": one.captures}
        for one in programs
    ]
    return {"nonce": secrets.token_hex(16), "deadline_s": deadline_s, "runs": runs, **more}


def encode_order(order: Mapping[str, Any]) -> str:
    """The order as one word of a command line."""
    return base64.b64encode(json.dumps(order).encode()).decode()


def deadline(timeout_s: float) -> float:
    """Seconds after which the node ends its programs itself, so that its report of where it hung arrives in time."""
    return timeout_s - min(3.0, timeout_s / 5)


def find_answer(body: bytes, nonce: str) -> bytes | None:
    """The answer in a program's whole output, after whatever the site or the image printed; None without one."""
    match = re.search(rb"\n" + nonce.encode() + rb" answer (\d{1,9}) ([0-9a-f]{64})\n", body)
    if match is None:
        return None
    data = body[match.end() : match.end() + int(match[1])]
    if hashlib.sha256(data).hexdigest().encode() != match[2]:
        raise malformed("the answer was cut off or damaged in transit")
    return data


def parse_results(data: bytes, wanted: int) -> list[Result]:
    """Results of the programs in an answer; NodeUnavailable where it reports an error or is malformed."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed("the answer is not JSON") from None
    if isinstance(answer, dict) and isinstance(answer.get("wrong"), str):
        raise NodeUnavailable(clean(answer["wrong"])[:600], action="run `trainmaster check` on it by hand")
    runs = answer.get("runs") if isinstance(answer, dict) else None
    if not isinstance(runs, list) or len(runs) != wanted:
        raise malformed(f"not {wanted} program results")
    return [_parse_result(run) for run in runs]


def _parse_result(run: object) -> Result:
    if not isinstance(run, dict):
        raise malformed("a program result that is no object")
    code, state, out, err, files = (run.get(key) for key in ("code", "state", "out", "err", "files"))
    if not isinstance(code, int | None) or not isinstance(state, str | None):
        raise malformed("a program result without exit code or state")
    if not isinstance(out, str) or not isinstance(err, str):
        raise malformed("a program result without text")
    return Result(code=code, state=state, out=out, err=clean(err), files=check_files(files or {}))


def check_files(files: object) -> Mapping[str, str]:
    """Captured files of an answer: paths that stay inside their folder, and texts."""
    if not isinstance(files, dict):
        raise malformed("its files are no object")
    for name, text in files.items():
        if not isinstance(text, str) or not _is_safe(name):
            raise malformed(f"illegal file name {name[:80]!r}")
    return files


def _is_safe(name: str) -> bool:
    """Whether a path stays inside its folder and has the form that CapturingHost writes."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and len(part.encode()) <= 255 and part.isprintable() for part in parts)
    return plain and len(parts) <= 64 and (name == "answers.json" or parts[0] in ("files", "commands"))


def malformed(what: str) -> NodeUnavailable:
    action = "check what its login shell and its Python print"
    return NodeUnavailable(f"malformed answer: {what[:300]}", action=action)


def clean(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters are replaced."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
