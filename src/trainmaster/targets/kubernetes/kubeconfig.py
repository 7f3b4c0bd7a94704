"""Access to a cluster: address, certificates and credentials from a kubeconfig or from the pod's own account.

The server's certificate is always verified. `insecure-skip-tls-verify` is refused: the token would go to anybody.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.targets import _yaml_file

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_S = 30.0
# What changes who asks; without it a request would be another one than the user wrote down.
_UNSUPPORTED = frozenset({"auth-provider", "username"})
_HEADER_SAFE = "!#$&'*+^`|"  # with letters, digits and `_.-~`: what a header's name may hold (RFC 9110, section 5.6.2)
_EARLY_S = 60.0  # a token is renewed before it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach one API server, and as whom. Secrets are not shown."""

    server: str
    ca: str | None = field(default=None, repr=False)  # PEM; None: the system's authorities
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None  # read again: the cluster renews it
    certificate: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    command: Mapping[str, Any] | None = field(default=None, hash=False)  # `exec` of the kubeconfig
    proxy: str | None = field(default=None, repr=False)  # an address, which may hold a password
    server_name: str | None = None  # in the certificate, where it is not the host of `server`
    impersonate: tuple[tuple[str, str], ...] = ()  # headers

    def tls(self) -> ssl.SSLContext:
        """TLS settings with the cluster's authority and the client's certificate."""
        try:
            context = ssl.create_default_context(cadata=self.ca)
            if self.server_name is not None:
                context = _named_context(context, self.server_name)
            if self.certificate is not None:
                with tempfile.NamedTemporaryFile(
                    "w", suffix=".pem"
                ) as file:  # mode 600; the ssl module takes files only
                    file.write(f"{self.certificate}\n{self.key or ''}\n")
                    file.flush()
                    context.load_cert_chain(file.name)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(f"kubernetes: a certificate of the kubeconfig cannot be read: {error}") from None
        return context


