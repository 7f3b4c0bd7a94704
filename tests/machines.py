"""A recorded node that a test may damage: a copy of tests/hosts/h200, changed answer by answer."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster.checks import load
from trainmaster.checks.__main__ import main as check_main
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.host import Host
from trainmaster.node.recorded import RecordedHost
from trainmaster.targets import Node, Program, Result, Transfer

H200 = Path(__file__).parent / "hosts" / "h200"
PCI = "/sys/bus/pci/devices"


Answers = dict[str, Any]  # of answers.json, by kind and name


class HeldHost(RecordedHost):
    """A captured machine that is held in memory."""

    def __init__(self, folder: Path, answers: Answers, texts: Mapping[str, str]) -> None:
        Host.__init__(self)
        self._folder, self._answers, self._texts = folder, copied(answers), texts

    def _text(self, name: str, asked: str) -> str:
        if name not in self._texts:
            raise self._nothing("read", asked)
        return self._texts[name]


class Machine:
    """A captured machine and ways to change what it answers.

    With `of`, a copy of that one; it is held in memory until its folder is asked for, because a thousand tests copy it.
    """

    def __init__(self, folder: Path, *, of: Path | None = None) -> None:
        self._folder, self._of = folder, of
        self._answers, self._texts = (
            ({}, {}) if of is None else (copied(load_capture(of)[0]), dict(load_capture(of)[1]))
        )

    @property
    def folder(self) -> Path:
        if self._of is not None:
            shutil.copytree(self._of, self._folder)
            self._of = None
            self.put_answers(self._answers)
            for name, text in self._texts.items():
                self.put_text(name, text)
        return self._folder

    @property
    def host(self) -> RecordedHost:
        return RecordedHost(self._folder) if self._of is None else HeldHost(self._folder, self._answers, self._texts)

    @property
    def answers(self) -> Answers:
        """A copy, to be changed and put back."""
        return json.loads((self._folder / "answers.json").read_text()) if self._of is None else copied(self._answers)

    def put_answers(self, answers: Answers) -> None:
        if self._of is None:
            (self._folder / "answers.json").write_text(json.dumps(answers))
        else:
            self._answers = answers

    def text(self, name: str) -> str:
        return (self._folder / name).read_text() if self._of is None else self._texts[name]

    def put_text(self, name: str, text: str) -> None:
        if self._of is None:
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        else:
            self._texts[name] = text

    def file(self, path: str, text: str | None) -> None:
        """The file's text; None: it is not there."""
        if text is None:
            self.answer("read", path, {"error": "FileMissing", "message": f"{path} is not there"})
            return
        self.answer("read", path, {})
        self.put_text(f"files{path}", text)

    def answer(self, kind: str, name: str, answer: Any) -> None:
        answers = self.answers
        answers[kind][name] = answer
        self.put_answers(answers)

    def command(self, line: str, stdout: str, *, exit_code: int = 0, stderr: str = "") -> None:
        stem = "commands/" + re.sub(r"\W+", "_", line)
        self.put_text(f"{stem}.out", stdout)
        self.put_text(f"{stem}.err", stderr)
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
        self.smi(edit_smi(self.text("commands/nvidia_smi_q_x.out"), gpu, changes))

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


@functools.cache
def load_capture(folder: Path) -> tuple[Answers, dict[str, str]]:
    """The answers and the texts of a captured machine, by their names in its folder."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    texts = {name: (folder / name).read_bytes().decode(errors="replace") for name in names if name != "answers.json"}
    return json.loads((folder / "answers.json").read_text()), texts


def copied(answers: Answers) -> Answers:
    return {kind: dict(found) if isinstance(found, dict) else found for kind, found in answers.items()}


def edit_smi(text: str, gpu: int | None, changes: Mapping[str, str | None]) -> str:
    return _edit_smi(text, gpu, tuple(changes.items()))


@functools.lru_cache(maxsize=64)  # hundreds of tests begin with the same few machines
def _edit_smi(text: str, gpu: int | None, changes: tuple[tuple[str, str | None], ...]) -> str:
    root = ET.fromstring(text)
    for number, node in enumerate(root.findall("gpu")):
        for path, value in changes if gpu in (None, number) else ():
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
    return _smi_text(tuple(addresses), attached)


@functools.lru_cache(maxsize=64)
def _smi_text(addresses: tuple[str, ...], attached: int) -> str:
    text = (H200 / "commands" / "nvidia-smi_-q_-x.out").read_text()
    start, end = text.index("\t<gpu id="), text.index("</gpu>\n") + len("</gpu>\n")
    block = re.sub(r"\t\t<supported_clocks>.*</supported_clocks>\n", "", text[start:end], flags=re.DOTALL)
    blocks = [
        block.replace("00000000:00:06.0", f"0000{address}").replace("444444444444", f"{number:012x}")
        for number, address in enumerate(addresses)
    ]
    head = text[:start].replace("<attached_gpus>1<", f"<attached_gpus>{attached}<")
    return head + "".join(blocks) + text[end:]


class RecordedNodes:
    """Node contract (targets.NodeAccess) over captured machines: checks run in this process, on what was captured."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders, self.transfer = folders, Transfer()

    async def nodes(self) -> list[Node]:
        return [Node(name=name) for name in self._folders]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:
        (program,) = programs
        assert program.module == "trainmaster.checks"
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = check_main([*program.words, "--replay", str(self._folders[node.name])])
        return [Result(code=code, state=None, out=out.getvalue(), err=err.getvalue())]

    async def close(self) -> None:
        """Nothing was made."""
