"""Output of a comparison: text for a terminal, Markdown for a pull request, JUnit XML for CI, JSON and CSV for
programs."""

import json
import re
from typing import Any

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from analysis.compare import SetComparison
from analysis.compare.judging import NOT_COMPARED, PairResult
from analysis.compare.phrases import (
    HEAD,
    RIGHT,
    SHORT,
    build_cells,
    describe_ground,
    describe_intervals,
    describe_sides,
    format_headline,
    format_time_change,
    list_remarks,
)
from analysis.formats import (
    escape_markdown,
    find_width,
    format_markdown_table,
    join_csv,
    render_text_table,
)
from bench.core.errors import make_printable

_STYLES = {"broken": "bold red", "open": "yellow"}


def to_text(compared: SetComparison, *, wide: bool = False) -> str:
    """Return a text table of the results. It has the main columns and fits the terminal or, if `wide`, has all columns
    and one line per row."""
    names = [name.split(" · ") for name, _ in compared.lines]
    # Parts that the names of all pairs share are written once, above the table.
    shared = [part for part in names[0] if all(part in name for name in names)] if len(names) > 1 and not wide else []
    short = [" · ".join(part for part in name if part not in shared) for name in names]
    head, styles = HEAD if wide else SHORT, [_STYLES.get(line.held or "", "") for _, line in compared.lines]
    cells = [build_cells(name, line) for name, (_, line) in zip(short, compared.lines, strict=True)]
    rows = [[row[HEAD.index(name)] for name in head] for row in cells]
    width = None if wide else find_width()
    table = render_text_table(head, rows, [name in RIGHT for name in head], width, styles)
    equal = f"Equal in all configurations: {make_printable(' · '.join(shared))}." if shared else ""
    parts = [make_printable(describe_sides(compared)), equal, table.rstrip("\n"), describe_intervals(compared)]
    return "".join(f"{part}\n" for part in (*parts, format_headline(compared)) if part)


_FOLDED = (
    "equal within 3 %", "no detectable difference", "too few repeats to tell", "not comparable", "only in A",
    "only in B", "failed in both",
)  # fmt: skip


def to_markdown(compared: SetComparison) -> str:
    """Return Markdown for GitHub. Unchanged pairs, and pairs that could not be compared, are in collapsed sections
    (`<details>`)."""
    shown = [(name, line) for name, line in compared.lines if not _is_folded(line)]
    parts = [f"**{escape_markdown(format_headline(compared))}**", escape_markdown(describe_sides(compared))]
    parts += [_render_pairs_table(shown)] if shown else []
    for status in _FOLDED:
        members = [(name, line) for name, line in compared.lines if _is_folded(line) and line.status == status]
        if members:
            summary = f"<summary>{len(members)} {status}</summary>"
            parts.append(f"<details>{summary}\n\n{_render_pairs_table(members)}\n\n</details>")
    return "\n\n".join([*parts, escape_markdown(describe_intervals(compared))]) + "\n"


def _is_folded(line: PairResult) -> bool:
    return line.status in _FOLDED and line.held != "broken" and not line.changes


def _render_pairs_table(lines: list[tuple[str, PairResult]]) -> str:
    cells = [build_cells(name, line) for name, line in lines]
    return format_markdown_table(HEAD, cells, [name in RIGHT for name in HEAD]).rstrip()


_CLASS = "zeroscale.compare"
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # from XML 1.0, production 2


def to_junit(compared: SetComparison) -> str:
    """Return JUnit XML with a test case per pair. Pairs that break the gate are failures. Pairs that could not be
    compared, or for which the gate is open (undecided), are skipped test cases."""
    suite = TestSuite("zeroscale compare")
    suite.add_property("sides", _strip_invalid_xml(describe_sides(compared)))
    suite.add_property("verdict", compared.verdict or "no gate")
    suite.add_property("outcome", _strip_invalid_xml(format_headline(compared)))
    suite.add_testcases([_build_case(name, line, compared.breaks(line)) for name, line in compared.lines])
    # A gate without any comparable pair fails, but JUnit XML needs a failed case to show it.
    if compared.verdict == "FAIL" and not compared.breaking():
        nothing = TestCase("anything to compare", _CLASS)
        nothing.result = [Failure(_strip_invalid_xml(format_headline(compared)), "gate")]
        suite.add_testcase(nothing)
    whole = JUnitXml("zeroscale")
    whole.add_testsuite(suite)
    text: bytes = whole.tostring()  # type: ignore[no-untyped-call]
    return text.decode()


def _build_case(name: str, line: PairResult, broken: bool) -> TestCase:
    case, details = TestCase(_strip_invalid_xml(name), _CLASS), _strip_invalid_xml(_format_details(line))
    if broken:
        case.result = [Failure(details, "gate")]
    elif line.held == "open":
        case.result = [Skipped(f"INCONCLUSIVE: {details}")]
    elif line.status in NOT_COMPARED:
        case.result = [Skipped(details)]
    case.system_out = details
    return case


def _format_details(line: PairResult) -> str:
    """Return the result of a pair as text, without the name of the pair."""
    parts: list[str] = [line.status]
    if line.comparison:
        parts += [f"time change {format_time_change(line)}", f"compared data: {describe_ground(line)}"]
    return "; ".join([*parts, *list_remarks(line)])


def _strip_invalid_xml(text: str) -> str:
    """Remove characters that XML does not allow. The XML writer escapes all other special characters."""
    return _NO_XML.sub("", text)


_SIDE = (
    "config_id", "environment_id", "machine", "sample_s", "step_s", "peak_allocated_bytes", "n", "outcome", "flags",
)  # fmt: skip


def to_json(compared: SetComparison) -> str:
    """Return JSON: the verdict of the regression gate (PASS, FAIL or INCONCLUSIVE), and an object for each pair of
    configurations."""
    (a, b), gate = compared.question.called, compared.question.gate
    plain = {
        "a": a,
        "b": b,
        "across": [part.name for part in compared.question.across],
        "gate": gate and gate._asdict() | {"allowed": sorted(gate.allowed)},
        "verdict": compared.verdict,
        "broken": compared.verdict == "FAIL",
        "headline": format_headline(compared),
        "lines": [
            {**_build_row(name, line), "changes": [change._asdict() for change in line.changes]}
            for name, line in compared.lines
        ],
    }
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(compared: SetComparison) -> str:
    """Return CSV with a row for each pair. A changed quantity is written as `name: values of A -> values of B`."""
    rows = []
    for name, line in compared.lines:
        changes = [(one.name, *(" ".join(map(str, side)) for side in (one.a, one.b))) for one in line.changes]
        rows.append(_build_row(name, line) | {"changes": "; ".join(f"{n}: {a} -> {b}" for n, a, b in changes)})
    return join_csv(list(rows[0]) if rows else ["name"], rows)


def _build_row(name: str, line: PairResult) -> dict[str, Any]:
    found = line.comparison
    interval = found.interval if found else None
    return {
        "name": name,
        "status": line.status,
        "why": line.why,
        "held": line.held,
        "doubts": ", ".join(line.gate_reasons),
        "ratio": found and found.ratio,
        **{f"ratio_{end}": interval and getattr(interval, end) for end in ("low", "high")},
        **{f"interval_{part}": interval and getattr(interval, part) for part in ("kind", "level")},
        "p": found and found.p_value,
        **{name: found and getattr(found, name) for name in ("cliffs_delta", "unit")},
        "a_runs": line.runs and line.runs[0],
        "b_runs": line.runs and line.runs[1],
        **{f"{side}_{key}": one and one.row[key] for side, one in (("a", line.a), ("b", line.b)) for key in _SIDE},
    }