class Credentials:
    """The Authorization header, renewed when it has to be."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._token, self._until = access.token, float("inf")
        if access.command is not None:
            self._until = 0.0

        self._asking = asyncio.Lock()

    def forget(self) -> None:
        """The server refused the token: a program is asked for another one."""
        if self._access.command is not None:
            self._until = 0.0

    async def headers(self) -> list[tuple[str, str]]:
        """Who asks: the token, and whom it speaks for."""
        return [*(await self._bearer()), *self._access.impersonate]

    async def _bearer(self) -> list[tuple[str, str]]:
        if (path := self._access.token_file) is not None:
            try:
                return _bearer(await asyncio.to_thread(path.read_text))
            except (OSError, UnicodeDecodeError) as error:
                raise Unreachable(f"kubernetes: the token file {path} cannot be read: {error}") from None
        if self._access.command is not None:
            async with self._asking:  # many polls, one program
                if time.time() > self._until - _EARLY_S:
                    self._token, self._until = await _run_command(self._access.command)
        return _bearer(self._token)


def _bearer(token: str | None) -> list[tuple[str, str]]:
    if not token:
        return []
    if not re.fullmatch(r"[!-~]+", token.strip()):
        raise UsageError("kubernetes: the token has characters that no token has; copy it again, without line breaks")
    return [("Authorization", f"Bearer {token.strip()}")]


async def _run_command(command: Mapping[str, Any]) -> tuple[str, float]:
    """Token of a credential plugin (`aws eks get-token`), and when it ends."""
    try:
        words = [str(command["command"]), *map(str, command.get("args") or ())]
        given = {str(variable["name"]): str(variable["value"]) for variable in command.get("env") or ()}
    except (KeyError, TypeError, AttributeError):
        raise UsageError(
            "kubernetes: exec of the kubeconfig needs command, args as a list, env as names and values"
        ) from None
    version = str(command.get("apiVersion", "client.authentication.k8s.io/v1"))
    asks = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(asks)}
    process = None
    try:
        async with asyncio.timeout(_EXEC_S):
            process = await asyncio.create_subprocess_exec(
                *words, env=environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, stderr = await process.communicate()
    except FileNotFoundError:
        raise UsageError(f"kubernetes: {words[0]} of the kubeconfig is not installed") from None
    except (OSError, ValueError) as error:  # TimeoutError is one; ValueError: a NUL byte
        if process is not None and process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 2.0)
        raise Unreachable(
            f"kubernetes: {words[0]} gave no credentials: {str(error) or f'none within {_EXEC_S:g} s'}"
        ) from None
    try:
        status = json.loads(out)["status"]
        ends = status.get("expirationTimestamp")
        return str(status["token"]), datetime.fromisoformat(ends).timestamp() if ends else float("inf")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = stderr.decode(errors="replace").strip()[-200:]
        raise Unreachable(f"kubernetes: {words[0]} gave no credentials (exit {process.returncode}): {text}") from None


def load_access(kubeconfig: str | None, context: str | None) -> Access:
    """Access by the settings: a kubeconfig, the pod's own account, or the usual places."""
    if (
        kubeconfig is None
        and context is None
        and (_ACCOUNT / "token").exists()
        and "KUBERNETES_SERVICE_HOST" in os.environ
    ):
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        name = f"[{host}]" if ":" in host else host
        ca = (_ACCOUNT / "ca.crt").read_text()
        return Access(server=f"https://{name}:{port}", ca=ca, token_file=_ACCOUNT / "token")
    paths = find_files(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
    return _yaml_file.load_all(paths, parse_access, context, what="kubernetes: kubeconfig")


def find_files(listed: str) -> list[Path]:
    """Files of a list as KUBECONFIG has it. As kubectl does, those that are not there are left out, unless all are."""
    paths = [Path(path).expanduser() for path in listed.split(os.pathsep) if path]
    existing = [path for path in paths if not _is_missing(path)]
    return existing or paths[:1] or [Path(listed)]


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # told when it is read
        return False
    return False


def parse_access(files: Sequence[tuple[Any, Path]], context: str | None) -> Access:
    """Access of one context of kubeconfig files; relative files lie beside the one that names them.

    Merged as kubectl does: of a value, or an entry of a name, that several files state, the first one counts alone.
    """
    stated = [(document, folder) for document, folder in files if document]
    if not stated or not all(isinstance(document, Mapping) for document, _ in stated):
        raise UsageError("kubernetes: the kubeconfig is empty, or not a kubeconfig")
    wanted = context or next(
        (document["current-context"] for document, _ in stated if document.get("current-context")), None
    )
    chosen, _ = _named(stated, "contexts", wanted, "context")
    cluster, beside_cluster = _named(stated, "clusters", chosen.get("cluster"), "cluster")
    user, beside_user = _named(stated, "users", chosen.get("user"), "user")
    for fields, where in ((cluster, "cluster"), (user, "user")):
        if ignored := sorted(_UNSUPPORTED & {name for name, value in fields.items() if value}):
            raise UsageError(f"kubernetes: {ignored[0]} of the kubeconfig's {where} is not supported; leave it out")
    for name in ("token", "tokenFile"):
        if not isinstance(user.get(name) or "", str):
            raise UsageError(f"kubernetes: {name} of the kubeconfig is not text; write it in quotes")
    server = str(cluster.get("server", ""))
    if cluster.get("insecure-skip-tls-verify"):
        raise UsageError("kubernetes: insecure-skip-tls-verify is not supported; write certificate-authority instead")
    if not server.startswith("https://"):
        raise UsageError(f"kubernetes: {server!r} is not an https:// address; credentials would be sent in clear text")
    try:
        sound = bool(urlsplit(server).hostname) and (urlsplit(server).port or 443) > 0
    except ValueError:
        sound = False
    if not sound or not re.fullmatch(r"[!-~]+", server):
        raise UsageError(f"kubernetes: server {server!r:.200} of the kubeconfig is not an address")
    return Access(
        server=server.rstrip("/"),
        ca=_text(cluster, "certificate-authority", beside_cluster),
        token=user.get("token"),
        token_file=beside_user / user["tokenFile"] if user.get("tokenFile") else None,
        certificate=_text(user, "client-certificate", beside_user),
        key=_text(user, "client-key", beside_user),
        command=_plugin(user.get("exec"), beside_user),
        proxy=_proxy(cluster.get("proxy-url")),
        server_name=_word(cluster, "tls-server-name"),
        impersonate=_impersonation(user),
    )


def _proxy(stated: Any) -> str | None:
    if not stated:
        return None
    try:
        address = urlsplit(str(stated))
        sound = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 1) > 0
    except ValueError:
        sound = False
    if not sound:  # not shown: it may hold a password
        raise UsageError("kubernetes: proxy-url of the kubeconfig is no address of a proxy; write http://HOST:PORT")
    return str(stated)


