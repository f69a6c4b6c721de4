"""Compare the training speed of our runs with a baseline that does the same work without zeroscale: Hugging Face's
Trainer with DeepSpeed.

  python -m tests.benchmarks.plain model=mt5_large batch.micro=16 machine=h200
  python -m tests.benchmarks.plain model=tiny precision=fp32 machine=cpu --loop deepspeed

Baseline and our runs use the same model (transformers' own, with random weights), micro-batch, sequence lengths,
precision, data, gradient clipping and device. They run in separate processes, one after the other. Trainer gets the
ZeRO-2 configuration of its documentation without offload, and its default optimizer. zeroscale runs twice: with the
preset of engine=zero2, and with the options of the study single_gpu_fast. Trainer needs the package accelerate. Without
it, DeepSpeed's documented loop is the baseline.

Only the steps after WARM_UP warm-up steps are timed. The device is synchronised at both ends of the timed window.
"""

import argparse
import importlib.util
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.core.processes import build_module_command

WARM_UP, STEPS = 10, 30
POINT = ("devices_per_node=1", "nodes=1", "data=synthetic", "batch.accumulation=1")
ZERO_2: dict[str, Any] = {
    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
    "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True,
}  # fmt: skip
"""The section `zero_optimization` of the ZeRO-2 example in https://huggingface.co/docs/transformers/deepspeed.
`offload_optimizer` is removed, because it would only make the baseline slower."""


def main() -> int:
    """In each round, print the tokens per second of the baseline and of our two runs. Also print the speed of our runs
    divided by the speed of the baseline in the same round: median, lowest and highest ratio. Return 0 if all
    measurements succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--loop", choices=LOOPS, help="default: trainer, or deepspeed where accelerate is missing")
    parser.add_argument("--results", type=Path, default=Path("results/runs"), help="of our own runs (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed, of the plain loop (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn (%(default)s)")
    parser.add_argument("--as-process", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    loop = args.loop or ("trainer" if importlib.util.find_spec("accelerate") else "deepspeed")
    if args.as_process:
        spec, out = map(Path, args.as_process)
        out.write_text(json.dumps({"seconds": LOOPS[loop](spec.read_text(), args.steps)}))
        return 0
    sides = {"engine=zero2": ("engine=zero2",), "single_gpu_fast": list_fast_options()}
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds):
        theirs = measure_plain_tokens_per_s(loop, args.overrides, args.steps)
        print(f"round {number + 1}: {loop} with ZeRO-2, as documented: {theirs:,.0f} tokens/s", flush=True)
        for name, options in sides.items():
            ours = measure_our_tokens_per_s([*POINT, *options, *args.overrides], args.results)
            ratios[name].append(ours / theirs)
            print(f"  ours, {name}: {ours:,.0f} tokens/s, {ratios[name][-1]:.3f} times the plain loop", flush=True)
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f}) times the plain loop")
    return 0


def list_fast_options() -> list[str]:
    """Return the engine, model and optimizer overrides of the study single_gpu_fast, which make training on one GPU
    faster."""
    from bench.config import compose

    base = compose.read_study("single_gpu_fast").base
    return [f"{key}={value}" for key, value in base.items() if key.startswith(("engine", "model.", "optimizer."))]


def measure_our_tokens_per_s(overrides: Sequence[str], results: Path) -> float:
    """Measure one configuration with `zeroscale run`. Return its tokens per second, padding included."""
    command = build_module_command("bench.cli", "run", *overrides, "--json", "--study", "plain")
    done = subprocess.run([*command, "--results", str(results)], stdout=subprocess.PIPE, text=True, check=False)
    record = json.loads(done.stdout or "{}")
    if done.returncode:
        raise SystemExit(f"our own run failed: {record.get('outcome')}")
    seen = record["observations"]
    steps = len(seen["steps"]["step_s"]) - seen["steps"]["cut"]
    return float((seen["tokens"]["encoder"] + seen["tokens"]["decoder"]) * steps / seen["steps"]["window_s"])


def measure_plain_tokens_per_s(loop: str, overrides: Sequence[str], steps: int) -> float:
    """Run the baseline `loop` (trainer or deepspeed) in a new process. Return the tokens per second of its timed steps,
    padding included."""
    from bench.config import compose
    from bench.measure.environment import find_device_kind

    composed = compose.compose_request(compose.parse_single([*POINT, "engine=zero2", *overrides]))
    if composed.spec.global_batch != composed.spec.batch.micro or composed.spec.precision == "fp16":
        raise SystemExit("the plain loop knows one process, accumulation 1, and bf16 or fp32 only")
    device = composed.machine.device or find_device_kind()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    alone |= {"DS_ACCELERATOR": device, "TOKENIZERS_PARALLELISM": "false"}
    alone |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        spec, out = Path(folder, "spec.json"), Path(folder, "out.json")
        spec.write_text(composed.spec.model_dump_json(by_alias=True))
        words = ["--as-process", str(spec), str(out), "--loop", loop, "--steps", str(steps)]
        command = build_module_command("tests.benchmarks.plain", *words)
        if subprocess.run(command, env=os.environ | alone, check=False).returncode:
            raise SystemExit(f"the plain loop ({loop}) failed")
        seconds = json.loads(out.read_text())["seconds"]
    lengths = composed.spec.tokens_per_sample
    return float(composed.spec.global_batch * lengths * steps / seconds)


def time_trainer(text: str, steps: int) -> float:
    """Return the seconds that transformers' Trainer needs for `steps` steps after its warm-up steps. `text` is the JSON
    of the spec."""
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    spec, model, samples = prepare_model(text)

    class TrialSamples(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return (WARM_UP + steps) * int(spec.batch.micro)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return samples(index)

    class PlainWindow(TrainerCallback):  # type: ignore[misc]
        edges: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARM_UP, WARM_UP + steps):
                self.edges.append(read_device_clock())

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=spec.batch.micro, max_steps=WARM_UP + steps,
            learning_rate=spec.optimizer.lr, weight_decay=spec.optimizer.weight_decay,
            max_grad_norm=spec.optimizer.gradient_clipping, bf16=spec.precision == "bf16",
            gradient_checkpointing=spec.activation_checkpointing, logging_steps=10_000, save_strategy="no",
            report_to=[], disable_tqdm=True, deepspeed=build_documented_config(dict.fromkeys(AUTOMATIC, "auto")),
        )  # fmt: skip
        window = PlainWindow()
        trainer = Trainer(model=model, args=given, train_dataset=TrialSamples(), callbacks=[window])
        trainer.train()
        # accelerate silently ignores DeepSpeed on a CPU
        if type(trainer.model_wrapped).__name__ != "DeepSpeedEngine":
            raise SystemExit("Trainer did not use DeepSpeed here: compare with --loop deepspeed")
    return window.edges[1] - window.edges[0]


AUTOMATIC = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
"""Keys of DeepSpeed's configuration that are set to "auto", so that Trainer fills them in."""


