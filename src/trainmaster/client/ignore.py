"""Rules that leave files out, in the form of .gitignore; of the rules that match a path the last one counts.

    *.log        a name in any folder          /data      in the top folder alone
    cache/       folders alone                 a/**/b     any number of folders between
    !keep.log    not left out after all        # comment

A file below a folder that is left out cannot be brought back, as in git.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Ignore:
    """Compiled rules."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _compile(line)) is not None]

    def matches(self, path: str, *, is_folder: bool) -> bool:
        """Whether a path, relative and with `/`, is left out."""
        left_out = False
        for pattern, folders_only, keep in self._rules:
            if (is_folder or not folders_only) and pattern.fullmatch(path):
                left_out = not keep
        return left_out


def _compile(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    keep = text.startswith("!")
    text = text[1:] if keep else text
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    body = _translate(text.lstrip("/"))
    try:
        return re.compile(body if "/" in text else f"(?:.*/)?{body}", re.DOTALL), folders_only, keep
    except re.error:  # an odd class such as [z-a] matches nothing, as in git
        return None


def _translate(glob: str) -> str:
    found, at = "", 0
    while at < len(glob):
        if glob.startswith("**/", at):
            found, at = found + "(?:.*/)?", at + 3
        elif glob.startswith("**", at):
            found, at = found + ".*", at + 2
        elif glob[at] == "*":
            found, at = found + "[^/]*", at + 1
        elif glob[at] == "?":
            found, at = found + "[^/]", at + 1
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            inside = glob[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            found, at = f"{found}[{'^' + inside[1:] if inside[0] in '!^' else inside}]", end + 1
        elif glob[at] == "\\" and at + 1 < len(glob):
            found, at = found + re.escape(glob[at + 1]), at + 2
        else:
            found, at = found + re.escape(glob[at]), at + 1
    return found
