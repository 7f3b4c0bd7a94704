"""The rights in deploy/ are those that the target uses: with them a job lives and dies, without one it is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kube import ADMIN, LIMITED, Kube
from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.core.errors import TargetError
from trainmaster.core.states import TargetState
from trainmaster.targets.kubernetes import rights
from trainmaster.targets.kubernetes.settings import parse_settings

pytestmark = pytest.mark.spawns
SHIPPED = Path(__file__).parents[3] / "deploy" / "kubernetes" / "rbac.yaml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def grant(kube: Kube, namespace: str, kind: str, *, without: tuple[str, str] | None = None) -> None:
    """Give the user without rights those of the manifest, all but one."""
    for one in rights.role_objects(parse_settings({"kind": kind, "namespace": namespace})):
        made = copy.deepcopy(one)
        for rule in made.get("rules", []):
            if without is not None and rule["resources"] == [without[0]]:
                rule["verbs"].remove(without[1])
        if "rules" in made:
            made["rules"] = [rule for rule in made["rules"] if rule["verbs"]]
        if "subjects" in made:
            made["subjects"] = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "limited"}]
        plural = f"{made['kind'].lower()}s"
        inside = f"/namespaces/{namespace}" if "namespace" in made["metadata"] else ""
        root = "/api/v1" if made["kind"] == "ServiceAccount" else RBAC
        kube.call("POST", f"{root}{inside}/{plural}", made)


@pytest.mark.parametrize("kind", ["job", "pytorchjob", "trainjob", "hyperpod"])
def test_these_rights_are_enough(
    kind: str, kube: Kube, namespace: str, settings_file: Callable[..., Path], place: Any, run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    grant(kube, namespace, kind)
    target = targets.load(f"kubernetes:{settings_file(token=LIMITED, kind=kind, gpus=0)}")

    async def go() -> None:
        handle = await target.submit(target.plan(place()))
        assert (await target.poll(handle)).state is TargetState.WAITING
        await target.cancel(handle, reason="user_cancelled")
        await target.release(handle)

    run(go())


@pytest.mark.parametrize(
    ("resource", "verb"), [("jobs", "create"), ("pods/log", "get"), ("pods", "watch"), ("secrets", "deletecollection")]
)
def test_a_missing_right_is_named(
    resource: str, verb: str, kube: Kube, namespace: str, settings_file: Callable[..., Path]
) -> None:
    grant(kube, namespace, "job", without=(resource, verb))
    path = settings_file(token=LIMITED, gpus=0)
    done = CliRunner().invoke(build(), ["cluster", "rights", f"kubernetes:{path}"])
    assert done.exit_code == 1
    missing = [line for line in done.output.splitlines() if line.startswith("MISSING")]
    assert len(missing) == 1 and f" {verb} {resource}" in missing[0], done.output


def test_an_administrator_lacks_nothing(settings_file: Callable[..., Path]) -> None:
    done = CliRunner().invoke(build(), ["cluster", "rights", f"kubernetes:{settings_file(token=ADMIN)}"])
    assert done.exit_code == 0 and "MISSING" not in done.output, done.output


def test_a_refusal_names_the_right_and_the_way_to_it(
    kube: Kube, namespace: str, settings_file: Callable[..., Path], place: Any, run: Any
) -> None:
    grant(kube, namespace, "job", without=("jobs", "patch"))
    target = targets.load(f"kubernetes:{settings_file(token=LIMITED, gpus=0)}")
    with pytest.raises(TargetError, match=rf"may not patch jobs\.batch in namespace {namespace}; .*cluster rights"):
        run(target.submit(target.plan(place())))


def test_the_shipped_manifest_is_this_one() -> None:
    head, _, body = SHIPPED.read_text().partition("apiVersion")
    assert all(line.startswith("#") for line in head.splitlines())
    assert list(yaml.safe_load_all("apiVersion" + body)) == rights.role_objects(
        parse_settings({"namespace": "training"})
    )
