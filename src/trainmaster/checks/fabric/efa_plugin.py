"""NCCL finds the plugin that speaks EFA (aws-ofi-nccl). Without it NCCL uses TCP on a node full of EFA devices."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.checks.contract import VERDICT
from trainmaster.checks.fabric import _rdma_devices
from trainmaster.core.errors import HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS = {
    "summary.test_results.efa_network": VERDICT,
    "network.aws_ofi_nccl_plugin.installed": VERDICT,
    "network.aws_ofi_nccl_plugin.path": "path",
}
# Where Amazon's installer, its images and the plugin's own build put it.
PLACES = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/aws-ofi-nccl/lib", "/opt/aws-ofi-nccl/lib", "/usr/local/lib")
_BELOW = ("", "/x86_64-linux-gnu", "/aarch64-linux-gnu")


LOADER = "/etc/ld.so.conf.d"  # where packages name folders for the dynamic loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The plugin's file, and whether the dynamic loader searches its folder; None: a capture without that answer."""

    efa: bool
    path: str | None
    searched: bool | None = None


def read(host: Host) -> Plugin:
    devices = _rdma_devices.read(host)
    if not any(device.efa for device in devices):
        unknown = [device for device in devices if device.unknown]
        if unknown:
            raise HostError(unknown[0].troubles[0].reason)
        return Plugin(efa=False, path=None)
    library_folders = [folder for folder in (host.env("LD_LIBRARY_PATH") or "").split(":") if folder.startswith("/")]
    for folder in dict.fromkeys([*library_folders, *(place + below for place in PLACES for below in _BELOW)]):
        for name in system_files.list_optional(host, folder) or ():
            if name.startswith(("libnccl-net", "libnccl-ofi")) and ".so" in name:
                searched = folder in library_folders or _is_named(host, f"{folder}/{name}") or _loads(host, folder)
                return Plugin(efa=True, path=f"{folder}/{name}", searched=searched)
    return Plugin(efa=True, path=None)


def _is_named(host: Host, path: str) -> bool:
    """Whether NCCL_NET_PLUGIN names the file itself."""
    return host.env("NCCL_NET_PLUGIN") == path


def _loads(host: Host, folder: str) -> bool | None:
    """Whether the loader's settings name the folder."""
    try:
        names = [name for name in system_files.list_optional(host, LOADER) or () if name.endswith(".conf")]
        lines = [line.strip() for name in names for line in host.read(f"{LOADER}/{name}").splitlines()]
    except NotCaptured:
        return None
    return folder in (line.rstrip("/") for line in lines if not line.startswith("#"))


def judge(plugin: Plugin, expect: Expect) -> Finding:
    if not plugin.efa:
        if expect.efa_devices or expect.transport == "EFA":
            return error("there is no EFA device whose plugin could be looked for", action="see efa")
        return skip("no EFA device here", proof="/sys/class/infiniband has no device of the driver efa")
    if plugin.path is None:
        action = "install aws-ofi-nccl (the EFA installer has it) and put its folder into LD_LIBRARY_PATH"
        reason = "no libnccl-net is in LD_LIBRARY_PATH or where the EFA installer puts it"
        return (fail if expect.efa_devices else warn)(reason, action=action)
    if plugin.searched is False:
        reason = f"{plugin.path} is where the loader does not search: not in LD_LIBRARY_PATH and not in {LOADER}"
        return warn(reason, action="add its folder to LD_LIBRARY_PATH, or NCCL will use TCP", path=plugin.path)
    return ok(plugin.path, path=plugin.path)
