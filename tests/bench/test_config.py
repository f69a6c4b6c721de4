"""Tests of overrides and config files: the specs that they produce, and the error messages for invalid ones."""

from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.config import compose
from bench.config.exclude_rules import collect_fields, list_field_names
from bench.core.errors import UserError
from bench.core.spec import config_id
from bench.core.study import Study

GROUP_FILES = [
    (group, path.stem)
    for group in compose.GROUPS
    for path in sorted((compose.find_conf_folder() / group).glob("*.yaml"))
    if path.stem != "hugging_face"  # this family needs a config file, and other tests cover it
]


def ask(*overrides: str, config_dir: Path | None = None) -> compose.Request:
    composed = compose.compose_request(compose.parse_single(["devices_per_node=2", *overrides]), config_dir)
    compose.check(composed, "cpu")
    return composed


@pytest.mark.parametrize(("group", "name"), GROUP_FILES)
def test_every_file_in_conf_composes_and_decodes(group: str, name: str) -> None:
    composed = compose.compose_request([(group, name), ("devices_per_node", 2)])
    if group == "launcher":  # slurm_<site> is the launcher slurm with a site's options
        assert composed.launcher == name.partition("_")[0]
    elif group == "measure":
        assert composed.spec.measure.window_s == {"full": 60, "quick": 5, "smoke": 2}[name]
    elif group == "objective":
        assert composed.spec.objective == name
    else:
        assert (composed.machine if group == "machine" else getattr(composed.spec, group)).name == name


@pytest.mark.parametrize(
    "path", sorted((compose.find_conf_folder() / "study").glob("*.yaml")), ids=lambda path: path.stem
)
def test_header_of_every_study_states_question_cost_and_result(path: Path) -> None:
    assert compose.read_study(path.stem).name == path.stem
    head = path.read_text().splitlines()[:10]
    words = ("Question:", "Cost:", "Result:")
    assert all(any(line.startswith(f"# {word}") for line in head) for word in words)


def test_groups_and_values_use_hydras_grammar() -> None:
    composed = ask("model=mt5_base", "engine=zero3", "batch.micro=8", "optimizer.betas=[0.8,0.99]", "+seed=3")
    assert composed.spec.model.parameters == 582_401_280
    assert composed.spec.engine.options["stage"] == 3
    assert composed.spec.batch.micro == 8
    assert composed.spec.optimizer.betas == (0.8, 0.99)
    assert composed.spec.seed == 3


