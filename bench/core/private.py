"""Secrets must be in no record, log, script or archive. Known by the name of a variable, or by their own form."""

import re

_SECRET = re.compile(
    r"(?:^|_)(?:"
    r"[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|(?:API|ACCESS|PRIVATE|SSH)?KEYS?|CREDS?|PASS"
    r"|O?AUTH[0-9]?|PAT|JWT|COOKIES?|BEARER|NETRC|DSN|(?<=_)PWD|(?:REDIS|DATABASE|DB|BROKER)_UR[IL]"
    r"|CERTS?|CERTIFICATES?|LICEN[CS]ES?|PEM|SIGNATURES?"
    r")(?:_|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s@]*:[^/\s@]*@")
# Tokens of Hugging Face, OpenAI and its like, AWS, GitHub and GitLab. What comes before must not go on as a word.
_TOKEN = re.compile(
    rb"(?<![A-Za-z0-9_-])(?:"
    rb"(hf_)[A-Za-z0-9]{16,}|(sk-)(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}|(AKIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    rb"|(gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}|(glpat-)[A-Za-z0-9_-]{16,}"
    rb")"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable's name looks like a secret, or its value holds a token or an address with a password."""
    return bool(_SECRET.search(name) or _LOGIN.search(value) or _TOKEN.search(value.encode()))


def mask_tokens(content: bytes) -> bytes:
    """Return `content` with every token replaced by its prefix and `***`."""
    return _TOKEN.sub(lambda match: match[match.lastindex or 0] + b"***", content)
