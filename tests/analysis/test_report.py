import json
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from records import failed, machine, run, save, spec, steps

from analysis import report, results
from bench.core.errors import UserError
from tests.report_data import read_data

MEASURED = Path(__file__).parents[2] / "results" / "measured"
EVIL = '"><script>alert("x")</script><img src=http://evil.example/x>'


class Page(HTMLParser):
    """Parser that collects tags, texts and scripts of a page. The content of a script does not count as text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.text, self.scripts = html, [], [], []
        self.within = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.within = tag
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self.within == "script" else self.text).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with three ok runs, a failure whose texts contain HTML, and a file that is not a record."""
    quiet = {"steps": steps((0.1, 0.11, 0.12) * 10)}
    evidence = {"traceback": f"Traceback\n  {EVIL}", "ranks": [EVIL]}
    folder = save(
        tmp_path_factory.mktemp("runs"),
        run(spec("ddp"), **quiet),
        run(spec("zero1"), machine=machine(fp32=1.0), **quiet),
        run(spec("zero2"), torch="2.12.0", **quiet),
        failed("oom", spec("zero3"), reason=f"rank 0: {EVIL}", outcome_evidence=evidence),
    )
    (folder / "record.json").write_text(EVIL)
    return folder


@pytest.fixture(scope="module")
def out(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the report of the fixture `runs`. Tests only read it."""
    folder = tmp_path_factory.mktemp("reports") / "new" / "out"
    assert report.write_report(results.read([runs]), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(out: Path) -> Page:
    return Page((out / "report.html").read_text())


def test_tables_are_files_next_to_the_page(out: Path) -> None:
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    tables = {f"{name}.{form}" for name in ("runs", "configurations", "best") for form in ("csv", "md", "tex")}
    assert files == {"report.html", *tables}


def test_page_loads_nothing_from_the_network(page: Page) -> None:
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            assert not re.match(r"\s*(\w+:|//)", attributes.get(name) or ""), attributes
    assert page.all("link") == page.all("img") == page.all("iframe") == []
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", page.html))
    assert "@import" not in page.html
    policies = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    inline = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert policies == [f"default-src 'none'; img-src data:; {inline}"], "nothing may be fetched, connected to or sent"


def test_links_of_the_page_lead_to_existing_files_and_sections(page: Page, out: Path) -> None:
    linked = {str(link["href"]) for link in page.all("a")}
    parts = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    assert {link[1:] for link in linked if link.startswith("#")} <= parts
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {link for link in linked if not link.startswith("#")} == files - {"report.html"}


def test_text_from_records_is_escaped_on_the_page(page: Page, out: Path) -> None:
    data, ours = page.scripts
    assert EVIL in json.dumps(read_data(out / "report.html")["runs"]).replace('\\"', '"'), "the script shows it as text"
    assert "<" not in data, "no text can end the script that it stands in"
    assert "alert(" not in ours
    assert len(page.all("script")) == 2
    assert page.words.count('<script>alert("x")</script>') == 2, "in the reason and in the traceback"


def test_table_has_a_row_per_configuration(page: Page) -> None:
    table = page.html[page.html.index('data-table="configurations"') :]
    assert len(Page(table[: table.index("</table>")]).all("tr")) == 1 + 4


def test_page_explains_the_units_of_memory(page: Page) -> None:
    assert "a GB, the unit of predictions, is 10 9 bytes or 0.931 GiB" in page.words
    assert f"{1e9 / 2**30:.3f}" == "0.931"


def test_page_shows_evidence_of_failures_and_lists_skipped_files(page: Page) -> None:
    assert "tiny: zero3, micro 2, 2 ranks: oom rank 0:" in page.words
    assert "traceback Traceback" in page.words
    assert "1 of 5 files were skipped" in page.words
    assert "not a zeroscale record" in page.words


def test_page_highlights_differences_between_environments(page: Page) -> None:
    assert "Runs of 2 environment classes are never pooled. The classes differ in torch." in page.words
    decides = re.findall(r'<tr class="decides"><th scope="row">([^<]+)', page.html)
    assert decides == ["torch"] * 2, "listed under the differences and in the whole provenance"
    assert "dense peak fp32 1 TFLOP/s" in page.words


def test_page_is_smaller_than_a_megabyte(tmp_path: Path) -> None:
    page = report.write_report(results.read(["results/measured/two_cores.zip/smoke"]), tmp_path)
    assert page.stat().st_size < 400_000


@pytest.mark.thorough
@pytest.mark.parametrize("archive", sorted(path.name for path in MEASURED.glob("*.zip")))
def test_pages_of_all_recorded_studies_are_smaller_than_a_megabyte(tmp_path: Path, archive: str) -> None:
    page = report.write_report(results.read([MEASURED / archive]), tmp_path)
    assert page.stat().st_size < 1_000_000


def test_page_begins_with_the_answer(page: Page) -> None:
    headings = re.findall(r'<h2 id="(\w+)"', page.html)
    assert headings == [
        "answer", "sure", "asked", "figures", "tables", "failures", "environments", "flags", "columns",
    ]  # fmt: skip


def test_report_of_several_nodes_contains_claims_and_scaling(tmp_path: Path) -> None:
    seconds = {("zero2", 1): 0.25, ("zero3", 1): 0.5, ("zero2", 2): 0.75}
    records = [run(spec(engine, nodes=nodes), steps=steps((s,) * 30)) for (engine, nodes), s in seconds.items()]
    out = tmp_path / "out"
    saved = save(tmp_path / "runs", *records, failed("oom", spec("zero3", nodes=2)))
    report.write_report(results.read([saved]), out)
    page = Page((out / "report.html").read_text())
    assert "an analogue and not a reproduction" in page.words and "tiny (0.000402M parameters) on cpu." in page.words
    assert {"claims.csv", "claims.md", "scaling.csv", "scaling.tex"} < {link["href"] for link in page.all("a")}
    assert "Weak scaling" in page.words


def test_second_report_replaces_only_files_of_the_first(runs: Path, out: Path, tmp_path: Path) -> None:
    first = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = tmp_path / "again"
    (again / "figures").mkdir(parents=True)
    (again / "notes.txt").write_text("mine")
    (again / "report.html").write_text("old")
    report.write_report(results.read([runs]), again)
    assert {path: (again / path).read_bytes() for path in first} == first, "equal records give equal files"
    assert (again / "notes.txt").read_text() == "mine"
    assert not list(again.glob(".new-*"))


def test_full_disk_keeps_the_older_report(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "runs.csv").write_text("old")
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == report.PAGE:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        report.write_report(results.read([runs]), out)
    assert (out / "runs.csv").read_text() == "old"
    assert not list(out.glob(".new-*"))


def test_file_at_the_path_of_the_output_folder_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="choose another --out"):
        report.write_report(results.read([runs]), tmp_path / "out")


@pytest.mark.processes
@pytest.mark.thorough
def test_progress_is_shown_on_a_terminal_and_absent_from_a_log(tmp_path: Path) -> None:
    report = "import sys; from bench.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", report, "report", "tests/data/runs.zip/smoke", "--out", str(tmp_path)]
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as running:
        os.close(theirs)
        shown = b""
        while part := _read_terminal(ours):
            shown += part
        assert running.stdout and running.stdout.read().decode() == f"{tmp_path}/report.html\n"
    os.close(ours)
    assert running.returncode == 0
    # Reading the records takes less time than the bar's refresh interval, so the line for them may never be drawn.
    for pattern in (r"figures, \d+ of \d+", r"0:00:\d\d"):
        assert re.search(pattern, shown.decode())
    quiet = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (quiet.stdout, quiet.stderr) == (f"{tmp_path}/report.html\n", "")


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""
