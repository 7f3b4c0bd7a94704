"""No rule of the kernel log stands behind words that drop its message: messages are made from each rule's pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from trainmaster.node.parse import kernel_log
from trainmaster.node.parse.kernel_event_rules import RULES, WORDS, Rule


def make(items: Iterable[Any]) -> list[str]:
    """Texts of a parsed pattern in which each of its alternatives stands once; the first of all others beside it."""
    parts = [_choices(kind, value) for kind, value in items]
    whole = {"".join(part[0] for part in parts)}
    for number, part in enumerate(parts):
        before, after = parts[:number], parts[number + 1 :]
        for choice in part[1:]:
            whole.add("".join([*(other[0] for other in before), choice, *(other[0] for other in after)]))
    return sorted(whole)


def _choices(kind: Any, value: Any) -> list[str]:
    if kind is _constants.LITERAL:
        return [chr(value)]
    if kind is _constants.IN:
        return [_member(value)]
    if kind is _constants.BRANCH:
        return [text for branch in value[1] for text in make(branch)]
    if kind is _constants.SUBPATTERN:
        return make(value[3])
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        least, _most, inner = value
        return [text * max(1, least) for text in make(inner)] + ([""] if least == 0 else [])
    if kind is _constants.ANY:
        return [" "]
    return [""]  # a place or a look ahead


def _member(items: list[Any]) -> str:
    """A character of a set."""
    if items[0][0] is _constants.NEGATE:
        return "x"
    kind, value = items[0]
    if kind is _constants.RANGE:
        return chr(value[0])
    return "1" if kind is _constants.CATEGORY else chr(value)


@pytest.mark.parametrize("rule", RULES, ids=[f"{number}-{rule.kind}" for number, rule in enumerate(RULES)])
def test_every_message_of_a_rule_passes_the_words_before_it(rule: Rule) -> None:
    texts = [text for text in make(_parser.parse(rule.pattern.pattern)) if rule.pattern.search(text)]
    assert texts
    for text in texts:
        assert any(word in text for word in rule.words), text
        assert re.search(WORDS, text), text
        # An earlier rule may claim it; that it is dropped is what must not happen.
        assert kernel_log.parse(f"[ 9.5] {text} more\n").events, text


def test_a_message_that_no_word_lets_pass_is_noticed() -> None:
    """The rule of the kernel's user-access error once stood behind words without it."""
    old = "Hardware Error|Hardware error|Machine Check"
    assert not re.search(old, "mce: Uncorrected hardware memory error in user-access at 8a398a400")
    (rule,) = [rule for rule in RULES if rule.kind == "machine_check"]
    texts = make(_parser.parse(rule.pattern.pattern))
    assert [text for text in texts if rule.pattern.search(text) and not re.search(old, text)]
