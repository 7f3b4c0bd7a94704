"""Host whose files of /proc and /sys are whole, or an error.

The kernel ends each of these files with a newline and writes ASCII. A file that is empty, was cut short or holds other
bytes is a failed read; taken for an answer, it could hide the fault that it would have shown.
"""

from __future__ import annotations

from trainmaster.core.errors import HostError
from trainmaster.node.host import CommandResult, Disk, Host, KernelClock

# Empty where there is nothing to list: a kernel without modules, a network without IPv6.
MAY_BE_EMPTY = ("/proc/modules", "/proc/net/if_inet6")


class WholeFiles(Host):
    """Another host, with damaged kernel files refused."""

    def __init__(self, inner: Host) -> None:
        super().__init__({})
        self._inner = inner

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:
        return self._inner.run(*argv, timeout_s=timeout_s)

    def read(self, path: str) -> str:
        text = self._inner.read(path)
        if not path.startswith(("/proc/", "/sys/")) or (not text and path in MAY_BE_EMPTY):
            return text
        if not text.endswith("\n"):
            raise HostError(f"{path} is empty or was cut short: {text[-40:]!r}")
        if "\x00" in text or "\ufffd" in text:
            raise HostError(f"{path} holds bytes that are no text")
        return text

    def list(self, path: str) -> tuple[str, ...]:
        return self._inner.list(path)

    def disk(self, path: str) -> Disk:
        return self._inner.disk(path)

    def env(self, name: str) -> str | None:
        return self._inner.env(name)

    def kernel_clock(self) -> KernelClock:
        return self._inner.kernel_clock()
