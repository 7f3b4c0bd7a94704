"""How one piece of news is sent: as a signed webhook, or through a channel of apprise. Neither ever raises.

A webhook goes to https on another machine, or to a host that an admin allowed. Its name is looked up here and the
connection made to the address that was checked, so that a name cannot mean one machine for the check and another for
the sending; redirects are not followed. What a receiver answers beside its status is not read.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from trainmaster.core.errors import UsageError
from trainmaster.core.loopback import is_loopback_host
from trainmaster.core.secret.shapes import HEX_40, recognise

WEBHOOK_S = 10.0  # for looking up, connecting, sending and the first line of the answer, together
APPRISE_S = 30.0
_THREADS = 16  # that may hang at the same time, in a resolver or in a library
# Cloud metadata services that do not live on a link-local address.
_METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"})
# Networks whose addresses end in an IPv4 address: NAT64, its local prefix, and the compatible ones of RFC 4291.
_EMBEDDING = [ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")]

T = TypeVar("T")
Resolve = Callable[[str, int], list[str]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of one sending. `error` None: it arrived."""

    status: int | None = None
    error: str | None = None
    final: bool = False  # trying again cannot help


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One try to send one body."""

    parts: SplitResult
    body: bytes
    headers: Mapping[str, str]
    limit_s: float


def check_url(url: str, *, allow_hosts: Collection[str] = ()) -> SplitResult:
    """A webhook's address in its parts; UsageError where it may not be one. Asks nobody."""
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or any(c <= " " for c in url):
        raise UsageError("not a web address; write for example https://hooks.example.org/trainmaster")
    if parts.username is not None or parts.password is not None:
        raise UsageError("an address with a password in it would be stored; check the signature instead")
    # 40 digits may be a commit elsewhere; in the address of a hook they are its key.
    if (what := recognise(url) or ("a key" if HEX_40.search(url) else None)) is not None:
        raise UsageError(f"the URL contains {what} and would be stored; check the signature instead")
    if host in allow_hosts:
        return parts
    if parts.scheme == "http":
        raise UsageError("a webhook needs https; an admin allows http by the host in allow_hosts of notify.yaml")
    if is_loopback_host(host.rstrip(".")):
        raise UsageError("a webhook cannot go to this machine; an admin allows it by allow_hosts of notify.yaml")
    if bad := _find_forbidden(_read_addresses(host.rstrip("."))):
        raise UsageError(f"{_refusal(host, bad)}; an admin allows it by allow_hosts of notify.yaml")
    return parts


async def send_webhook(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    allow_hosts: Collection[str] = (),
    limit_s: float = WEBHOOK_S,
    resolve: Resolve | None = None,
    context: ssl.SSLContext | None = None,
) -> Sent:
    """Send one signed body; anything but a 2xx is an error."""
    try:
        parts = check_url(url, allow_hosts=allow_hosts)
        async with asyncio.timeout(limit_s):
            sent = Sending(parts=parts, body=body, headers=headers, limit_s=limit_s)
            return await _post(sent, allow_hosts=allow_hosts, resolve=resolve or look_up, context=context)
    except UsageError as refused:
        return Sent(error=str(refused), final=True)
    except TimeoutError:
        return Sent(error=f"no answer within {limit_s:g} s")
    except socket.gaierror:
        return Sent(error=f"the name {urlsplit(url).hostname} is not known")
    except ModuleNotFoundError:
        return Sent(error="webhooks need packages that are not installed; run: pip install 'trainmaster[server]'")
    except Exception as error:  # whatever a resolver, a socket or a library comes up with
        return Sent(error=f"{type(error).__name__}: {error}")


