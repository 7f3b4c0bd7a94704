"""Each GPU behind NVSwitches is registered with a healthy fabric of one version. Without it CUDA does not start.

Fabric Manager's own log is read where there is one: it reports errors of NVSwitches that a GPU does not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from trainmaster.checks import nvidia, profiles
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import fabric_manager, xid_catalog
from trainmaster.node.parse.fabric_manager import FabricLog

LEVEL = 1
GPU = True
EXPECTS = ("fabric",)
COMPARES = ()
METRICS: dict[str, str] = {}
STATE, STATUS = "fabric/state", "fabric/status"
# Who shares an NVLink domain: schemas spell the two names in two ways.
DOMAIN = {
    "clique": ("fabric/cliqueId", "fabric/clique_id"),
    "cluster UUID": ("fabric/clusterUuid", "fabric/cluster_uuid"),
}
IMEX = "nvidia-imex"
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_DOMAIN_FORMS = {"clique": re.compile(r"[0-9]{1,10}"), "cluster UUID": re.compile(_UUID)}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
SERVICE = "nvidia-fabricmanager"
LOG = "/var/log/fabricmanager.log"  # LOG_FILE_NAME of fabricmanager.cfg, by default
START = f"start the fabric manager: systemctl restart {SERVICE}"
RESET = "drain the node; reset all its GPUs and NVSwitches together"
# Healthy values of each part (nvmlGpuFabricInfo_v3).
HEALTHY = {
    "summary": {"Healthy"},
    "bandwidth": {"Full"},
    "route_recovery_in_progress": {"False", "No"},
    "route_unhealthy": {"False", "No"},
    "access_timeout_recovery": {"False", "No"},
    "incorrect_configuration": {"None", "False", "No"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`service`, `imex`: state of the two services; `manager`: version. None: not readable here (a container)."""

    gpus: nvidia.Gpus
    service: str | None
    manager: str | None = None
    imex: str | None = None
    log: FabricLog | None = None


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    service = manager = imex = log = None
    listed = gpus.smi.gpus if gpus.smi else ()
    if gpus.switches or any(gpu.reports(STATE) for gpu in listed):
        service = _service(host, SERVICE)
        manager = _version(host)
        log = _log(host)
    if any(_domain(gpu, "cluster UUID").strip("0-") for gpu in listed):  # NVLink between nodes
        imex = _service(host, IMEX)
    return Evidence(gpus=gpus, service=service, manager=manager, imex=imex, log=log)


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    findings = nvidia.judge_each(evidence.gpus, expect, lambda gpu, device: _judge_one(gpu, device, evidence, expect))
    if evidence.gpus.smi is not None:
        findings += _judge_node(evidence, evidence.gpus.smi)
    if evidence.log is not None and nvidia.refuse(evidence.gpus, expect) is None:
        findings += _judge_log(evidence.log)
    return findings


def _judge_log(log: FabricLog) -> list[Finding]:
    """Errors in Fabric Manager's own log since it last started; those of an NVSwitch by the catalog of SXids."""
    catalog = xid_catalog.load()
    findings = []
    for sxid in log.sxids:
        row = catalog.of_sxid(sxid)
        reason = f"SXid {sxid.code}{_times(sxid.count)} in {LOG}: {row.meaning}"
        if row.severity != "info":
            say = fail if row.severity == "fail" else warn
            values = {"sxid": sxid.code, "count": sxid.count, "last": sxid.last, "text": sxid.text}
            findings.append(say(reason, action=row.action, device=f"nvswitch {sxid.device}", **values))
    for message in log.messages:
        reason = f"Fabric Manager reports an error{_times(message.count)} ({LOG}): {message.text}"
        action = f"{RESET}, then {START}" if message.grave else f"restart the job; if it returns, {START}"
        say = fail if message.grave else warn
        findings.append(say(reason, action=action, count=message.count, last=message.last))
    return findings


def _times(count: int) -> str:
    return f" {count} times" if count > 1 else ""


def _judge_node(evidence: Evidence, smi: nvidia.Smi) -> list[Finding]:
    """Faults of the node: versions that differ, IMEX that does not run."""
    findings = []
    if evidence.manager is not None and smi.driver is not None and evidence.manager != smi.driver:
        reason = f"Fabric Manager {evidence.manager} does not match driver {smi.driver}"
        findings.append(fail(reason, action=f"install Fabric Manager {smi.driver}, then restart it"))
    if evidence.imex in ("failed", "inactive", "deactivating"):
        say = fail if evidence.imex == "failed" else warn
        reason = f"the IMEX service is {evidence.imex}: GPUs of other nodes in the NVLink domain cannot be reached"
        findings.append(say(reason, action=f"start it: systemctl restart {IMEX}, and see its log"))
    return findings


