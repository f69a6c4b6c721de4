"""Fixtures that open reports in headless Chromium.

If Chromium is missing, the tests are skipped. If an environment variable requires Chromium, they fail instead.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opened import Opened
from playwright.sync_api import Browser, expect, sync_playwright
from records import failed, machine, run, save, scattered, spec, steps

from analysis import report, results
from bench.core.spec import EngineSpec

ROOT = Path(__file__).parents[3]
REQUIRE = "ZEROSCALE_REQUIRE_CHROMIUM"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 100_000  # generous, because an idle machine needs milliseconds
EVIL = """</script><!--"><img src=x onerror="document.title='hacked'">"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running Chromium. It is closed after each test module. Until then, Playwright's event loop occupies the thread
    of the tests, so no other code can run an event loop in this thread."""
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but chromium is not installed")
        pytest.skip("no chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS), timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of two engines on one and two nodes with two micro-batches. The larger micro-batch runs out of memory. One
    run has a log."""
    records = [
        run(spec(engine, micro, nodes=nodes), steps=steps(scattered(0.9 * s, s, 1.1 * s)))
        for engine, s in (("zero2", 0.1), ("zero3", 0.2))
        for nodes in (1, 2)
        for micro in (2, 4)
        if (engine, nodes, micro) != ("zero2", 2, 4)
    ]
    folder = tmp_path_factory.mktemp("sweep")
    runs = save(folder / "runs", *records, failed("oom", spec("zero2", 4, nodes=2), reason="rank 1: out of memory"))
    logged = runs / "smoke" / records[0].config_id / "0.0" / "run.log"
    logged.write_text("".join(f"line {number}\n" for number in range(100)))
    return reported(runs, folder / "out")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of two engines and two models on a machine with a long name."""
    records = [
        run(
            spec(engine, model={"name": model}),
            repeat=repeat,
            steps=steps(scattered(0.9 * s, s, 1.1 * s)),
            machine=machine(fp32=1.0).model_copy(update={"name": f"testbed_400mbit_{model}"}),
            started_at=started_at,  # runs with equal times and the same start would count as copies of one run
        )
        for model, started_at in (("big", "2026-11-24T09:00:00+00:00"), ("small", "2026-11-24T10:00:00+00:00"))
        for engine, s in (("zero2", 0.1), ("zero3", 0.2))
        for repeat in range(3)
    ]
    folder = tmp_path_factory.mktemp("models")
    return reported(save(folder / "runs", *records), folder / "out")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of runs whose texts contain HTML, scripts and control characters."""
    folder = tmp_path_factory.mktemp("hostile")
    log = "</script><script>document.title = 'hacked'</script>\n\x1b[31mred"
    engine = EngineSpec(name="zero1", backend="deepspeed", options={"note": EVIL})
    hostile_fields = {"study": "<b>evil", "environment": {"hosts": (EVIL,)}, "torch": EVIL}
    good = run(spec().model_copy(update={"engine": engine}), **hostile_fields, steps=steps(scattered(0.09, 0.1, 0.11)))
    bad = failed("error", spec("zero3"), reason=EVIL, outcome_evidence={EVIL: EVIL}, **hostile_fields)
    runs = save(folder / "runs", run(spec("zero1"), **hostile_fields), good, bad)
    (runs / "<b>evil" / good.config_id / "0.0" / "run.log").write_text(log)
    return reported(runs, folder / "out")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of recorded runs, whose figures have many panels."""
    return reported(ROOT / "results" / "measured" / "two_cores.zip", tmp_path_factory.mktemp("recorded"))


def reported(runs: Path, out: Path) -> Path:
    return report.write_report(results.read([runs]), out)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Function that opens a report in a new browser window with a given screen width."""
    contexts = []

    def open_page(path: Path, width: int = 1400, fragment: str = "", **more: object) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        found = Opened(context.new_page(), [], [])
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.errors.append(message.text))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.goto(path.as_uri() + fragment)
        if more.get("java_script_enabled", True) and found.page.locator("#data").count():
            found.page.wait_for_selector("body[data-ready]")  # the script unpacks its data first
        return found

    yield open_page
    for context in contexts:
        context.close()
