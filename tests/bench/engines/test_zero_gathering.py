"""Tests of a simulation (replay) of DeepSpeed's stage 3 coordinator, which gathers and releases weights. The results
are compared with a hand calculation for three tensors of 10, 20 and 30 elements.

A stop is the execution of one module. The replay gives one row per stop: the weights and gradients in memory while the
module runs. The example has a first module without a weight, and then three modules with one weight each. The replay
has a stop for the first module only in backward, where this module marks that the gradient of the embedding is
complete. So forward has three stops and three rows. Backward has four stops and five rows. Its last row is not a stop,
but the final reduction of gradients.
"""

from bench.core.engine_costs import ModelSizes
from bench.core.network import EqualTensors, WeightModule, list_modules, list_tensors
from bench.engines.deepspeed.costs.gathering import GatheringLimits, replay
from bench.models import t5

SHORT = GatheringLimits(prefetch=25, live=40, reuse=0, persistence=0, bucket=35, contiguous=True, checkpointing=False)

THREE = ModelSizes(
    (EqualTensors(10, 1), EqualTensors(20, 1), EqualTensors(30, 1)),
    lambda: [WeightModule(0), *(WeightModule(segment=number, weight=number, size=number) for number in range(3))],
)


def test_prefetched_weights_exist_twice_until_the_last_of_them_is_used() -> None:
    forward, _ = replay(THREE, SHORT)
    # the first weight is gathered alone; the other two are gathered together, into one flat tensor
    assert forward.padded[0].tolist() == [1, 1, 1]
    assert forward.exact[0] == 0
    # the flat tensor stays after both weights are copied out of it; the use of the last weight frees it, and the second
    # weight is gathered again for backward
    assert forward.padded[1].tolist() == [0, 1, 1]
    assert forward.exact[1] == 20 + 30
    assert forward.padded[2].tolist() == [0, 1, 0]
    assert forward.exact[2] == 30


def test_full_bucket_is_reduced_at_the_next_gradient() -> None:
    _, backward = replay(THREE, SHORT)
    assert backward.fresh.tolist() == [30, 20, 10, 0, 0]
    assert backward.reduced.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert backward.padded[:3].tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_gradient_larger_than_the_bucket_is_still_in_memory_at_the_next_gradient() -> None:
    _, backward = replay(THREE, SHORT._replace(bucket=25))
    assert backward.fresh.tolist() == [30, 20 + 30, 10, 0, 0]
    assert backward.reduced.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 0, 0]]


def test_weights_stay_gathered_from_their_first_use_without_limits() -> None:
    forward, backward = replay(THREE, SHORT._replace(prefetch=100, live=1000, reuse=1000))
    assert forward.exact[-1] == 20 + 30
    assert (backward.exact + backward.padded @ [10, 20, 30]).tolist() == [60, 30, 10, 0, 0]  # until their last use


def test_persistent_weights_are_never_gathered() -> None:
    for walk in replay(THREE, SHORT._replace(persistence=30)):
        assert not walk.exact.any()
        assert not walk.padded.any()


def test_modules_have_every_parameter_in_the_order_of_the_segments() -> None:
    for tied in (True, False):
        network = t5.stacks(t5.Shape(
            d_model=48, d_kv=8, d_ff=80, encoder_layers=2, decoder_layers=3, heads=4, vocab=96,
            gated=not tied, activation="relu", separate_head=not tied,
        ))  # fmt: skip
        found = list_modules(network)
        weights = {module.weight: module.size for module in found if module.weight is not None}
        counted = [list(weights.values()).count(size) for size in range(len(list_tensors(network)))]
        assert counted == [size.number for size in list_tensors(network)]
        segments = [module.segment for module in found]
        assert segments == sorted(segments)
        assert sorted(set(segments)) == list(range(1 + 2 + 2 * 2 + 2 + 3 * 3 + 2))  # … head and loss
        complete = [module.weight for module in found if module.weight is not None and module.completes]
        assert sorted(complete) == sorted(weights)
