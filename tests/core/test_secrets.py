"""Forty shapes of secrets are found in every field of a spec; values that only look similar are not."""

from __future__ import annotations

import copy
import random
import shlex
import string
import time
from typing import Any

import pytest

from trainmaster.core import schema
from trainmaster.core.errors import SpecError
from trainmaster.core.secret.in_spec import find_in_spec
from trainmaster.core.secret.shapes import hide, recognise
from trainmaster.core.spec import parse_spec

PICK = random.Random(7)
ALL = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def some(letters: int, of: str = ALL) -> str:
    return "".join(PICK.choice(of) for _ in range(letters))


SHAPES = {
    "trainmaster": "tm_" + some(43),
    "aws key id": "AKIA" + some(16, string.ascii_uppercase),
    "aws session": "ASIA" + some(16, string.ascii_uppercase),
    "hugging face": "hf_" + some(34),
    "hugging face org": "api_org_" + some(34),
    "github": "ghp_" + some(36),
    "github app": "ghs_" + some(36),
    "github fine": "github_pat_" + some(50),
    "gitlab": "glpat-" + some(20),
    "gitlab deploy": "gldt-" + some(20),
    "google": "AIza" + some(35),
    "google oauth": "ya29." + some(40),
    "slack bot": "xoxb-" + some(12, string.digits) + "-" + some(24),
    "slack app": "xapp-1-" + some(30),
    "slack webhook": "https://hooks.slack.com/services/T00000000/B00000000/" + some(24),
    "discord": "https://discord.com/api/webhooks/123456789012345678/" + some(60),
    "telegram": some(9, string.digits[1:]) + ":AA" + some(33),
    "npm": "npm_" + some(36),
    "pypi": "pypi-" + some(60),
    "docker": "dckr_pat_" + some(27),
    "digitalocean": "dop_v1_" + some(64, HEX),
    "databricks": "dapi" + some(32, HEX),
    "sendgrid": "SG." + some(22) + "." + some(43),
    "stripe": "sk_live_" + some(24),
    "replicate": "r8_" + some(37),
    "nvidia": "nvapi-" + some(64),
    "groq": "gsk_" + some(52),
    "openai": "sk-" + some(48),
    "anthropic": "sk-ant-api03-" + some(80),
    "azure": "AccountKey=" + some(86) + "==",
    "signed url": "https://b.s3.amazonaws.com/x?X-Amz-Signature=" + some(64, HEX),
    "jwt": "eyJ" + some(20) + ".eyJ" + some(30) + "." + some(40),
    "bearer": "Authorization: Bearer " + some(32),
    "basic": "Authorization: Basic " + some(24),
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "vault": "hvs." + some(24),
    "url": f"postgres://me:{some(12)}@db.example.org/x",
    "short url": "https://u:pw@example.org/x",
    "export": f"export X_API_KEY={some(12)}",
    "wandb": "wandb login " + some(40, HEX),
    "option": f"run --password {some(10)}",
    "assignment": f"MY_SECRET='{some(9)}'",
}
SPEC: dict[str, Any] = {
    "name": "a", "project": "p", "command": ["run", "x"], "env": {"A": "b"}, "target": "local",
    "resources": {"nodes": 1}, "limits": {"attempts": 1},
}  # fmt: skip
TRAIN: dict[str, Any] = {"name": "a", "train": {"data": {"source": "text", "path": "x"}}}
FULL: dict[str, Any] = schema.to_plain(parse_spec(TRAIN))


def text_fields() -> list[str]:
    """Every place of a spec that takes text: those of a training job and those of a command."""
    found: list[str] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else name)
        elif value is None or isinstance(value, str):
            found.append(path)

    walk(FULL, "")
    return found


def planted(path: str, secret: str) -> Any:
    """A parsed spec with the secret at a place; None where the parser takes no such text there."""
    plain = here = copy.deepcopy(FULL)
    *parents, last = path.split(".")
    for name in parents:
        here = here[name]
    here[last] = secret
    try:
        return parse_spec({name: value for name, value in plain.items() if value is not None})
    except Exception:
        return None


def test_there_are_forty_shapes() -> None:
    assert len(SHAPES) >= 40


