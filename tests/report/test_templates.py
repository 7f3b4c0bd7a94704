"""Templates print what Jinja's own do, with fewer steps."""

from __future__ import annotations

import pytest
from jinja2 import DictLoader, Template
from markupsafe import Markup

from trainmaster.report import html

PAGES = {
    "layout": "<main>{% block main %}{% endblock %}</main>",
    "page": '{% extends "layout" %}{% block main %}{% for value in values %}'
    '{% include "line" %}{% endfor %}{% endblock %}',
    "line": "{% macro twice(it) %}{{ it }}{{ it }}{% endmacro %}<p>{{ value }}{{ twice(value) }}{{ value ~ '<' }}</p>",
}  # fmt: skip
VALUES = ["plain", "größe 模型", "<b>", "a & b", '"', "'", ">", "\x1b[31m", "", 7, 1.5, None, Markup("<i>")]


def test_values_are_printed_as_jinja_prints_them() -> None:
    ours = html.environment().overlay(loader=DictLoader(PAGES))
    theirs = html.environment().overlay(loader=DictLoader(PAGES))
    theirs.template_class = Template
    for value in VALUES:
        text = ours.get_template("page").render(values=[value])
        assert text == theirs.get_template("page").render(values=[value])
    assert "<p>&lt;b&gt;&lt;b&gt;&lt;b&gt;&lt;b&gt;&lt;</p>" in ours.get_template("page").render(values=["<b>"])


@pytest.mark.parametrize("name", ["page", "line", "layout"])
def test_a_template_is_one_text_however_long_it_is(name: str) -> None:
    """Jinja hands each piece of a block or an include on through all templates around it."""
    template = html.environment().overlay(loader=DictLoader(PAGES)).get_template(name)
    context = template.new_context({"values": list(range(100)), "value": "x"})
    assert len(list(template.root_render_func(context))) == 1
    assert all(len(list(block(context))) == 1 for block in template.blocks.values())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("type `trainmaster jobs`, then wait", "type <code>trainmaster jobs</code>, then wait"),
        ("a ` alone", "a ` alone"),
        ("none ``", "none ``"),
        ("`<b>` and <i>", "<code>&lt;b&gt;</code> and &lt;i&gt;"),
    ],
)
def test_commands_between_backticks_are_code(text: str, shown: str) -> None:
    assert html.commands(text) == shown
