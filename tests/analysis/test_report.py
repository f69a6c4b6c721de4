import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from records import failed, machine, run, save, spec, steps

from analysis import reading, report
from analysis.columns import columns
from bench.errors import UserError

EVIL = '"><script>alert("x")</script><img src=http://evil.example/x>'


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.text = html, [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good runs, one failure whose texts try to be HTML, and one foreign file."""
    quiet = {"steps": steps((0.1, 0.11, 0.12) * 10)}
    evidence = {"traceback": f"Traceback\n  {EVIL}", "ranks": [EVIL]}
    folder = save(
        tmp_path_factory.mktemp("runs"),
        run(spec("ddp"), **quiet),
        run(spec("zero1"), machine=machine(fp32=1.0), **quiet),
        run(spec("zero2"), torch="2.12.0", **quiet),
        failed("oom", spec("zero3"), reason=f"rank 0: {EVIL}", told=evidence),
    )
    (folder / "record.json").write_text(EVIL)
    return folder


@pytest.fixture(scope="module")
def out(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of those; tests only read it."""
    folder = tmp_path_factory.mktemp("reports") / "new" / "out"
    assert report.write(reading.read([runs]), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(out: Path) -> Page:
    return Page((out / "report.html").read_text())


def test_the_files_are_these(out: Path) -> None:
    pictures = {f"figures/{name}.{form}" for name in ("throughput", "memory") for form in ("svg", "pdf", "png")}
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"report.html", "runs.csv", "runs.md", *pictures}


def test_the_page_asks_nothing_of_a_network(page: Page) -> None:
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
            assert not re.match(r"\s*(\w+:|//)", attributes.get(name) or ""), attributes
    assert page.all("link") == page.all("img") == page.all("iframe") == []
    assert set(re.findall(r"url\(([^)]*)\)", page.html)) <= set(re.findall(r"url\((#[^)]*)\)", page.html))
    assert "@import" not in page.html
    policies = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]


def test_its_links_lead_to_its_files(page: Page, out: Path) -> None:
    linked = [link["href"] for link in page.all("a")]
    assert len(linked) == 8
    assert all((out / str(file)).is_file() for file in linked)


def test_text_from_records_is_text(page: Page) -> None:
    assert len(page.all("script")) == 1
    assert "alert" not in "".join(re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL))
    assert page.words.count('<script>alert("x")</script>') == 3, "the reason twice, and the traceback"


def test_every_run_is_a_row_with_every_column(page: Page) -> None:
    table = page.html[page.html.index('<table class="runs">') :]
    table = Page(table[: table.index("</table>")])
    assert len(table.all("tr")) == 1 + 4
    assert len(table.all("th")) == len(table.all("button")) == len(columns())
    assert len(table.all("td")) == 4 * len(columns())


def test_failures_show_their_evidence_and_what_was_skipped_is_named(page: Page) -> None:
    assert len(page.all("details")) == 1
    assert "no such" not in page.words
    assert "1 of 5 files were skipped" in page.words
    assert "not a zeroscale record" in page.words


def test_provenance_says_what_differs(page: Page) -> None:
    assert "2 environment classes, never pooled; they differ in torch." in page.words
    shaded = re.findall(r'<tr class="differs"><th scope="row">([^<]+)', page.html)
    assert shaded == ["torch"]
    assert "dense peak fp32 1 TFLOP/s" in page.words


def test_the_summary_comes_first_and_says_how_sure(page: Page) -> None:
    headings = re.findall(r'<h2 id="(\w+)"', page.html)
    assert headings == ["asked", "answer", "sure", "figures", "runs", "failures", "provenance", "flags", "columns"]
    assert "Every configuration ran once (n = 1)" in page.words
    assert "1 of 4 configurations have no number: 1 oom." in page.words
    assert "1 of 2 ok runs of other engines have losses verified beside ddp." in page.words
    assert "within the run, n\xa0=\xa01" in page.html


def test_several_nodes_show_what_becomes_of_the_studys_claims(tmp_path: Path) -> None:
    seconds = {("zero2", 1): 0.25, ("zero3", 1): 0.5, ("zero2", 2): 0.75}
    records = [run(spec(engine, nodes=nodes), steps=steps((s,) * 30)) for (engine, nodes), s in seconds.items()]
    out = tmp_path / "out"
    report.write(reading.read([save(tmp_path / "runs", *records, failed("oom", spec("zero3", nodes=2)))]), out)
    page = Page((out / "report.html").read_text())
    assert "an analogue and not a reproduction" in page.words and "tiny (0.000402M parameters) on cpu." in page.words
    section = page.words[page.words.index("What becomes of the study's claims") : page.words.index("Figures")]
    for line in (
        "tiny, cpu as in the study 1 slower, 1 unknown (n = 1)",
        "tiny, cpu cannot be told 1 slower, 1 unknown (n = 1)",
        "zero2, micro 2, 2 samples per step and device, fp32 1 node 2 nodes slower 3.00 0.2500 (0.2500 to",
        "C3 tiny, cpu 2 × 2 ranks, micro 2, fp32 zero2 zero3 unknown – 0.7500 (0.7500 to 0.7500, 95 %, n = 1) oom",
    ):
        assert line in section.replace("\xa0", " ")
    assert {"claims.csv", "claims.md"} < {link["href"] for link in page.all("a")}
    assert len((out / "claims.csv").read_text().splitlines()) == 1 + 6
    assert "| C3 | ZeRO-2 had lower seconds per step" in (out / "claims.md").read_text()
    assert "C1 says little there" in (out / "claims.md").read_text(), "every device keeps its work here"


def test_a_second_report_replaces_the_first_and_nothing_else(runs: Path, out: Path, tmp_path: Path) -> None:
    first = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = tmp_path / "again"
    (again / "figures").mkdir(parents=True)
    (again / "notes.txt").write_text("mine")
    (again / "report.html").write_text("old")
    report.write(reading.read([runs]), again)
    assert {path: (again / path).read_bytes() for path in first} == first, "equal records give equal files"
    assert (again / "notes.txt").read_text() == "mine"
    assert not list(again.glob(".new-*"))


def test_a_disk_that_fills_up_leaves_the_older_report(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        report.write(reading.read([runs]), out)
    assert (out / "runs.csv").read_text() == "old"
    assert not list(out.glob(".new-*"))


def test_a_file_in_the_way_is_said(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="choose another --out"):
        report.write(reading.read([runs]), tmp_path / "out")


CLICK = """<script>
const heads = [...document.querySelectorAll(".runs th")], head = heads.find(h => h.textContent.trim() === "step_s");
const column = () => [...document.querySelectorAll(".runs tbody tr")].map(r => r.cells[head.cellIndex].textContent);
const press = () => { head.querySelector("button").click(); return head.getAttribute("aria-sort") + " " + column(); };
document.title = press() + "; " + press();
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_heading_sorts_and_says_so(tmp_path: Path) -> None:
    medians = {"ddp": 9.5, "zero1": 10.25, "zero2": 0.5}
    records = [run(spec(engine), steps=steps((s,) * 30)) for engine, s in medians.items()]
    runs = save(tmp_path / "runs", failed("oom", spec("a")), *records)
    page = report.write(reading.read([runs]), tmp_path / "out")
    page.write_text(page.read_text().replace("</body>", CLICK))
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search("<title>(.*)</title>", told)
    assert title is not None
    assert title[1] == "ascending 0.5000,9.500,10.25,–; descending 10.25,9.500,0.5000,–"
