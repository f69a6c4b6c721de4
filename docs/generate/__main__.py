"""Write all generated pages of docs/reference: `python -m docs.generate`."""

from docs.generate import FOLDER, pages

FOLDER.mkdir(exist_ok=True)
for name, text in pages().items():
    (FOLDER / name).write_text(text, encoding="utf-8")
