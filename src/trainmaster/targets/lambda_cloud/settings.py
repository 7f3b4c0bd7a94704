"""Settings of the target `lambda`, from the environment of the server. Secrets are read from a variable or a 0600 file.

LAMBDA_API_KEY            the API key, or
LAMBDA_API_KEY_FILE       a file with it that only its owner can read
LAMBDA_API_URL            https://cloud.lambda.ai; the simulator prints its own
LAMBDA_SSH_KEY_FILE       private key for the instances, FILE.pub beside it; ~/.ssh/id_ed25519, else ~/.ssh/id_rsa
LAMBDA_SSH_USER           ubuntu
LAMBDA_SSH_PORT           22
LAMBDA_PYTHON             python3, the Python of the instances
LAMBDA_LOST_AFTER_S       600: a silent instance is lost after this, also where the listing shows it as active
LAMBDA_PACE               1: divides every interval of the client; above 1 for a simulator only
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.core.vendors import lambda_api
from trainmaster.targets._provider import SshAccess, Timing
from trainmaster.targets.lambda_cloud.client import ApiKey, Times

URL = "https://cloud.lambda.ai"
KEY_VARIABLE, KEY_FILE_VARIABLE = "LAMBDA_API_KEY", "LAMBDA_API_KEY_FILE"
_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_rsa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the API is, and how its instances are reached."""

    url: str
    access: SshAccess
    timing: Timing
    times: Times
    request_s: float
    launch_s: float


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings without the key; UsageError where a value is none."""
    pace = _number(environment, "LAMBDA_PACE", 1.0)
    if not pace >= 1.0:
        raise UsageError("lambda: LAMBDA_PACE is less than 1; the limits of the API do not allow more requests")
    url = environment.get("LAMBDA_API_URL") or URL
    if pace > 1.0 and url == URL:
        raise UsageError("lambda: LAMBDA_PACE is for a simulator; the API limits requests to one a second")
    times, port = Times(), int(_number(environment, "LAMBDA_SSH_PORT", 22.0))
    if not 0 < port < 65536:
        raise UsageError(f"lambda: LAMBDA_SSH_PORT={environment['LAMBDA_SSH_PORT']!r} is no port; write 1 to 65535")
    access = SshAccess(
        user=environment.get("LAMBDA_SSH_USER") or "ubuntu",
        key=_expanded(environment.get("LAMBDA_SSH_KEY_FILE")) or _default_key(),
        port=port,
        python=environment.get("LAMBDA_PYTHON") or "python3",
        python_setting="LAMBDA_PYTHON",
        lost_after_s=_number(environment, "LAMBDA_LOST_AFTER_S", 600.0),
    )
    return Settings(
        url=url,
        access=access,
        timing=Timing(listing_s=Timing().listing_s / pace, settle_s=max(Timing().settle_s / pace, 2.0)),
        times=Times(request_s=max(times.request_s / pace, 5.0), deadline_s=max(times.deadline_s / pace, 5.0),
                    launch_s=max(times.launch_s / pace, 5.0), first_rest_s=times.first_rest_s / pace),
        request_s=lambda_api.REQUEST_INTERVAL_S / pace,
        launch_s=lambda_api.LAUNCH_INTERVAL_S / pace,
    )  # fmt: skip


def read_key(environment: Mapping[str, str] = os.environ) -> ApiKey:
    """The API key; UsageError where there is none, or others can read it."""
    if text := environment.get(KEY_VARIABLE):
        return ApiKey(text)
    name = environment.get(KEY_FILE_VARIABLE)
    if not name:
        raise UsageError(f"lambda: no API key; set {KEY_VARIABLE}, or {KEY_FILE_VARIABLE} to a file with mode 0600")
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or mode & 0o077:
                raise UsageError(f"lambda: others can read {path}; run: chmod 600 {path}")
            return ApiKey(file.read(4096).decode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"lambda: {path} cannot be read: {error.strerror}") from None


def read_public_key(access: SshAccess) -> str:
    """The public half of the SSH key, without its comment."""
    if access.key is None:
        raise UsageError("lambda: no SSH key; run ssh-keygen -t ed25519, or set LAMBDA_SSH_KEY_FILE")
    path = Path(f"{access.key}.pub").expanduser()
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"lambda: {path} cannot be read: {error}") from None
    if len(words) < 2:
        raise UsageError(f"lambda: {path} holds no public key")
    return f"{words[0]} {words[1]}"


def _expanded(name: str | None) -> str | None:
    return os.path.expanduser(name) if name else None  # noqa: PTH111 (an unknown user's home stays as it is)


def _default_key() -> str | None:
    paths = (Path(name).expanduser() for name in _KEYS)
    return next((str(path) for path in paths if path.exists()), None)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"lambda: {name}={text!r} is no positive number")
    return value
