"""What is random on one rank, as a file of a checkpoint: every rank draws its own dropout."""

from pathlib import Path

import torch
import torch.distributed as dist


def save(folder: Path) -> None:
    """Write this rank's random state beside what ranks share."""
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    torch.save({"cpu": torch.get_rng_state(), **on_gpu}, _find_own(folder))


def load(folder: Path) -> None:
    """Take up what `save` wrote on this rank."""
    state = torch.load(_find_own(folder))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _find_own(folder: Path) -> Path:
    return folder / f"random_state_{dist.get_rank()}.pt"
