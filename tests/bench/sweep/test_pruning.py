"""Tests of pruning. A point (configuration) is pruned, which means skipped, if two conditions hold. Another point ran
out of memory. The pruned point would certainly run out of memory, too."""

from pathlib import Path

from sweeps import attempt, point, spec

from bench.core import store
from bench.core.record import Outcome
from bench.core.spec import RunSpec, config_id
from bench.sweep.definition import RunKey
from bench.sweep.pruning import find_pruned_outcome, find_siblings, is_to_confirm

MICROS = (1, 2, 4, 8)


class Rules:
    """Rules for the points of one sweep, applied to the attempts in its folder. They decide whether a point is skipped
    without a run, and whether a point that ran out of memory runs again to confirm it."""

    def __init__(self, specs: list[RunSpec], repeats: int = 1) -> None:
        wanted = ((key(made, repeat), point(made).spec) for made in specs for repeat in range(repeats))
        self._kin = find_siblings(wanted)

    def find_outcome(self, made: RunKey, folder: Path) -> Outcome | None:
        return find_pruned_outcome(
            self._kin[made.config_id, made.machine], lambda config_id: store.list_attempts(folder / config_id)
        )

    def to_confirm(self, made: RunKey, folder: Path) -> bool:
        return is_to_confirm(
            self._kin[made.config_id, made.machine], lambda config_id: store.list_attempts(folder / config_id)
        )


def key(made: RunSpec, repeat: int = 0) -> RunKey:
    return RunKey(config_id(made), "cpu", repeat)


def test_larger_micro_batch_is_pruned_after_two_runs_out_of_memory(tmp_path: Path) -> None:
    one, two, four, eight = (spec(batch__micro=micro) for micro in MICROS)
    rules = Rules([one, two, four, eight])
    attempt(tmp_path, four, "oom")
    assert rules.find_outcome(key(eight), tmp_path) is None, "one out-of-memory may be a mishap"
    assert rules.to_confirm(key(four), tmp_path)
    attempt(tmp_path, four, "oom")
    outcome = rules.find_outcome(key(eight), tmp_path)
    assert outcome and outcome.kind == "pruned"
    assert outcome.evidence == {"run": f"{config_id(four)}/0.1", "micro": 4}
    assert not rules.to_confirm(key(four), tmp_path), "it is confirmed"
    assert rules.find_outcome(key(two), tmp_path) is None, "a smaller one may fit"
    assert rules.find_outcome(key(one), tmp_path) is None


def test_larger_micro_batch_is_pruned_after_all_repeats_ran_out_of_memory(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    rules = Rules([four, eight], repeats=3)
    for repeat in range(2):
        attempt(tmp_path, four, "oom", repeat)
    assert rules.find_outcome(key(eight), tmp_path) is None
    assert not rules.to_confirm(key(four), tmp_path), "the third repeat serves as confirmation"
    attempt(tmp_path, four, "oom", 2)
    assert rules.find_outcome(key(eight), tmp_path)


def test_one_successful_run_prevents_pruning(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    for repeat, kind in enumerate(("oom", "oom", "ok")):
        attempt(tmp_path, four, kind, repeat)
    assert Rules([four, eight]).find_outcome(key(eight), tmp_path) is None


def test_points_that_differ_in_more_than_the_micro_batch_are_not_pruned(tmp_path: Path) -> None:
    four = spec(batch__micro=4)
    others = [
        spec(batch__micro=8, engine="zero3"),
        spec(batch__micro=8, activation_checkpointing=True),
        spec(batch__micro=8, batch__accumulation=2),
        spec(batch__micro=8, precision="fp32"),
        spec(batch__micro=8, nodes=2),
    ]
    rules = Rules([four, *others])
    for _ in range(2):
        attempt(tmp_path, four, "oom")
    assert [rules.find_outcome(key(other), tmp_path) for other in others] == [None] * len(others)


def test_out_of_memory_on_another_machine_prunes_nothing(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    for _ in range(2):
        attempt(tmp_path, four, "oom", machine="small")
    assert Rules([four, eight]).find_outcome(key(eight), tmp_path) is None


def test_out_of_memory_is_not_confirmed_without_larger_points_to_prune(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    attempt(tmp_path, eight, "oom")
    assert not Rules([four, eight]).to_confirm(key(eight), tmp_path)
