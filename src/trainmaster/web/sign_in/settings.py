"""The file of `trainmaster serve --oidc`: the provider, and which claims give which role in which project.

    issuer: https://accounts.example.org       # exactly as the provider's discovery document writes it
    client_id: trainmaster
    client_secret_file: /run/secrets/oidc      # or TRAINMASTER_OIDC_CLIENT_SECRET; neither: a public client
    url: https://trainmaster.example.org       # how browsers reach this server
    roles:
      - {claim: groups, value: ml-admins, role: admin}
      - {claim: groups, value: lab, role: user, project: lab}

The client's secret is in no field, so that it is in no message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trainmaster.core.errors import Fault, UsageError
from trainmaster.core.loopback import is_loopback_host
from trainmaster.core.roles import RANK, Role
from trainmaster.core.schema import build_new, field

VARIABLE = "TRAINMASTER_OIDC_CLIENT_SECRET"
CALLBACK = "/login/oidc/callback"
_LONGEST_SECRET = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A role in one project, or in every project."""

    role: Role
    project: str | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A claim that gives a role."""

    claim: str = field(doc="name of the claim; a dot leads into an object", example="groups", pattern=r".{1,200}")
    value: str = field(doc="the claim is this text, or a list with it", example="ml-team", pattern=r".{1,1000}")
    role: Role = field(doc="role that it gives", example="user")
    project: str | None = field(
        default=None,
        doc="in this project; not stated: in all",
        pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}",
        example="lab",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the file says."""

    issuer: str = field(doc="issuer of the provider", example="https://accounts.example.org")
    client_id: str = field(
        doc="id of this server at the provider", example="trainmaster", pattern=r"[\x21-\x7e]{1,500}"
    )
    url: str = field(doc="how browsers reach this server", example="https://trainmaster.example.org")
    roles: tuple[Rule, ...] = field(doc="which claims give which role")
    client_secret_file: str = field(default="", doc="file with the secret of the client")
    scopes: tuple[str, ...] = field(
        default=("openid", "profile", "email"),
        doc="scopes to request",
        pattern=r"[\x21\x23-\x5b\x5d-\x7e]{1,200}",
        example="openid",
    )
    label: str = field(
        default="Sign in with your company's account", doc="text of the button", pattern=r".{1,60}", example="Sign in"
    )
    name_claim: str = field(default="email", doc="claim that is the name in pages and audit log")
    session_hours: float = field(default=8.0, doc="a session ends after this long", gt=0, le=24)
    userinfo: bool = field(default=False, doc="also read the claims of the userinfo endpoint")

    HINTS: ClassVar[Mapping[str, str]] = {
        "client_secret": f"put it into a file and name that by client_secret_file, or set {VARIABLE}"
    }

    def faults(self) -> Iterable[Fault]:
        """Faults between fields."""
        for name, url in (("issuer", self.issuer), ("url", self.url)):
            if not is_safe_url(url, loopback=True) or urlsplit(url).query:
                yield Fault(path=name, message="not an https address; http is for loopback alone")
        if urlsplit(self.url).path.strip("/"):
            yield Fault(path="url", message="has a path; this server answers at the root of a name")
        if "openid" not in self.scopes:
            yield Fault(path="scopes", message="openid is missing, and without it there is no ID token")
        if not self.roles:
            yield Fault(path="roles", message="empty, so that nobody would have a role; write at least one rule")

    @property
    def redirect_uri(self) -> str:
        return self.url.rstrip("/") + CALLBACK

    @property
    def secure(self) -> bool:
        """Whether browsers reach this server by https."""
        return urlsplit(self.url).scheme == "https"

    @property
    def issuer_host(self) -> str:
        return urlsplit(self.issuer).hostname or ""


@dataclass(frozen=True, kw_only=True)
class Client:
    """The settings and the secret of the client, which stays out of every text of this."""

    settings: Settings
    secret: str | None

    def __repr__(self) -> str:
        return f"Client({self.settings.client_id})"


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Client:
    """The settings of a file; UsageError where they cannot be used."""
    from trainmaster.documents import yaml_file

    settings = yaml_file.load(path, what="--oidc").read(lambda value: build_new(Settings, value))
    secret: str | None = environment.get(VARIABLE) or None
    if settings.client_secret_file:
        file = path.parent / settings.client_secret_file
        try:
            with file.open(encoding="ascii") as opened:
                secret = opened.read(_LONGEST_SECRET + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not plain text"
            raise UsageError(f"--oidc {path}: client_secret_file {file}: cannot be read ({why})") from None
        if not secret or len(secret) > _LONGEST_SECRET:
            raise UsageError(f"--oidc {path}: client_secret_file {file}: empty or too long; write the secret into it")
    return Client(settings=settings, secret=secret)


def is_safe_url(url: str, *, loopback: bool) -> bool:
    """An https address, or where `loopback` says so an http address of this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or " " in url or "@" in parts.netloc or parts.fragment or not host:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and loopback and is_loopback_host(host))


def find_grants(rules: Iterable[Rule], claims: Mapping[str, Any]) -> tuple[Grant, ...]:
    """The highest role of each project that the claims give; those of all projects first."""
    best: dict[str | None, Role] = {}
    for rule in rules:
        before = best.get(rule.project)
        if _holds(rule, claims) and (before is None or RANK[rule.role] > RANK[before]):
            best[rule.project] = rule.role
    everywhere = best.get(None)
    kept = {p: r for p, r in best.items() if p is None or everywhere is None or RANK[r] > RANK[everywhere]}
    return tuple(Grant(role=kept[p], project=p) for p in sorted(kept, key=lambda p: (p is not None, p or "")))


def _holds(rule: Rule, claims: Mapping[str, Any]) -> bool:
    # Anybody can claim an address that the provider did not verify.
    if rule.claim == "email" and claims.get("email_verified") not in (True, "true"):
        return False
    found = find_claim(claims, rule.claim)
    return rule.value in found if isinstance(found, list) else isinstance(found, str) and found == rule.value


def find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its whole name (which may be a URL with dots), or by a path into objects."""
    if name in claims:
        return claims[name]
    here: Any = claims
    for part in name.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here
