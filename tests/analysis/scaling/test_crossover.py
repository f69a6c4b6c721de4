"""Tests of crossovers: with more nodes, one configuration overtakes another. A crossover is reported only between two
measured node counts, and only if the configurations differ detectably at both node counts."""

from clusters import asked, measured, out_of_memory, repeats
from records import failed, results, run

from analysis.scaling.crossover import Crossover, find_crossovers
from analysis.stats.compare import TOO_FEW, compare, verdicts
from bench.core.record import RunRecord


def engines(two: dict[int, float], three: dict[int, float]) -> list[RunRecord]:
    """Return runs of zero2 and zero3. `two` has the seconds per step of zero2 by node count, and `three` those of
    zero3. Each device has the same work at all node counts."""
    return [
        record
        for engine, times in (("zero2", two), ("zero3", three))
        for nodes, seconds in times.items()
        for record in measured(asked(nodes, engine=engine), seconds)
    ]


def only(*records: RunRecord) -> Crossover:
    (found,) = find_crossovers(results(*records))
    return found


def test_a_crossover_lies_between_two_measured_node_counts() -> None:
    found = only(*engines({1: 1.0, 2: 1.2, 4: 1.6}, {1: 1.1, 2: 1.3, 4: 1.5}))
    assert [node_comparison.verdict for node_comparison in found.node_comparisons] == ["faster", "faster", "slower"]
    assert (found.found, found.between) == ("between", ((2, 4),))
    assert found.sentence == "zero3 overtakes zero2 between 2 and 4 nodes"


def test_crossover_is_symmetric_in_the_two_configurations() -> None:
    found = only(*engines({1: 1.1, 2: 1.2}, {1: 1.0, 2: 1.3}))
    assert found.sentence == "zero2 overtakes zero3 between 1 and 2 nodes"


def test_crossover_range_includes_node_counts_with_a_tie() -> None:
    found = only(*engines({1: 1.0, 2: 1.2, 4: 1.6}, {1: 1.1, 2: 1.2, 4: 1.5}))
    assert found.node_comparisons[1].verdict == "equal within 3 %"
    assert found.between == ((1, 4),)


def test_two_crossovers_of_one_pair() -> None:
    found = only(*engines({1: 1.0, 2: 1.2, 4: 1.5}, {1: 1.1, 2: 1.1, 4: 1.6}))
    assert found.between == ((1, 2), (2, 4))
    assert found.sentence == "zero3 overtakes zero2 between 1 and 2 nodes; zero2 overtakes zero3 between 2 and 4 nodes"


def test_no_crossover_if_the_same_configuration_leads_at_both_ends() -> None:
    found = only(*engines({1: 1.0, 2: 1.2, 4: 1.4}, {1: 1.1, 2: 1.2, 4: 1.5}))
    assert found.found == "none seen"
    assert found.sentence == "no crossover seen: zero2 is faster than zero3 on 1 to 4 nodes"


def test_crossover_is_unknown_with_a_tie_at_an_end() -> None:
    assert only(*engines({1: 1.0, 2: 1.2}, {1: 1.1, 2: 1.2})).found == "cannot be told"


def test_failed_node_counts_are_listed_without_effect_on_the_crossover() -> None:
    records = engines({2: 1.2, 4: 1.6}, {1: 1.1, 2: 1.3, 4: 1.5})
    found = only(*records, *out_of_memory(asked(1, engine="zero2")))
    first = found.node_comparisons[0]
    assert first.one is not None
    assert (first.nodes, first.one["outcome"], first.comparison, first.verdict) == (1, "oom", None, None)
    assert found.between == ((2, 4),)
    alone = only(*engines({1: 1.0, 2: 1.2}, {1: 1.1}), *out_of_memory(asked(2, engine="zero3")))
    assert alone.found == "cannot be told", "a single node count gives no curve"


