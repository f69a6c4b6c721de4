"""Tests of `zeroscale run` without arguments. The command uses the devices of this machine. If devices are missing, it
reports this before it starts any process."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ended_well import saved_pair
from started_runs import PATIENCE_S, Command

from analysis import flags, results
from bench import api
from bench.cli import main
from bench.cli.run import format_answer
from bench.config import compose
from bench.core import store
from bench.core.errors import UserError
from bench.core.point_fields import flatten
from bench.core.record import RunRecord
from bench.core.spec import MeasureSpec
from bench.measure import environment
from bench.sweep import inputs, local_attempt

Refused = Callable[..., str]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that simulates a machine with the given number of GPUs of the given name, and a torch that was built
    with CUDA."""

    def show(number: int, name: str = "NVIDIA L4") -> None:
        monkeypatch.setattr(environment.devices, "count_devices", lambda: number)
        monkeypatch.setattr(environment.devices, "query", lambda device, question: name)
        monkeypatch.setattr(environment, "_read_torch_constant", lambda name: "12.8")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return show


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    inputs.find_local_device.cache_clear()
    yield
    inputs.find_local_device.cache_clear()


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Function that simulates a machine without GPUs, with this number of CPU cores."""

    def leave(cores: int) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(cores)))

    return leave


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    def line(*words: str) -> str:
        assert main([*words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return line


def devices(*overrides: str) -> int:
    return compose.compose_request(compose.parse_single(overrides)).spec.devices_per_node


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (64, 2)])
def test_default_on_a_cpu_is_two_processes_or_one_on_a_single_core(
    processor: Callable[[int], None], cores: int, processes: int
) -> None:
    processor(cores)
    assert devices() == devices("machine=cpu") == processes
    assert devices("devices_per_node=3") == 3


@pytest.mark.parametrize(
    ("visible", "number"), [(None, 4), ("0", 1), ("2,3", 2), ("0,1,2,3,4", 4), ("1,-1,2", 1), ("GPU-8a,GPU-9b", 2)]
)
def test_default_is_all_visible_gpus(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int
) -> None:
    gpus(4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices() == number


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_select_the_cpu(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices() == min(2, environment.count_cores())


def test_devices_of_a_named_machine_are_counted_if_it_is_this_machine(gpus: Callable[..., None]) -> None:
    gpus(4, "NVIDIA H200")
    assert devices("machine=h200") == 4
    assert devices("machine=h200", "machine.devices_per_node=2") == 2, "what its file says goes first"
    with pytest.raises(
        UserError, match="machine=a100_80: this machine has NVIDIA H200; to run here choose machine=auto; to predict, "
    ):
        devices("machine=a100_80")
    assert devices("machine=a100_80", "machine.devices_per_node=8") == 8


def test_device_count_is_required_for_other_machines() -> None:
    with pytest.raises(UserError, match="devices_per_node: launcher=slurm uses other machines"):
        devices("launcher=slurm")
    assert devices("launcher=slurm", "machine.devices_per_node=8") == 8
    assert devices("launcher=slurm", "devices_per_node=4") == 4


def test_prediction_is_for_the_run_that_would_start_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=tiny", "nodes=4", "machine=cpu"]) == 0
    assert f"4 × {min(2, environment.count_cores())} devices" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [("run",), ("sweep",), ("run", "--dry-run"), ("sweep", "--dry-run")])
def test_missing_devices_are_refused_before_the_start(
    verb: tuple[str, ...], gpus: Callable[..., None], refused: Refused, tmp_path: Path
) -> None:
    gpus(1)
    words = (*verb, "--results", str(tmp_path))
    assert "devices_per_node=2: this computer has 1 GPU; set 1 or less" in refused(*words, "devices_per_node=2")
    assert "machine=h200: expects NVIDIA H200, but this computer has NVIDIA L4" in refused(
        *words, "machine=h200", "devices_per_node=1"
    )
    assert list(tmp_path.iterdir()) == []


def test_too_many_processes_for_the_processor_are_refused(processor: Callable[[int], None], refused: Refused) -> None:
    processor(2)
    assert "devices_per_node=100000: too many processes for 2 cores; set 16 or less" in refused(
        "run", "--dry-run", "devices_per_node=100000"
    )
    assert "machine=h200: this computer has no GPU" in refused("run", "--dry-run", "machine=h200", "devices_per_node=8")
    for verb in ("run", "sweep"):
        training = ("data=text", "learning.tokens=1000", "devices_per_node=17")
        limit = refused(verb, "--dry-run", *training)
        assert "devices_per_node=17: too many processes" in limit, (
            "not the evaluation samples, which 17 does not divide"
        )


def chosen(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    """Run a command as a dry run, and return the specs that it prints."""
    assert main([*words, "--dry-run", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    return [one["spec"] for one in (plain if isinstance(plain, list) else [plain])]


def test_default_point_on_a_cpu_is_small(processor: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    processor(2)
    smoke = compose.compose_points(compose.read_study("smoke"), []).points[0].composed.spec
    for words in (("run", "engine=zero3"), ("sweep", "engine=zero3"), ("sweep", "engine=ddp,zero3")):
        spec = chosen(capsys, *words)[0]
        assert spec["precision"] == smoke.precision
        assert spec["sequence"] == smoke.sequence
        assert spec["measure"] == smoke.measure.model_dump()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("sequence.encoder=64", "sequence.encoder", 64),
        ("sequence={decoder: 16}", "sequence.decoder", 16),
        ("measure.max_s=100", "measure.max_s", 100),
        ("precision=bf16", "precision", "bf16"),
        ("seed=3", "seed", 3),
    ],
)
@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_override_on_a_cpu_changes_no_other_key(
    verb: str,
    override: str,
    key: str,
    value: object,
    processor: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    processor(2)
    [spec], [default] = chosen(capsys, verb, override), chosen(capsys, verb)
    flat, before = dict(flatten(spec)), dict(flatten(default))
    assert flat[key] == value
    assert {name for name in flat if flat[name] != before[name]} == {key}


def test_named_protocol_on_a_cpu_uses_its_whole_file(
    processor: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    processor(2)
    [spec] = chosen(capsys, "run", "measure=full")
    assert (spec["measure"], spec["precision"]) == (MeasureSpec().model_dump(), "fp32")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "precision=fp32 sequence.encoder=128 sequence.decoder=32 measure=smoke"),
        (("sequence.encoder=64", "precision=bf16"), "sequence.decoder=32 measure=smoke"),
        (("model=gpt2_tiny", "measure=quick"), "precision=fp32 sequence.tokens=256"),
    ],
)
def test_line_of_cpu_defaults_names_exactly_the_changed_keys(
    words: tuple[str, ...], named: str, processor: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    processor(2)
    assert main(["run", *words, "--dry-run"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"defaults on a CPU: {named}"]


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_refusal_of_a_cpu_default_says_that_it_is_a_default(
    verb: str, processor: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, zeroscale shortens sequences by default. This default can be invalid, for example for a model family
    that supports only one sequence length. In this case, the error message must say that the value is a default."""

    def refuse(composed: compose.Request, device: str | None) -> None:
        raise UserError(f"sequence.decoder={composed.spec.sequence['decoder']}", "is too short", "set 64")

    processor(2)
    monkeypatch.setattr("bench.sweep.plan.check_runnable", refuse)
    for own, remark in (((), " (sequence.decoder=32 is a default for runs on a CPU)"), (("sequence.decoder=32",), "")):
        assert main([verb, "engine=ddp", *own, "--dry-run"]) == 2
        assert capsys.readouterr().err == f"zeroscale: sequence.decoder=32: is too short{remark}; set 64\n"