def _judge_one(gpu: nvidia.Gpu, device: str, evidence: Evidence, expect: Expect) -> Finding:
    if not gpu.reports(STATE):
        return _judge_unreported(gpu, device, evidence, expect)
    state, status = gpu.word(STATE), gpu.text(STATUS)
    values = {"state": state, "status": status}
    if state != "Completed":
        return fail(f"its fabric state is {state[:40]}", action=START, device=device, **values)
    if gpu.reports(STATUS) and gpu.word(STATUS) != "Success":
        return fail(f"its fabric status is {status[:40]}", action=RESET, device=device, **values)
    health = {name: gpu.text(f"fabric/health/{name}") for name in HEALTHY if gpu.reports(f"fabric/health/{name}")}
    for name, good in HEALTHY.items():
        if name in health and health[name] not in good and f"fabric/health/{name}" in gpu.reported_paths():
            reason = f"its fabric is not healthy: {name.replace('_', ' ')} {health[name][:40]}"
            return fail(reason, action=RESET, device=device, **values)
    for name in DOMAIN:
        domains = [_domain(other, name) for other in (evidence.gpus.smi.gpus if evidence.gpus.smi else ())]
        usual, count = Counter(filter(None, domains)).most_common(1)[0] if any(domains) else ("", 0)
        mine = _domain(gpu, name)
        if mine and mine != usual and count * 2 >= len(list(filter(None, domains))):
            reason = f"its {name} is {mine[:60]}, and {usual[:60]} on {count} other GPUs of this node"
            return fail(reason, action=RESET, device=device, **values)
    gpu.word(STATUS)
    for name in HEALTHY:  # after every value that can be read: ERR! is no fault of the fabric, and no pass
        path = f"fabric/health/{name}"
        if name in health or nvidia.most_report(evidence.gpus, gpu, path):
            gpu.word(path)  # what most equal GPUs report it must report too
    for name, paths in DOMAIN.items():
        if gpu.reports(*paths) or nvidia.most_report(evidence.gpus, gpu, *paths):
            text = gpu.word(*paths)
            if not _DOMAIN_FORMS[name].fullmatch(text):
                raise nvidia.NotReported(paths[0], text, applies=True)
    domain = {"clique": _domain(gpu, "clique") or None, "cluster_uuid": _domain(gpu, "cluster UUID") or None}
    return ok("registered with the fabric", device=device, **values, **domain)


def _judge_unreported(gpu: nvidia.Gpu, device: str, evidence: Evidence, expect: Expect) -> Finding:
    """GPUs before Hopper report no fabric state; the service is then the evidence."""
    service, gpus, model = evidence.service, evidence.gpus, profiles.of_gpu(gpu.name)
    if service in ("inactive", "failed", "deactivating") and gpus.switches:
        reason = f"the fabric manager is {service} and the node has {len(gpus.switches)} NVSwitches"
        return fail(reason, action=START, device=device, service=service)
    reports = nvidia.generation(gpu) not in (*nvidia.RETIRES_PAGES, "Ampere", "Ada Lovelace", None)
    alone = nvidia.expected(gpus, expect) == 1
    must = expect.fabric or (gpus.switches and reports) or (model is not None and model.fabric and not alone)
    if must or nvidia.peers_report(gpus, gpu, STATE):
        if expect.fabric and not gpus.switches and not reports and service != "active":
            return fail("it is behind no NVSwitch", action="use a node with NVSwitches", device=device, service=service)
        if service == "active" and not reports:
            return ok("the fabric manager runs", device=device, service=service)
        reason = f"it reports no fabric state: {gpu.text(STATE) or 'nothing'}"
        return error(reason, action="restart the fabric manager, or update the NVIDIA driver", device=device)
    if service == "active":
        return ok("the fabric manager runs", device=device, service=service)
    if gpus.switches:
        reason = "the node has NVSwitches and the state of the fabric manager is unknown"
        return error(reason, action=f"read it: systemctl is-active {SERVICE}", device=device)
    proof = (
        f"the PCI bus shows no NVSwitch, and no GPU of the node reports a fabric state ({gpu.text(STATE) or 'absent'})"
    )
    return skip("it is behind no NVSwitch", proof=proof, device=device)


def _domain(gpu: nvidia.Gpu, name: str) -> str:
    return gpu.text(*DOMAIN[name]) if gpu.reports(*DOMAIN[name]) else ""


def _service(host: Host, name: str) -> str | None:
    try:
        return host.run("systemctl", "is-active", name).stdout.strip() or None
    except HostError:
        return None  # a container has no systemd; the GPUs themselves report from Hopper on


def _log(host: Host) -> FabricLog | None:
    """None where there is no such log, or it is kept from this user: the state of the GPUs is evidence enough."""
    try:
        return fabric_manager.parse(host.read(LOG))
    except HostError:
        return None


def _version(host: Host) -> str | None:
    """Version of the installed fabric manager: `Fabric Manager version is : 535.104.05`."""
    try:
        result = host.run("nv-fabricmanager", "--version")
    except HostError:
        return None
    match = re.search(r"version is\s*:\s*(\d{3}\.[\d.]{2,12})", result.stdout, re.IGNORECASE | re.ASCII)
    return match[1].rstrip(".") if match else None
