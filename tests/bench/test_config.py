"""The command line's grammar: what is asked for, and what a user is told who asked for something else."""

from pathlib import Path

import pytest

from bench import config
from bench.errors import UserError
from bench.spec import config_id

GROUP_FILES = [
    (group, path.stem)
    for group in config.GROUPS
    for path in sorted((config.conf_dir() / group).glob("*.yaml"))
    if path.stem != "hugging_face"  # needs a config file: see below
]


def ask(*overrides: str, config_dir: Path | None = None) -> config.Request:
    asked = config.request(config.single(overrides), config_dir)
    config.check(asked, "cpu")
    return asked


@pytest.mark.parametrize(("group", "name"), GROUP_FILES)
def test_every_file_in_conf_composes_and_decodes(group: str, name: str) -> None:
    asked = config.request([(group, name)])
    part = {"machine": asked.machine.name, "launcher": asked.launcher}.get(group)
    assert (part or getattr(asked.spec, group).name) == name


@pytest.mark.parametrize("path", sorted((config.conf_dir() / "study").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_says_what_it_asks_costs_and_shows(path: Path) -> None:
    assert config.study(path.stem).name == path.stem
    head = path.read_text().splitlines()[:8]
    assert [any(line.startswith(f"# {word}") for line in head) for word in ("Asks:", "Costs:", "Shows:")] == [True] * 3


def test_groups_and_values_are_chosen_in_hydras_grammar() -> None:
    asked = ask("model=mt5_base", "engine=zero3", "batch.micro=8", "optimizer.betas=[0.8,0.99]", "+seed=3")
    assert asked.spec.model.parameters == 582_401_280
    assert asked.spec.engine.options["stage"] == 3
    assert asked.spec.batch.micro == 8
    assert asked.spec.optimizer.betas == (0.8, 0.99)
    assert asked.spec.seed == 3


def test_options_of_the_zero_section_are_reached_without_a_plus() -> None:
    asked = ask("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native")
    assert asked.spec.engine.options["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("modle=tiny", "modle: no such key; did you mean model?"),
        ("model=tinny", "model=tinny: no such file in conf/model; did you mean tiny?"),
        ("batch.mico=3", "batch.mico: no such key; did you mean micro?"),
        ("engine.reduce_bukket_size=3", "engine.reduce_bukket_size: no such key; did you mean reduce_bucket_size?"),
        ("data.worker=3", "data.worker: no such key; did you mean workers?"),
        ("measure.wdith=3", "measure.wdith: no such key; did you mean width?"),
        ("launcher.hang=3", "launcher.hang: no such key; did you mean hang_s?"),
        ("optimizer.beta=3", "optimizer.beta: no such key; did you mean betas?"),
        ("precision=fp8", "precision=fp8: input should be 'bf16', 'fp16' or 'fp32'"),
        ("batch.micro=0", "batch.micro=0: input should be greater than 0"),
        ("batch.micro=two", "batch.micro=two: input should be a valid integer"),
        ("nodes=2", "nodes=2: launcher=local starts one node; set nodes=1"),
        ("batch.global=7", "batch.global=7 is not batch.micro=4"),
        ("engine=ddp,zero1", "engine=ddp,zero1: a list of values is a sweep; use `zeroscale sweep`"),
        ("model.shape.d_model=64", "model.name=tiny: its shape has"),
        ("model.attention=flex", "model.attention=flex: flex attention needs a GPU"),
        ("engine.backend=zero", "engine.backend=zero: no such file in bench/engines"),
        ("engine.stage=3", "engine"),
        ("~seed", "~seed: nothing can be deleted; set seed=null"),
        ("seed", "seed: not an override"),
        ("=3", "=3: not an override"),
        ("seed=range(1,3)", "seed=range(1,3): not a list"),
        ("model=hugging_face", "model.config_file: Missing mandatory value"),
        ("seed=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_a_wrong_input_is_told_in_one_line_with_its_remedy(override: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        ask(override)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_precision_that_the_machine_cannot_compute_in_is_refused() -> None:
    with pytest.raises(UserError, match="precision=bf16: machine=v100_16 cannot compute in it; choose from fp16, fp32"):
        ask("machine=v100_16", "precision=bf16")


def test_a_model_of_ones_own_is_a_shape_in_a_yaml(tmp_path: Path) -> None:
    tmp_path = tmp_path / "my conf, isn't it"
    (tmp_path / "model").mkdir(parents=True)
    text = (config.conf_dir() / "model" / "tiny.yaml").read_text()
    own = text.replace("name: tiny", "name: mine").replace("parameters: 2116352", "parameters: null")
    (tmp_path / "model" / "mine.yaml").write_text(own)
    asked = ask("model=mine", config_dir=tmp_path)
    assert asked.spec.model.name == "mine"
    assert asked.spec.model.parameters is None


def test_a_model_of_ones_own_is_a_hugging_face_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "mt5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6,'
        ' "vocab_size": 250112, "feed_forward_proj": "gated-gelu"}'
    )
    asked = ask("model=hugging_face", f"model.config_file={file}", "model.name=own_small")
    published = config.request([("model", "mt5_small")])
    assert asked.spec.model.shape == published.spec.model.shape


def test_where_and_how_a_run_starts_is_no_part_of_its_identity() -> None:
    assert config_id(ask("machine=cpu", "launcher.hang_s=5").spec) == config_id(ask().spec)
