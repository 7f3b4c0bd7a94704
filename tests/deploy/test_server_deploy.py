"""The server in containers: the Helm chart as it is rendered, the compose files, and the token that a secret holds."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

import trainmaster
from deploy import charts
from deploy.charts import CHART, ChartError
from trainmaster.cli.main import build
from trainmaster.cli.server.serve import _admit
from trainmaster.core.errors import UsageError
from trainmaster.store import audit, tokens
from trainmaster.store.database import Database
from trainmaster.web.auth import may_bind

DEPLOY = CHART.parents[1]
POSTGRES = {"database": {"existingSecret": "pg"}}


def render(home: Path, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The parts of the chart by kind; each is valid for the newest Kubernetes that is known."""
    parts = charts.render(values or {}, namespace="ml", home=home)
    for part in parts:
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)
    return {part["kind"]: part for part in parts}


def options_of_serve() -> set[str]:
    """The options of `trainmaster serve`."""
    verbs: Any = typer.main.get_command(build())
    serve = verbs.get_command(None, "serve")
    return {word for parameter in serve.params for word in parameter.opts}


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.spawns
def test_the_chart_runs_without_rights_and_with_its_probes(tmp_path: Path) -> None:
    parts = render(tmp_path)
    assert set(parts) == {"Secret", "Service", "StatefulSet"}
    pod = parts["StatefulSet"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert server["args"][0] == "serve" and flags(server["args"]) <= options_of_serve()
    assert server["image"] == f"trainmaster-server:{trainmaster.__version__}"
    token = base64.b64decode(parts["Secret"]["data"]["token"]).decode()
    assert tokens.SHAPE.fullmatch(token) and token not in yaml.safe_dump(parts["StatefulSet"])
    assert [claim["metadata"]["name"] for claim in parts["StatefulSet"]["spec"]["volumeClaimTemplates"]] == ["data"]
    selector = parts["Service"]["spec"]["selector"]
    assert selector.items() <= parts["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.spawns
def test_the_chart_with_postgresql_an_ingress_and_more_servers(tmp_path: Path) -> None:
    ingress = {"enabled": True, "host": "train.example.org", "tlsSecret": "tls"}
    two = {"replicas": 2, "volume": {"existingClaim": "shared"}}
    one = {"admin": {"existingSecret": "mine"}, "serviceAccountName": "tm", "storage": "s3://b/p"}
    parts = render(tmp_path, {**POSTGRES, **one, **two, "ingress": ingress})
    assert set(parts) == {"Service", "StatefulSet", "Ingress"}
    spec = parts["StatefulSet"]["spec"]
    (server,) = spec["template"]["spec"]["containers"]
    (database,) = [entry for entry in server["env"] if entry["name"] == "TRAINMASTER_DATABASE"]
    assert database["valueFrom"]["secretKeyRef"] == {"name": "pg", "key": "url"}
    assert "--storage=s3://b/p" in server["args"] and spec["replicas"] == 2 and "volumeClaimTemplates" not in spec
    for unfit in ({"replicas": 2}, {**POSTGRES, "replicas": 2}, {"ingress": {"enabled": True}}):
        with pytest.raises(ChartError, match=r"replicas: more than one needs PostgreSQL|ingress.host: the name"):
            render(tmp_path, unfit)


def test_the_compose_files_start_the_same_server() -> None:
    alone, more = (yaml.safe_load((DEPLOY / f"compose{kind}.yaml").read_text()) for kind in ("", ".postgres"))
    server = alone["services"]["server"]
    assert server["command"][0] == "serve" and flags(server["command"]) <= options_of_serve()
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and server["user"].endswith(":-1000:1000}")
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    (secret,) = server["secrets"]
    assert f"--admin-token-file=/run/secrets/{secret}" in server["command"] and secret in alone["secrets"]
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    assert f" AS {server['build']['target']}\n" in dockerfile
    assert all(f"ARG {name}=" in dockerfile for name in server["build"]["args"])
    url = more["services"]["server"]["environment"]["TRAINMASTER_DATABASE"]
    assert url.startswith("postgresql+psycopg://trainmaster:${DATABASE_PASSWORD") and "postgres" in more["services"]
    ignored = (DEPLOY.parent / ".gitignore").read_text().split()
    assert "deploy/admin-token" in ignored, "a token is not committed"


def test_a_token_of_a_file_lets_in_and_the_one_before_it_no_longer(any_db: Database, tmp_path: Path) -> None:
    file, first, second = tmp_path / "token", f"tm_{'a' * 43}", f"tm_{'b' * 43}"
    with pytest.raises(UsageError, match="there is no token"):
        may_bind(any_db, "0.0.0.0")
    for token in (first, first, second):
        file.write_text(f"{token}\n")
        _admit(any_db, file)
        may_bind(any_db, "0.0.0.0")
        found = tokens.find_token(any_db, token)
        assert found is not None and found.role.value == "admin" and found.project is None
    assert tokens.find_token(any_db, first) is None, "a secret that was changed is changed for everybody"
    actions = [entry.action for entry in audit.list_audit(any_db, limit=10)]
    assert actions == ["token.create", "token.create"], "the same file again changes nothing"
    with any_db.write() as conn:
        tokens.revoke(conn, tokens.FROM_FILE + tokens.digest(second)[:8], at=datetime.now(UTC))
    _admit(any_db, file)
    assert tokens.find_token(any_db, second) is None, "what was revoked stays so"
    for content in ("secret", f"tm_{'a' * 42}", ""):
        file.write_text(content)
        with pytest.raises(UsageError, match="not a token"):
            _admit(any_db, file)
