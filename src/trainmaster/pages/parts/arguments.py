"""A command as its arguments by name, so that two commands can be compared flag by flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

# A name is at most 80 characters: it stands in addresses of pages. -5 and -1e-3 are values.
_FLAG = re.compile(r"(--?[A-Za-z_][^=\s]{0,77})(?:=(.*))?", re.DOTALL)
_SETTING = re.compile(r"(\+{0,2}[A-Za-z_][\w./@-]{0,77})=(.*)", re.DOTALL)  # as Hydra and OmegaConf take them
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_SCRIPT = 4096  # characters of a script that are split: 200 runs are compared while somebody waits
_MOST = 300  # arguments that are compared one by one; of more the whole command is shown
ALONE = "given"  # value of a flag that has none


def name_arguments(words: Sequence[str]) -> dict[str, str]:
    """By name: `--lr 0.1` and `--lr=0.1` are --lr, `lr=0.1` is lr; a word of no flag is named by its place.

    Which flags take a value is not known here: the word behind a flag is its value unless it is a flag or a setting.
    Values of a flag that is repeated stand in one text.
    """
    named: dict[str, list[str]] = {}
    open_flag: str | None = None
    places = 0
    for word in _open_shell(words):
        flag, setting = _FLAG.fullmatch(word), _SETTING.fullmatch(word)
        if open_flag is not None and flag is None and setting is None:
            named[open_flag].append(word)
            open_flag = None
        elif flag is not None:
            value = flag[2]
            named.setdefault(flag[1], []).extend([value] if value is not None else [])
            open_flag = flag[1] if value is None else None
        elif setting is not None:
            named.setdefault(setting[1], []).append(setting[2])
            open_flag = None
        else:
            places += 1
            named[f"word {places}"] = [word]
    return {name: " ".join(values) if values else ALONE for name, values in named.items()}


def _open_shell(words: Sequence[str]) -> list[str]:
    """The words of `bash -c "…"` with those of its script; as they are where the script cannot be split."""
    if len(words) < 3 or not _SHELL.fullmatch(words[0]) or not re.fullmatch(r"-[a-z]*c", words[1]):
        return list(words)
    if len(words[2]) > _SCRIPT:
        return list(words)
    try:
        return [*words[:2], *shlex.split(words[2]), *words[3:]]
    except ValueError:
        return list(words)


def find_different(commands: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """By argument, of those that differ: its value in each run that has it. Empty where only the spelling differs, or
    where there are too many."""
    by_run = {run: name_arguments(words) for run, words in commands.items()}
    names = dict.fromkeys(name for arguments in by_run.values() for name in arguments)
    if len(names) > _MOST:
        return {}
    listed = {name: {run: own[name] for run, own in by_run.items() if name in own} for name in names}
    return {
        name: values for name, values in listed.items() if len(values) < len(by_run) or len(set(values.values())) > 1
    }
