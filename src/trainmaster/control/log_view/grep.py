"""Lines of a log that a regular expression matches: a program of its own, so that an expression can be stopped.

    python -I -S grep.py < request        the first line is a JSON object, the log follows unless it names a path

With `end` only the lines that begin before that offset are searched; with `within` the first one is the first that
begins behind `offset` - 1, so that several programs search parts of one file.

Python's `re` holds the interpreter while it backtracks, for hours if the expression is bad. Here it costs only its own
process, which has limits on time and memory and is killed when it does not answer. Standard library only: it starts in
20 ms. Texts of which every match must have one are looked for first, a gigabyte a second and more. Lines are searched
whole; one of more than 4 MB is taken as several of that length.
"""

from __future__ import annotations

import heapq
import io
import itertools
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_BLOCK = 1 << 20  # stays in the cache of a core
_LONGEST = 4 << 20  # bytes of a line
_LINE = 8192  # bytes of a line that are given; all of it is searched
_HEAD = 512  # of them from its beginning, where the match is further on: time and level stand there
_MEMORY = 1 << 30
_RARE = 1024  # a byte that is met once in so many is worth being looked for alone: each time costs 0.4 µs
_PLAIN = 4  # bytes without letters that are worth being looked for alone where case is ignored
# Letters beyond ASCII that are k, s or i where case is ignored: Kelvin, long s, I with a dot, i without one.
_FOLDED = tuple((ord(small), letter.encode()) for small, letter in zip("ksii", "\u212a\u017f\u0130\u0131", strict=True))
_SAMPLED = 256  # bytes at each of eight places of a block: what is rare there is counted
_PIECE = 29_000  # CPython looks for a text in less than 30,000 bytes by a way that takes three quarters of the time
Literals = list[tuple[bytes, ...]]


class Sought(NamedTuple):
    """An expression, in the forms in which it is looked for."""

    of_text: re.Pattern[str]
    of_bytes: re.Pattern[bytes] | None  # the same for lines in ASCII; None where it has letters beyond that itself
    literals: Literals
    by_line: bool  # what is around a line may change whether it matches: a block cannot be searched as a whole
    lower: bool
    also: re.Pattern[str] | None  # what a line has to match too


