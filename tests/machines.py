"""A recorded node that a test may damage: a copy of tests/hosts/h200, changed file by file."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.checks import load
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.recorded import RecordedHost

H200 = Path(__file__).parent / "hosts" / "h200"
PCI = "/sys/bus/pci/devices"


class Machine:
    """The node's folder and ways to change what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def host(self) -> RecordedHost:
        return RecordedHost(self.folder)

    def file(self, path: str, text: str | None) -> None:
        """The file's text; None: it is not there."""
        if text is None:
            self.answer("read", path, {"error": "FileMissing", "message": f"{path} is not there"})
            return
        self.answer("read", path, {})
        place = self.folder / f"files{path}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def answer(self, kind: str, name: str, answer: Any) -> None:
        answers = json.loads((self.folder / "answers.json").read_text())
        answers[kind][name] = answer
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def command(self, line: str, stdout: str, *, exit_code: int = 0, stderr: str = "") -> None:
        stem = "commands/" + re.sub(r"\W+", "_", line)
        (self.folder / f"{stem}.out").write_text(stdout)
        (self.folder / f"{stem}.err").write_text(stderr)
        self.answer("run", line, {"exit_code": exit_code, "took_s": 0.1, "text": stem})

    def refuses(self, line: str, error: str, message: str) -> None:
        self.answer("run", line, {"error": error, "message": message})

    def smi(self, text: str) -> None:
        self.command("nvidia-smi -q -x", text)

    def gpus(self, on_bus: int, *, listed: int | None = None, drop: int | None = None) -> None:
        """As many H200s on the bus and in /dev; nvidia-smi lists the first `listed`, or all but `drop`."""
        addresses = [f"0000:{16 + n:02x}:00.0" for n in range(on_bus)]
        self.answer("list", PCI, addresses)
        self.answer("list", "/dev", ["null", "nvidiactl", *(f"nvidia{n}" for n in range(on_bus))])
        for address in addresses:
            self.file(f"{PCI}/{address}/vendor", "0x10de\n")
            self.file(f"{PCI}/{address}/class", "0x030200\n")
        shown = [n for n in range(on_bus) if n != drop][:listed]
        self.smi(smi_text([addresses[n] for n in shown], attached=len(shown)))
        if on_bus > 1:
            self.nvlinks(len(shown), links=18)

    def nvlinks(self, gpus: int, *, links: int, gbps: float = 26.562) -> None:
        """What `nvidia-smi nvlink` prints of GPUs whose links are all up and clean."""
        heads = [f"GPU {n}: NVIDIA H200 (UUID: GPU-00000000-1111-2222-3333-{n:012x})\n" for n in range(gpus)]
        states = "".join(f"\t Link {link}: {gbps:.3f} GB/s\n" for link in range(links))
        words = ("Replay Errors", "Recovery Errors", "CRC Errors")
        counts = "".join(f"\t Link {link}: {word}: 0\n" for link in range(links) for word in words)
        self.command("nvidia-smi nvlink -s", "".join(head + states for head in heads))
        self.command("nvidia-smi nvlink -e", "".join(head + counts for head in heads))

    def edit(self, gpu: int | None, changes: Mapping[str, str | None]) -> None:
        """Write other values into the entry of one GPU, or of all; None takes the element away."""
        text = (self.folder / "commands" / "nvidia_smi_q_x.out").read_text()
        self.smi(edit_smi(text, gpu, changes))

    def replace(self, line: str, old: str, new: str, *, count: int = 1) -> None:
        """Another word in what a command printed; it must be there."""
        text = self.host.run(*shlex.split(line)).stdout
        assert old in text
        self.command(line, text.replace(old, new, count))

    def no_gpus(self) -> None:
        self.answer("list", PCI, ["0000:00:00.0"])
        self.answer("list", "/dev", ["null"])
        self.refuses("nvidia-smi -q -x", "CommandMissing", "nvidia-smi is not on this machine")

    def judge(self, check: str, **expect: Any) -> list[Finding]:
        module = load(check)
        found = module.judge(module.read(self.host), Expect(**expect))
        return found if isinstance(found, list) else [found]

    def verdicts(self, check: str, **expect: Any) -> dict[str | None, str]:
        return {finding.device: str(finding.verdict) for finding in self.judge(check, **expect)}


def edit_smi(text: str, gpu: int | None, changes: Mapping[str, str | None]) -> str:
    root = ET.fromstring(text)
    for number, node in enumerate(root.findall("gpu")):
        for path, value in changes.items() if gpu in (None, number) else ():
            found = node.find(path)
            assert found is not None, path
            if value is None:
                above = node.find(path.rpartition("/")[0] or ".")
                assert above is not None
                above.remove(found)
            else:
                found.text = value
                for child in list(found):
                    found.remove(child)
    return ET.tostring(root, encoding="unicode")


def smi_text(addresses: list[str], *, attached: int) -> str:
    """The real XML with its one GPU repeated at these addresses."""
    text = (H200 / "commands" / "nvidia-smi_-q_-x.out").read_text()
    start, end = text.index("\t<gpu id="), text.index("</gpu>\n") + len("</gpu>\n")
    block = re.sub(r"\t\t<supported_clocks>.*</supported_clocks>\n", "", text[start:end], flags=re.DOTALL)
    blocks = [
        block.replace("00000000:00:06.0", f"0000{address}").replace("444444444444", f"{number:012x}")
        for number, address in enumerate(addresses)
    ]
    head = text[:start].replace("<attached_gpus>1<", f"<attached_gpus>{attached}<")
    return head + "".join(blocks) + text[end:]
