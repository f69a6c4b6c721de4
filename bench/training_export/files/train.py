"""Train a T5 with DeepSpeed, as ds_config.json, model.json and training_arguments.json beside this file say.

  torchrun --nproc-per-node=8 train.py --steps 20

Replace `samples` by your data. Needs torch, DeepSpeed and transformers.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from transformers import T5Config, T5ForConditionalGeneration

HERE = Path(__file__).parent
FIRST_WORD = 2  # 0 pads and 1 ends a sequence


def main() -> None:
    args = _arguments()
    config, shape, training = (
        json.loads((HERE / name).read_text()) for name in ("ds_config.json", "model.json", "training_arguments.json")
    )
    deepspeed.init_distributed()
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # else every rank builds on the first one
    torch.manual_seed(training["seed"])
    model = build(config, shape)
    if training["gradient_checkpointing"]:
        # the second name is the older one, deprecated where the first exists
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    start = _resume(engine, args.save)
    data = samples(engine, args, shape["config"]["vocab_size"], training["seed"] + start)
    engine.train()
    for step in range(start, args.steps):
        began = time.monotonic()
        for _ in range(config["gradient_accumulation_steps"]):
            loss = engine(**next(data)).loss
            engine.backward(loss)
            engine.step()
        if step % args.log_every == 0 or step + 1 == args.steps:
            _tell(step, loss, time.monotonic() - began)
        if args.save and (step + 1) % args.save_every == 0:
            engine.save_checkpoint(args.save, client_state={"step": step + 1})


def samples(engine: Any, args: argparse.Namespace, vocabulary: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches for ever. Here they are random tokens: put your data in their place."""
    rank, micro = torch.distributed.get_rank(), engine.train_micro_batch_size_per_gpu()
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    while True:
        tokens = torch.randint(FIRST_WORD, vocabulary, (micro, args.encoder + args.decoder), generator=generator)
        tokens = tokens.to(engine.device)
        yield {"input_ids": tokens[:, : args.encoder], "labels": tokens[:, args.encoder :].contiguous()}


def build(config: dict[str, Any], shape: dict[str, Any]) -> Any:
    """Return the model with random weights, in the precision and on the device of training; at stage 3 divided among
    the ranks from the start."""
    plain = T5Config(**shape["config"])
    # T5Config ties head and embedding whatever it is told; said afterwards it holds
    plain.tie_word_embeddings = plain.scale_decoder_outputs = not shape["separate_head"]
    with _construction(config):
        model = T5ForConditionalGeneration(plain)
    if shape["separate_head"]:
        for stack in (model.encoder, model.decoder):
            stack.embed_tokens.weight = model.shared.weight
    _initialise(model, plain)
    if shape["compile_blocks"]:
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile()
    return model


def _construction(config: dict[str, Any]) -> AbstractContextManager[Any]:
    if config["zero_optimization"]["stage"] == 3:
        partitioned: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config)
        return partitioned
    if config["bf16"]["enabled"] or config["fp16"]["enabled"]:
        torch.set_default_dtype(torch.bfloat16 if config["bf16"]["enabled"] else torch.float16)
    return torch.device(deepspeed.get_accelerator().current_device_name())


def _initialise(model: Any, config: T5Config) -> None:
    """Draw every weight by T5's own rules, which deepspeed.zero.Init does not keep, whole on every rank."""
    torch.set_default_dtype(torch.float32)
    inner = config.num_heads * config.d_kv
    deviations = {
        "shared": 1.0, "lm_head": 1.0, "q": (config.d_model * config.d_kv) ** -0.5, "o": inner**-0.5,
        "wo": config.d_ff**-0.5,
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        owner = name.split(".")[-2]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if "norm" in owner:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, deviations.get(owner, config.d_model**-0.5))


def _resume(engine: Any, folder: str | None) -> int:
    """Return the step to go on with."""
    if not folder or not (Path(folder) / "latest").is_file():
        return 0
    _, state = engine.load_checkpoint(folder)
    return int(state["step"])


def _tell(step: int, loss: torch.Tensor, seconds: float) -> None:
    value = loss.item()  # waits for the device
    if torch.distributed.get_rank() == 0:
        print(f"step {step}  loss {value:.4f}  {seconds:.3g} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, default %(default)s")
    parser.add_argument("--encoder", type=int, default=512, help="tokens of a sample, default %(default)s")
    parser.add_argument("--decoder", type=int, default=128, help="tokens of a sample, default %(default)s")
    parser.add_argument("--save", metavar="DIR", help="keep checkpoints here, and go on from the latest")
    parser.add_argument("--save-every", type=int, default=1000, metavar="STEPS", help="default %(default)s")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="default %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
