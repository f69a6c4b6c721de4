"""Tests that a spec which FSDP2 cannot run raises an error before the run starts. Other tests check the predicted costs
of FSDP2 without running it."""

from typing import Any

import pytest
import yaml
from test_engines_agree import CONF

from bench import engines
from bench.config import compose
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.engines.fsdp.options import shard_ranks
from bench.predict.step_time import predict_step_time
from bench.predict.workload import predict_engine_memory, predict_engine_step

PRESETS = ("fsdp", "fsdp_no_reshard", "fsdp_hybrid")


WRITTEN_OUT = {"reshard_after_forward": True, "reduce_dtype": None}


def spec(options: dict[str, Any], **fields: Any) -> RunSpec:
    plain = {
        "model": {"name": "test", "shape": {}},
        "engine": {"name": "fsdp", "backend": "fsdp", "options": WRITTEN_OUT | options},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 1},
        "nodes": 2,
        "devices_per_node": 4,
    }  # fmt: skip
    return RunSpec.model_validate(plain | fields)


def check(asked: RunSpec) -> None:
    plugin = engines.load("fsdp")
    plugin.check(plugin.Options.model_validate(asked.engine.options), asked)


@pytest.mark.parametrize(("options", "fields", "message"), [
    ({}, {"precision": "fp16"}, "has no loss scale"),
    ({}, {"optimizer": {"implementation": "native"}}, "no native optimizer"),
    ({}, {"optimizer": {"name": "adafactor"}}, "need whole matrices, and a rank of engine fsdp has some of their rows"),
    ({"reduce_dtype": "bf16"}, {"precision": "fp32"}, "a run with precision=fp32 reduces in fp32"),
    ({"shard_ranks": 3}, {}, "does not divide the 8 data-parallel ranks"),
    ({"shard_ranks": 1}, {}, "nothing is partitioned; set engine=ddp"),
    ({"reshard_after_forward": 3}, {}, "must divide the 8 ranks that share one copy"),
    ({"reshard_after_forward": 4, "shard_ranks": 4}, {}, "and below 4"),
    ({"reshard_after_forward": 1}, {}, "at least 2"),
])  # fmt: skip
def test_unsupported_fsdp_specs_are_refused_in_one_line(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check(spec(options, **fields))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": 4}, {"shard_ranks": 2}, {"shard_ranks": "node"}, {"offload": True}]
)
def test_supported_fsdp_options_pass_the_check(options: dict[str, Any]) -> None:
    check(spec(options))


def test_shard_ranks_are_all_ranks_or_those_of_a_node_or_the_given_number() -> None:
    options = engines.load("fsdp").Options
    found = []
    for given in ({}, {"shard_ranks": "node"}, {"shard_ranks": 2}):
        asked = spec(given)
        found.append(shard_ranks(options.model_validate(asked.engine.options), asked))
    assert found == [8, 4, 2]
    single = spec({"shard_ranks": "node"}, devices_per_node=1)
    # with one rank per node, all ranks share a copy
    assert shard_ranks(options.model_validate(single.engine.options), single) == 2


def test_labels_of_fsdp_presets_are_different() -> None:
    labels = {name: engines.facts(preset(name)).label for name in PRESETS}
    assert labels == {
        "fsdp": "FSDP2",
        "fsdp_no_reshard": "FSDP2, weights kept for backward",
        "fsdp_hybrid": "FSDP2, hybrid shards",
    }


def preset(name: str) -> RunSpec:
    options = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert (options.pop("name"), options.pop("backend")) == (name, "fsdp")
    return spec(options, engine={"name": name, "backend": "fsdp", "options": options})


def asked(*words: str) -> RunSpec:
    return compose.compose_request(
        compose.parse_single(["model=mt5_base", "machine=a100_80", "launcher=slurm", *words])
    ).spec


def test_predicted_mt5_base_with_fsdp_has_12_bytes_per_parameter_over_the_shard_ranks() -> None:
    """The model has 582,401,280 parameters. The number of rows of each parameter is divisible by the 8 ranks, so no
    shard is padded."""
    for name, ranks in (("fsdp", 16), ("fsdp_hybrid", 8)):
        run = asked(f"engine={name}", "nodes=2", "devices_per_node=8")
        held = predict_engine_memory(run, "cuda").resident()
        assert held["weights"] + held["optimizer moments"] == pytest.approx(12 * 582_401_280 / ranks, rel=1e-6)
        assert predict_engine_step(run, "cuda").updated == pytest.approx(582_401_280 / ranks, rel=1e-6)
        assert engines.facts(run).division == (ranks, ranks, ranks)


def test_offloaded_fsdp_states_are_in_host_memory_and_step_time_is_not_predicted() -> None:
    run = asked("engine=fsdp", "engine.offload=true", "devices_per_node=8")
    needed = predict_engine_memory(run, "cuda")
    assert needed.resident() == {}
    host = needed.host()
    assert host is not None
    assert sum(high for _, high in host.values()) == pytest.approx(16 * 582_401_280 / 8, rel=1e-6)
    with pytest.raises(UserError, match="AdamW on the host"):
        predict_engine_step(run, "cuda")


def test_hybrid_shards_transfer_only_gradient_shards_between_nodes() -> None:
    run = asked("engine=fsdp_hybrid", "nodes=4", "devices_per_node=8")
    between = [transfer for transfer in predict_engine_step(run, "cuda").transfers if transfer.nodes is not None]
    (copies,) = between
    assert (copies.kind, copies.ranks, copies.nodes, copies.at_once) == ("all_reduce", 4, 4, 8)
    assert copies.payload_bytes == pytest.approx(2 * 582_401_280 / 8, rel=1e-6)
    machine = compose.compose_request(
        compose.parse_single(["machine=a100_80", "launcher=slurm", "devices_per_node=8"])
    ).machine
    slower = machine.model_copy(update={"inter_node_bytes_per_s": machine.inter_node_bytes_per_s / 8})
    hybrid = [predict_step_time(run, of).parts["all-reduce"] for of in (machine, slower)]
    assert hybrid[1] > 4 * hybrid[0]
