"""A checkpoint of a divided model: torch.distributed.checkpoint for what ranks share, a file for each one's own."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from bench.distributed import random_state


def save(folder: Path, module: Module, optimizer: Optimizer, steps: int) -> None:
    """Write weights, the optimizer's state, each rank's random state and `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    state_dict_saver.save({"model": model, "optimizer": state, "steps": torch.tensor(steps)}, checkpoint_id=folder)
    random_state.save(folder)


def load(folder: Path, module: Module, optimizer: Optimizer) -> int:
    """Take up what `save` wrote, on as many ranks, and return its `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": state, "steps": torch.tensor(0)}
    state_dict_loader.load(found, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    random_state.load(folder)
    return int(found["steps"])
