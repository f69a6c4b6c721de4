"""Read and write digests.json, which holds a digest of the output of each golden case."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("digests.json")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read() -> dict[str, str]:
    """Return the stored digests by case name."""
    kept: dict[str, str] = json.loads(FILE.read_text())
    return kept


def write(texts: Mapping[str, str]) -> None:
    FILE.write_text(json.dumps({name: digest(text) for name, text in sorted(texts.items())}, indent=1) + "\n")