def test_studies_and_gpus_have_no_cpu_defaults(
    gpus: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: {devices_per_node: 1}\naxes: {engine: [ddp]}\n")
    [spec] = chosen(capsys, "sweep", f"study={tmp_path / 'mine.yaml'}", "machine=cpu")
    assert (spec["precision"], spec["measure"]) == ("bf16", MeasureSpec().model_dump())
    gpus(1)
    [spec] = chosen(capsys, "run")
    assert (spec["precision"], spec["devices_per_node"]) == ("bf16", 1)


def _parse_next(text: str) -> list[str]:
    """Return the command that the output suggests as a next step, as a list of words. In the output, the line before
    the command states the purpose of the command."""
    return shlex.split(text.partition(":\n")[2].replace("\\\n", ""))  # unlike a shell, shlex keeps continued lines


@pytest.mark.processes
@pytest.mark.cold
def test_first_run_prints_its_rate_flags_and_the_next_command(tmp_path: Path) -> None:
    run = Command(tmp_path, ["machine=cpu"])
    output, errors = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 0, errors
    [record] = [store.read_record(path) for path in store.find_records([tmp_path])]
    assert record.observations and record.observations.steps and record.observations.tokens
    steps, tokens = record.observations.steps, record.observations.tokens
    rate = tokens.all * len(step_s := steps.step_s[steps.cut :]) / steps.window_s
    lines = output.splitlines()
    assert lines[1].startswith("ok: ") and f"n = {len(step_s)}" in lines[1]
    assert lines[2].startswith(f"{rate:,.0f} tokens per second")
    raised = flags.list_flags(record)  # the flags raised depend on the speed of this machine
    assert [line for line in lines if line.startswith("flags: ")] == [f"flags: {', '.join(raised)}"] * bool(raised)
    text = " ".join(" ".join(lines).split())
    assert all(f"{name}: the run {flags.FLAGS[name].meaning}" in text for name in raised)
    notes = flags.list_notes(record)
    assert [line for line in lines if line.startswith("notes: ")] == [f"notes: {', '.join(notes)}"] * bool(notes)
    reference, report = output.split("next, ")[1:]
    assert _parse_next(reference)[:4] == ["zeroscale", "run", "engine=ddp", "machine=cpu"]
    assert _parse_next(report) == ["zeroscale", "report", str(tmp_path / "adhoc"), "--out", "results/reports/adhoc"]
    assert "precision=fp32" in errors and "precision=fp32" in record.circumstance.overrides


def test_printed_next_command_has_the_same_folders_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "my conf"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text(Path("conf/model/tiny.yaml").read_text())
    given = ["--config-dir", str(own), "--study", "mine", "--results", str(tmp_path / "my results")]
    record = next(record for record in map(store.read_record, store.find_records([Path("tests/data/runs.zip/smoke")]))
                  if record.spec.engine.name == "zero1" and record.outcome.kind == "ok")  # fmt: skip
    folder = tmp_path / "my results" / "mine" / "point" / "0.0"
    text = "\n".join(format_answer(record, folder, ["model=mine", "engine=zero1"], given))
    program, *words = _parse_next(text.split("next, ")[1])
    assert (program, words) == ("zeroscale", ["run", "engine=ddp", "model=mine", *given])
    assert main([*words, "machine=cpu", "--dry-run"]) == 0
    assert "ddp" in capsys.readouterr().out


def test_run_is_compared_with_the_reference_run_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that deviates from the reference run is invalid, and the exit code is 1. If the folder has a reference run,
    the output does not suggest another."""
    for factor, code in ((1.0, 0), (1.5, 1)):
        folders = saved_pair(tmp_path / f"{factor}", factor)
        made = (folders["zero1"], store.read_record(folders["zero1"] / store.RECORD))
        monkeypatch.setattr(api, "measure", lambda *_, made=made, **__: made)
        assert main(["run", "machine=cpu", "--no-prune"]) == code
        output = capsys.readouterr().out
        assert "to verify the losses" not in output
        assert ("invalid: loss differs from that of ddp" in output) == bool(code)
        assert main(["run", "machine=cpu", "--no-prune", "--json"]) == code
        assert RunRecord.model_validate_json(capsys.readouterr().out).outcome.kind == ("invalid" if code else "ok")
    shutil.rmtree(folders["ddp"])
    assert main(["run", "machine=cpu", "--no-prune"]) == 0
    assert "to verify the losses" in capsys.readouterr().out


def test_next_command_names_the_flag_that_only_tables_have(tmp_path: Path) -> None:
    """The flag `unverified` of a run depends on the other runs of its folder. `format_answer` does not read these other
    runs. So its output names the command that compares the runs."""
    for path in store.find_records([Path("tests/data/runs.zip/smoke")]):
        record = store.read_record(path)
        if record.outcome.kind == "ok" and record.spec.engine.name in ("ddp", "zero1"):
            (shown,) = results.read([path]).table["flags"]
            text = "\n".join(format_answer(record, tmp_path / "adhoc" / "point" / "0.0", []))
            (printed,) = (line for line in text.splitlines() if line.startswith("flags: "))
            assert {*shown.split()} - {*printed.removeprefix("flags: ").split(", ")} <= {"unverified"}
            assert ("without it, tables have the flag unverified" in text) == ("unverified" in shown)


def test_training_prints_its_losses_quality_and_the_path_of_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = map(store.read_record, store.find_records([Path("results/measured/finetune_cpu.zip")]))
    record = next(record for record in records if record.spec.adapter.name == "lora")
    folder = tmp_path / "study" / "point" / "0.0"
    (folder / "adapter").mkdir(parents=True)
    assert record.observations and record.observations.evaluations
    first, last = record.observations.evaluations
    assert first.loss and last.loss and first.quality and last.quality
    lines = format_answer(record, folder, [])
    assert f"held-out loss: {first.loss:.4g} before, {last.loss:.4g} after 240,000 tokens" in lines
    before, after = first.quality["exact_match"], last.quality["exact_match"]
    assert f"exact match: {before:.4g} before, {after:.4g} after 240,000 tokens" in lines
    assert f"saved adapter: {folder}/adapter" in lines
    data = record.observations.data
    assert data
    [size] = [line for line in lines if line.startswith("data: ")]
    # 625 steps of 32 samples
    assert size.endswith(
        f"samples, {data['held_out']['samples']} of them held out; {20_000 / data['sequences']:.3g} epochs"
    )
    monkeypatch.setattr(api, "measure", lambda *_, **__: (folder, record))
    assert main(["run", "machine=cpu", "--json", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert RunRecord.model_validate_json(printed.out) == record
    assert f"saved adapter: {folder}/adapter\n" in printed.err


def test_settings_of_a_training_without_effect_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    learning = ["learning.tokens=10_000", "learning.evaluation_samples=16"]
    words = ["run", "model=gpt2_tiny", "machine=cpu", "devices_per_node=1", "data=text", "batch.micro=4", *learning]
    assert main([*words, "learning.evaluate_every=5_000", "--dry-run"]) == 0
    assert "no effect" not in capsys.readouterr().out
    assert main([*words, "learning.evaluate_every=20_000", "learning.checkpoint_every=5_000", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "learning.evaluate_every=20000 has no effect, because the training ends after 10,2" in printed
    assert "checkpoint_every=5000: if the run is interrupted, `zeroscale sweep` with the same settings" in printed


def test_gpu_machine_without_a_gpu_is_one_error_with_all_problems(
    processor: Callable[[int], None], refused: Refused
) -> None:
    """There are two problems: no GPU, and an unknown number of devices. One error message must name both, so that a
    user does not meet them one after the other."""
    processor(2)
    line = refused("run", "machine=h100")
    assert "machine=h100: this machine has no GPU that torch can use; to run here choose machine=cpu; " in line
    assert "to predict, advise or submit, set devices_per_node=8" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (),
            [
                "    predicted memory: ",
                ": fits",
                "    no step time predicted: machine=cpu has no peak_tflops.fp32; ",
            ],
        ),
        (("sequence.encoder=100000000",), [" GB of this machine, for all ranks: does not fit;"]),
        (
            ("machine.memory_bytes=1e8", "batch.micro=16"),
            ["predicted memory: ", " GB of 0.1 GB of the device: does not fit; "],
        ),
    ],
)
def test_dry_run_predicts_memory_and_time_or_gives_the_reason(
    words: tuple[str, ...], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--dry-run", "machine=cpu", "devices_per_node=2", *words]) == 0
    _, *predicted = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in predicted)
    for part in expected:
        assert part in "\n".join(predicted)


@pytest.mark.parametrize(("excess", "option", "code"), [(1.1, "", 130), (1.3, "", 2), (1.3, "--no-prune", 130)])
@pytest.mark.parametrize("form", ["text", "--json"])
def test_run_far_out_of_memory_is_refused(
    excess: float,
    option: str,
    code: int,
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, a run that is far out of memory would use all memory of the machine. A run that exceeds the machine's
    memory by less than 20 % starts, because the prediction may be wrong. A sweep has the same limit."""
    words = ["machine=cpu", "devices_per_node=2", "precision=fp32", "sequence.encoder=128", "sequence.decoder=32"]
    host = api.predict(overrides=words)[0].host()
    assert host
    monkeypatch.setattr("bench.cli.run.environment.read_host_memory_bytes", lambda: int(host.low / excess))
    monkeypatch.setattr(api, "measure", lambda made, **given: (_ for _ in ()).throw(KeyboardInterrupt))
    words += filter(None, [option, form.removeprefix("text")])
    assert main(["run", *words, "--results", str(tmp_path)]) == code
    printed = capsys.readouterr()
    assert ("does not fit" in printed.out) == (form == "text")
    assert ("far more than the " in printed.err and "add --no-prune" in printed.err) == (code == 2)


def test_unwritable_results_folder_is_found_before_the_wait_for_the_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_attempt, "take_turn", lambda *given: pytest.fail("waits for the lock"))
    (tmp_path / "file").touch()
    assert main(["run", "machine=cpu", "devices_per_node=1", "--results", str(tmp_path / "file")]) == 2
    assert "cannot be written to (Not a directory)" in capsys.readouterr().err
