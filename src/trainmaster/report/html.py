"""A job page as HTML: the part both the web and the report show, and the report as one file that needs nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.runtime import Context
from markupsafe import Markup, escape

from trainmaster.api.jobs import JobPage
from trainmaster.api.run import Curves
from trainmaster.core.clean_text import clean
from trainmaster.core.money.cost import BOUNDS, dollars, price_words, submitter
from trainmaster.report import chart, formats, phrases

FOLDER = Path(__file__).parent
_SPECIAL = re.compile("[&<>'\"]")


def render_html(page: JobPage) -> str:
    """The whole report: style and script inside, no address outside, and a policy that lets nothing else run."""
    template = environment().get_template("report.html")
    return template.render(**context(page), style=_ours("style.css"), script=_ours("chart.js"), policy=policy())


def policy() -> str:
    """The report's own content policy: its style and its script by hash, nothing from anywhere.

    Should a hostile value ever slip past the escaping, a browser still runs none of it.
    """
    script, style = _hash(asset("chart.js")), _hash(asset("style.css"))
    return f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"


def style_policy(style: str) -> str:
    """The same for a file without a script."""
    return f"default-src 'none'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"


@functools.cache
def asset(name: str) -> str:
    """A file of this folder, as text."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _ours(name: str) -> Markup:
    return Markup(asset(name))  # noqa: S704 (a file of this package, not a value)


@functools.cache
def environment() -> Environment:
    """Jinja with escaping always on and every unknown name an error."""
    env = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
        # A page of a log includes a template for each of its lines, and each would ask for the time of a file.
        auto_reload=False,
    )
    env.template_class = _Whole
    env.filters["commands"] = commands
    env.globals.update(bounds=BOUNDS, dollars=dollars, price_words=price_words, submitter=submitter)
    env.globals.update(
        {name: getattr(formats, name) for name in ("age", "count", "duration", "moment", "percent", "short", "size")}
    )
    env.globals.update(
        bar=bar,
        evidence=phrases.evidence,
        is_kept=phrases.is_kept,
        metrics_text=phrases.metrics_text,
        fold=phrases.fold,
        tally=phrases.tally,
        value_text=phrases.value_text,
        tones=phrases.TONES,
        overall_tones=phrases.OVERALL_TONES,
        verdict_tones=phrases.VERDICT_TONES,
    )
    return env


class _Whole(Template):
    """A template of which a block or an include is one text: Jinja hands each of its pieces through all around it.

    A text without a character to escape is printed as it is: to make it `Markup` first takes longer than to look.
    """

    @classmethod
    def from_code(
        cls,
        environment: Environment,
        code: CodeType,
        globals: MutableMapping[str, Any],  # noqa: A002 (Jinja's name)
        uptodate: Callable[[], bool] | None = None,
    ) -> Template:
        """The template of compiled code."""
        made = super().from_code(environment, code, globals, uptodate)
        made.root_render_func.__globals__["escape"] = _escape
        made.root_render_func = _join(made.root_render_func)
        made.blocks = {name: _join(block) for name, block in made.blocks.items()}
        return made


def _join(render: Callable[[Context], Iterator[str]]) -> Callable[[Context], Iterator[str]]:
    def whole(context: Context) -> Iterator[str]:
        yield "".join(render(context))

    return whole


def _escape(value: object) -> str:
    return value if type(value) is str and _SPECIAL.search(value) is None else escape(value)


def _clean(value: object) -> object:
    """Every value that a template prints passes here: text of a job is never control. Our own markup stays."""
    return clean(value) if type(value) is str else value


def commands(text: str) -> Markup:
    """A text whose parts between backticks are commands to type. One backtick alone is a character."""
    parts = clean(text).split("`")
    if len(parts) % 2 == 0 or "" in parts[1::2]:
        return escape(clean(text))
    shown = (Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts))
    return Markup("").join(shown)


def bar(share: float) -> Markup:
    """A thin progress bar. Its number stands beside it as text, so it is hidden from screen readers."""
    return Markup(
        '<svg class="bar-share" aria-hidden="true"><rect width="100%" height="100%" rx="2"/>'
        '<rect width="{:.1f}%" height="100%" rx="2"/></svg>'
    ).format(100 * max(0.0, min(1.0, share)))


def context(page: JobPage, *, drawn: bool = True) -> dict[str, Any]:
    """What the templates of a job page need. Not `drawn`: without charts, for a page that shows none."""
    return {
        "page": page,
        "tone": phrases.TONES[page.status],
        "title": phrases.title(page),
        "sentence": phrases.sentence(page),
        "figures": phrases.figures(page),
        "spec": phrases.spec_text(page.spec) if page.spec else "",
        **({"charts": _charts(page.run.curves, _saved(page))} if drawn else {}),
    }


def _saved(page: JobPage) -> tuple[int, ...]:
    """Steps of the saved checkpoints."""
    return tuple(each.step for each in page.run.checkpoints if each.event == "saved" and each.step is not None)


@functools.lru_cache(maxsize=64)  # a run that is over, or has no new step, is drawn once: some 30 ms
def _charts(curves: Curves, saved: tuple[int, ...]) -> dict[str, object]:
    loss = [chart.Line(name="training", points=curves.loss)]
    if curves.eval_loss:
        loss.append(chart.Line(name="held-out", points=curves.eval_loss, dots=True))
    marks = [chart.Mark(x=step, label="checkpoint") for step in saved]
    side = (
        ("rate", "Tokens per second", "tokens/s", curves.tokens_per_s, True),
        ("lr", "Learning rate", "learning rate", curves.lr, True),
        ("norm", "Gradient norm", "gradient norm", curves.grad_norm, True),
    )
    drawn = [
        chart.render(
            key=key, title=title, x_name="step", lines=[chart.Line(name=name, points=points)], zero=zero, small=True
        )
        for key, title, name, points, zero in side
    ]
    return {
        "loss": chart.render(key="loss", title="Loss", x_name="step", lines=loss, marks=marks),
        "side": [svg for svg in drawn if svg],
    }


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
