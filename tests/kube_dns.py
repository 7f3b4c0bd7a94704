"""Names of pods in the test cluster: `python kube_dns.py KUBECONFIG` answers for HOSTNAME.SUBDOMAIN, as CoreDNS does.

Only IPv4 addresses of pods that state both names are known; everything else does not exist.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import sys
import urllib.request
from pathlib import Path

import yaml

ADDRESS, DOMAIN = "10.245.0.1", "cluster.local"
_A, _TTL_S = 1, 1


def main(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(cafile=str(path.parent / cluster["certificate-authority"]))
    ask = urllib.request.Request(
        f"{cluster['server']}/api/v1/pods", headers={"Authorization": f"Bearer {user['token']}"}
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((ADDRESS, 53))
        while True:
            query, who = server.recvfrom(512)
            name, kind, end = parse(query)
            try:
                with urllib.request.urlopen(ask, context=context, timeout=5) as answer:
                    found = find_address(json.load(answer)["items"], name)
            except OSError:
                continue  # it is asked again
            server.sendto(render(query[:end], found, kind), who)


def parse(query: bytes) -> tuple[str, int, int]:
    """Name and kind of the first question, and where it ends."""
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode(errors="replace").lower())
        at += size + 1
    return ".".join(labels), int(struct.unpack_from("!H", query, at + 1)[0]), at + 5


def find_address(pods: list[dict[str, dict[str, str]]], name: str) -> str | None:
    for pod in pods:
        spec, space = pod["spec"], pod["metadata"]["namespace"]
        if name == f"{spec.get('hostname')}.{spec.get('subdomain')}.{space}.svc.{DOMAIN}" and "podIP" in pod["status"]:
            return pod["status"]["podIP"]
    return None


def render(question: bytes, address: str | None, kind: int) -> bytes:
    number, has = question[:2], address is not None and kind == _A
    flags = 0x8580 if address is not None else 0x8583  # authoritative; NXDOMAIN
    head = number + struct.pack("!HHHHH", flags, 1, int(has), 0, 0)
    if not has or address is None:
        return head + question[12:]
    return head + question[12:] + struct.pack("!HHHIH", 0xC00C, _A, 1, _TTL_S, 4) + socket.inet_aton(address)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
