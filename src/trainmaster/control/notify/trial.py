"""A test message to one webhook or channel, sent at once: not news, so it is in no row and never sent again."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmaster.api.webhooks import Webhook
from trainmaster.control.notify import channels, send, signing
from trainmaster.control.notify.send import Sent
from trainmaster.core.errors import UsageError

TOPIC = "test"
_TITLE = "Trainmaster: a test"


async def try_webhook(home: Path, hook: Webhook, *, by: str) -> Sent:
    """Send a signed test to a webhook, on or off; its shape is that of news."""
    name = f"{hook.id}.test-{uuid.uuid4()}"
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    message: dict[str, Any] = {
        "v": 1, "id": 0, "delivery": name, "topic": TOPIC, "project": hook.project or "", "job_id": None, "at": at,
        "data": {"message": _say(by)},
    }  # fmt: skip
    body = signing.render_body(message)
    try:
        config = await asyncio.to_thread(channels.load, home)
        key = await asyncio.to_thread(signing.signing_key, home, hook.id)
    except (UsageError, OSError) as error:
        return Sent(error=str(error))
    headers = signing.webhook_headers(key, body, topic=TOPIC, delivery=name, at=time.time())
    return await send.send_webhook(hook.url, body, headers, allow_hosts=config.allow_hosts)


async def try_channel(home: Path, name: str, *, by: str) -> Sent:
    """Send a test through a channel of notify.yaml or the environment."""
    try:
        config = await asyncio.to_thread(channels.load, home)
    except UsageError as error:
        return Sent(error=str(error))
    if name not in config.channels:
        return Sent(error=f"there is no channel {name}")
    return await send.send_apprise(config.channels[name].url, title=_TITLE, body=_say(by))


def _say(by: str) -> str:
    return f"{by} has asked for this message; nothing has happened."
