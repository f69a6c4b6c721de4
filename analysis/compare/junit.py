"""A comparison as JUnit XML: a test case for each configuration, as a CI shows them."""

import re

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from analysis.compare import SetComparison
from analysis.compare.judging import PairResult
from analysis.compare.phrases import describe_ground, describe_sides, format_headline, format_time_change, list_remarks

_CLASS = "zeroscale.compare"
_NOT_COMPARED = ("not comparable", "only in A", "only in B", "failed in A", "failed in both")
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def to_junit(compared: SetComparison) -> str:
    """Return the XML. What breaks the gate failed, and what could not be compared was skipped; without a gate, none
    fails."""
    suite = TestSuite("zeroscale compare")
    suite.add_property("sides", _strip_invalid_xml(describe_sides(compared)))
    suite.add_property("verdict", compared.verdict or "no gate")
    suite.add_property("outcome", _strip_invalid_xml(format_headline(compared)))
    suite.add_testcases([_build_case(name, line, compared.breaks(line)) for name, line in compared.lines])
    if compared.broken and not compared.breaking():
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
    elif line.status in _NOT_COMPARED:
        case.result = [Skipped(details)]
    case.system_out = details
    return case


def _format_details(line: PairResult) -> str:
    """Return what a person needs to know of a line, besides its name."""
    timed = (
        [f"time per sample {format_time_change(line)}", f"rests on {describe_ground(line)}"] if line.comparison else []
    )
    return "; ".join([line.status, *timed, *list_remarks(line)])


def _strip_invalid_xml(text: str) -> str:
    """Leave out what no XML may hold; the writer escapes the rest."""
    return _NO_XML.sub("", text)