def compile_sought(pattern: str, flags: int, *, also: str | None = None) -> Sought:
    """The forms of an expression; re.error or ValueError where it is none."""
    of_text = re.compile(pattern, flags)
    of_bytes = re.compile(pattern.encode(), flags) if pattern.isascii() else None
    return Sought(
        of_text, of_bytes, find_literals(pattern), of_bytes is None or _looks_around(_parse(pattern)),
        bool(flags & re.IGNORECASE), re.compile(also) if also else None,
    )  # fmt: skip


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    seconds = float(request["seconds"])
    limit = math.ceil(seconds) + 1  # a block that has begun is searched to its end
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    flags = re.MULTILINE | (re.IGNORECASE if request["ignore_case"] else 0)
    try:
        sought = compile_sought(request["pattern"], flags, also=request.get("also"))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        _answer({"fault": str(error)})
        return
    assert isinstance(sys.stdin.buffer, io.BufferedReader)
    log: io.RawIOBase | io.BufferedIOBase = sys.stdin.buffer
    if request["path"] is not None:
        log = io.FileIO(os.open(request["path"], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        log.seek(request["offset"])
        if request.get("within"):
            request["offset"] = _seek_line(log, request["offset"])
    # The clock is that of the machine: what the start of this program took is counted, half of it at the most.
    until = max(request.get("begun", -math.inf) + seconds, time.monotonic() + seconds / 2)
    for answer in search(log, sought, request, until=until):
        _answer(answer)


def _seek_line(log: io.RawIOBase, at: int) -> int:
    """Go to the first line that begins at this place or behind it; where none does, to the end."""
    log.seek(max(at - 1, 0))
    while piece := log.read(1 << 16) or b"":
        if (ends := piece.find(b"\n")) >= 0:
            return log.seek(ends + 1 - len(piece), io.SEEK_CUR)
    return log.tell()


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()  # what was found is there, also where this program is ended


def search(
    log: io.RawIOBase | io.BufferedIOBase, sought: Sought, request: dict[str, Any], *, until: float
) -> Iterator[dict[str, Any]]:
    """Each line that matches, then where the search ended and whether that was the end of the log, or of its part."""
    at, left, end = int(request["offset"]), int(request["limit"]), request.get("end")
    stop = sys.maxsize if end is None else end
    if sought.lower:
        literals = [tuple(text.lower() for text in choice) for choice in sought.literals]
        sought = sought._replace(literals=literals)
    block = bytearray(_LONGEST + _BLOCK)  # the beginning of a line from the block before, and what is read behind it
    held, inside = 0, False  # of a line that is taken as several: the next one goes on with it, where `stop` is too
    while True:
        if at >= stop and not inside:
            yield {"next": at, "done": True}
            return
        got = log.readinto(memoryview(block)[held : held + _BLOCK]) or 0
        size = held + got
        end = block.rfind(b"\n", 0, size) + 1 if got else size
        if end == 0 and size >= _LONGEST:
            end = size
        for start, line, place in _matches(block, end, sought):
            if at + start >= stop and not (inside and start == 0):
                break
            yield {"at": at + start, "text": _shorten(line, place)}
            left -= 1
            if left == 0:
                yield {"next": at + min(start + len(line) + 1, size), "done": False}
                return
        if end:
            inside = block[end - 1] != 10
        at, held = at + end, size - end
        block[:held] = block[end:size]
        if not got:
            yield {"next": at, "done": True}
            return
        if time.monotonic() > until:
            # Behind `stop` the lines are another program's: what that one found there is not to be asked for again.
            yield {"next": at, "done": at >= stop and not inside}
            return


def _matches(block: bytearray, size: int, sought: Sought) -> Iterator[tuple[int, bytes, tuple[int, int]]]:
    """Each line that matches: where it begins, its bytes, and where in them the match is."""
    place = 0
    for hit in _hits(block, size, sought):
        if hit < place:
            continue  # in a line that was looked at
        start = block.rfind(b"\n", 0, hit) + 1
        place = block.find(b"\n", hit, size) + 1 or size + 1
        line = bytes(block[start : place - 1])
        # Line by line: a match that goes over a line end is none.
        if (span := _find_in(line, sought)) is not None:
            yield start, line, span


def _find_in(line: bytes, sought: Sought) -> tuple[int, int] | None:
    """Where in a line the match is. Beyond ASCII a letter is several bytes, and one character for the expression."""
    text = line.decode(errors="replace")
    if sought.also is not None and sought.also.search(text) is None:
        return None
    if sought.of_bytes is None or not line.isascii():
        if (match := sought.of_text.search(text)) is not None:
            return len(text[: match.start()].encode()), len(text[: match.end()].encode())
        if sought.of_bytes is None or "\ufffd" not in text:
            return None  # what is no text is searched as bytes too
    found = sought.of_bytes.search(line)
    return found.span() if found is not None else None


def _hits(block: bytearray, size: int, sought: Sought) -> Iterator[int]:
    """Places, in order, in all lines that may match."""
    if sought.literals:
        sample = b"".join(block[at : min(size, at + _SAMPLED)] for at in range(0, size, max(1, size // 8)))
        small = sample.lower() if sought.lower else sample
        # The choice that is met least here: every line has a date, few have what is sought.
        chosen = min(sought.literals, key=lambda choice: (sum(map(small.count, choice)), -min(map(len, choice))))
        if not (sought.lower and _has_folded(block, size, chosen)):
            yield from heapq.merge(*_places(block, size, chosen, sample, lower=sought.lower))
            return
    whole = None if sought.by_line or not block[:size].isascii() else sought.of_bytes
    place = 0
    while place < size:
        hit = place
        if whole is not None:
            found = whole.search(block, place, size)
            if found is None or found.start() >= size:  # behind the last line end no line begins
                return
            hit = found.start()
        yield hit
        place = block.find(b"\n", hit, size) + 1 or size


def _has_folded(block: bytearray, size: int, texts: Sequence[bytes]) -> bool:
    """Whether a letter is in it that stands for one of these texts. One byte is found twenty times as fast as two."""
    return any(
        block.find(letter[:1], 0, size) >= 0 and block.find(letter, 0, size) >= 0
        for small, letter in _FOLDED
        if any(small in text for text in texts)
    )


def _places(
    block: bytearray, size: int, texts: Sequence[bytes], sample: bytes, *, lower: bool
) -> Iterator[Iterator[int]]:
    """Where each of the texts is, by a byte of it that is rare here if one is: it is found ten times as fast."""
    cases = {byte: {byte, byte ^ 32} if lower and chr(byte).isalpha() else {byte} for byte in set(b"".join(texts))}
    # Of bytes as rare the one that most of the texts have: if it is not here at all, none of them is.
    order = {byte: (sum(map(sample.count, both)), -sum(byte in text for text in texts)) for byte, both in cases.items()}
    absent: set[int] = set()
    small: bytearray | None = None
    for text in texts:
        rarest = min(text, key=order.__getitem__)
        plain = max(re.findall(rb"[^a-z]+", text), key=len, default=b"") if lower else text
        if order[rarest][0] * _RARE <= len(sample):
            for byte in cases[rarest] - absent:
                if block.find(byte, 0, size) < 0:
                    absent.add(byte)
                else:
                    yield _places_by_part(block, size, text, bytes([byte]), text.index(rarest), lower=lower)
        elif len(plain) >= _PLAIN or plain == text:
            yield _places_by_part(block, size, text, plain, text.index(plain), lower=lower)
        else:
            small = block[:size].lower() if small is None else small
            yield _places_by_part(small, size, text, text, 0, lower=False)


def _places_by_part(
    block: bytearray, size: int, text: bytes, part: bytes, before: int, *, lower: bool
) -> Iterator[int]:
    length = len(text)
    for place in _find_all(block, size, part, before):
        first = place - before
        if (block[first : first + length].lower() == text) if lower else block.startswith(text, first, size):
            yield first


def _find_all(block: bytearray, size: int, part: bytes, start: int) -> Iterator[int]:
    step = _PIECE - len(part) if 1 < len(part) < _PIECE else size  # for one byte the C library has something faster
    for begin in range(start, size, step):
        end = min(size, begin + step + len(part) - 1)
        place = block.find(part, begin, end)
        while place >= 0:
            yield place
            place = block.find(part, place + 1, end)


def _shorten(line: bytes, match: tuple[int, int]) -> str:
    """A line as text; of a long one its beginning, and the part around the match where that is further on."""
    if match[1] <= _LINE or len(line) <= _LINE:
        return line[:_LINE].decode(errors="replace")
    first = max(_HEAD, min(match[0], len(line)) - _HEAD)
    part = line[first : first + _LINE - _HEAD]
    return f"{line[:_HEAD].decode(errors='replace')} … {part.decode(errors='replace')}"


def find_literals(pattern: str) -> Literals:
    """Texts in ASCII of which a match must contain one: each choice holds for every match, none where there is none."""
    parsed = _parse(pattern)
    return [] if parsed.state.flags & re.IGNORECASE else _required(parsed)  # written into the expression


def _parse(pattern: str) -> Any:
    parser = getattr(re, "_parser", None) or __import__("sre_parse")
    return parser.parse(pattern)


def _looks_around(parsed: Any) -> bool:
    """Whether a part of an expression can see more than what it matches, or takes what it cannot give back.

    Of a block of lines such an expression may find no match where it has one in a line alone. Line ends and the ends of
    words are the same in both.
    """
    for code, value in parsed:
        kind = str(code)
        if kind.startswith(("ASSERT", "POSSESSIVE", "ATOMIC")):
            return True
        if kind == "AT" and str(value) not in ("AT_BEGINNING", "AT_END", "AT_BOUNDARY"):
            return True
        if kind == "SUBPATTERN" and value[2] & re.MULTILINE:  # switched off
            return True
        if any(_looks_around(part) for part in _parts(kind, value)):
            return True
    return False


def _parts(kind: str, value: Any) -> list[Any]:
    """The expressions inside of one part."""
    if kind.endswith("_REPEAT"):
        return [value[2]]
    if kind == "SUBPATTERN":
        return [value[3]]
    if kind == "BRANCH":
        return list(value[1])
    if kind == "GROUPREF_EXISTS":
        return [part for part in value[1:] if part is not None]
    return []


def _required(parsed: Any) -> Literals:
    choices: Literals = []
    run = ""
    for code, value in parsed:
        kind = str(code)
        if kind == "LITERAL" and value != 10 and value < 128:
            run += chr(value)
            continue
        before, run = run, ""
        if kind.endswith("_REPEAT") and 0 < value[0] <= _LINE:
            least, most, what = value
            inside = _required(what)
            if len(what) == 1 and str(what[0][0]) == "LITERAL" and inside:
                run = least * inside[0][0].decode()
                if least == most:
                    run, before = before + run, ""
                else:
                    before += run
            else:
                choices += inside
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:  # no flags of its own
            choices += _required(value[3])
        elif kind == "BRANCH":
            each = [max(_required(part), key=lambda choice: min(map(len, choice)), default=()) for part in value[1]]
            if all(each):
                choices.append(tuple(dict.fromkeys(text for choice in each for text in choice)))
            if before:  # what is common to the beginnings of all stands before them
                choices.append(tuple(dict.fromkeys(before.encode() + _leading(part) for part in value[1])))
                before = ""
        if before:
            choices.append((before.encode(),))
    return choices + ([(run.encode(),)] if run else [])


def _leading(parsed: Any) -> bytes:
    """The text in ASCII that a part of an expression begins with."""
    run = itertools.takewhile(lambda item: str(item[0]) == "LITERAL" and item[1] != 10 and item[1] < 128, parsed)
    return bytes(value for _, value in run)


if __name__ == "__main__":
    main()