@pytest.mark.slow
@pytest.mark.matrix(one_in=6)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_a_shape_is_found_in_every_field(shape: str) -> None:
    secret = SHAPES[shape]
    assert recognise(secret) is not None
    specs = [
        parse_spec({**SPEC, "env": {"A": secret}}),
        parse_spec({**SPEC, "command": ["run", f"--with={secret}"]}),
        parse_spec({**SPEC, "command": ["bash", "-c", f"cd /x; {secret}; run"]}),
        *(spec for path in text_fields() if (spec := planted(path, secret)) is not None),
    ]
    assert len(specs) > 6, "free text is taken in more than the command"
    for spec in specs:
        faults = list(find_in_spec(spec))
        assert faults, spec
        assert not any(secret in f"{fault.path} {fault.message}" for fault in faults), "an error must not repeat it"


@pytest.mark.parametrize(
    "name", ["DB_PASSWORD", "REDIS_PASSWD", "CLIENT_SECRET", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"]
)
def test_a_short_password_is_refused_by_its_name(name: str) -> None:
    assert list(find_in_spec(parse_spec({**SPEC, "env": {name: "x"}})))


def test_an_option_and_its_value_are_seen_together() -> None:
    assert list(find_in_spec(parse_spec({**SPEC, "command": ["run", "--password", "hunter2"]})))
    assert not list(find_in_spec(parse_spec({**SPEC, "command": ["run", "--password", "$DB_PASSWORD"]})))


@pytest.mark.parametrize(
    "text",
    [
        "EOS_TOKEN=<|end|>", "TOKENIZERS_PARALLELISM=false", "--tokenizer=meta-llama/Llama-3.2-1B", "sort_key=loss",
        "python train.py --url=s3://bucket/data --time=12:30", "export HF_TOKEN=$HF_TOKEN", "--revision=" + "0a" * 20,
        "git checkout 1b -- commit " + "0a" * 20, "https://example.org/a?b=c", "mailto:me@example.org",
        "basic training", "max_tokens=1024", "pad_token=[PAD]", "key=value", "sha256:" + "ab" * 32,
        "--num-key-value-heads 8", f"/builds/{'0a' * 20}/src/train.py", f"PYTHONPATH=/a/{'0a' * 20}/src:/b",
        "--password=${DB_PASSWORD}", "bearer of news", "0a" * 20, "0a" * 32, f"s3://bucket/{'0a' * 20}",
        f"git checkout {'0a' * 20}", f"builder:cuda13.0-{'0a' * 20}", f"TE_TAG={'0a' * 20}", f"CACHE_KEY={'0a' * 20}",
        "https://x-access-token:${GITHUB_TOKEN}@github.com/a", "https://${TOKEN}:x-oauth-basic@github.com/",
        "https://me:***@github.com/a", "Getting a bearer token...", "Your basic configuration is", "ALL NOPASSWD: ALL",
        "SECRET=/tmp/secret.json", "HF_ACCESS_TOKEN=hf_xxxxxx", "LICENSE_KEY=REPLACE_LICENSE_KEY_HERE",
        "docker build --secret id=INDEX_URLS .",
        "arn:aws:secretsmanager:us-west-2:029272617770:secret:team/token-JTgxb0",
        "user@host:/path", "00000000-0000-4000-8000-000000000000",
    ],
)  # fmt: skip
def test_a_text_that_only_looks_similar_passes(text: str) -> None:
    assert recognise(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "wandb login --relogin {}", "wandb.login(key='{}')", "WANDB_API_KEY={}", "--wandb-key {}", '"token": "{}"',
        "WANDB_KEY={}",
    ],
)  # fmt: skip
def test_forty_digits_after_the_name_of_a_key_are_a_key(text: str) -> None:
    assert recognise(text.format("0a" * 20)) is not None and "0a" * 20 not in hide(text.format("0a" * 20))


