"""Tests of a report that is used with mouse and keyboard, on a wide and on a narrow screen."""

from collections.abc import Callable
from pathlib import Path

import pytest
from opened import Opened
from playwright.sync_api import Locator, Page, expect

from bench.core.record import SCHEMA_VERSION

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

Open = Callable[..., Opened]
LEAST_PX, MOST_PX = 8.0, 20.0
"""Smallest and largest height of readable letters, in pixels."""


def figure(page: Page, title: str) -> Locator:
    return page.locator("figure").filter(has=page.get_by_role("heading", name=title))


def points(page: Page) -> Locator:
    """Return the points of the throughput figure that show a number. The page contains each panel twice, for two screen
    widths. Only one of the two is counted."""
    return figure(page, "Throughput").locator("use[data-t]:visible")


def rows(page: Page, table: str) -> list[str]:
    """Return the engine of every visible row of a table."""
    head = page.locator(f"[data-table={table}] th button").all_inner_texts()
    column = next(index for index, text in enumerate(head) if text.startswith("engine"))
    return page.locator(f"[data-table={table}] tbody tr:visible td:nth-child({column + 1})").all_inner_texts()


def test_report_opens_without_network_requests_or_errors(opened: Open, sweep: Path) -> None:
    page, requests, errors = opened(sweep)
    points(page).first.hover()
    assert requests == [sweep.as_uri()]
    assert errors == []


