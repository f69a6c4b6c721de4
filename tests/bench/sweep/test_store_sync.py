"""Tests of several processes that submit points of one study. The jobs of the study use an object store. Each process
reads the study's state from the store, and writes records for attempts that ended without a record."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sweeps import point, spec, sweep

from bench import launchers
from bench.core import store
from bench.core.machine import Machine
from bench.core.object_store import ObjectStore, StoreUnavailable
from bench.core.record import Circumstance
from bench.core.scheduling import JobState, SchedulingOptions
from bench.core.spec import config_id
from bench.core.study_store import StudyStore, sync
from bench.sweep import definition, jobs
from bench.sweep.jobs import Job
from bench.sweep.lost import finalize_lost
from bench.sweep.status import StudyState, read_state

FOUR = spec(batch__micro=4)
PREEMPTED = JobState("7", "s-1", None, "ended", "FAILED", outcome="preempted", why="a spot machine was taken")


class Launcher(NamedTuple):
    """Simulated launcher whose jobs use the object store at `url`. `states` are the states of jobs that the scheduler
    reports."""

    url: str
    states: Mapping[tuple[str, int | None], JobState]
    Options: type[SchedulingOptions] = SchedulingOptions

    def sync(self, folder: Path, options: SchedulingOptions) -> None:
        sync(folder, self.url)

    def ask(self, names: Collection[str], options: Any) -> Mapping[tuple[str, int | None], JobState]:
        return {key: state for key, state in self.states.items() if key[0] in names}


@pytest.fixture
def submitters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders of two processes that submit points of the same study. A job of the study began a run (an
    attempt) and was then preempted. So this attempt has no record."""
    url, made = f"file://{tmp_path}/bucket/s", sweep([point(FOUR)])
    monkeypatch.setattr(launchers, "load_queueing", lambda name: Launcher(url, {("s-1", None): PREEMPTED}))
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        definition.write(folder, made)
    job = Job(
        name="s-1", mode="packed", nodes=1, devices_per_node=2, time_limit_min=10,
        points=(made.requested(made.points[0], 0),),
    )  # fmt: skip
    jobs.write_handle(jobs.write(folders[0], job), "7")
    node = StudyStore(ObjectStore(url), tmp_path / "node")
    launcher = {"name": "slurm", "job": "s-1", "task": None, "restart": 0}
    circumstance = Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher=launcher)
    node.open_attempt(node.folder / config_id(FOUR), FOUR, circumstance)
    return folders


def read_ends(view: StudyState) -> list[tuple[str | None, str]]:
    return [(attempt.outcome, attempt.reason) for attempt in view.tried(config_id(FOUR))]


def test_a_killed_job_leaves_a_claim_that_the_first_submitter_concludes(tmp_path: Path, submitters: list[Path]) -> None:
    one, other = submitters
    views = [read_state(folder) for folder in submitters]
    assert [job.handle for job in views[1].seen.jobs] == ["7"], "the second submitter knows the job of the first"
    assert [read_ends(view) for view in views] == [[(None, "")]] * 2
    assert finalize_lost(views[0]) == 1
    assert read_ends(read_state(one)) == [("preempted", PREEMPTED.why)]
    # The second submitter read the study earlier and also writes a record. Only the first submitter's record counts.
    folder = other / config_id(FOUR) / "0.0"
    assert finalize_lost(views[1]) == 1
    mine = (folder / store.RECORD).read_bytes().replace(PREEMPTED.why.encode(), b"another reason")
    store.write_atomically(folder / store.RECORD, mine)
    assert read_ends(read_state(other)) == [("preempted", PREEMPTED.why)]
    assert finalize_lost(read_state(other)) == 0
    kept = tmp_path / "bucket/s" / config_id(FOUR) / "0.0" / store.RECORD
    assert [path.read_bytes() for path in (one / config_id(FOUR) / "0.0" / store.RECORD, folder / store.RECORD)] == [
        kept.read_bytes()
    ] * 2


def test_a_store_that_does_not_respond_is_reported_and_the_folder_is_still_read(
    tmp_path: Path, submitters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state(submitters[0])

    def refuse(folder: Path, url: str) -> None:
        raise StoreUnavailable(url, "does not respond")

    monkeypatch.setattr(f"{__name__}.sync", refuse)
    with pytest.raises(StoreUnavailable):
        read_state(submitters[0])
    assert read_ends(read_state(submitters[0], ask=False)) == [(None, "")]