def test_options_of_deepspeeds_zero_section_need_no_plus() -> None:
    composed = ask("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native")
    assert composed.spec.engine.options["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_bucket_of_a_preset_is_at_most_the_size_of_the_model(engine: str) -> None:
    tiny, large = ask("model=tiny", f"engine={engine}").spec, ask("model=mt5_base", f"engine={engine}").spec
    assert tiny.engine.options["reduce_bucket_size"] == 2_200_000, "2,116,352 parameters, rounded up to 100,000"
    assert large.engine.options["reduce_bucket_size"] == 50_000_000, "a model of 582,401,280 parameters can fill it"


@pytest.mark.parametrize("size", [1_000_000, 50_000_000])
def test_bucket_set_by_the_user_is_kept(size: int) -> None:
    given = ask("model=tiny", "engine=zero2", f"engine.reduce_bucket_size={size}").spec
    assert given.engine.options["reduce_bucket_size"] == size


def test_bucket_of_a_users_own_preset_is_kept(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    preset = "name: mine\nbackend: deepspeed\nstage: 1\nreduce_bucket_size: 50_000_000\noverlap_comm: true\n"
    (tmp_path / "engine/mine.yaml").write_text(preset)
    assert ask("model=tiny", "engine=mine", config_dir=tmp_path).spec.engine.options["reduce_bucket_size"] == 50_000_000


def test_fitted_bucket_gives_another_config_id_than_the_preset_size() -> None:
    recorded = {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True}
    preset_size, fitted = ask("engine=zero2", "engine.reduce_bucket_size=50_000_000").spec, ask("engine=zero2").spec
    assert preset_size.engine.options == recorded, "a study can be resumed whose records have this size"
    assert config_id(fitted) != config_id(preset_size)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("modle=tiny", "modle: no such key; did you mean model?"),
        ("micro=4", "micro: no such key; did you mean batch.micro?"),
        ("model=tinny", "model=tinny: no such file in conf/model; did you mean tiny?"),
        ("model=3", "model=3: names no file in conf/model; choose from byt5_base"),
        ("model=[tiny]", "model=['tiny']: names no file in conf/model"),
        ("batch.mico=3", "batch.mico: no such key; did you mean batch.micro?"),
        (
            "engine.reduce_bukket_size=3",
            "engine.reduce_bukket_size: no such key; did you mean engine.reduce_bucket_size?",
        ),
        ("data.worker=3", "data.worker: no such key; did you mean data.workers?"),
        ("measure.widnow_s=3", "measure.widnow_s: no such key; did you mean measure.window_s?"),
        ("launcher.hang=3", "launcher.hang: no such key; did you mean launcher.hang_s?"),
        ("optimizer.beta=3", "optimizer.beta: no such key; did you mean optimizer.betas?"),
        ("model.layers=3", "model.layers: no such key; did you mean model.shape.encoder_layers?"),
        ("interface=ib0", "interface: no such key; `zeroscale explain` lists the keys"),
        ("launcher.partition=gpu", "launcher.partition: no such key; choose launcher=slurm, which has it"),
        ("data.hub=foo", "data.hub: no such key; choose data=text, which has it"),
        ("engine.bucket_cap_mb=3", "engine.bucket_cap_mb: no such key; choose engine=ddp, which has it"),
        ("engine.nonsense=1", "engine.nonsense: no such key; `zeroscale explain engine` lists the keys"),
        ("precision=fp8", "precision=fp8: must be one of bf16, fp16, fp32; did you mean "),
        ("batch.micro=0", "batch.micro=0: must be an integer > 0; set batch.micro=1 or more"),
        ("batch.micro=two", "batch.micro=two: must be an integer > 0; `zeroscale explain batch.micro` describes it"),
        ("nodes=1.5", "nodes=1.5: must be an integer > 0; set nodes=1 or nodes=2"),
        ("nodes=0.5", "nodes=0.5: must be an integer > 0; set nodes=1 or more"),
        ("model.dropout=2", "model.dropout=2: must be a number ≥ 0, < 1; set model.dropout below 1"),
        (
            "launcher.lock=maybe",
            "launcher.lock=maybe: must be true or false; set launcher.lock=true or launcher.lock=false",
        ),
        ("launcher.quiet_within_s=soon", "launcher.quiet_within_s=soon: must be a number ≥ 0 or null; "),
        ("nodes=2", "nodes=2: launcher=local runs on one node only; set nodes=1"),
        ("batch.global=7", "batch.global=7 is not batch.micro=4"),
        ("engine=ddp,zero1", "engine=ddp,zero1: is a list of values, which only sweeps support; use `zeroscale sweep`"),
        ("model.shape.d_model=64", "model.name=tiny: its shape has"),
        ("model.attention=flex", "model.attention=flex: flex attention needs a GPU"),
        ("engine.backend=zero", "engine.backend=zero: no such file in bench/engines"),
        ("engine.stage=3", "engine"),
        ("~seed", "~seed: keys cannot be deleted; set seed=null"),
        ("seed", "seed: not an override"),
        ("=3", "=3: not an override"),
        ("seed=range(1,3)", "seed=range(1,3): not a list"),
        ("engine=ddp,,zero1", "engine=ddp,,zero1: not an override (an empty value before or after a comma); write"),
        ("engine=[ddp", "engine=[ddp: not an override (it ends too early, for example without a closing bracket"),
        ("seed=(1", "seed=(1: not an override (unexpected '('); write"),
        ("seed='x", "seed='x: not an override (it ends too early"),
        ("model=hugging_face", "model.config_file: missing; give the path of a config.json"),
        ("seed=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_wrong_input_is_reported_in_one_line_with_its_remedy(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        ask(override)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("targets", "limit"), [("[]", 1024), ("[q_proj,down_proj]", 4096)])
def test_rank_above_that_of_the_smallest_adapted_matrix_is_refused(targets: str, limit: int) -> None:
    words = ("model=llama_3_8b", "adapter=lora", f"adapter.targets={targets}", "launcher=slurm", "devices_per_node=8")
    ask(*words, f"adapter.rank={limit}")
    with pytest.raises(UserError, match=f"^adapter.rank={limit + 1}: .* a rank of {limit} at most; set adapter.rank"):
        ask(*words, f"adapter.rank={limit + 1}")


def test_precision_unsupported_by_the_machine_is_refused() -> None:
    with pytest.raises(UserError, match="precision=bf16: machine=v100_16 does not support it; choose from fp16, fp32"):
        ask("machine=v100_16", "precision=bf16")


def test_users_own_model_is_a_shape_in_yaml(tmp_path: Path) -> None:
    tmp_path = tmp_path / "my conf, isn't it"
    (tmp_path / "model").mkdir(parents=True)
    text = (compose.find_conf_folder() / "model" / "tiny.yaml").read_text()
    own = text.replace("name: tiny", "name: mine").replace("parameters: 2116352", "parameters: null")
    (tmp_path / "model" / "mine.yaml").write_text(own)
    composed = ask("model=mine", config_dir=tmp_path)
    assert composed.spec.model.name == "mine"
    assert composed.spec.model.parameters is None


def test_users_own_model_is_a_hugging_face_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "mt5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6,'
        ' "vocab_size": 250112, "feed_forward_proj": "gated-gelu"}'
    )
    composed = ask("model=hugging_face", f"model.config_file={file}", "model.name=own_small")
    published = compose.compose_request([("model", "mt5_small")])
    assert composed.spec.model.shape == published.spec.model.shape


def test_launcher_and_machine_are_not_part_of_the_identity() -> None:
    assert config_id(ask("machine=cpu", "launcher.hang_s=5").spec) == config_id(ask().spec)


def test_mapping_is_merged_and_list_is_replaced() -> None:
    composed = ask("engine=zero3", "engine.offload_param={device: cpu, pin_memory: false}", "optimizer.betas=[0.5,0.6]",
                "engine.offload_param.pin_memory=true", "sequence={decoder: 7}")  # fmt: skip
    assert composed.spec.engine.options["offload_param"] == {"device": "cpu"}, "true is the default"
    assert composed.spec.optimizer.betas == (0.5, 0.6)
    assert composed.spec.sequence == {"encoder": 512, "decoder": 7}


def test_interpolations_are_resolved_everywhere() -> None:
    assert ask("seed=7", "batch.micro=${seed}").spec.batch.micro == 7
    study = Study(name="s", base={"data.workers": "${nodes}"}, axes={"nodes": [1]})
    assert compose.compose_points(study, []).points[0].composed.spec.data.workers == 1


def test_point_of_a_study_equals_the_single_point() -> None:
    study = Study(
        name="s",
        base={"model": "mt5_base", "devices_per_node": 2},
        axes={"engine": ["ddp", "zero3"], "batch.micro": [1, 2]},
    )
    for point in compose.compose_points(study, []).points:
        assert point.composed == compose.compose_request(point.overrides)
        assert point.config_id == config_id(point.composed.spec)


def test_every_exclude_rule_counts_its_excluded_points() -> None:
    study = Study(
        name="s",
        axes={"engine": ["ddp", "zero1", "zero3"], "batch.micro": [1, 2, 4]},
        exclude=("engine == 'ddp' and batch.micro > 1", "engine.stage == 3", "batch.micro == 4", "seed == 1"),
    )
    found = compose.compose_points(study, [])
    assert [(point.composed.spec.engine.name, point.composed.spec.batch.micro) for point in found.points] == [
        ("ddp", 1), ("zero1", 1), ("zero1", 2),
    ]  # fmt: skip
    assert list(found.excluded.values()) == [2, 3, 1, 0]


def test_excluded_points_may_be_infeasible() -> None:
    engines = {"engine": ["zero0", "zero1"]}
    cannot_run = Study(name="s", base={"precision": "fp16"}, axes=engines, exclude=("engine.stage == 0",))
    assert len(compose.compose_points(cannot_run, []).points) == 1
    cannot_decode = Study(
        name="s",
        base={"batch.global": 12, "devices_per_node": 2},
        axes={"batch.micro": [2, 3, 4]},
        exclude=("batch.global % (batch.micro * world_size) != 0",),
    )
    assert [point.composed.spec.accumulation for point in compose.compose_points(cannot_decode, []).points] == [3, 2]
    with pytest.raises(UserError, match=r"batch\.global=12 is not batch\.micro=4"):
        compose.compose_points(cannot_decode.model_copy(update={"exclude": ("nodes > 1",)}), [])


def test_study_without_points_left_is_refused() -> None:
    with pytest.raises(UserError, match="study=s: none of its 2 points is left"):
        compose.compose_points(Study(name="s", axes={"seed": [1, 2]}, exclude=("seed > 0",)), [])


def test_unknown_name_in_a_rule_is_refused_before_decoding() -> None:
    study = Study(name="s", axes={"model": ["nonexistent"]}, exclude=("engine.stge == 0",))
    with pytest.raises(UserError, match=r"`engine.stge` is no name of a point; did you mean engine.stage\?"):
        compose.compose_points(study, [])


def test_equal_points_on_one_machine_are_merged() -> None:
    study = Study(name="s", axes={"machine": ["cpu", "auto"], "batch.accumulation": [None, 1, 2]})
    found = compose.compose_points(study, [])
    assert [point.overrides for point in found.points] == [
        (("machine", machine), ("batch.accumulation", accumulation))
        for machine in ("cpu", "auto")
        for accumulation in (None, 2)
    ]
    assert found.merged == 2


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (
            {"launcher.hang_s": [3, 67], "engine": ["ddp", "zero1"]},
            "launcher.hang_s=3,67: not part of a configuration, so its values make no separate points; "
            "write launcher.hang_s=3.67 for a decimal number, or give one value at a time",
        ),
        ({"launcher.lock": [True, False]}, "launcher.lock=true,false: not part of a configuration, so its values"),
        ({"launcher": ["local", "slurm"]}, "launcher=local,slurm: not part of a configuration, so its values"),
        ({"machine.memory_bytes": [10**9, 2 * 10**9]}, "machine.memory_bytes=1000000000,2000000000: not part of"),
    ],
)
def test_values_that_make_no_separate_points_are_refused(axes: dict[str, list[Any]], expected: str) -> None:
    with pytest.raises(UserError) as refused:
        compose.compose_points(Study(name="s", base={"devices_per_node": 2}, axes=axes), [])
    assert expected in str(refused.value)


