"""Targets in the help of `--on TARGET`, and its completion: read from their traits when one of the two is shown."""

from __future__ import annotations

import re

_MARK = re.compile(r"\{targets(?::(\w+))?\}")


def fill(text: str) -> str:
    """The help of an option, with all targets in place of `{targets}`, and those with a verb for `{targets:check}`."""
    if _MARK.search(text) is None:  # nearly every option: no target is imported
        return text
    from trainmaster import targets

    return _MARK.sub(lambda mark: ", ".join(targets.spell_all(mark[1])), text)


def complete(incomplete: str) -> list[str]:
    """Targets that begin so; with a colon where an option has to follow."""
    from trainmaster import targets

    words = [f"{name}:" if targets.traits(name).required else name for name in targets.names()]
    return [word for word in words if word.startswith(incomplete)]