def test_a_key_of_forty_digits_is_known_by_the_word_before_it() -> None:
    for command in (["wandb", "login", "0a" * 20], ["run", "--wandb-key", "0a" * 20]):
        assert [fault.path for fault in find_in_spec(parse_spec({**SPEC, "command": command}))] == ["command[2]"]
    assert not list(find_in_spec(parse_spec({**SPEC, "command": ["git", "checkout", "0a" * 20]})))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/service-account/service-account.json"),
        ("SCCACHE_S3_NO_CREDENTIALS", "0"), ("CACHE_KEY", "0a" * 32), ("APEX_TAG", "0a" * 20),
        ("HF_TOKEN", "hf_xxxxxx"),
    ],
)  # fmt: skip
def test_a_variable_that_only_sounds_secret_passes(name: str, value: str) -> None:
    assert not list(find_in_spec(parse_spec({**SPEC, "env": {name: value}})))


def test_a_place_is_allowed_with_a_reason_and_no_other_one() -> None:
    spec = {**SPEC, "command": ["run", "--password", "hunter2"], "env": {"DB_PASSWORD": "x"}}
    assert [fault.path for fault in find_in_spec(parse_spec(spec))] == ["env.DB_PASSWORD", "command[2]"]
    allowed = parse_spec({**spec, "allow": {"command[2]": "the password of a throw-away database"}})
    assert [fault.path for fault in find_in_spec(allowed)] == ["env.DB_PASSWORD"]
    assert list(find_in_spec(parse_spec({**SPEC, "allow": {"command[2]": SHAPES["github"]}}))), "the reason is stored"
    with pytest.raises(SpecError, match="write why this is no secret"):
        parse_spec({**spec, "allow": {"command[2]": " "}})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_a_message_hides_every_shape(shape: str) -> None:
    secret = SHAPES[shape]
    text = hide(f"no job {secret}; see the list")
    assert secret not in text and text.startswith("no job ") and recognise(text) is None
    assert hide("no job 6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11; see the list").endswith("see the list")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_a_fault_of_a_spec_does_not_repeat_a_secret(shape: str) -> None:
    for wrong in ({"limits": {"timeout_s": SHAPES[shape]}}, {SHAPES[shape]: 1}, {"zone": SHAPES[shape]}):
        with pytest.raises(SpecError) as refused:
            parse_spec({**SPEC, **wrong})
        assert SHAPES[shape][-12:] not in str(refused.value)


# Seen to pass before: an option of another name, a name that is not at its end, odd characters, an underscore before.
NAMED = [
    "run --token abcdef.0123456789abcdef", "deploy --github-token=abcd1234efgh", "curl -s -u user:pass https://x",
    "curl --user me:hunter2 https://x", "curl -uuser:pa55 https://x", "sshpass -p hunter2 ssh h",
    "sshpass -phunter2 ssh",
    "mysql -u root -phunter2 db", "/usr/bin/mariadb -h db -pS3cret", "redis-cli -a hunter2 ping", "MYSQL_PWD=hunter2",
    "DB_PASS=hunter2", "run --db-pass hunter2", "SECRET_KEY_BASE=hunter2", "SECRET_KEY=hunter2",
    "Cookie: session=hunter2hunter2; x=y", "AUTH_COOKIE=hunter22", "PASSWORD=$hunter!2", "PASSWORD=%hunter2",
    "PASSWORD={hunter2", "PASSWORD=<hunter2", "PASSWORD=***hunter2", r"PASSWORD=\"hunter2\"", "PASSWORD='two hunter2'",
    "PASSWORD=h'u\"nter2", r'{\"db_password\": \"hunter2\"}', "sshpass -p 'two hunter2' ssh h",
    "my_" + SHAPES["github"], f"x_{SHAPES['aws key id']}_y", "HOME_" + SHAPES["trainmaster"],
]  # fmt: skip


