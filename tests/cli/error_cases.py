"""Command lines of every verb for its error contract: one that must fail in each way."""

from __future__ import annotations

NO_SERVER = "http://127.0.0.1:1"
ACCEPT = (
    "accept --model transformer --layers 1 --width 8 --heads 1 --sequence 4 --active-iterations 1 --processes 1 --out"
)
# A case is the words of a command line. {blocked} lies below a file, so it can never be made; {bad} holds bytes that
# are not UTF-8; {full} is a disk without a free byte. `>` sends standard output to the place that cannot be written.
CASES: dict[str, dict[str, str]] = {
    "demo": {"output": "demo --home {blocked}", "encoding": "demo --home {bad_home}", "disk": "demo --home {full}/h"},
    "examples": {
        "output": "examples --to {blocked}",
        "encoding": "",  # it reads nothing of a user's
        "disk": "examples --to {full}/examples",
    },
    "check": {
        "output": "check --only shm --out {blocked}",
        "encoding": "check --only shm --expect {bad}",
        "disk": "check --only shm --out {full}/evidence",
    },
    "bandwidth": {
        "output": "bandwidth --collective all_reduce --max 8K --backend gloo --processes 1 --out {blocked}",
        "encoding": "bandwidth --nccl-tests {bad}",
        "disk": "bandwidth --nccl-tests {log} >",
    },
    "accept": {
        "output": f"{ACCEPT} {{blocked}}/results.json",
        "encoding": "",  # it reads no file
        "disk": f"{ACCEPT} {{full}}/results.json",
    },
    "cluster": {
        "output": "cluster hyperpod-rules >",
        "encoding": "cluster lint {bad}",
        "disk": "cluster hyperpod-rules --json >",
    },
    "baseline": {
        "output": "baseline record {results} --file {blocked}/b.toml",
        "encoding": "baseline record {bad}",
        "disk": "baseline record {results} --file {full}/b.toml",
    },
    "isolate": {
        "output": "isolate --sim nodes=8,racks=2,seed=1 >",
        "encoding": "isolate --on ssh:{bad}",
        "disk": "isolate --sim nodes=8,racks=2,seed=1 --json >",
    },
    "rejudge": {
        "output": "rejudge {bundle} >",
        "encoding": "rejudge {bad_bundle}",
        "disk": "rejudge {bundle} --json >",
    },
    "remedy": {
        "output": "remedy {bundle} --with slurm --json >",
        "encoding": "remedy {bad_bundle} --with slurm",
        "disk": "remedy {bundle} --with kubernetes --json >",
    },
    "readmit": {
        "output": "readmit {bundle} --with slurm --home {out_home} >",
        "encoding": "readmit {bad_bundle} --with slurm",
        "disk": "readmit {bundle} --with slurm --home {out_home} >",
    },
    "history": {
        "output": "history --add {bundle} --home {blocked}",
        "encoding": "history --add {bad_bundle}",
        "disk": "history --add {bundle} --home {full}/h",
    },
    "data": {
        "output": "data prepare {corpus} --out {blocked} --processes 1",
        "encoding": "data validate {corpus} --model {bad}",
        "disk": "data prepare {corpus} --out {full}/tokens --processes 2",
    },
    "train": {
        "output": "train {config} checkpoint.folder={blocked}",
        "encoding": "train {bad}",
        "disk": "train {config} checkpoint.folder={full}/c",
    },
    "drill": {
        "output": "drill {config} --out {blocked}",
        "encoding": "drill {bad}",
        "disk": "drill {config} --kills 1 --out {full}/proof",
    },
    "plan": {"output": "plan {config} >", "encoding": "plan {bad}", "disk": "plan {config} --json >"},
    "export": {
        "output": "export {checkpoint} {blocked}",
        "encoding": "export --from-hf {bad_model} {free}/made",
        "disk": "export {checkpoint} {full}/model",
    },
    "submit": {
        "output": "submit {spec} --home {blocked}",
        "encoding": "submit {bad}",
        "disk": "submit {spec} --home {full}/h",
    },
    "serve": {
        "output": "serve --port 0 --home {blocked}",
        "encoding": "serve --port 0 --tls-cert {bad} --tls-key {bad}",
        "disk": "serve --port 0 --home {full}/h",
    },
    "work": {"output": "work --home {blocked}", "encoding": "work --home {bad_home}", "disk": "work --home {full}/h"},
    "reap": {"output": "reap --no-database >", "encoding": "reap --home {bad_home}", "disk": "reap --home {full}"},
    "backup": {
        "output": "backup {blocked} --home {out_home}",
        "encoding": "backup {free}/copy --home {bad_home}",
        "disk": "backup {full}/copy --home {out_home}",
    },
    "restore": {
        "output": "restore {bad_home} --home {blocked}",
        "encoding": "restore {bad_home} --home {free}/restored",
        "disk": "restore {bad_home} --home {full}/h",
    },
    "rebuild": {
        "output": "rebuild --home {blocked}",
        "encoding": "rebuild --home {bad_home}",
        "disk": "rebuild --home {full}/h",
    },
    "delete": {
        "output": "delete x --yes --home {blocked}",
        "encoding": "delete x --yes --home {bad_home}",
        "disk": "delete x --yes --home {full}/h",
    },
    "report": {
        "output": "report {events} --out {blocked}.html",
        "encoding": "report some-job --home {bad_home}",
        "disk": "report {events} --out {full}/report.html",
    },
    "sim": {
        "output": "sim lambda --port 0 --folder {blocked}",
        "encoding": "sim lambda --port 0 --folder {free}/sim --api-key-file {bad}",
        "disk": "sim lambda --port 0 --folder {full}/sim",
    },
    "token": {
        "output": "token create me --home {blocked}",
        "encoding": f"token list --server {NO_SERVER}",
        "disk": "token create me --home {full}/h",
    },
    "target": {
        "output": "target grant lambda --project lab --home {blocked}",
        "encoding": f"target list --server {NO_SERVER}",
        "disk": "target grant lambda --project lab --home {full}/h",
    },
    **{
        verb: {
            "output": f"{verb} {job} --home {{blocked}}",
            "encoding": f"{verb} {job} --server {NO_SERVER}",  # its token file holds bytes that are not UTF-8
            "disk": f"{verb} {job} --home {{full}}/h",
        }
        for verb, job in {
            "jobs": "", "top": "--once", "show": "x", "logs": "x", "events": "x", "cancel": "x", "pause": "x",
            "resume": "x",
            "fetch": "x", "cost": "", "goodput": "", "queue": "", "nodes": "",
        }.items()
    },
}  # fmt: skip
# Without any extra: words, and the extra that the message names; None: the verb needs none and does its work.
BASE: dict[str, tuple[str, str | None]] = {
    "demo": ("demo --home {free}/h", "train,server"),
    "examples": ("examples", None),
    "check": ("check --only shm --json", None),
    "bandwidth": ("bandwidth", "train"),
    "accept": ("accept", "train"),
    "cluster": ("cluster hyperpod-rules", None),
    "baseline": ("baseline record {results} --file {free}/b.toml", None),
    "isolate": ("isolate --sim nodes=8,racks=2,seed=1", None),
    "rejudge": ("rejudge {bundle} --json", None),
    "remedy": ("remedy {bundle} --with slurm", None),
    "readmit": ("readmit {bundle} --with slurm", None),
    "history": ("history", None),
    "data": ("data prepare {corpus} --out {free}/tokens --tokenizer hub:gpt2", "data"),
    "train": ("train {config}", "train"),
    "drill": ("drill {config}", "train"),
    "plan": ("plan {config}", None),
    "export": ("export {checkpoint} {free}/model", "train"),
    "submit": ("submit {spec}", "server"),
    "serve": ("serve", "server"),
    "work": ("work", "server"),
    "reap": ("reap", "server"),
    "backup": ("backup {free}/copy", "server"),
    "restore": ("restore {bundle} --home {free}/restored", "server"),
    "rebuild": ("rebuild", "server"),
    "delete": ("delete x --yes", "server"),
    "report": ("report {events} --out -", "server"),
    "sim": ("sim lambda --list-faults", None),
    "token": ("token list", "server"),
    "target": ("target list", "server"),
    **{
        verb: (f"{verb} {job} --server {NO_SERVER}", "client")
        for verb, job in {
            "jobs": "", "top": "--once", "show": "x", "logs": "x", "events": "x", "cancel": "x", "pause": "x",
            "resume": "x",
            "fetch": "x", "cost": "", "goodput": "", "queue": "", "nodes": "",
        }.items()
    },
}  # fmt: skip
