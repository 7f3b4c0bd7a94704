"""Where news may be sent, and how: addresses that are refused, TLS by name, channels of the server's own file."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmaster.control.notify import channels, outbox, send, signing
from trainmaster.core.errors import UsageError
from trainmaster.store import outbox as deliveries
from trainmaster.store.database import Database

from .receiver import Receiver, receiving

SECRET = "xoxb-planted-0451"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/x", "ftp://example.org", "https://", "example.org", "https://u:p@example.org/", "file:///etc",
        "https://exa mple.org", "http://10.0.0.1/", "http://127.0.0.1.example.org/", "https://example.org:99999/",
        "https://example.org/\r\nHost: x", "https://exämple.org/",
    ],
)  # fmt: skip
def test_an_address_that_may_not_be_a_webhook_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        send.check_url(url)
    assert asyncio.run(send.send_webhook(url, b"", {})).final, "and is not sent to where a row has it all the same"


@pytest.mark.parametrize("url", ["https://example.org/a?b=c", "https://example.org:8443/"])
def test_https_is_taken(url: str) -> None:
    send.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8470/v1/tokens", "https://127.0.0.1/", "http://localhost/", "https://localhost:8470/",
        "https://[::1]:1/", "https://example.org/?token=hf_0123456789abcdefghijABCDEFGHIJ", "http://example.org/",
        "https://hooks.slack.com/services/T00000000/B00000000/0123456789abcdefghijABCD",
    ],
)  # fmt: skip
def test_this_machine_and_secrets_are_no_address_of_a_webhook(url: str) -> None:
    with pytest.raises(UsageError):
        send.check_url(url)


FORBIDDEN = [
    "169.254.169.254", "0.0.0.0", "0", "127.1", "2130706433", "0x7f000001", "127.0.0.1.", "localhost.", "224.0.0.1",
    "100.100.100.200", "[fe80::1]", "[fe80::1%25lo]", "[fe80::1%lo]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a9fe:a9fe]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[::127.0.0.1]",
    "[::169.254.169.254]", "[2001:0:1:2::5601:5601]",
]  # fmt: skip


@pytest.mark.parametrize("host", FORBIDDEN)
def test_a_forbidden_address_is_refused_before_anything_is_sent(host: str) -> None:
    with pytest.raises(UsageError, match="allow_hosts"):
        send.check_url(f"https://{host}:8443/x")
    name = host.strip("[]")
    send.check_url(f"https://{host}/x", allow_hosts=[name])


def test_an_address_of_a_private_network_is_taken() -> None:
    for host in ("10.255.3.4", "192.0.2.7", "[fd12:3456::7]"):
        send.check_url(f"https://{host}/x")


def test_the_own_address_of_the_machine_is_not_sent_to() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the address of the outgoing interface
        own = probe.getsockname()[0]
    sent = asyncio.run(send.send_webhook("https://me.example.org/", b"", {}, resolve=lambda _host, _port: [own]))
    assert sent.status is None and "not sent to" in str(sent.error)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://metadata.example.org/", "169.254.169.254"),
        ("https://metadata.example.org/", "fd00:ec2::254"),
        ("https://metadata.example.org/", "::ffff:169.254.169.254"),
        ("https://rebound.example.org/", "127.0.0.1"),
        ("https://rebound.example.org/", "0.0.0.0"),
    ],
)
def test_a_name_that_means_a_forbidden_address_is_refused(url: str, address: str) -> None:
    sent = asyncio.run(send.send_webhook(url, b"", {}, resolve=lambda _host, _port: [address]))
    assert sent.status is None and "not sent to" in str(sent.error)


def test_an_allowed_host_is_sent_to_whatever_its_address(receiver: Receiver) -> None:
    sent = asyncio.run(
        send.send_webhook(
            f"http://hooks.internal:{receiver.port}/x",
            b"{}",
            {},
            allow_hosts=["hooks.internal"],
            resolve=lambda _host, _port: ["127.0.0.1"],
        )
    )
    assert sent == send.Sent(status=204)
    assert receiver.got[0].headers["Host"] == f"hooks.internal:{receiver.port}"


def test_a_resolver_that_hangs_costs_its_time_limit_and_no_more() -> None:
    ended = threading.Event()

    def hang(_host: str, _port: int) -> list[str]:
        ended.wait(60)
        return []

    sent = asyncio.run(send.send_webhook("https://example.org/", b"", {}, resolve=hang, limit_s=0.1))
    ended.set()
    assert sent.error == "no answer within 0.1 s" and not sent.final


def certificate(folder: Path, name: str) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(who).issuer_name(who).public_key(key.public_key())
        .serial_number(7).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / f"{name}.pem"
    no_password = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize(("name", "right"), [("localhost", True), ("somebody-else.example.org", False)])
def test_the_certificate_must_be_that_of_the_name(tmp_path: Path, name: str, right: bool) -> None:
    """The connection is made to an address; the name is what the certificate is held against."""
    pem = certificate(tmp_path, name)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pem)
    trusting = ssl.create_default_context(cafile=str(pem))
    with receiving(serving) as receiver:
        sent = asyncio.run(
            send.send_webhook(f"{receiver.url}/x", b"{}", {}, context=trusting, allow_hosts=["localhost"])
        )
    assert sent.status == (204 if right else None)
    assert right or "CERTIFICATE_VERIFY_FAILED" in str(sent.error)


def write(home: Path, text: str, mode: int = 0o600) -> None:
    path = home / channels.FILE
    path.write_text(text)
    path.chmod(mode)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "channels: {ops: {url: 'json://127.0.0.1'}}", mode=0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        channels.load(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    [
        f"channels: {{ops: {{url: 'slack://{SECRET}', topics: [job.dreamt]}}}}",
        f"channels: {{ops: {{url: 'slack://{SECRET}', colour: red}}}}",
        f"channels: {{ops: slack://{SECRET}: [}}",
        f"channels: {{'webhook:x': {{url: 'slack://{SECRET}'}}}}",
    ],
)
def test_a_wrong_file_is_refused_without_telling_its_secrets(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(UsageError) as error:
        channels.load(tmp_path, {})
    assert SECRET not in str(error.value)


def test_channels_come_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    write(tmp_path, f"link: https://tm.example.org/\nchannels: {{ops: {{url: 'slack://{SECRET}', projects: [mine]}}}}")
    config = channels.load(tmp_path, {"TRAINMASTER_NOTIFY_MAIL": "mailto://x", "OTHER": "y"})
    assert sorted(config.channels) == ["mail", "ops"] and config.link == "https://tm.example.org"
    assert config.channels["ops"].wants("job.failed", "mine") and not config.channels["ops"].wants("job.failed", "x")
    assert SECRET not in repr(config)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # an import of apprise's own
def test_apprise_tells_people_and_no_row_knows_where(
    db: Database, tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"json://user:{SECRET}@127.0.0.1:{receiver.port}/{SECRET}"
    write(tmp_path, f"link: https://tm.example.org\nchannels: {{ops: {{url: '{url}', topics: [job.failed]}}}}")
    receiver.answer = lambda _got: 500 if len(receiver.got) == 1 else 200
    payload = {"name": "trial", "message": "exit code 3", "url": "/jobs/7", "status": "failed"}
    with db.write() as conn:
        for topic in ("job.failed", "job.completed"):
            outbox.put(conn, key=topic, topic=topic, project="default", job_id=None, payload=payload)

    async def main() -> None:
        stop = asyncio.Event()
        pace = outbox.Pace(tick_s=0.02, first_rest_s=0.02)
        running = asyncio.create_task(outbox.run(db, tmp_path, stop=stop, pace=pace))
        while not [row for row in deliveries.list_deliveries(db) if row.done_at or row.tries > 2]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        stop.set()
        await running

    caplog.set_level("DEBUG")
    asyncio.run(main())
    (row,) = deliveries.list_deliveries(db)
    assert (row.channel, row.tries, row.news.topic) == ("ops", 2, "job.failed")
    got = receiver.got[-1]
    assert got.headers["Authorization"] == "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert got.json["title"] == "job.failed: trial"
    assert "exit code 3" in got.json["message"] and "https://tm.example.org/jobs/7" in got.json["message"]
    assert SECRET not in repr(deliveries.list_deliveries(db)) and SECRET not in caplog.text


def test_a_body_that_is_too_large_is_cut_and_says_so() -> None:
    body = signing.render_body({"v": 1, "data": {"message": "x" * (1 << 20)}})
    assert len(body) < 100 and b'"cut":true' in body
