"""Forty shapes of secrets are found in every field of a spec; values that only look similar are not."""

from __future__ import annotations

import copy
import random
import string
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
