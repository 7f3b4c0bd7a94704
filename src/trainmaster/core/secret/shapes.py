"""Shapes of secrets in a text: recognise them, and hide them in a message.

Two signs: a shape that only a credential has, and a name of a credential before a value, in an assignment
(`export X_API_KEY=…`) or in an option (`--password …`). `$HF_TOKEN`, TOKENIZERS_PARALLELISM=false and the id of a
commit are no secrets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

# Prefixes as their makers document them; lengths are the shortest in use.
_SHAPES = {
    "a token of a Trainmaster server": r"\btm_[A-Za-z0-9_-]{43,}",
    "an AWS access key": r"\b(AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "a Hugging Face token": r"\b(hf|api_org)_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bgl(pat|dt|rt|cbt|ptt|ft|soat|agent|oas)-[A-Za-z0-9_-]{16,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{30,}",
    "a Google OAuth token": r"\b(ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,})",
    "a Slack token": r"\b(xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,})",
    "a Slack webhook": r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    "a Discord webhook": r"discord(app)?\.com/api/webhooks/\d+/[A-Za-z0-9_-]{20,}",
    "a Telegram token": r"\b\d{8,10}:AA[A-Za-z0-9_-]{30,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{30,}",
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{20,}",
    "a Docker token": r"\bdckr_(pat|oat)_[A-Za-z0-9_-]{20,}",
    "a DigitalOcean token": r"\bdo[opr]_v1_[a-f0-9]{32,}",
    "a Databricks token": r"\bdapi[a-f0-9]{32}",
    "a SendGrid key": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "a Stripe key": r"\b[rs]k_(live|test)_[A-Za-z0-9]{16,}",
    "a Replicate token": r"\br8_[A-Za-z0-9]{30,}",
    "an NVIDIA key": r"\bnvapi-[A-Za-z0-9_-]{30,}",
    "a Groq key": r"\bgsk_[A-Za-z0-9]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "an Azure storage key": r"\b(AccountKey|SharedAccessKey)=[A-Za-z0-9+/=]{20,}",
    "a signed URL": r"[?&](X-Amz-Signature|X-Goog-Signature|sig)=[A-Za-z0-9%+/=_-]{20,}",
    "a JSON Web Token": r"\beyJ[A-Za-z0-9_-]{8,2000}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    # A word without a digit is prose: "a bearer token", "bearer authentication".
    "a bearer token": r"(?i)\bbearer\s+(?=[^\s]*\d|[^\s]{20})[A-Za-z0-9._~+/=-]{8,}",
    "a password of HTTP": r"\b[Bb](?:asic|ASIC)\s+(?=\S*(?:\d|[a-z][A-Z]|=))[A-Za-z0-9+/]{12,}={0,2}(?![A-Za-z0-9])",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an age key": r"\bAGE-SECRET-KEY-1[A-Z0-9]{20,}",
    "a Vault token": r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}",
    # A reference ($NAME) is none, in either place: GitHub's "x-oauth-basic" is the password beside a token as the user.
    "a URL with user and password": r"://(?![^\s/:@]*\$[^\s/:@]*:x-oauth-basic@)[^\s/:@]*:(?!\\?[$<{]|\*{3})[^\s/@]+@",
    "a URL with a token as user": r"https?://[A-Za-z0-9_-]{20,}@",
}
# 40 hexadecimal digits are the id of a commit, or a key of Weights & Biases and others: then a name of a key, or a
# login, stands before them.
HEX_40 = re.compile(r"(?<![0-9A-Fa-f])[0-9a-f]{40}(?![0-9A-Fa-f])")
_KEY_BEFORE = re.compile(
    r"(?i)(?<!cache[_-])(?:key|token|secret|auth|login)[\"']?(?:\s+--[\w-]+)*[\s=:(\"']*(?:key\s*=\s*[\"']?)?$"
)
_KEY_ROOM = 200  # characters before the digits: reading all of them each time is quadratic
# `pass` alone is a word of many trades (BYPASS, FIRST_PASS): it is a password after the name of what has one.
_OWNERS = (
    r"(?:db|database|user|admin|root|smtp|e?mail|imap|mysql|mariadb|pg|postgres(?:ql)?|redis|mongo(?:db)?|rabbitmq|"
    r"amqp|mqtt|ldap|s?ftp|ssh|sudo|vpn|proxy|http|auth|login|key|keystore|registry|docker|nexus|jenkins|elastic)"
)
NAMES = (
    r"(?:password|(?<!no)(?<!/etc/)passwd|passphrase|secret(?:[_-]?key(?:[_-]?base)?)?|api[_-]?key|access[_-]?key|"
    r"private[_-]?key|signing[_-]?key|encryption[_-]?key|auth[_-]?token|access[_-]?token|[_-]pwd|"
    rf"(?<![a-z0-9]){_OWNERS}[_-]?pass)"
)
WORDS = rf"[\w-]*{NAMES}"  # with what stands before it; quadratic where a search may begin within such a word
# Options whose value is a token; `--eos-token` and `--max-tokens` are of language models.
TOKENS = (
    r"(?:(?:hf|hub|api|auth|access|github|gh|git|gitlab|wandb|bearer|session|refresh|bot|registry|login)[_-])?token"
)
# Stands where a secret could: a whole reference ($NAME, ${NAME}, <…>, %(name)s, {name}), a path, a switch,
# a blank to fill, or the name that a build mounts one by (`docker build --secret id=…`).
_REFERENCE = (
    r"(?:\\?\$(?:[{(]|\w+(?![^\s\"'`;|&),:/@.\\}\]-]))|<[^<>\n]*>|<[(|]|%\(|%[a-z](?!\w)|%\w+%|\{\{|\{[^{}\s]*\}|"
    r"\*{3,}(?![^\s\"'`;|&),:/@.\\}\]-]))"
)
HARMLESS = (
    rf"(?:{_REFERENCE}|(?:id|type)=|~?/(?:etc|home|run|tmp|var)/|"
    r"(?:\.{0,2}/(?:[\w.-]+/)*[\w-]+\.[a-z]{2,5}|true|false|yes|no|none|null|[01]|"
    r"\w{0,8}x{4,}|(?:your|replace|insert)[_-][a-z_-]+)(?![^\s\"']))"
)
# A value in quotes is one with its blanks; a quote within a word ends it only where a delimiter follows.
_VALUE = (
    rf"(?:\"(?!{HARMLESS})(?:[^\"\\\n]|\\.){{3,}}\"|'(?!{HARMLESS})[^'\n]{{3,}}'|"
    rf"(?:\\?[\"'])?(?!{HARMLESS}|[\s\"'])[^\s\"'](?:[^\s\"']|[\"'](?=[^\s\"',;:)}}\]\\>])){{2,}})"
)
_WORD = rf"(?:\"(?!{HARMLESS})[^\"\n]+\"|'(?!{HARMLESS})[^'\n]+'|[\"']?(?!{HARMLESS}|-)[^\s\"']+)"
_UP_TO = r"\b(?![:.\w-])[^\n|;&]{0,400}?\s"  # from a program to one of its options
# The words that follow an option in another word are a secret too.
_NAMED = (
    # Begins where a word does, or behind the first hyphen of one that is a reference ($a-password=…).
    rf"(?i)(?:(?<![\w$:-])|(?<=[$:])\w*-){WORDS}[\"']?\s*(?:[=:]|\\?[\"']\s*:)\s*{_VALUE}",
    rf"(?<![\w$])[A-Za-z_]*(?:TOKEN|(?<!CACHE_)KEY)\s*=\s*[\"']?(?!(?i:{HARMLESS}))[A-Za-z0-9+/_.~-]{{16,}}",
    rf"(?i)(?:^|\s)--?{WORDS}\s+(?!-){_VALUE}",
    # In prose a word follows: "use --token to log in".
    rf"(?i)(?:^|\s)--?{TOKENS}[\s=]+[\"']?(?!{HARMLESS}|-)(?=\S*\d|\S{{16}})[^\s\"']{{6,}}",
    rf"(?i)(?<![\w-])cookie[\"']?\s*:\s*[\"']?[\w.-]+=(?!{HARMLESS})[^\s\"';]{{4,}}[^\n\"']*",
    rf"(?<![\w$])(?:[A-Z][A-Z0-9_]*_)?COOKIE=[\"']?(?!(?i:{HARMLESS}))(?=\S*\d|\w+=)[^\s\"']{{8,}}",
    rf"(?<![\w.-])curl{_UP_TO}(?:-[uU]\s*|--(?:proxy-)?user[\s=])[\"']?[^\s:\"'$-][^\s:\"'$]*:{_WORD}",
    rf"(?<![\w.-])sshpass{_UP_TO}-p\s*{_WORD}",
    rf"(?<![\w.-])redis-cli{_UP_TO}-a\s+{_WORD}",
    # -p alone asks for it; -p3306:3306 is a port of a container.
    rf"(?<![\w.-])(?:mysql|mariadb)(?:dump|admin|import|check|-dump|-admin)?{_UP_TO}-p(?!\d+(?::\d+)*(?!\S)){_WORD}",
)
_ANY = "a secret"
HIDDEN = "(a secret, not shown)"


@functools.cache
def _compiled() -> Sequence[tuple[str, re.Pattern[str]]]:
    """Kinds of secrets with their shapes, compiled at the first use: it takes a tenth of a second.

    A shape may stand beside an underscore (`my_ghp_…`), which \\b does not part from a letter.
    """
    fixed = [(what, re.sub(r"^\\b", "(?<![A-Za-z0-9])", shape)) for what, shape in _SHAPES.items()]
    return [(what, re.compile(shape)) for what, shape in (*fixed, *((_ANY, shape) for shape in _NAMED))]


def recognise(text: str) -> str | None:
    """The kind of secret in this text; None where there is none."""
    for what, shape in _compiled():
        if shape.search(text):
            return what
    if any(_is_key(text, match) for match in HEX_40.finditer(text)):
        return "a key of 40 hexadecimal digits"
    return None


def hide(text: str) -> str:
    """The text with every secret in it replaced: a message must not repeat one."""
    for _, shape in _compiled():
        text = shape.sub(HIDDEN, text)
    return HEX_40.sub(lambda match: HIDDEN if _is_key(text, match) else match[0], text)


def _is_key(text: str, digits: re.Match[str]) -> bool:
    return _KEY_BEFORE.search(text[max(0, digits.start() - _KEY_ROOM) : digits.start()]) is not None