async def _post(
    sending: Sending, *, allow_hosts: Collection[str], resolve: Resolve, context: ssl.SSLContext | None
) -> Sent:
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # below it every address is logged, and some hold a token
    parts, limit_s = sending.parts, sending.limit_s
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = await in_thread(lambda: resolve(host, port))
    if not addresses:
        return Sent(error=f"{host} has no address")
    if host not in allow_hosts and (bad := _find_forbidden(addresses)):
        return Sent(error=_refusal(host, bad))
    where = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    target = f"{parts.scheme}://{where}:{port}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    verify = (context or _trusted()) if parts.scheme == "https" else False
    # Without the environment's proxies: behind one, the address that was checked is not the one that is reached.
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False, verify=verify, timeout=limit_s) as client:
        headers = {**sending.headers, "Host": parts.netloc}
        request = client.build_request(
            "POST", target, content=sending.body, headers=headers, extensions={"sni_hostname": host}
        )
        answer = await client.send(request, stream=True)
        await answer.aclose()
    status = answer.status_code
    if 200 <= status < 300:
        return Sent(status=status)
    if 300 <= status < 400:
        return Sent(status=status, error=f"HTTP {status}: redirects are not followed; give the address it leads to")
    return Sent(status=status, error=f"HTTP {status}", final=status == 410)  # 410: the receiver wants no more of it


async def send_apprise(url: str, *, title: str, body: str, limit_s: float = APPRISE_S) -> Sent:
    """Send through a channel. Its library is synchronous, and no thread can be ended: one that hangs is left behind."""
    try:
        return await in_thread(lambda: _notify(url, title, body), limit_s=limit_s)
    except TimeoutError:
        return Sent(error=f"the channel was not done within {limit_s:g} s")
    except ModuleNotFoundError:
        return Sent(error="channels need packages that are not installed; run: pip install 'trainmaster[notify]'")
    except Exception as error:
        # The text may quote the URL, which is a secret.
        return Sent(error=f"the channel failed: {type(error).__name__}")


def _notify(url: str, title: str, body: str) -> Sent:
    import apprise

    # Below this level they write URLs with their tokens.
    for name in ("apprise", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sender = apprise.Apprise()
    if not sender.add(url):
        return Sent(error="the channel's URL is none that apprise knows", final=True)
    if sender.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT):
        return Sent()
    return Sent(error="the channel did not take it; the server's log may say more")


async def in_thread(work: Callable[[], T], *, limit_s: float = WEBHOOK_S) -> T:
    """Do something that may hang in a thread of its own. Not in the loop's pool, where it would keep the reconciler's
    database work waiting; and not in one that Python waits for when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def main() -> None:
        result: Any = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failed = error
        finally:
            _hanging.release()
        with suppress(RuntimeError):  # the loop has ended: nobody waits for this any more
            loop.call_soon_threadsafe(finish, result, failed)

    if not _hanging.acquire(blocking=False):
        raise TimeoutError("too many sendings hang")
    threading.Thread(target=main, name="notify", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done


_hanging = threading.BoundedSemaphore(_THREADS)


def look_up(host: str, port: int, *, flags: int = 0) -> list[str]:
    """The addresses of a name, IPv4 first: more receivers are reached by it."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return sorted(addresses, key=lambda text: ":" in text)


def _read_addresses(host: str) -> list[str]:
    """The address that a host is in itself, in any notation that a lookup takes (127.1, 0x7f000001); none of a name."""
    try:
        return look_up(host.partition("%")[0], 443, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


def _find_forbidden(addresses: Iterable[str]) -> str | None:
    return next((text for text in addresses if not _may_send(text)), None)


def _refusal(host: str, address: str) -> str:
    which = "" if host == address else f"{address}, "
    return f"{host} is {which}an address that webhooks are not sent to"


def _may_send(text: str) -> bool:
    """Whether an address may be sent to. Private networks may: receivers of one's own are there, behind TLS. This
    machine may not: a server of ours would take the message for one of its own user."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (inner := _carried(address)) is not None:
        return _may_send(str(inner))
    return not (
        address.is_loopback
        or address.is_link_local  # the metadata services of most clouds
        or address.is_multicast
        or address.is_unspecified
        or str(address) in _METADATA
        or _is_own(str(address))
    )


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for: mapped, NAT64 (RFC 6052, RFC 8215), 6to4, Teredo, compatible."""
    if address.ipv4_mapped is not None or address.sixtofour is not None:
        return address.ipv4_mapped or address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _EMBEDDING) and address.packed[-4:] != b"\0\0\0\1":
        return ipaddress.IPv4Address(address.packed[-4:])
    return None


def _is_own(address: str) -> bool:
    """Whether an address is one of this machine: only such can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@functools.cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()
