"""Engine for a pipeline: each rank has some stages of the model and executes its list of actions in a schedule.

Activations and their gradients are sent from rank to rank. Tensor-parallel ranks each have a slice of every matrix of a
stage. Data-parallel copies of a stage partition only AdamW's states (as in ZeRO stage 1), or also gradients and weights
(as in ZeRO stage 3). Weights and gradients have the run's precision. In bf16, norm, clipping and AdamW use fp32 and
master weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from bench import objectives
from bench.core.engine_facts import LayoutPosition, find_rank, list_stages, place
from bench.core.record import TimedPass
from bench.core.spec import RunSpec
from bench.engines.distributed.executor import Neighbours, RankStages, ScheduleExecutor
from bench.engines.distributed.flat import DividedParameters, DividedUpdate, GatheredParameters, WholeParameters
from bench.engines.distributed.ranks import weigh
from bench.engines.distributed.schedule import add_gathers, build_schedule
from bench.engines.distributed.simulation import SENDS_PER_RANK
from bench.engines.distributed.slices import find_slice
from bench.engines.distributed.slices import make_whole as whole
from bench.engines.pipeline.options import Options, size_of
from bench.engines.precision.update import construction, describe_optimizer, parameter_count

__all__ = ["PipelineEngine", "build", "construction", "parameter_count", "whole"]


def build(module: Module, spec: RunSpec) -> "PipelineEngine":
    """Return the engine for this rank's stages. The process group must exist. Collective."""
    assert isinstance(module, RankStages)
    return PipelineEngine(module, spec)