def test_each_number_has_a_point_and_each_failure_a_label(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    assert points(page).count() == 7
    assert figure(page, "Throughput").locator("text:visible", has_text="OOM").count() == 1


def test_hover_shows_configuration_repeats_and_interval(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    points(page).first.hover(force=True)
    shown = page.locator("#tip")
    expect(shown).to_contain_text("tiny: zero2, micro 2")
    expect(shown).to_contain_text("from the steps of one run, indicative, n = 1")
    expect(shown).to_contain_text("flags: short unverified")
    page.locator("h1").hover()
    expect(shown).to_be_hidden()


def test_legend_entry_hides_its_series_by_mouse_and_keyboard(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    entry = figure(page, "Throughput").get_by_role("button", name="zero2")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert points(page).count() == 4
    assert figure(page, "Peak memory by engine").locator("use[data-t]:visible").count() == 7, "of this figure alone"
    entry.focus()
    page.keyboard.press("Enter")
    assert points(page).count() == 7


def test_arrow_keys_reach_every_point_and_enter_opens_its_runs(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    figure(page, "Throughput").locator("svg:has([data-t]):visible").first.focus()
    tips = set()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        tips.add(page.locator("#tip").inner_text().splitlines()[0])
    assert tips == {f"tiny: {engine}, micro {micro}" for engine in ("zero2", "zero3") for micro in (2, 4)}
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("tiny: zero3, micro 4, 2 ranks")


def test_click_on_a_point_opens_its_runs_with_record_and_log(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    points(page).first.click(force=True)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("tiny: zero2, micro 2, 2 ranks")
    dialog.get_by_text("record.json").click()
    expect(dialog.locator("pre").first).to_contain_text(f'"schema_version": {SCHEMA_VERSION}')
    dialog.get_by_text("End of run.log").click()
    expect(dialog.locator("pre").last).to_contain_text("line 40\nline 41")
    assert "line 39" not in dialog.locator("pre").last.inner_text()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_filters_apply_to_tables_and_failures(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    page.get_by_role("checkbox", name="zero3").check()
    assert set(rows(page, "configurations")) == {"zero3"}
    assert page.locator("#failures ~ details:visible").count() == 0, "the failure is of zero2"
    expect(page.locator("#count")).to_have_text("4 of 8 configurations")
    page.get_by_role("group", name="Nodes").get_by_role("checkbox", name="2").check()
    expect(page.locator("#count")).to_have_text("2 of 8 configurations")
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#count")).to_have_text("8 of 8 configurations")


def test_count_of_configurations_is_announced_to_screen_readers(opened: Open, sweep: Path) -> None:
    assert opened(sweep).page.locator("#count").get_attribute("aria-live") == "polite"


def test_address_preserves_the_chosen_filters(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    page.get_by_role("checkbox", name="zero3").check()
    fragment = page.evaluate("location.hash")
    restored = opened(sweep, fragment=fragment).page
    assert restored.get_by_role("checkbox", name="zero3").is_checked()
    assert set(rows(restored, "configurations")) == {"zero3"}


def test_tab_key_reaches_every_control(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    selector = "main a, main input, main button, main summary, main [tabindex='0']"
    visible = [one for one in page.locator(selector).all() if one.is_visible()]
    reached = page.evaluate("reached = new Set(), 0")
    for _ in range(len(visible) + 20):
        page.keyboard.press("Tab")
        reached = page.evaluate("reached.add(document.activeElement), reached.size")
    missed = page.evaluate(
        """(asked) => [...document.querySelectorAll(asked)].filter((one) => one.checkVisibility() && !reached.has(one))
           .map((one) => one.outerHTML.slice(0, 80))""",
        selector,
    )
    assert reached >= len(visible)
    assert missed == []


def test_table_is_sorted_within_the_rows_of_each_model(opened: Open, models: Path) -> None:
    page = opened(models).page
    table = page.locator("[data-table=configurations]")
    read_rows = lambda: [text.split()[1 if "\t" in text else 0] for text in table.locator("tbody tr").all_inner_texts()]  # noqa: E731
    assert read_rows() == ["big", "zero2", "zero3", "small", "zero2", "zero3"]
    heading = table.locator("th").filter(has_text="engine").locator("button")
    heading.click()
    heading.click()
    assert read_rows() == ["big", "zero3", "zero2", "small", "zero3", "zero2"]
    page.get_by_role("group", name="Model").get_by_role("checkbox", name="big").check()
    assert table.locator("tr.group:visible").all_inner_texts() == ["big"]


@pytest.mark.parametrize(("width", "stacked"), [(1400, False), (400, True)])
def test_tables_fit_the_screen_and_are_stacked_on_narrow_screens(
    opened: Open, models: Path, width: int, *, stacked: bool
) -> None:
    page = opened(models, width).page
    wider = (
        "[...document.querySelectorAll('.scroll:has(table)')].filter((one) => one.scrollWidth > one.clientWidth).length"
    )
    assert page.evaluate(f"[...document.querySelectorAll('details')].forEach((one) => one.open = true), {wider}") == 0
    label = "getComputedStyle(document.querySelector('[data-table=runs] td'), '::before').content"
    assert (page.evaluate(label) == '"configuration"') is stacked


def test_numbers_are_separated_from_the_text_of_the_next_column(opened: Open, models: Path) -> None:
    page = opened(models).page
    gaps = page.evaluate(
        """[...document.querySelectorAll('th.number + th:not(.number)')].flatMap((head) =>
             [...head.closest('table').querySelectorAll('tr[data-f]')].map((row) => row.cells[head.cellIndex])
           ).map((cell) => {
             const [number, text] = [cell.previousElementSibling, cell].map((one) => {
               const range = document.createRange();
               range.selectNodeContents(one);
               return range.getBoundingClientRect();
             });
             return text.width && number.width ? text.left - number.right : 99;
           })"""
    )
    assert gaps and min(gaps) >= 16


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_keyboard_sorts_a_table_with_missing_values_last(opened: Open, sweep: Path, key: str) -> None:
    page = opened(sweep).page
    heading = page.locator("[data-table=configurations] th").filter(has_text="step time")
    column = heading.evaluate("head => head.cellIndex + 1")
    cells = page.locator(f"[data-table=configurations] tbody td:nth-child({column})")
    heading.locator("button").focus()
    page.keyboard.press(key)
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [text.split()[0] for text in cells.all_inner_texts()] == ["0.100"] * 3 + ["0.200"] * 4 + ["–"]
    page.keyboard.press(key)
    assert heading.get_attribute("aria-sort") == "descending"
    assert [text.split()[0] for text in cells.all_inner_texts()] == ["0.200"] * 4 + ["0.100"] * 3 + ["–"]


def test_keyboard_filters_tables_and_opens_a_run(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    page.get_by_role("checkbox", name="zero3").focus()
    page.keyboard.press("Space")
    assert set(rows(page, "configurations")) == {"zero3"}
    page.locator("[data-table=configurations] .open:visible").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("tiny: zero3, micro 2, 2 ranks, fp32, repeat 0, attempt 0")


def test_click_on_a_row_opens_its_runs_and_selecting_its_text_does_not(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    row = page.locator("[data-table=configurations] tbody tr[data-f]").nth(1)
    cell, dialog = row.locator("td").nth(1), page.get_by_role("dialog")
    cell.dblclick(position={"x": 8, "y": 12})
    page.wait_for_timeout(400)  # longer than the script waits for a second click
    assert page.evaluate("getSelection().toString()").strip() == cell.inner_text()
    assert dialog.count() == 0
    page.evaluate("getSelection().empty()")
    identity = row.locator(".open").inner_text()
    cell.click()
    expect(dialog).to_contain_text("repeat 0, attempt 0")
    assert identity in dialog.inner_text()


def test_a_table_without_matching_rows_is_replaced_by_a_sentence(opened: Open, recorded: Path) -> None:
    """A filter for zero3 or for 4 nodes keeps rows of the crossover table, because a row compares two engines over
    several node counts. A filter for ddp keeps no row, so a sentence replaces the table."""
    page = opened(recorded).page
    box = page.locator(".scroll:has([data-table=crossovers])")
    crossovers, sentence = box.locator("tr[data-f]:visible"), box.locator("+ [data-empty]")
    assert crossovers.count() > 0 and sentence.is_hidden()
    page.get_by_role("checkbox", name="zero3", exact=True).check()
    page.get_by_role("group", name="Nodes", exact=True).get_by_role("checkbox", name="4").check()
    assert crossovers.count() > 0 and sentence.is_hidden()
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("checkbox", name="ddp", exact=True).check()
    assert box.is_hidden() and sentence.is_visible()


@pytest.mark.parametrize("width", [718, 740])  # of A4 and of Letter paper between margins of 1 cm
def test_printed_tables_fit_the_paper_with_whole_numbers(opened: Open, recorded: Path, width: int) -> None:
    page = opened(recorded, width).page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    broken = page.evaluate(
        """[...document.querySelectorAll('.full th.number')].flatMap((head) =>
             [...head.closest('table').querySelectorAll('tr[data-f]')].map((row) => row.cells[head.cellIndex])
           ).map((cell) => cell.firstChild).filter((text) => {
             const range = document.createRange();
             range.selectNodeContents(text);
             return /^\\S+$/.test(text.textContent.trim()) && range.getClientRects().length > 1;
           }).length"""
    )
    assert broken == 0


def test_text_from_records_is_inert_on_the_whole_page(opened: Open, hostile: Path) -> None:
    page, requests, errors = opened(hostile)
    points(page).first.hover(force=True)
    expect(page.locator("#tip")).to_contain_text('(note=</script><!--"><img src=x')
    page.locator("[data-table=configurations] .open").last.click()
    expect(page.get_by_role("dialog")).to_contain_text('reason</script><!--"><img src=x')
    for folded in page.locator("dialog summary").all():
        folded.click()
    assert page.title() == "zeroscale: <b>evil (2026-11-24)"
    assert page.locator("img").count() == 0 and page.locator("dialog script").count() == 0
    assert requests == [hostile.as_uri()]
    assert errors == []


def test_log_is_shown_without_control_characters(opened: Open, hostile: Path) -> None:
    page = opened(hostile).page
    page.locator("[data-table=configurations] tr", has_text="note=<").locator(".open").click()
    page.get_by_text("End of run.log").click()
    expect(page.locator("dialog pre").last).to_have_text("</script><script>document.title = 'hacked'</script>\nred")


@pytest.mark.parametrize("width", [1400, 400])
def test_report_fits_the_screen_with_legible_text_in_figures(opened: Open, sweep: Path, width: int) -> None:
    page = opened(sweep, width).page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    heights = page.evaluate(
        """[...document.querySelectorAll('figure svg text')].filter((one) => one.checkVisibility())
           .map((one) => parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getScreenCTM().a)"""
    )
    assert heights and LEAST_PX <= min(heights) <= max(heights) <= MOST_PX


def test_panels_side_by_side_are_as_wide_as_the_page(opened: Open, sweep: Path) -> None:
    page = opened(sweep).page
    boxes = [one.bounding_box() for one in figure(page, "Throughput").locator("svg[role=img]:visible").all()]
    whole = page.locator("main").bounding_box()
    assert whole and all(boxes)
    assert sum(box["width"] for box in boxes if box) > 0.9 * whole["width"]
    assert len({box["y"] for box in boxes if box}) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_have_the_colours_of_the_page(opened: Open, sweep: Path, scheme: str) -> None:
    page = opened(sweep, color_scheme=scheme).page
    ink = page.evaluate("getComputedStyle(document.body).color")
    text = figure(page, "Throughput").locator("text:visible").first
    assert text.evaluate("text => getComputedStyle(text).fill") == ink
    line, mark = (
        page.evaluate(f"getComputedStyle(document.querySelector('{where}')).{what}")
        for where, what in (("figure [data-series=zero2] use", "fill"), ("figure [data-series=zero2] path", "stroke"))
    )
    assert line == mark == {"light": "rgb(0, 158, 115)", "dark": "rgb(37, 191, 146)"}[scheme]


def test_printed_report_has_a_white_background_and_no_controls(opened: Open, sweep: Path) -> None:
    page = opened(sweep, color_scheme="dark").page
    page.emulate_media(media="print")
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (ink, paper) == ("rgb(27, 27, 29)", "rgb(253, 253, 252)")
    assert page.locator("#filters").is_hidden() and page.locator("nav").is_hidden()
    assert points(page).count() == 7


def test_all_numbers_are_visible_without_scripts(opened: Open, sweep: Path) -> None:
    page = opened(sweep, java_script_enabled=False).page
    assert len(rows(page, "configurations")) == 8
    assert page.locator("#filters").is_hidden()
    assert points(page).count() == 7
    expect(page.locator("noscript")).to_be_visible()


def test_more_panels_of_a_figure_appear_when_they_are_opened(opened: Open, recorded: Path) -> None:
    page, _, errors = opened(recorded)
    known = page.locator("figure").filter(has=page.locator("[data-fold]")).first
    fold = known.locator("[data-fold]")
    promised = int(fold.locator("summary").inner_text().split()[0])
    assert fold.locator(".panel").count() == 0
    entries = known.locator("[data-hides]").all()
    for entry in entries:
        entry.click()
    fold.locator("summary").click()
    expect(fold.locator(".panel")).to_have_count(promised)
    assert fold.locator("[data-series]").count() > 0
    assert fold.locator("[data-series]:visible").count() == 0, "series that the legend hides stay hidden"
    for entry in entries:
        entry.click()
    fold.locator("use[data-t]:visible").first.dispatch_event("pointerenter")
    expect(page.locator("#tip")).to_be_visible()
    assert errors == []


def test_print_has_every_panel_and_every_comparison(opened: Open, recorded: Path) -> None:
    page = opened(recorded).page
    folds = page.locator("[data-fold]")
    assert folds.count() > 1
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for fold in folds.all():
        assert fold.locator(".panel, td").count() >= int(
            fold.locator("summary").inner_text().replace("All ", "").split()[0]
        )
