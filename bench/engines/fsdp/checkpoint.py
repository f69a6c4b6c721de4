"""A checkpoint of a divided model: torch.distributed.checkpoint for what ranks share, a file for each one's own."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer


def save(folder: Path, module: Module, optimizer: Optimizer, steps: int) -> None:
    """Write weights, the optimizer's state, each rank's random state and `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    state_dict_saver.save({"model": model, "optimizer": state, "steps": torch.tensor(steps)}, checkpoint_id=folder)
    torch.save(_random_state(), folder / _own())


def load(folder: Path, module: Module, optimizer: Optimizer) -> int:
    """Take up what `save` wrote, on as many ranks, and return its `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": state, "steps": torch.tensor(0)}
    state_dict_loader.load(found, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    random_state = torch.load(folder / _own())
    torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state:
        torch.cuda.set_rng_state(random_state["cuda"])
    return int(found["steps"])


def _own() -> str:
    return f"random_state_{dist.get_rank()}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}
