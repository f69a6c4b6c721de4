"""Script that runs the ranks of a pipeline whose forward and backward passes only sleep: `python idle_ranks.py OUT
SCHEDULE RANKS STAGES MICRO`.

STAGES is the number of stages per rank, and MICRO the number of micro-batches. The ranks are forked and connect through
a file next to OUT. Each rank writes OUT-<rank>.json with two numbers of seconds: the time from its first to its last
action, and the part of this time in which it waited for neighbouring ranks.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from bench.engines.distributed.executor import Neighbours, ScheduleExecutor
from bench.engines.distributed.schedule import PipelineSize, build_schedule

FORWARD_S, BACKWARD_S = 0.02, 0.04


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return states.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return gradient


class Stage(nn.Module):
    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 1))
        self.first, self.last = first, last

    def forward(self, *states: Tensor, number: Tensor) -> Tensor | tuple[Tensor]:
        made = Sleeping.apply(self.weight * (number if self.first else states[0]))  # type: ignore[no-untyped-call]
        return made.mean() if self.last else (made,)


def run_rank(out: str, name: Any, size: PipelineSize, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{out}-meeting", rank=rank, world_size=size.ranks)
    mine = {s: Stage(first=s == 0, last=s == size.stages - 1) for s in size.stages_of(rank)}
    neighbours = Neighbours(size.rank_of, ((1, 1, 1),), torch.ones(1), limit=2 * size.ranks)
    executor = ScheduleExecutor(mine, build_schedule(name, size)[rank], size, neighbours, {})
    for _ in range(2):  # the first step creates the connections
        distributed.barrier()
        executor.run([{"number": torch.ones(1, 1, 1)}] * size.micro_batches)
    Path(f"{out}-{rank}.json").write_text(json.dumps(executor.read_times_s()))
    distributed.barrier()


def main() -> None:
    out, name = sys.argv[1:3]
    size, children = PipelineSize(*map(int, sys.argv[3:])), []
    for rank in range(size.ranks):
        if (child := os.fork()) == 0:
            status = 1
            try:
                run_rank(out, name, size, rank)
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(status)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
