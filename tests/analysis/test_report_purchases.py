"""What to measure next, and on which nodes intervals rest."""

import numpy as np
from records import results, run, spec, steps

from analysis.report.purchases import list_purchase_caveats
from bench.record import RunRecord


def allocations(hosts: list[str], scatter: float) -> list[RunRecord]:
    """A run of steady steps on each of these hosts."""
    rng = np.random.default_rng(0)
    of = spec()
    times = 0.1 * np.exp(scatter * rng.standard_normal(len(hosts)))
    return [
        run(of, repeat=number, steps=steps((float(seconds),) * 30), environment={"hosts": (host,)})
        for number, (host, seconds) in enumerate(zip(hosts, times, strict=True))
    ]


def test_runs_that_differ_need_more_of_them_and_not_more_steps() -> None:
    told, alike = list_purchase_caveats(results(*allocations(["a"] * 3, 0.02)))
    assert "1 of 1 configurations with two or more are less sure than 2 %" in told
    assert "1 needs more allocations, not more steps: zero1, micro 2" in told
    assert alike.startswith("1 configuration had the same nodes in all allocations")


def test_what_is_sure_enough_needs_nothing() -> None:
    assert list(list_purchase_caveats(results(*allocations(["a", "b", "c"], 0.001)))) == []
    assert list(list_purchase_caveats(results(run()))) == []
