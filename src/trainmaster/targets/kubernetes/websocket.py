"""WebSocket to an API server, for commands in pods: one binary message at a time, refusals as errors of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from trainmaster import __version__
from trainmaster.core.errors import MissingExtra, Unreachable
from trainmaster.targets.kubernetes.errors import parse, refusal
from trainmaster.targets.kubernetes.kubeconfig import Access

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_CONNECT_S, _CLOSE_S = 20.0, 2.0
_MAX_MESSAGE_BYTES = 16 << 20
_TOO_LARGE = 1009  # RFC 6455, section 7.4.1: the code with which our end closes


class WebSocket:
    """One open connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, data: bytes) -> None:
        """Send one binary message; waits while the server does not read."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(data)
        except ConnectionClosed as error:
            raise Unreachable(f"kubernetes: {type(error).__name__}: {error}") from None

    async def receive(self) -> bytes | None:
        """The next message; None where the other side has closed."""
        from websockets.exceptions import ConnectionClosed

        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == _TOO_LARGE:
                raise Unreachable("kubernetes: a message of the server is too large") from None
            return None

    async def close(self) -> None:
        await self._connection.close()


async def connect(
    access: Access,
    path: str,
    query: Sequence[tuple[str, str]],
    headers: Sequence[tuple[str, str]],
    protocols: Sequence[str],
) -> WebSocket:
    """Open a connection; the server's refusal, or Unreachable, where there is none."""
    try:
        from websockets.asyncio import client
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.typing import Subprotocol
    except ImportError:
        raise MissingExtra("commands in pods", "kubernetes") from None

    class Connect(client.connect):
        """An API server redirects nowhere; the token would go along."""

        def process_redirect(self, exc: Exception) -> Exception:
            return exc

    address = urlsplit(access.server)
    try:
        connection = await Connect(
            f"wss://{address.netloc}{address.path}{path}?{urlencode(query)}",
            ssl=access.tls(),
            proxy=access.proxy,
            additional_headers=[*headers, ("Accept", "*/*")],
            user_agent_header=f"trainmaster/{__version__}",
            subprotocols=[Subprotocol(protocol) for protocol in protocols],
            compression=None,
            open_timeout=_CONNECT_S,
            close_timeout=_CLOSE_S,
            ping_interval=None,  # a command may be silent for hours; none were sent before either
            max_size=_MAX_MESSAGE_BYTES,
        )
    except InvalidStatus as error:
        status, what = error.response.status_code, path.rpartition("/")[2]
        raise refusal(status if status >= 300 else 500, parse(bytes(error.response.body or b"")), what=what) from None
    except (WebSocketException, OSError, EOFError) as error:  # TimeoutError is an OSError
        raise Unreachable(f"kubernetes: {type(error).__name__}: {str(error)[:200]}") from None
    return WebSocket(connection)