def test_properties_of_a_machine_may_differ_with_its_name() -> None:
    machines = [{"machine.name": name, "machine.power_w": power} for name, power in (("a", 300), ("b", 400))]
    found = compose.compose_points(Study(name="s", base={"devices_per_node": 2}, axes={"which": machines}), [])
    assert [point.composed.machine.power_w for point in found.points] == [300, 400]


def test_points_are_checked_for_their_own_device() -> None:
    study = Study(name="s", base={"model.attention": "flex"}, axes={"seed": [1, 2]})
    assert len(compose.compose_points(study, [], None, lambda composed: "cuda").points) == 2
    with pytest.raises(UserError, match="flex attention needs a GPU"):
        compose.compose_points(study, [], None, lambda composed: "cpu" if composed.spec.seed == 2 else "cuda")


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_exclude_rule_uses_the_completed_fields_of_a_point(engine: str) -> None:
    composed = ask("model=mt5_xl", f"engine={engine}", "data=text", "batch.accumulation=3", "machine=cpu")
    seen, spec = collect_fields(composed), composed.spec.model_dump(by_alias=True)
    flat = {
        **spec,
        "engine": spec["engine"] | spec["engine"]["options"],
        "data": spec["data"] | spec["data"]["options"],
    }

    def value(tree: Any, path: tuple[str, ...]) -> Any:
        for name in path:
            tree = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
        return tree

    for path in leaves(flat):
        assert value(seen, list_field_names()[".".join(path)]) == value(flat, path), path
    assert value(seen, list_field_names()["batch.global"]) == 4 * 3 * 2
    assert value(seen, list_field_names()["engine.gradient_as_bucket_view"]) is (True if engine == "ddp" else None), (
        "a default"
    )
    assert value(seen, list_field_names()["world_size"]) == 2
    assert [value(seen, list_field_names()[group]) for group in ("model", "engine", "data", "machine")] == [
        "mt5_xl", engine, "text", "cpu",
    ]  # fmt: skip


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of each value in a nested mapping, as a tuple of keys. Values inside a field `options` are
    omitted."""
    found = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += leaves(value, (*path, name)) if name != "options" else []
        elif path or name not in ("model", "engine", "data"):
            found.append((*path, name))
    return found


def test_users_own_file_with_the_name_of_a_shipped_one_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "machine" / "h200.yaml"
    own.parent.mkdir()
    own.write_text("name: h200\n")
    with pytest.raises(UserError, match="have this name; rename your file"):
        compose.compose_request([("machine", "h200")], tmp_path)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize(
    "key",
    [
        "optimizer.lr", "optimizer.eps", "measure.max_s", "measure.window_s", "model.dropout", "launcher.hang_s",
        "launcher.time_limit_min", "machine.price_per_device_hour", "machine.memory_bytes_per_s",
        "machine.peak_tflops.bf16", "seed", "batch.micro",
    ],
)  # fmt: skip
def test_infinite_number_is_refused(key: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{key}=-?(inf|nan): must be a finite number; ") as caught:
        ask(f"{key}={value}")
    assert str(caught.value).isprintable()


def test_infinite_options_of_engine_and_data_are_refused() -> None:
    for words in (("data=text", "data.noise_density=nan"), ("engine=ddp", "engine.bucket_cap_mb=inf")):
        with pytest.raises(UserError, match="must be a finite number; "):
            ask(*words)
    with pytest.raises(UserError, match=r"optimizer\.betas\.1=inf: must be a finite number"):
        ask("optimizer.betas=[0.9,inf]")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=" + "[" * 1500, "not an override ("),
        ("seed=" + "9" * 5000, "not an override (Exceeds the limit"),
        ("seed=glob(*)", "seed=glob(*): not a list"),
        ("model=" + "x" * 300, "no such file in conf/model"),
        ("data.source='a\nb'", "no such file in bench/data"),
        ("model.shape.encoder_layers=1000000000", "model.shape.encoder_layers=1000000000: must be an integer > 0, "),
        ("data=text data.files=['a**b.txt']", "data.files=a**b.txt: no such file"),
        ("data=text data.files=['~nobody-of-that-name/x.txt']", "no such file"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1.0]: a decay rate must be at least 0 and below 1"),
        ("optimizer.betas=[-0.1,0.9]", "optimizer.betas=[-0.1, 0.9]: a decay rate must be at least 0 and below 1"),
        ("model=hugging_face model.config_file=/dev/null", "model.config_file=/dev/null: not a readable config.json"),
    ],
)
def test_absurd_input_is_refused_in_one_short_line(
    override: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--dry-run", "machine=cpu", "devices_per_node=1", *override.split(" ")]) == 2
    line = capsys.readouterr().err
    assert expected in line
    assert line.count("\n") == 1 and line[:-1].isprintable() and len(line) < 700


@pytest.mark.parametrize("text", ["[]", '"x"', '{"model_type": "t5", "feed_forward_proj": ["a"]}', "[" * 100_000, "{"])
def test_invalid_config_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError):
        ask("model=hugging_face", f"model.config_file={file}")


def test_missing_folder_of_users_own_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--config-dir .*/none: no such folder; name a folder with subfolders like those of conf/"
    ):
        ask(config_dir=tmp_path / "none")


def test_keys_of_the_older_protocol_are_read_with_a_hint_to_the_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of the older measurement protocol are accepted in overrides and in a user's YAML file (such as
    conf/engine/mine.yaml). For each old key, a warning names the new key."""
    given = ask("measure.min_s=7.25", "measure.width=0.0123", "measure.max_steps=321", "measure.warmup_max_steps=33")
    assert given.spec.measure == ask("measure.window_s=7.25").spec.measure
    folder = tmp_path / "measure"
    folder.mkdir()
    (folder / "mine.yaml").write_text("warmup_steps: 3\nmin_steps: 9\nmin_s: 1.75\nmax_steps: 40\nmax_s: 6.0\n")
    mine = ask("measure=mine", config_dir=tmp_path).spec.measure
    assert (mine.warmup_steps, mine.min_steps, mine.window_s, mine.max_s) == (3, 9, 1.75, 6.0)
    warnings = caplog.messages
    assert "measure.min_s=7.25: is called measure.window_s" in warnings
    assert "measure.min_s=1.75: is called measure.window_s" in warnings
    assert all("measure.window_s" in line or "measure.gpu_warmup_s" in line for line in warnings) and len(warnings) == 6


def test_study_with_the_older_protocol_is_read() -> None:
    study = compose.read_study(str(Path(__file__).parents[1] / "data/studies/step_time.yaml"))
    [protocol] = {point.composed.spec.measure for point in compose.compose_points(study, []).points}
    assert (protocol.window_s, protocol.min_steps, protocol.max_s) == (2.0, 16, 9.0)
