"""Hand a point over to those who train: a folder that starts without this package.

It holds DeepSpeed's config, the model's, Hugging Face TrainingArguments, a training script that needs torch, DeepSpeed
and transformers alone, a job script, and a README.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from bench import engines, objectives
from bench.errors import UserError
from bench.models.t5.shape import NAMES, Shape
from bench.plugins import StandaloneLauncherPlugin
from bench.record import Limits
from bench.spec import Device, ModelSpec, RunSpec
from bench.training_export.arguments import build_training_arguments

_FILES = Path(__file__).with_name("files")


class TrainingExport(NamedTuple):
    """What is handed over, to where, and why."""

    spec: RunSpec
    launcher: StandaloneLauncherPlugin
    options: Limits  # the launcher's
    device: Device
    steps: int | None  # to train, in optimizer steps; None: not known
    why: str  # the advice as it was told


def check_free(folder: Path) -> None:
    """Raise UserError if there is something in `folder` already, or no folder to make it in."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"--export {folder}", "is there already, and nothing is overwritten", "name a new folder")
    if not folder.absolute().parent.is_dir():
        raise UserError(f"--export {folder}", f"there is no folder {folder.absolute().parent}", "make it first")


def write_files(folder: Path, contents: dict[str, str]) -> None:
    """Write files, texts by name, into a new folder: all or nothing. UserError where it cannot be made."""
    check_free(folder)
    try:
        made = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
        try:
            for name, text in contents.items():
                (made / name).write_text(text, encoding="utf-8")
            for path in (made, made / "job.sh"):
                path.chmod(0o755)
            made.replace(folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise UserError(f"--export {folder}", rule, "free some space or name another folder") from error


def build_files(given: TrainingExport) -> dict[str, str]:
    """Return the text of every file by its name; UserError for what only this package can run."""
    spec, steps = given.spec, given.steps
    config = _build_config(spec)
    script = given.launcher.standalone(_build_command(spec, steps), spec, given.options, given.device)
    return {
        "ds_config.json": _format_json(config),
        "model.json": _format_json(_build_model(spec.model)),
        "training_arguments.json": _format_json(build_training_arguments(spec, steps)),
        "train.py": (_FILES / "train.py").read_text(encoding="utf-8"),
        "job.sh": script.text,
        "README.md": _format_readme(spec, script.start, given.why),
    }


def _build_command(spec: RunSpec, steps: int | None) -> list[str]:
    lengths = [word for kind, length in spec.sequence.items() for word in (f"--{kind}", str(length))]
    return ["train.py", *lengths, *(["--steps", str(steps)] if steps else [])]


def _format_readme(spec: RunSpec, start: str, why: str) -> str:
    text = (_FILES / "README.md.j2").read_text(encoding="utf-8")
    made = jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return str(made.render(spec=spec, start=start, why=why))


def _build_config(spec: RunSpec) -> dict[str, Any]:
    """Return DeepSpeed's config; UserError for what only this package can run."""
    config = engines.facts(spec).deepspeed_config
    if config is None:
        rule = "the answer is not an engine of DeepSpeed, so there is no DeepSpeed config to hand over"
        raise UserError(f"engine={spec.engine.name}", rule, "ask with engine=zero0,zero1,zero2,zero3")
    if spec.model.family != "t5":
        raise UserError(
            f"model.family={spec.model.family}", "only the T5 family can be handed over", "leave out --export"
        )
    if spec.model.attention == "flex":
        rule = "transformers reads T5's position bias past its end there, so it cannot be handed over"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa")
    if spec.model.loss_chunk_tokens:
        rule = "transformers computes its loss whole, so it cannot be handed over"
        raise UserError(f"model.loss_chunk_tokens={spec.model.loss_chunk_tokens}", rule, "leave it out")
    if objectives.weighs_targets(spec):
        rule = f"the script averages over micro-batches, and their target tokens vary with data={spec.data.name}"
        raise UserError("loss_mean=tokens", rule, "set loss_mean=micro_batches, or data=synthetic")
    return config(spec)


def _build_model(model: ModelSpec) -> dict[str, Any]:
    """Return transformers' T5Config and what it does not hold."""
    shape = Shape.model_validate(model.shape)
    return {
        "config": {
            **{theirs: getattr(shape, ours) for ours, theirs in NAMES.items()},
            "feed_forward_proj": f"gated-{shape.activation}" if shape.gated else shape.activation,
            "dropout_rate": model.dropout,
            "attn_implementation": model.attention,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        "separate_head": shape.separate_head,
        "compile_blocks": model.compile == "blocks",
    }


def _format_json(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2) + "\n"
