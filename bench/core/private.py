"""Detection of secrets (passwords, access tokens), which must not be in any record, log, script or archive. A secret is
recognised by the name of its variable or by its format."""

import re

_NAME = re.compile(
    r"(?:^|_)(?:"
    r"[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?"
    # Only these words before KEY: NCCL_IB_PKEY, an InfiniBand partition key, is not a secret.
    r"|(?:[A-Z0-9]*(?:API|ACCESS|PRIVATE|SECRET|SSH|AUTH|MASTER|SIGNING|ENCRYPTION))?KEYS?"
    r"|CREDS?|PASS|O?AUTH[0-9]?|PAT|JWT|COOKIES?|BEARER|NETRC|DSN|(?<=_)PWD|(?:REDIS|DATABASE|DB|BROKER)_UR[IL]"
    r"|CERTS?|CERTIFICATES?|LICEN[CS]ES?|PEM|SIGNATURES?"
    r")(?:_|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s@]*:[^/\s@]*@")
# Access tokens of Hugging Face, OpenAI and similar services, AWS, GitHub and GitLab. A token's prefix inside a word
# (task-…, weighs_…) does not begin a token. But a letter or digit before the prefix may be the end of an escape
# sequence: \n and \u001b in JSON, %3D in a URL, or the colour of a terminal (ESC[1;31m).
_TOKEN = re.compile(
    rb"(?=[hsAg])"  # tested first: most bytes fail here, which makes the search seven times as fast
    rb"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4})|(?<=%[0-9a-fA-F]{2})|(?<=[0-9\[]m))(?:"
    rb"(hf_)[A-Za-z0-9]{16,}|(sk-)(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}|(AKIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    rb"|(gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}|(glpat-)[A-Za-z0-9_-]{16,}"
    rb")"
)


def is_secret(name: str, value: str = "") -> bool:
    """Return True if a variable's name looks like that of a secret, or if its value contains a token or a URL with a
    password."""
    return bool(_NAME.search(name) or _LOGIN.search(value) or _TOKEN.search(value.encode()))


def mask_tokens(content: bytes) -> bytes:
    """Return `content` with every access token replaced by its prefix and `***`. `_TOKEN` defines the recognised
    formats."""
    return _TOKEN.sub(lambda match: match[match.lastindex or 0] + b"***", content)