class PipelineEngine:
    """Pipeline engine. `bench.engines.Engine` documents its methods."""

    def __init__(self, stages: RankStages, spec: RunSpec) -> None:
        self._spec, self._options, size = spec, Options.of(spec), size_of(spec)
        self._here = place(spec, dist.get_rank())
        named = {name: parameter for name, parameter in stages.named_parameters() if parameter.requires_grad}
        # an empty tensor, since a parameter would keep memory alive that `_divide` replaces
        like = next(iter(named.values())).detach().new_empty(0)
        self._device = like.device
        self.gathered = self._divide(stages, named)
        neighbours = Neighbours(
            # the rank with the same samples
            lambda stage: find_rank(spec, self._here._replace(pipeline=stage % size.ranks)),
            stages.shapes, like, limit=SENDS_PER_RANK * size.ranks,
        )  # fmt: skip
        order = build_schedule(self._options.schedule, size)[self._here.pipeline]
        order = add_gathers(order, self._options.gather_ahead) if self.gathered else order
        mine = {number: stages[number] for number in size.stages_of(self._here.pipeline)}
        self._executor = ScheduleExecutor(mine, order, size, neighbours, self.gathered)

    def _divide(self, stages: RankStages, named: dict[str, Parameter]) -> dict[int, GatheredParameters]:
        """Partition the optimizer update among data-parallel copies, as the option `sharding` says. `named` has the
        trained parameters by name. Return, by stage number, the parameters that are whole only while their stage
        computes."""
        group, left = self._make_data_group(), dict(named)
        counted = {name for name, parameter in named.items() if self._is_counted(stages, name, parameter)}
        # zero3 gathers stage by stage; parameters that several stages share stay whole
        gathered = dict[int, GatheredParameters]()
        if self._options.sharding == "zero3" and dist.get_world_size(group) > 1:
            for number in list_stages(self._spec, dist.get_rank()):
                names = [name for name, _ in stages[number].named_parameters() if name not in stages.shared]
                mine = {name: left.pop(name) for name in names if name in left}
                if mine:
                    places = [place for place, name in enumerate(mine) if name in counted]
                    gathered[number] = GatheredParameters(list(mine.values()), places, group, stages.among)
        parts: list[DividedParameters] = list(gathered.values())
        groups = self._make_holder_groups(stages)
        for holders in sorted({self._list_holders(stages, name) for name in left}):  # in the same order on every rank
            names = sorted(name for name in left if self._list_holders(stages, name) == holders)
            places = [at for at, name in enumerate(names) if name in counted]
            parameters, same = [left[name] for name in names], groups.get(holders)
            parts.append(WholeParameters(parameters, places, group, stages.among, same))
        self._update = DividedUpdate(parts, self._spec.optimizer)
        return gathered

    def _make_data_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks with copies of this rank's stages. Every rank creates all groups in the same
        order."""
        parallel, groups = self._spec.parallel, dict[LayoutPosition, dist.ProcessGroup]()
        for pipeline in range(parallel.pipeline):
            for tensor in range(parallel.tensor):
                copies = [LayoutPosition(pipeline, data, tensor) for data in range(self._spec.data_parallel)]
                groups[copies[0]] = dist.new_group([find_rank(self._spec, copy) for copy in copies])
        return groups[self._here._replace(data=0)]

    def _list_holders(self, stages: RankStages, name: str) -> tuple[int, ...]:
        """Return the positions in the pipeline that share a parameter; empty if only one position has it."""
        holders = sorted({stage % self._spec.parallel.pipeline for stage in stages.shared.get(name, ())})
        return tuple(holders) if len(holders) > 1 else ()

    def _make_holder_groups(self, stages: RankStages) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return the process groups of ranks that share parameters, such as a tied embedding. All ranks of a group
        belong to this rank's data-parallel copy and tensor-parallel slice. The key of a group is the tuple of its
        positions in the pipeline. Every rank creates all groups in the same order."""
        found = dict[tuple[int, ...], dist.ProcessGroup]()
        for holders in sorted({self._list_holders(stages, name) for name in stages.shared} - {()}):
            for first in range(self._spec.world_size // self._spec.parallel.pipeline):  # each copy and slice
                here = place(self._spec, first)
                ranks = [find_rank(self._spec, here._replace(pipeline=pipeline)) for pipeline in holders]
                group = dist.new_group(ranks)
                if here == self._here._replace(pipeline=here.pipeline):
                    found[holders] = group
        return found

    def _is_counted(self, stages: RankStages, name: str, parameter: Parameter) -> bool:
        """Return True if this rank counts the parameter in the global gradient norm. Only the first rank that shares
        the parameter counts it."""
        holders = self._list_holders(stages, name)
        first = not holders or holders[0] == self._here.pipeline
        return first and (find_slice(parameter) is not None or self._here.tensor == 0)

    def train_step(self, micro_batches: Iterable[dict[str, Tensor]]) -> Tensor | None:
        losses = self.run_passes(micro_batches)
        self._update()
        return torch.stack(losses).mean() if losses else None

    def run_passes(self, micro_batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
        """Run the passes of a step without the update. Return the loss of each micro-batch, 0-d; the list is empty if
        another rank has the last stage. Gradients are added to the gradients that the parameters already have."""
        if not objectives.weighs_targets(self._spec):
            return self._executor.run(micro_batches)  # each micro-batch is loaded when a pass needs it
        # Count targets before the first pass. Later, the all-reduce would make ranks wait within the schedule.
        weighed = list(weigh(micro_batches, self._spec))
        return self._executor.run([one.tensors for one in weighed], [one.weight for one in weighed])

    def idle_s(self) -> float:
        """Return the seconds of this rank's pipeline bubble, the sum of two waits. During the schedule, the rank waits
        for its neighbours. After the schedule, it waits for the slowest rank. This second wait is the difference
        between the step time of the slowest rank and the step time of this rank. Return 0 without a pipeline."""
        own_s, waited_s = self._executor.read_times_s()
        if self._spec.parallel.pipeline == 1:
            return 0.0
        longest_s = torch.tensor(own_s, dtype=torch.float64, device=self._device)
        dist.all_reduce(longest_s, dist.ReduceOp.MAX)
        return waited_s + float(longest_s) - own_s

    def transfer_wait_s(self) -> float:
        return self._executor.read_times_s()[1]

    def list_passes(self) -> list[TimedPass]:
        return [
            TimedPass(kind, stage, micro_batch, round(begin_s, 6), round(end_s, 6))
            for (kind, stage, micro_batch), begin_s, end_s in self._executor.list_passes()
        ]

    def gradient_norm(self) -> Tensor | None:
        return self._update.norm

    def skipped_steps(self) -> int:
        return 0  # without a loss scale no step is skipped

    def config(self) -> dict[str, Any]:
        """Return the engine's options, the precision and the optimizer's settings."""
        given = self._options.model_dump(mode="json")
        return {**given, "precision": self._spec.precision, "optimizer": describe_optimizer(self._spec)}
