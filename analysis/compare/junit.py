"""A comparison as JUnit XML: a test case for each configuration, as a CI shows them."""

import re

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from analysis.compare import Compared
from analysis.compare.judging import Line
from analysis.compare.words import also, change, ground, headline, sides

_CLASS = "zeroscale.compare"
_IN_VAIN = ("not comparable", "only in A", "only in B", "failed in A", "failed in both")
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def to_junit(compared: Compared) -> str:
    """Return the XML. What breaks the gate failed, and what could not be compared was skipped; without a gate, none
    fails."""
    suite = TestSuite("zeroscale compare")
    suite.add_property("sides", _xml(sides(compared)))
    suite.add_property("verdict", compared.verdict or "no gate")
    suite.add_property("outcome", _xml(headline(compared)))
    suite.add_testcases([_case(name, line, compared.breaks(line)) for name, line in compared.lines])
    if compared.broken and not compared.breaking():
        nothing = TestCase("anything to compare", _CLASS)
        nothing.result = [Failure(_xml(headline(compared)), "gate")]
        suite.add_testcase(nothing)
    whole = JUnitXml("zeroscale")
    whole.add_testsuite(suite)
    text: bytes = whole.tostring()  # type: ignore[no-untyped-call]
    return text.decode()


def _case(name: str, line: Line, broken: bool) -> TestCase:
    case, told = TestCase(_xml(name), _CLASS), _xml(_told(line))
    if broken:
        case.result = [Failure(told, "gate")]
    elif line.held == "open":
        case.result = [Skipped(f"INCONCLUSIVE: {told}")]
    elif line.status in _IN_VAIN:
        case.result = [Skipped(told)]
    case.system_out = told
    return case


def _told(line: Line) -> str:
    """Return what a person needs to know of a line, besides its name."""
    timed = [f"time per sample {change(line)}", f"rests on {ground(line)}"] if line.comparison else []
    return "; ".join([line.status, *timed, *also(line)])


def _xml(text: str) -> str:
    """Leave out what no XML may hold; the writer escapes the rest."""
    return _NO_XML.sub("", text)
