"""What must stand in no record, script or page, by the names of environment variables."""

import re

_SECRET = re.compile(
    r"(?:^|_)(?:"
    r"[A-Z0-9]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|(?:API|ACCESS|PRIVATE|SSH)?KEYS?|CREDS?|PASS"
    r"|O?AUTH[0-9]?|PAT|JWT|COOKIES?|BEARER|NETRC|DSN|(?<=_)PWD|(?:REDIS|DATABASE|DB|BROKER)_UR[IL]"
    r")(?:_|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s@]*:[^/\s@]*@")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable's name, or an address with a password in its value, looks like a secret."""
    return bool(_SECRET.search(name) or _LOGIN.search(value))