def time_deepspeed(text: str, steps: int) -> float:
    """Return the seconds that DeepSpeed's documented loop ("Writing DeepSpeed models") needs for `steps` steps after
    its warm-up steps. `text` is the JSON of the spec. Like Trainer, the loop uses torch's fused AdamW."""
    import deepspeed
    import torch

    spec, model, samples = prepare_model(text)
    sizes = {"train_batch_size": spec.batch.micro, "train_micro_batch_size_per_gpu": spec.batch.micro}
    config = build_documented_config(
        {**sizes, "gradient_accumulation_steps": 1, "gradient_clipping": spec.optimizer.gradient_clipping}
    )
    config |= {"bf16": {"enabled": spec.precision == "bf16"}, "zero_allow_untested_optimizer": True}
    deepspeed.init_distributed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.optimizer.lr, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    count = itertools.count()
    edges = []
    for step in range(WARM_UP + steps + 1):
        if step in (WARM_UP, WARM_UP + steps):
            edges.append(read_device_clock())
        drawn = [samples(next(count)) for _ in range(spec.batch.micro)]
        batch = {name: torch.stack([sample[name] for sample in drawn]).to(engine.device) for name in drawn[0]}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    return edges[1] - edges[0]


LOOPS: dict[str, Callable[[str, int], float]] = {"trainer": time_trainer, "deepspeed": time_deepspeed}


def build_documented_config(more: dict[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration with the section `zero_optimization` of an example for ZeRO-2 in DeepSpeed's
    documentation, and with the keys in `more`."""
    precision = {"bf16": {"enabled": "auto"}} if "auto" in more.values() else {}
    return {"zero_optimization": dict(ZERO_2), "wall_clock_breakdown": False, **precision, **more}


def prepare_model(text: str) -> tuple[Any, Any, Callable[[int], dict[str, Any]]]:
    """Read a spec from its JSON. Return the spec, transformers' own model with random weights, and a function that
    returns the sample at an index. The samples are the same as in our runs."""
    import torch

    from bench import models
    from bench.core.spec import RunSpec
    from bench.data import vocabulary
    from bench.data.synthetic import RandomTokens

    spec = RunSpec.model_validate_json(text)
    family = models.load_builder(spec.model.family)
    # on a GPU at once, because one core would take a minute to draw billions of weights
    model = family.build(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    family.initialise(model, spec)
    draw = RandomTokens(spec.seed, vocabulary(spec), tuple(spec.sequence.values()))

    def sample(index: int) -> dict[str, Any]:
        tokens, labels = draw(index)
        return {"input_ids": torch.from_numpy(tokens.copy()), "labels": torch.from_numpy(labels.copy())}

    return spec, model, sample


def read_device_clock() -> float:
    """Wait until the GPU has finished its work, if there is one. Return the current time in seconds."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
