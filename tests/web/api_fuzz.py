"""`make api-fuzz`: schemathesis asks the running server what its OpenAPI document allows, and what it does not.

Every answer is held to the document: a status it names, a type it names, a body of its shape, no 5xx; and what the
document forbids is refused. As five callers: an admin, a viewer, a user of one project, nobody where a token is
required, and nobody over loopback. Known ids and names are mixed in, or nearly everything would be a 404.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from pages import samples
from trainmaster.store import costs, tokens, webhooks
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.tokens import Role
from trainmaster.web.app import create_app
from web.furnished import iterated, keep, serving

CALLERS = ("admin", "viewer", "user", "nobody", "loopback")
_NAMES = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection",
)  # fmt: skip
HOOK = "11111111-2222-4333-8444-555555555555"


@dataclass
class Tally:
    """What was asked and what came back."""

    cases: int = 0
    operations: set[str] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def furnish(db: Database, home: Path) -> dict[str, list[Any]]:
    """A database with something of everything, and what its parts are called."""
    job_ids = [samples.completed(db), samples.failed_run(db), samples.pending(db, project="infra")]
    full, at = iterated(db, name="iterated"), datetime.now(UTC)
    paths = ("project.yaml", "attempts/1/rank-0.log", "outputs/model.bin")
    keep(db, home, full.id, dict.fromkeys(paths, b"x" * 1000))
    with db.write() as conn:
        costs.set_budget(conn, "research", "month", 10_000, at=at)
        tokens.issue(conn, name="spare", role=Role.USER, project=None, at=at)
        webhooks.insert_webhook(conn, HOOK, url="https://hooks.example.org/x", project=None, topics=[], at=at)
    return {
        "uuid": [story.id for story in (*job_ids, full)],
        "n": [1, 2, 999],
        "stream": ["agent.log", "rank-0.log", "events.jsonl", "exit.json", "plan.json", "../agent.log"],
        "path": [*paths, "../../secret"],
        "project": ["research", "infra", "nobody"],
        "period": ["month", "total"],
        "name": ["spare", "nobody"],
        "id": [HOOK],
        "project_id": ["research", "infra"],
        "status": ["completed", "failed"],
        "job_id": [full.id],
        "model_id": ["m1"],
        "after": ["1:0", "1:99999"],
        "attempt": [1, 2],
    }


def fire(where: str | Path, *, cases: int, seed: int, callers: tuple[str, ...] = CALLERS) -> Tally:
    """So many cases over all operations, as each of these callers."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        db = open_database(where)
        known = furnish(db, home)
        passes = {}
        with db.write() as conn:
            for name, project in (("admin", None), ("viewer", None), ("user", "research")):
                passes[name] = tokens.issue(conn, name=name, role=Role(name), project=project, at=datetime.now(UTC))
        for caller in callers:
            app = create_app(db, home, reconcile=False, require_token=caller != "loopback", rate=None)
            with serving(app) as url:
                token = passes.get(caller)
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                _as_caller(url, headers, known, cases // len(callers), seed, tally)
        db.close()
    return tally


def _as_caller(
    url: str, headers: dict[str, str], known: dict[str, list[Any]], cases: int, seed: int, tally: Tally
) -> None:
    document = requests.get(f"{url}/v1/openapi.json", timeout=30).json()
    exact = _list_answers(document)
    schema = schemathesis.openapi.from_dict(_loosen_tuples(document))
    schema.config.update(base_url=url)
    schema.config.generation.with_security_parameters = False  # who asks is ours to say
    operations = [result.ok() for result in schema.get_all_operations()]
    tally.operations |= {operation.label for operation in operations}
    load_all_checks()
    checks = [CHECKS.get_one(name) for name in _NAMES]
    session = requests.Session()
    session.headers.update(headers)
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    each = -(-cases // (len(operations) * len(modes)))
    for operation in operations:
        for mode in modes:
            _ask(
                operation, mode, session, checks, known, each=each, seed=seed, tally=tally,
                exact=exact.get(operation.label),
            )  # fmt: skip


def _list_answers(document: dict[str, Any]) -> dict[str, Draft202012Validator]:
    """What an answer 200 in JSON must be, by operation, from the whole document."""
    found = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("responses", {}).get("200", {}).get("content", {})
            if shape := content.get("application/json", {}).get("schema"):
                whole = {**shape, "components": document["components"]}
                found[f"{method.upper()} {path}"] = Draft202012Validator(whole)
    return found


def _loosen_tuples(part: Any) -> Any:
    """The document for schemathesis 4.32.5, which turns `prefixItems` into what it then refuses as a schema."""
    if isinstance(part, list):
        return [_loosen_tuples(each) for each in part]
    if not isinstance(part, dict):
        return part
    loose = {name: _loosen_tuples(value) for name, value in part.items()}
    if "prefixItems" in loose:
        loose["items"] = {"anyOf": loose.pop("prefixItems")}
    return loose


def _ask(
    operation: Any, mode: Any, session: Any, checks: Any, known: Any, *,
    each: int, seed: int, tally: Tally, exact: Draft202012Validator | None,
) -> None:  # fmt: skip
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except Exception as error:  # an operation without parameters has nothing that could be wrong
        if mode is GenerationMode.POSITIVE:
            raise
        assert "negat" in f"{type(error).__name__} {error}".lower(), error
        return

    @hypothesis.seed(seed)
    @settings(
        max_examples=each, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], report_multiple_bugs=False,
    )  # fmt: skip
    @given(case=strategy, data=st.data())
    def one(case: Any, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE:
            for container in (case.path_parameters, case.query):
                for name in container or ():
                    if name in known and data.draw(st.integers(0, 3)):
                        container[name] = data.draw(st.sampled_from(known[name]))
        response = case.call(session=session, timeout=30)
        tally.cases += 1
        tally.statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)
        kinds = response.headers.get("content-type", ())
        if exact is not None and response.status_code == 200 and any("json" in kind for kind in kinds):
            exact.validate(response.json())

    try:
        one()
    except hypothesis.errors.Unsatisfiable:
        return
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.failures.append(f"{operation.label} ({mode.name.lower()}): {_tell(error)}")


def _tell(error: BaseException) -> str:
    parts = getattr(error, "exceptions", ())
    return "\n".join(_tell(part) for part in parts) if parts else f"{type(error).__name__}: {error}"


def main() -> int:
    arguments = argparse.ArgumentParser(prog="api_fuzz", description=__doc__)
    # A tenth is lost where an operation has so few ways to be asked that they would only be repeated.
    arguments.add_argument("--cases", type=int, default=6_500, help="about so many, over all callers")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--database", help="URL of an empty PostgreSQL database; a new SQLite file where none is given"
    )
    arguments.add_argument("--as", dest="caller", choices=CALLERS, help="one caller")
    chosen = arguments.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        callers = (chosen.caller,) if chosen.caller else CALLERS
        where = chosen.database or Path(folder) / "trainmaster.db"
        tally = fire(where, cases=chosen.cases, seed=chosen.seed, callers=callers)
    statuses = ", ".join(f"{status} {count:,}" for status, count in sorted(tally.statuses.items()))
    for failure in tally.failures:
        print(failure, "\n")
    print(
        f"{tally.cases:,} cases, {len(tally.operations)} operations, {len(tally.failures)} failed, "
        f"{time.perf_counter() - began:.0f} s  ({statuses})"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
