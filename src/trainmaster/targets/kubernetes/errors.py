"""Refusals of the API server as errors of ours.

TargetError
├── Missing      404: the object is not there
├── Taken        409: another manager owns a field, or the object is being deleted
├── Expired      410: this point of the history is gone; list again
├── Denied       401, 403: the right that is missing, and where to get it
└── Unreachable  429, 5xx, no answer
SpecError        422, 400: the object does not fit, with the path of each field
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trainmaster.core.errors import Fault, SpecError, TargetError, TrainmasterError, Unreachable

_RIGHT = re.compile(r'cannot (\w+) resource "([^"]+)" in API group "([^"]*)"(?: in the namespace "([^"]+)")?')
_SHELL = (("create", "pods"), ("get", "pods"), ("get", "configmaps"))  # those of `rights.needed` for a shell
_NOT_TYPED = "failed to create typed patch object"
_QUOTA = "exceeded quota"


class Missing(TargetError):
    """The object is not there."""


class Taken(TargetError):
    """Another writer owns what was to be written."""


class Expired(TargetError):
    """The resource version is too old; list again."""


class Denied(TargetError):
    """The account lacks a right."""


def refusal(status: int, body: Any, *, what: str) -> TrainmasterError:
    """The error for a request that the API server refused."""
    document = body if isinstance(body, Mapping) else {}
    text = str(document.get("message") or f"status {status}")[:1000]
    if status == 404:
        return Missing(f"kubernetes: {what}: {text}")
    if status == 409:
        return Taken(f"kubernetes: {what}: {text}")
    if status == 410:
        return Expired(f"kubernetes: {what}: {text}")
    if status in (401, 403):
        return _denied(status, text, what)
    if status in (400, 422):
        return SpecError(_faults(document, text, what))
    if _NOT_TYPED in text:  # 500 in older servers, for a fault of the object
        return SpecError([Fault(path=what, message=text.partition(_NOT_TYPED)[2].strip(": "))])
    if status == 429 or status >= 500:
        return Unreachable(f"kubernetes: {what}: {text}")
    return TargetError(f"kubernetes: {what}: {text}")


def parse(content: bytes) -> Any:
    """The document of an answer; its text as a message where it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return {"message": content[:500].decode(errors="replace")}


def _denied(status: int, text: str, what: str) -> TargetError:
    if status == 401:
        return Denied(f"kubernetes: {what}: the credentials are refused; renew those of the kubeconfig")
    if _QUOTA in text:
        return TargetError(f"kubernetes: {what}: {text}")
    if match := _RIGHT.search(text):
        verb, resource, group, namespace = match.groups()
        where = f" in namespace {namespace}" if namespace else ""
        right = f"{verb} {resource}{'.' + group if group else ''}{where}"
        if resource == "pods/exec" or (verb, resource) in _SHELL:
            return Denied(
                f"kubernetes: the account may not {right}; deploy/kubernetes/rbac.yaml does not give it; see the "
                "rights of a shell with: trainmaster cluster rights --shell, and print them with --manifest"
            )
        return Denied(
            f"kubernetes: the account may not {right}; apply deploy/kubernetes/rbac.yaml, and see every missing right "
            "with: trainmaster cluster rights"
        )
    return Denied(f"kubernetes: {what}: {text}")


def _faults(document: Mapping[str, Any], text: str, what: str) -> list[Fault]:
    details = document.get("details") or {}
    causes = [cause for cause in details.get("causes") or () if isinstance(cause, Mapping)]
    kind = str(details.get("kind") or what)
    faults = [
        Fault(path=f"{kind} {cause.get('field', '')}".strip(), message=str(cause.get("message", "")))
        for cause in causes
    ]
    return faults or [Fault(path=kind, message=text)]
