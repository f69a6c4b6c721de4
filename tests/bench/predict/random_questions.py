"""Helper for tests: it draws random command lines of `predict` and `advise` with random machine files, and checks their
results.

A command line may have any input of a user: engines with their options, layouts, models, batches, lengths and
precisions. A machine file may lack numbers, have impossible numbers, or be calibrated. Each command must give a
consistent result, or a UserError of one line.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from bench import api
from bench.core.errors import UserError
from bench.core.files import find_conf_folder
from bench.core.spec import Batch
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.sweep.advise.search import Answer
from bench.sweep.prediction import Prediction

ADVISED = 20
"""One in this many commands is an `advise`, which is slow because it searches hundreds of configurations. The other
commands are `predict`."""
ROUNDING = 1 + 1e-9
LONGEST = 700  # largest number of characters of an error message

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp_hybrid", "fsdp_no_reshard", "pipeline",
           "interleaved", "modular", "lga")  # fmt: skip
ZERO: dict[str, Sequence[str]] = {
    "overlap_comm": ("true", "false"),
    "reduce_bucket_size": ("1", "1000", "500000000", "1e9", "0", "-1"),
    "+engine.contiguous_gradients": ("true", "false"),
    "+engine.reduce_scatter": ("true", "false"),
    "+engine.round_robin_gradients": ("true",),
    "+engine.zero_quantized_weights": ("true",),
    "+engine.zero_quantized_gradients": ("true",),
    "+engine.zero_hpz_partition_size": ("2", "4", "8", "3"),
    "stage3_prefetch_bucket_size": ("0", "1", "500000000"),
    "stage3_param_persistence_threshold": ("0", "1000000000"),
    "stage3_max_live_parameters": ("0", "1000000000000"),
    "stage3_max_reuse_distance": ("0", "1000000000000"),
    "+engine.offload_optimizer": ("{device:cpu}", "{device:cpu,ratio:0.5}", "{device:nvme,nvme_path:/nvme}"),
    "+engine.offload_param": ("{device:cpu}", "{device:nvme,nvme_path:/nvme}"),
    "+engine.sub_group_size": ("1", "1000000"),
}
FSDP = {"reshard_after_forward": ("true", "false", "2", "3"), "shard_ranks": ("2", "node", "null", "1"),
        "reduce_dtype": ("bf16", "fp32", "null"), "+engine.offload": ("true",),
        "+engine.reduce_every_micro_step": ("false",)}  # fmt: skip
PIPELINE = {"schedule": ("gpipe", "1f1b", "interleaved", "breadth_first"), "+engine.cut": ("flops", "blocks"),
            "+engine.sharding": ("zero1", "zero3"), "+engine.gather_ahead": ("0", "1", "100")}  # fmt: skip
OTHERS: dict[str, Sequence[object]] = {
    "precision": ("bf16", "fp16", "fp32"),
    "activation_checkpointing": ("true", "false"),
    "model.attention": ("sdpa", "eager", "flex"),
    "model.dropout": ("0", "0.1", "0.999"),
    "model.loss_chunk_tokens": ("1", "512", "100000000"),
    "model.compile": ("none", "blocks"),
    "optimizer.implementation": ("torch", "fused", "native"),
    "optimizer.gradient_clipping": ("0", "1"),
    "parallel.sequence": ("true", "false"),
    "data.workers": ("0", "4"),
}
LENGTHS = (1, 2, 7, 31, 128, 512, 1000, 2048, 8192, 131_072)
MACHINE_NUMBERS = {
    "devices_per_node": (1, 1e3), "multiprocessors": (1, 1e3), "memory_bytes": (1e8, 1e13),
    "memory_bytes_per_s": (1e8, 1e14), "intra_node_bytes_per_s": (1e5, 1e13), "inter_node_bytes_per_s": (1e5, 1e13),
    "power_w": (0.1, 1e5), "host_memory_bytes": (1e8, 1e14), "host_link_bytes_per_s": (1e6, 1e13),
    "price_per_device_hour": (1e-9, 1e9),
}  # fmt: skip
"""Low and high end of the range from which each number of a machine file is drawn."""
ODD = (0, -1, math.nan, math.inf, "much", [1, 2], {"bf16": 1}, 1e-300, 1e300, True, "")


class Question(NamedTuple):
    """A command line of `predict` or `advise` for a test, with the folder that contains its machine files."""

    verb: str
    overrides: tuple[str, ...]
    config_dir: Path


class Fault(NamedTuple):
    """An inconsistency in the result of a command, such as negative bytes."""

    question: Question
    what: str

    def __str__(self) -> str:
        return f"zeroscale {self.question.verb} {' '.join(self.question.overrides)}: {self.what}"


def draw_questions(seed: int, count: int, folder: Path) -> Iterator[Question]:
    """Yield `count` random command lines, which depend only on `seed`. Their machine files are written into
    `folder`."""
    dice = Random(seed)
    models = sorted(path.stem for path in (find_conf_folder() / "model").glob("*.yaml") if path.stem != "hugging_face")
    machines = sorted(path.stem for path in (find_conf_folder() / "machine").glob("*.yaml") if path.stem != "auto")
    (folder / "machine").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        machine = dice.choice(machines)
        if dice.random() < 0.5:
            machine = f"drawn_{number}"
            (folder / "machine" / f"{machine}.yaml").write_text(yaml.safe_dump(_draw_machine(dice, machine)))
        if number % ADVISED == ADVISED - 1:
            yield Question("advise", (*_draw_advised(dice, models), f"machine={machine}"), folder)
        else:
            yield Question("predict", (*_draw_point(dice, models), f"machine={machine}"), folder)


def _draw_machine(dice: Random, name: str) -> dict[str, Any]:
    """Return the content of a random machine file. Some numbers are missing, and sometimes one number is impossible."""
    drawn: dict[str, Any] = {"name": name, "device": dice.choice(["cuda", "cuda", "cpu"])}
    for field, (low, high) in MACHINE_NUMBERS.items():
        if dice.random() < 0.85:
            value = math.exp(dice.uniform(math.log(low), math.log(high)))
            drawn[field] = int(value) if low >= 1 and "per_s" not in field else value
    peaks = {kind: math.exp(dice.uniform(math.log(0.01), math.log(1e4))) for kind in ("bf16", "fp16", "fp32")}
    drawn["peak_tflops"] = {kind: peak for kind, peak in peaks.items() if dice.random() < 0.8}
    if dice.random() < 0.3:
        drawn["matmul_ceiling_tflops"] = {kind: dice.uniform(0.1, 1.1) * peak for kind, peak in peaks.items()}
    if dice.random() < 0.15:
        drawn["calibration"] = _draw_calibration(dice, drawn["peak_tflops"])
    if dice.random() < 0.1:
        drawn[dice.choice([*MACHINE_NUMBERS, "peak_tflops", "matmul_ceiling_tflops", "calibration"])] = dice.choice(ODD)
    return drawn


def _draw_calibration(dice: Random, peaks: dict[str, float]) -> dict[str, Any]:
    """Return the calibration section of a machine file, with a few random shapes of matrix products and payloads of
    collectives. No measured rate exceeds the peak of its precision. Some entries are missing."""

    def draw_sizes(count: int) -> list[int]:
        return [2 ** dice.randint(0, 15) for _ in range(count)]

    matmul = [
        dict(zip("mkn", draw_sizes(3), strict=True), precision=kind, tflops=dice.uniform(0.001, 1) * peaks[kind])
        for kind in peaks
        for _ in range(dice.randint(0, 5))
    ]
    collectives = [
        {"kind": kind, "nodes": nodes, "ranks": nodes * dice.choice([1, 4, 8]), "payload_bytes": payload,
         "s": dice.uniform(1e-6, 10)}
        for kind in ("all_reduce", "all_gather", "reduce_scatter") for nodes in (1, 2) for payload in draw_sizes(2)
    ]  # fmt: skip
    found: dict[str, Any] = {"matmul": matmul, "collectives": collectives, "kernel_s": dice.choice([1e-6, 1e-2])}
    found["attention_tflops"] = {kind: dice.uniform(0.001, 1) * peak for kind, peak in peaks.items()}
    found["slowdown"] = dice.choice([[], [1.0], [1.0, 1.8, 0.1]])
    return {name: value for name, value in found.items() if dice.random() < 0.8}


def _draw_point(dice: Random, models: Sequence[str]) -> Iterator[str]:
    engine = dice.choice(ENGINES)
    yield f"engine={engine}"
    yield from _draw_model(dice, models)
    devices, nodes = dice.choice([1, 2, 3, 4, 8, 8, 16]), dice.choice([1, 1, 2, 3, 8, 16, 128])
    yield f"devices_per_node={devices}"
    yield f"nodes={nodes}"
    yield f"batch.micro={dice.choice([1, 1, 2, 3, 4, 8, 64, 4096])}"
    if engine in ("pipeline", "interleaved", "modular", "lga"):
        yield from _draw_layout(dice, engine, devices, nodes)
    elif dice.random() < 0.5:
        yield f"batch.{dice.choice(['accumulation', 'global'])}={dice.choice([1, 2, 5, 64, 1024])}"
    options = ZERO if engine.startswith("zero") else FSDP if engine.startswith("fsdp") else PIPELINE
    if engine != "ddp":
        yield from _draw_options(dice, {_format_option(name): values for name, values in options.items()}, 0.05)
    yield from _draw_options(dice, OTHERS, 0.12)


def _format_option(name: str) -> str:
    return name if name.startswith("+") else f"engine.{name}"


def _draw_options(dice: Random, options: dict[str, Sequence[object]], share: float) -> Iterator[str]:
    for name, values in options.items():
        if dice.random() < share:
            yield f"{name}={dice.choice(values)}"


def _draw_model(dice: Random, models: Sequence[str]) -> Iterator[str]:
    model = dice.choice(models)
    yield f"model={model}"
    if dice.random() < 0.6:
        kinds = ("tokens",) if model.startswith(("gpt", "llama")) else ("encoder", "decoder")
        yield from (f"sequence.{kind}={dice.choice(LENGTHS)}" for kind in kinds)


def _draw_layout(dice: Random, engine: str, devices: int, nodes: int) -> Iterator[str]:
    ranks = devices * nodes
    tensor = dice.choice([one for one in (1, 1, 2, 3, 4, 8, 16) if devices % one == 0 or dice.random() < 0.1])
    pipelines = [one for one in (1, 2, 4, 8, 16, 64) if ranks % (one * tensor) == 0 or dice.random() < 0.1]
    pipeline = dice.choice(pipelines or [1])
    yield f"parallel.tensor={tensor}"
    yield f"parallel.pipeline={pipeline}"
    yield f"parallel.stages_per_rank={1 if engine == 'pipeline' else dice.choice([1, 2, 2, 4, 12])}"
    yield f"batch.accumulation={pipeline * dice.choice([1, 1, 2, 4])}"


def _draw_advised(dice: Random, models: Sequence[str]) -> Iterator[str]:
    yield f"model={dice.choice(models)}"
    yield f"devices_per_node={dice.choice([1, 4, 8])}"
    if dice.random() < 0.7:
        yield f"engine={','.join(dice.sample(ENGINES, dice.randint(1, 3)))}"
    if dice.random() < 0.7:
        yield f"nodes={dice.choice(['1', '2,4', '16', '3', '1,64'])}"
    words = {
        "precision": OTHERS["precision"], "batch.global": (1, 48, 1024), "max_global_batch": (1, 512),
        "price": (1e-9, 2.5),
    }  # fmt: skip
    yield from _draw_options(dice, words, 0.3)
    if dice.random() < 0.5:
        yield dice.choice(["tokens=1e9", "tokens=1e15", "samples=100", "samples=1e6 ", "tokens=1"]).strip()
        more = {"deadline": ("1h", "30d"), "node_hours": (1, 1e6), "best": ("shortest", "cheapest"),
                "storage": (1, 2e9, 1e15)}  # fmt: skip
        yield from _draw_options(dice, more, 0.4)


def find_faults(question: Question) -> tuple[str, list[Fault]]:
    """Run a command. Return "answered" if it had a result, or "refused" if it raised an error. Also return a list of
    faults: inconsistencies in the result, or an error that is not a UserError of one line."""
    verb, overrides, config_dir = question
    try:
        if verb == "advise":
            texts = list(_list_advice_faults(api.advise(overrides, results=config_dir, config_dir=config_dir)))
        else:
            found = api.predict(overrides=overrides, config_dir=config_dir)
            texts = [fault for one in found for fault in _list_prediction_faults(one)]
    except UserError as refusal:
        text = str(refusal)
        long = "\n" in text or len(text) > LONGEST
        return "refused", [Fault(question, f"refused in more than a line: {text}")] * long
    except Exception as error:
        return "refused", [Fault(question, f"{type(error).__name__}: {error}")]
    return "answered", [Fault(question, what) for what in texts]


def _list_prediction_faults(found: Prediction) -> Iterator[str]:
    """Yield a description of each inconsistency in one prediction.

    A prediction is inconsistent if a term is negative or NaN, or if an interval's low end is above its high end. It is
    also inconsistent if memory or time become smaller with twice the micro-batch.
    """
    spec, machine = found.point.composed.spec, found.point.composed.machine
    if found.memory:
        for phase in found.memory.phases:
            yield from _list_bad_numbers(phase.name, phase.terms)
        low, high = found.memory.device
        if not 0 < low <= high or not 0 <= found.memory.resident <= found.memory.peak * ROUNDING:
            yield f"device {low} to {high} bytes, between steps {found.memory.resident}, peak {found.memory.peak}"
        if host := found.host():
            yield from _list_bad_numbers("host", host._asdict())
    if found.time:
        time = found.time
        yield from _list_bad_numbers("time", time.parts | {"hidden": time.hidden_s, "exposed": time.exposed_s})
        if not 0 < time.low_s <= time.step_s * ROUNDING <= time.high_s * ROUNDING**2:
            yield f"a step of {time.step_s} s between {time.low_s} and {time.high_s}"
        if time.mfu is not None and not 0 < time.mfu <= 1:
            yield f"{100 * time.mfu} % of the peak"
    if spec.batch.micro > 1000 or not found.memory:
        return
    micro = 2 * spec.batch.micro
    batch = Batch(micro=micro, accumulation=spec.accumulation, global_=2 * spec.global_batch)
    doubled = spec.model_copy(update={"batch": batch})
    if predict_memory(doubled, found.device, machine.memory_bytes).peak < found.memory.peak:
        yield "less memory with twice the micro-batch"
    measured = machine.calibration is not None  # random calibrated rates need not be monotonic in the size
    if (
        found.time
        and not measured
        and predict_step_time(doubled, machine, found.device).step_s * 1.02 < found.time.step_s
    ):
        yield "a shorter step with twice the micro-batch"


def _list_advice_faults(answer: Answer) -> Iterator[str]:
    question = answer.query.question
    for choice in answer.choices:
        low, middle, high = choice.estimate.low_s, choice.estimate.step_s, choice.estimate.high_s
        if not 0 < low <= middle * ROUNDING <= high * ROUNDING**2 or not math.isfinite(high):
            yield f"{choice.spec.engine.name}: a step of {middle} s between {low} and {high}"
        hours = question.hours(choice, middle)
        if hours is not None and not 0 < hours < math.inf:
            yield f"{choice.spec.engine.name}: {hours} hours"
        if choice.candidate.fits is False:
            yield f"{choice.spec.engine.name} does not fit and is among the choices"


def _list_bad_numbers(of: str, numbers: dict[str, Any]) -> Iterator[str]:
    for name, value in numbers.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            yield f"{of}: {name} is {value}"
