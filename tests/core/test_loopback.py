"""Which hosts are this machine. A wrong yes would admit a stranger without a token."""

from __future__ import annotations

import pytest

from trainmaster.core.loopback import is_loopback_address, is_loopback_host


@pytest.mark.parametrize("text", ["127.0.0.1", "127.8.9.10", "::1"])
def test_loopback_addresses(text: str) -> None:
    assert is_loopback_address(text) and is_loopback_host(text)


@pytest.mark.parametrize(
    "text", ["", "0.0.0.0", "10.0.0.1", "::", "127.0.0.1.example.com", "127.1", "localhost.example.com", "testclient"]
)
def test_everything_else(text: str) -> None:
    assert not is_loopback_address(text) and not is_loopback_host(text)


def test_localhost_is_a_host_but_no_address() -> None:
    assert is_loopback_host("localhost") and not is_loopback_address("localhost")
