"""Function that reads the compressed data that a report's page contains for its script."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def read_data(page: Path) -> dict[str, Any]:
    """Return the data of a page: columns, runs, configurations, texts of points, and HTML of folded parts."""
    packed = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', page.read_text())
    assert packed
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return data
