"""Lines of a log that a regular expression matches: a program of its own, so that an expression can be stopped.

    python -I -S grep.py < request        the first line is a JSON object, the log follows unless it names a path

Python's `re` holds the interpreter while it backtracks, for hours if the expression is bad. Here it costs only its own
process, which has limits on time and memory and is killed when it does not answer. Standard library only: it starts in
20 ms. A literal that every match must have is looked for first, which is as fast as memory. Lines are searched whole;
one of more than 4 MB is taken as several of that length.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

_BLOCK = 4 << 20
_LINE = 8192  # bytes of a line that are given; all of it is searched
_HEAD = 512  # of them from its beginning, where the match is further on: time and level stand there
_MEMORY = 1 << 30


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    seconds = float(request["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    flags = re.MULTILINE | (re.IGNORECASE if request["ignore_case"] else 0)
    pattern: str = request["pattern"]
    words: re.Pattern[str] | None = None  # of an expression with letters beyond ASCII: it is for text, not for bytes
    try:
        expression = re.compile(pattern.encode() if pattern.isascii() else b"", flags)
        if not pattern.isascii():
            words = re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        _answer({"fault": str(error)})
        return
    literal = find_literal(pattern)
    if request["ignore_case"]:
        literal = literal.lower()
    log: IO[bytes] = sys.stdin.buffer
    if request["path"] is not None:
        log = io.FileIO(os.open(request["path"], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        log.seek(request["offset"])
    for answer in search(log, expression, literal, request, words=words, until=time.monotonic() + seconds):
        _answer(answer)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")


def search(
    log: IO[bytes],
    expression: re.Pattern[bytes],
    literal: bytes,
    request: dict[str, Any],
    *,
    words: re.Pattern[str] | None = None,
    until: float,
) -> Iterator[dict[str, Any]]:
    """Each line that matches, then where the search ended and whether that was the end of the log."""
    at, rest, left = int(request["offset"]), b"", int(request["limit"])
    lower = bool(request["ignore_case"])
    while True:
        piece = log.read(_BLOCK)
        block = rest + piece
        end = len(block) if not piece else block.rfind(b"\n") + 1
        if end == 0 and len(block) >= _BLOCK:
            end = len(block)  # one line longer than a block
        for start, line, place in _matches(block[:end], expression, literal, words, lower=lower):
            yield {"at": at + start, "text": _shorten(line, place)}
            left -= 1
            if left == 0:
                yield {"next": at + start + len(line) + 1, "done": False}
                return
        at, rest = at + end, block[end:]
        if not piece:
            yield {"next": at, "done": True}
            return
        if time.monotonic() > until:
            yield {"next": at, "done": False}
            return


def _matches(
    block: bytes, expression: re.Pattern[bytes], literal: bytes, words: re.Pattern[str] | None, *, lower: bool
) -> Iterator[tuple[int, bytes, tuple[int, int]]]:
    """Each line that matches: where it begins, its bytes, and where in them the match is."""
    sought = block.lower() if lower and literal else block
    place = 0
    while place < len(block):
        if literal:
            hit = sought.find(literal, place)
        elif words is not None:
            hit = place
        else:
            found = expression.search(block, place)
            hit = found.start() if found is not None else -1
        if hit < 0:
            return
        start = block.rfind(b"\n", 0, hit) + 1
        end = block.find(b"\n", hit)
        end = len(block) if end < 0 else end
        line = block[start:end]
        # Line by line: a match that goes over a line end is none.
        if words is not None:
            text = line.decode(errors="replace")
            if (match := words.search(text)) is not None:
                first, last = (len(text[:at].encode()) for at in match.span())
                yield start, line, (first, last)
        elif (found := expression.search(line)) is not None:
            yield start, line, found.span()
        place = end + 1


def _shorten(line: bytes, match: tuple[int, int]) -> str:
    """A line as text; of a long one its beginning, and the part around the match where that is further on."""
    if match[1] <= _LINE or len(line) <= _LINE:
        return line[:_LINE].decode(errors="replace")
    first = max(_HEAD, min(match[0], len(line)) - _HEAD)
    part = line[first : first + _LINE - _HEAD]
    return f"{line[:_HEAD].decode(errors='replace')} … {part.decode(errors='replace')}"


def find_literal(pattern: str) -> bytes:
    """The longest text in ASCII that every match contains as it is; empty where there is none."""
    parser = getattr(re, "_parser", None) or __import__("sre_parse")
    runs, run = [], ""
    parsed = parser.parse(pattern)
    if parsed.state.flags & re.IGNORECASE:  # written into the expression
        return b""
    for code, value in parsed:
        if str(code) == "LITERAL" and value != 10 and value < 128:
            run += chr(value)
        else:
            runs.append(run)
            run = ""
    return max([*runs, run], key=len).encode()


if __name__ == "__main__":
    main()