def test_p_values_are_corrected_for_the_number_of_node_counts() -> None:
    two = {n: repeats(1.0, 0.01, seed=n) for n in (1, 2, 4, 8)}
    three = {n: repeats(1.03, 0.01, seed=100 + n) for n in (1, 2, 4, 8)}
    records = [
        record
        for engine, times in (("zero2", two), ("zero3", three))
        for n, seconds in times.items()
        for record in measured(asked(n, engine=engine), seconds)
    ]
    pairs = [compare([[s] for s in two[n]], [[s] for s in three[n]]) for n in two]
    assert [node_comparison.verdict for node_comparison in only(*records).node_comparisons] == verdicts(pairs)


def test_pairs_differ_only_in_their_engine() -> None:
    two = [record for n in (1, 2) for record in measured(asked(n, engine="zero2"), 1.0)]
    three = [record for n in (1, 2) for record in measured(asked(n, engine="zero3", precision="bf16"), 1.0)]
    assert find_crossovers(results(*two, *three)) == []


def with_options(records: list[RunRecord], **options: object) -> list[RunRecord]:
    """Return copies of the runs in which the engine has the given options instead of its own options."""
    return [
        run(
            record.spec.model_copy(update={"engine": record.spec.engine.model_copy(update={"options": options})}),
            repeat=record.circumstance.repeat,
            steps=record.observations.steps,
        )
        for record in records
        if record.observations
    ]


def test_engines_that_differ_in_offload_are_not_paired() -> None:
    three = with_options(engines({}, {1: 1.1, 2: 1.3}), offload_optimizer={"device": "cpu"})
    assert find_crossovers(results(*engines({1: 1.2, 2: 1.2}, {}), *three)) == []
    two = with_options(engines({1: 1.2, 2: 1.2}, {}), offload_optimizer={"device": "cpu"})
    assert only(*two, *three).sentence == "zero2 overtakes zero3 between 1 and 2 nodes"


def test_pair_names_options_that_differ_from_the_preset() -> None:
    three = with_options(engines({}, {1: 1.1, 2: 1.3}), stage3_prefetch_bucket_size=1)
    told = only(*engines({1: 1.2, 2: 1.2}, {}), *three).sentence
    assert told == "zero2 overtakes zero3 (stage3_prefetch_bucket_size=1) between 1 and 2 nodes"


def test_two_allocations_are_too_few_for_a_crossover() -> None:
    times = {("zero2", 1): 1.0, ("zero2", 2): 2.0, ("zero3", 1): 2.0, ("zero3", 2): 1.0}
    found = only(*(
        record for (engine, n), s in times.items() for record in measured(asked(n, engine=engine), [s, s])
    ))  # fmt: skip
    assert (found.found, {node_comparison.verdict for node_comparison in found.node_comparisons}) == (
        "cannot be told",
        {TOO_FEW},
    )
    assert found.sentence == "unknown whether zero2 and zero3 cross: too few repeats to tell"


def test_runs_of_different_environments_are_not_paired() -> None:
    two = [record for n in (2, 4) for record in measured(asked(n, engine="zero2"), 1.0)]
    three = [record for n in (2, 4) for record in measured(asked(n, engine="zero3"), 1.0, torch="3.0")]
    early = failed("hang", asked(1, engine="zero2"), torch=None)
    assert find_crossovers(results(early, *two, *three)) == []
    assert len(find_crossovers(results(early, *two, *engines({}, {2: 1.0, 4: 1.0})))) == 1


def test_crossover_at_the_best_micro_batch_compares_samples_per_second() -> None:
    """On 2 nodes, zero3 can use micro-batch 4, with which it computes twice the samples in less than twice the time. In
    contrast, zero2 runs out of memory at micro-batch 4."""
    records = engines({1: 1.0, 2: 1.0}, {1: 1.1, 2: 1.1})
    records += measured(asked(2, engine="zero3", micro=4), 1.8)
    records += out_of_memory(asked(2, engine="zero2", micro=4))
    (found,) = (one for one in find_crossovers(results(*records)) if one.batch == "best micro-batch")
    assert found.sentence == "zero3 overtakes zero2 between 1 and 2 nodes"
    last = found.node_comparisons[-1]
    assert last.one is not None
    assert last.other is not None
    assert (last.one["micro"], last.other["micro"]) == (2, 4)
    assert last.comparison is not None
    assert round(last.comparison.ratio, 6) == round((1.0 / 8) / (1.8 / 16), 6)
