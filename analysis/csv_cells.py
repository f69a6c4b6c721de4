"""CSV that reads back as it was and that no spreadsheet takes for something else."""

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""A text that begins like a formula gets an apostrophe before it, which is how spreadsheets mark text; one that begins
with an apostrophe gets another."""


class CsvLines:
    """The file of a csv writer whose `lineterminator` is END: then it quotes every cell with a line break of any kind.
    The lines themselves end as elsewhere."""

    END = "\r\n"

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        self._lines.append(line.removesuffix(self.END) + "\n")

    def __str__(self) -> str:
        return "".join(self._lines)


def escape_cell(cell: str) -> str:
    """Return a text as a cell."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def parse_cell(cell: str) -> str:
    """Return the text that a cell holds."""
    return cell[1:] if cell.startswith("'") else cell
