"""Secrets, which no record, log, script or archive may hold: recognised by a variable's name or by their own form."""

import re

_NAME = re.compile(
    r"(?:^|_)(?:"
    r"[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?"
    # not any word before KEY: NCCL_IB_PKEY, an InfiniBand partition key, is no secret
    r"|(?:[A-Z0-9]*(?:API|ACCESS|PRIVATE|SECRET|SSH|AUTH|MASTER|SIGNING|ENCRYPTION))?KEYS?"
    r"|CREDS?|PASS|O?AUTH[0-9]?|PAT|JWT|COOKIES?|BEARER|NETRC|DSN|(?<=_)PWD|(?:REDIS|DATABASE|DB|BROKER)_UR[IL]"
    r"|CERTS?|CERTIFICATES?|LICEN[CS]ES?|PEM|SIGNATURES?"
    r")(?:_|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s@]*:[^/\s@]*@")
# Tokens of Hugging Face, OpenAI and similar services, AWS, GitHub and GitLab. Such a prefix inside a word is none
# (task-…, weighs_…). But a word character before it may end an escape: \n and \u001b in JSON, %3D in an address, and
# the colour of a terminal (ESC[1;31m).
_TOKEN = re.compile(
    rb"(?=[hsAg])"  # first: most bytes fail here, which makes it seven times as fast
    rb"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4})|(?<=%[0-9a-fA-F]{2})|(?<=[0-9\[]m))(?:"
    rb"(hf_)[A-Za-z0-9]{16,}|(sk-)(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}|(AKIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    rb"|(gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}|(glpat-)[A-Za-z0-9_-]{16,}"
    rb")"
)


def is_secret(name: str, value: str = "") -> bool:
    """Return True if the name of a variable looks like a secret, or its value holds a token or a password in a URL."""
    return bool(_NAME.search(name) or _LOGIN.search(value) or _TOKEN.search(value.encode()))


def mask_tokens(content: bytes) -> bytes:
    """Return `content` with every token replaced by its prefix and `***`; see `_TOKEN` for the forms."""
    return _TOKEN.sub(lambda match: match[match.lastindex or 0] + b"***", content)