@pytest.mark.parametrize("text", NAMED)
def test_a_secret_is_known_by_the_name_before_it(text: str) -> None:
    hidden = hide(f"said {text} twice")
    assert recognise(text) is not None and recognise(hidden) is None
    assert not any(part in hidden for part in ("hunter2", "pa55", "S3cret", ":pass ", "nter2", SHAPES["github"]))


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--token", "hunter2"], ["curl", "-u", "me:hunter2", "https://x"],
        ["sudo", "curl", "-s", "-ume:hunter2"],
        ["sshpass", "-p", "hunter2", "ssh"], ["/usr/bin/mysql", "-u", "root", "-phunter2"], ["run", "--db-pass", "x"],
    ],
)  # fmt: skip
def test_it_is_known_in_a_list_of_words_too(words: list[str]) -> None:
    (fault,) = find_in_spec(parse_spec({**SPEC, "command": words}))
    assert "hunter2" in words[int(fault.path[len("command[") : -1])] or fault.path == "command[2]"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MYSQL_PWD", "x"), ("DB_PASS", "x"), ("SMTP_PASS", "-x"), ("SECRET_KEY_BASE", "x"),
        ("SESSION_COOKIE", "sid=12345"),
        ("DB_PASSWORD", "$ecret!"), ("DB_PASSWORD", "-abc"), ("DB_PASSWORD", "%abc"), ("DB_PASSWORD", "{abc"),
    ],
)  # fmt: skip
def test_a_variable_of_such_a_name_is_refused(name: str, value: str) -> None:
    assert list(find_in_spec(parse_spec({**SPEC, "env": {name: value}})))


# What jobs, build files and pipelines really write; each has a word, a sign or a shape of the rules above.
HARMLESS_LINES = """
python train.py --max-tokens 4096 --eos-token </s> --pad-token [PAD]
python -m trainmaster.train tokens=1024 --num-key-value-heads 8
--bos-token <s> --unk-token <unk> --mask-token [MASK]
vllm serve model --tokenizer-mode auto --max-num-batched-tokens 8192
use --token to log in, or set the variable
pass --token with a token of your own
kubeadm join --token $TOKEN --discovery-token-ca-cert-hash sha256:abc
kubeadm join --token <token> 10.0.0.1:6443
gh auth login --with-token < token.txt
huggingface-cli login --token ${HF_TOKEN} --add-to-git-credential
huggingface-cli login --token "$HF_TOKEN"
curl -fsSL https://example.org/install.sh | sh
curl -u $USER:$PASS https://example.org
curl -u "${USER}:${PASS}" https://example.org
curl --user-agent Mozilla/5.0 https://example.org
curl -o out.tar https://example.org:8443/a.tar
curl -sSf http://localhost:8080/healthz
curl -X POST -H 'Content-Type: application/json' -d '{"a": 1}' http://h:80
docker run -u 1000:1000 -v $PWD:/work image
docker run --user 1000:1000 --rm image
docker run --name mysql -p3306:3306 mysql:8
docker run -d -p 3306:3306 --name mysql mysql:8.0
apt-get install -y mysql-client libmysqlclient-dev pkg-config
apt-get install -y sshpass redis-tools
mysql -u root -p < dump.sql
mysql -h db -P 3306 -u root -p"$MYSQL_PWD" test
mysqladmin ping -h 127.0.0.1 --silent
mysqldump -p$DB_PASS --all-databases
sshpass -e ssh user@host true
sshpass -f /run/secrets/pw ssh host
sshpass -p "$PW" scp a host:
redis-cli -h redis -p 6379 ping
mkdir -p /var/lib/mysql && chown -R 1000:1000 /var/lib/mysql
PASSWORD=$DB_PASSWORD
PASSWORD=${DB_PASSWORD:-}
PASSWORD="$(cat /run/secrets/db)"
PASSWORD=%(password)s
PASSWORD={password}
PASSWORD={{ .Values.password }}
PASSWORD=<password>
PASSWORD=***
password: ${{ secrets.DB_PASSWORD }}
password: ********
db_password=$1
MYSQL_PWD=$MYSQL_ROOT_PASSWORD mysql -u root
MYSQL_ALLOW_EMPTY_PASSWORD=yes
POSTGRES_HOST_AUTH_METHOD=trust
DB_PASS="${DB_PASS}"
OLDPWD=/srv/src
PWD=/srv/src
BYPASS=enabled
FIRST_PASS=10
MULTI_PASS=adaptive
RENDER_PASSES=diffuse,depth
pass_rate=0.97
passed=12 failed=0
SECRET_KEY_BASE=$(bin/rails secret)
SECRET_KEY=${SECRET_KEY}
secretName: db-credentials
kubectl create secret generic db --from-file=./db.yaml
kubectl get secret db -o yaml
secretKeyRef:
imagePullSecrets:
COOKIE_SECURE=true
COOKIE_NAME=session
SESSION_COOKIE_SAMESITE=Lax
cookie: yes
Set-Cookie is not sent over HTTP
cookiecutter gh:audreyr/cookiecutter-pypackage
--cookie-jar cookies.txt
COOKIES=cookies.txt
sort_key=loss
primary_key: id
key: value
partition_key=customer_identifier
CACHE_KEY=linux-py311-abcdef0123456789
ssh-keygen -t ed25519 -f key -N ''
ssh -i ~/.ssh/id_ed25519 user@host
git clone git@github.com:org/repo.git
git clone https://github.com/org/repo.git
git clone https://${TOKEN}@github.com/org/repo.git
export HF_TOKEN=$HF_TOKEN
HF_HUB_ENABLE_HF_TRANSFER=1
TOKENIZERS_PARALLELISM=false
NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_DEBUG=INFO
torchrun --nproc-per-node 8 --rdzv-id 100 --rdzv-endpoint host:29500 train.py
srun --ntasks-per-node=8 --gpus-per-task=1 python train.py
sbatch --account=lab --qos=normal --time=01:00:00 job.sh
#SBATCH --output=logs/%x-%j.out
step 100 loss 2.31 tokens/s 10234 lr 3e-4
epoch=3 step=1200 loss=1.92 tokens=1048576
saved step-00000100 sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
RuntimeError: Token indices sequence length is longer than 512
ValueError: Invalid password hash algorithm
Permission denied (publickey,password).
sudo: a password is required
warning: using a password on the command line interface can be insecure
a basic understanding of tokens
bearer authentication is not enabled
pip install --extra-index-url https://download.pytorch.org/whl/cu128 torch
convert_hf_checkpoint_to_megatron_format.py --model-type llama
quantize_r8_weights_and_activations.py
task-id: task-7f3c9a12-train
desk_sk-learn-contrib
--api-key-file /run/secrets/key
--password-file /run/secrets/db
--password-stdin
docker login -u ci --password-stdin ghcr.io
""".strip().splitlines()


