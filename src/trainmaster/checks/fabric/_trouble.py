"""Files of an adapter that cannot be read: which one, why, and whether that is the adapter's own fault.

The reason decides. EIO and its like come from an adapter or a driver that does not answer; EACCES from the rights of
this process; EINVAL is how the kernel says that a device has no such value (drivers/infiniband/core/sysfs.c).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.results import Finding, error, fail

# The device or its driver does not answer: mlx5 and PCI give these for an adapter in its error state or off the bus.
SILENT = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)
# The device has no such value: a limited function, or a driver that keeps its numbers elsewhere.
ABSENT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_MEND = "see the kernel log for its driver; reset the adapter or power-cycle the node, and replace it if it stays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A file that could not be read. `code` is an errno; None: it was read, and is no answer."""

    path: str
    reason: str
    code: int | None

    @property
    def silent(self) -> bool:
        """Whether the device or its driver does not answer."""
        return self.code in SILENT

    @property
    def absent(self) -> bool:
        """Whether the device says that it has no such value."""
        return self.code in ABSENT


def of(path: str, failure: HostError) -> Trouble:
    return Trouble(path=path, reason=str(failure), code=system_files.code_of(failure))


def judge(trouble: Trouble, *, device: str, answering: int, **values: Any) -> Finding:
    """Fault of the adapter where it does not answer and `answering` others do; else an error with its cause."""
    if trouble.silent and answering:
        reason = f"it does not answer, and {answering} other adapters do: {trouble.reason}"
        return fail(reason, action=_MEND, device=device, **values)
    return error(trouble.reason, action=system_files.advise(trouble.code, trouble.path), device=device, **values)
