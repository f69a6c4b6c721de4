"""Write the outputs of all golden cases (commands whose output must not change) into a folder, and store new hashes of
these outputs in digests.json.

  python -m tests.golden texts/

Compare the folders of two revisions with `diff -r`.
"""

import sys
from pathlib import Path

from tests.golden import digests
from tests.golden.cases import cases

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: case() for name, case in cases(whole=True).items()}
    for name, text in texts.items():
        (folder / f"{name.replace('/', '-')}.txt").write_text(text)
    digests.write(texts)