def test_a_hundred_typical_lines_raise_no_alarm() -> None:
    assert len(HARMLESS_LINES) >= 100
    assert [line for line in HARMLESS_LINES if recognise(line) is not None] == []
    programs = ("python", "vllm", "kubeadm", "hugging", "curl", "docker", "mysql", "sshpass", "redis", "git")
    commands = [shlex.split(line) for line in HARMLESS_LINES if line.startswith(programs)]
    assert [words for words in commands if list(find_in_spec(parse_spec({**SPEC, "command": words})))] == []


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a-", "a" * 40 + " ", "eyJaaaaaaaa-", "$a-", "--a", "-"])
def test_a_long_text_takes_time_by_its_length_alone(unit: str) -> None:
    """Four times the text must not take sixteen times as long: one submission would stop the server for hours."""
    recognise("x")

    def measure(size: int) -> float:
        text, began = unit * (size // len(unit)), time.process_time()
        assert recognise(text) is None
        return time.process_time() - began

    short = min(measure(2_000) for _ in range(3))
    assert min(measure(16_000) for _ in range(3)) < 8 * short * 3


@pytest.mark.parametrize("text", ["$a-password=hunter22", ":a-b-password=hunter22", "x --db-password=hunter22"])
def test_a_password_behind_a_hyphen_is_known(text: str) -> None:
    assert recognise(text) is not None


def test_the_advice_and_the_names_of_fields_are_not_hidden() -> None:
    spec = parse_spec({"name": "a", "command": ["x"], "env": {"API_KEY": "hunter22hunter22"}})
    (fault,) = find_in_spec(spec)
    assert "allow: {'env.API_KEY': <reason>}" in fault.message and hide(fault.message) == fault.message
    assert hide(str(fault)) == str(fault)
    assert hide("ssh:/etc/passwd: no such file") == "ssh:/etc/passwd: no such file"
    assert "hunter22" not in hide("passwd: hunter22")