def _word(fields: Mapping[str, Any], name: str) -> str | None:
    """A text that is sent in a header or a handshake; None where it is not stated."""
    text = fields.get(name)
    if text is None or text == "":
        return None
    if not isinstance(text, str) or not re.fullmatch(r"[!-~]([ -~]*[!-~])?", text):
        raise UsageError(f"kubernetes: {name} of the kubeconfig is not a name; write printable ASCII, in quotes")
    return text


def _impersonation(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Headers for the user, the groups and whatever else of somebody else in whose name requests are sent."""
    name = _word(user, "as")
    groups, extra = user.get("as-groups") or [], user.get("as-user-extra") or {}
    sound = isinstance(groups, list) and isinstance(extra, Mapping)
    if not sound or not all(isinstance(values, list) for values in extra.values()):
        raise UsageError("kubernetes: as-groups of the kubeconfig is a list, as-user-extra a list for each name")
    if name is None:
        if groups or extra or user.get("as-uid"):
            raise UsageError("kubernetes: as-uid, as-groups and as-user-extra of the kubeconfig need `as` too")
        return ()
    headers = [("Impersonate-User", name)]
    if (uid := _word(user, "as-uid")) is not None:
        headers.append(("Impersonate-Uid", uid))
    headers += [("Impersonate-Group", _word({"as-groups": group}, "as-groups") or "") for group in groups]
    for key, values in extra.items():
        # A name may hold what a header may not: client-go escapes it so, and the server reads it in lower case.
        header = f"Impersonate-Extra-{quote(str(key).lower(), safe=_HEADER_SAFE)}"
        headers += [(header, _word({"as-user-extra": value}, "as-user-extra") or "") for value in values]
    return tuple(headers)


def _named_context(context: ssl.SSLContext, name: str) -> ssl.SSLContext:
    """The same settings, with `name` in every handshake: httpx has no such option behind a proxy."""

    class Named(ssl.SSLContext):
        def wrap_bio(
            self,
            incoming: ssl.MemoryBIO,
            outgoing: ssl.MemoryBIO,
            server_side: bool = False,
            server_hostname: str | bytes | None = None,  # noqa: ARG002 (that of the address)
            session: ssl.SSLSession | None = None,
        ) -> ssl.SSLObject:
            return super().wrap_bio(incoming, outgoing, server_side, name, session)

    context.__class__ = Named  # what create_default_context has set stays
    return context


def _plugin(stated: Any, folder: Path) -> Any:
    """A credential plugin. As with kubectl, `./bin/token` lies beside the kubeconfig, `aws` is searched in PATH."""
    if not isinstance(stated, Mapping) or "/" not in str(stated.get("command", "")):
        return stated
    return {**stated, "command": str(folder.absolute() / str(stated["command"]))}


def _named(
    files: Sequence[tuple[Mapping[str, Any], Path]], group: str, name: object, inner: str
) -> tuple[Mapping[str, Any], Path]:
    """The entry of that name, and the folder of its file."""
    seen: dict[str, None] = {}
    for document, folder in files:
        listed = document.get(group) or []
        if not isinstance(listed, list) or not all(isinstance(item, Mapping) for item in listed):
            raise UsageError(f"kubernetes: {group} of the kubeconfig is no list of {inner}s with names")
        for item in listed:
            seen[str(item.get("name"))] = None
            if item.get("name") == name:
                entry = item.get(inner) or {}
                if not isinstance(entry, Mapping):
                    raise UsageError(f"kubernetes: {inner} {name!r} of the kubeconfig is no mapping")
                return entry, folder
    known = ", ".join(seen) or "none"
    raise UsageError(f"kubernetes: the kubeconfig has no {inner} {name!r}; it has: {known}")


def _text(fields: Mapping[str, Any], name: str, folder: Path) -> str | None:
    """A PEM text, given as data or as a file."""
    try:
        if fields.get(f"{name}-data"):
            return base64.b64decode(str(fields[f"{name}-data"])).decode()
        return (folder / str(fields[name])).read_text() if fields.get(name) else None
    except (OSError, ValueError) as error:
        raise UsageError(f"kubernetes: {name} of the kubeconfig cannot be read: {error}") from None
