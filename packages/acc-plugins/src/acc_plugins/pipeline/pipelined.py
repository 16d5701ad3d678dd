"""Training through a pipeline of processes: each runs some of the layers, micro-batches follow one another through them.

[Note: who does what] The schedules are those of torch.distributed.pipelining: GPipe (Y. Huang et al., 2019), 1F1B (D. Narayanan et al., "PipeDream", 2019) and
interleaved 1F1B (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021). What they run is cut by `graph.py`. A
gradient is that of the mean loss over the whole batch: each micro-batch's loss is divided by their number. Weights that several stages use get the sum of
those stages' gradients on each of them, so that the same optimizer keeps them equal. With several pipelines, gradients are then averaged over them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.optim import Optimizer

from acc_bigmodel.inference.stages import choose_split_points
from acc_hooks.ties import replace_tensors
from acc_ops.exchange import raise_together, together, tried
from acc_ops.world import World, current_world
from acc_plugins.pipeline.batches import BatchForm
from acc_plugins.pipeline.errors import PipelineError
from acc_plugins.pipeline.graph import Cut, Leaves, cut, trace
from acc_plugins.pipeline.piped import Piped, mark_piped
from acc_plugins.pipeline.saving import PipelineState, gathered_on_first
from acc_plugins.pipeline.stage import StageModule
from acc_plugins.strategies.same_start import send_from_rank_0

logger = logging.getLogger(__name__)
_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


class Pipelined(Piped):
    """`model` as a pipeline over this world's processes: this rank has the weights of its stages, the others' are on the meta device.

    `example` is a batch as `step` will get it: (args, kwargs), args, kwargs or one tensor; every rank gives the same one. `microbatches` divide its rows. `loss`
    takes the model's output and `target`, and returns the mean loss of the rows it is given. `schedule` is "gpipe", "1f1b" or "interleaved1f1b", the
    latter with `stages_per_rank` of 2 or more. `split` are the names of the modules at which the second and later stages begin; by default stages
    get near equal bytes. With `replicas`, that many pipelines train on batches of their own, over neighbouring ranks each.

    Raises PipelineError (a ValueError), ValueError or TypeError on every rank, before weights are moved, for a model that cannot be cut and for sizes that
    do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        microbatches: int,
        schedule: Literal["gpipe", "1f1b", "interleaved1f1b"] = "1f1b",
        stages_per_rank: int = 1,
        split: str | Sequence[str] = "auto",
        replicas: int = 1,
        world: World | None = None,
    ) -> None:
        self.world = world or current_world()
        self.model = model
        self.microbatches = microbatches
        self._loss = loss
        self._schedule = schedule
        self._replicas = replicas
        self._stages_per_rank = stages_per_rank
        cuts = together(self.world, lambda: self._cut(example, split))
        self._check_same(cuts)
        send_from_rank_0([*model.parameters(), *model.buffers()], self.world)
        mesh = init_device_mesh(self.world.device.type, (replicas, self.ranks), mesh_dim_names=("dp", "pp"))
        self._line = mesh["pp"].get_group()
        self._copies = mesh["dp"].get_group()
        self._place = mesh["pp"].get_local_rank()
        self.stages = list(range(self._place, len(cuts), self.ranks))
        self._owners = {
            name: stage
            for stage, one in reversed(list(enumerate(cuts)))
            for name in (*one.parameters, *one.buffers)
        }
        self._names = sorted({name for stage in self.stages for name in cuts[stage].parameters})
        self._shared = self._shared_weights(cuts)
        self._runner = self._make_runner(cuts)
        self._drop_others()
        mark_piped(self.parameters())

    @property
    def ranks(self) -> int:
        """Processes of one pipeline."""
        return self.world.size // self._replicas

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of this rank's stages, by their names in the whole model."""
        known = dict(self.model.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name in self._names:
            if id(known[name]) not in seen:
                seen.add(id(known[name]))
                yield name, known[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of this rank's stages: give them to the optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch: gradients are added up, and the mean loss of this pipeline's batch is on every one of its ranks.

        Every rank of a pipeline gives the same batch. Raises PipelineError on every rank for a batch of another form than the example's.
        """
        given = self._agreed(args, kwargs, target)
        before = [p.grad for p, _, _ in self._shared]  # summed already
        for p, _, _ in self._shared:
            p.grad = None
        losses: list[Tensor] = []
        dummy = torch.zeros(self.microbatches, device=self.world.device)
        is_last = self.stages[-1] == self.ranks * self._stages_per_rank - 1
        if is_last:
            self._runner.step(target=dummy, losses=losses, **given)
        else:
            self._runner.step(**given)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)  # one format on all ranks
        for loss in losses:
            total += loss.detach().reshape(())
        self._exchange(before)
        last = dist.get_global_rank(self._line, self.ranks - 1)
        dist.broadcast(total, last, group=self._line)
        return total

    def clip_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the 2-norm over the whole model is at most `max_norm`; the norm before. A shared weight counts once."""
        mine = [p.grad for p in self.parameters() if p.grad is not None and self._answers_for(p)]
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if mine:
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mine))).double().square()
        dist.all_reduce(total, group=self._line)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        with torch.no_grad():
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(scale.to(p.grad.dtype))
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers of this rank's stages, by their names in the whole model."""
        own = {id(p) for p in self.parameters()}
        state = self.model.state_dict(keep_vars=True)
        parameters = {id(p) for p in self.model.parameters()}
        return {
            name: value.detach()
            for name, value in state.items()
            if (id(value) in own if id(value) in parameters else self._is_here(name))
        }

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers of the whole model, in CPU memory, on rank 0 of each pipeline; {} on the others. Every rank calls it."""
        made: dict[str, Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            owner = self._owners.get(name, 0) % self.ranks
            if self._place not in (0, owner):
                continue
            here = value.detach()
            if owner:
                here = here if self._place == owner else torch.empty_like(here, device=self.world.device)
                self._hand(here, owner)
            made[name] = here.cpu()
        return made if self._place == 0 else {}

    def _is_here(self, buffer: str) -> bool:
        """Whether no other rank's stage writes to it."""
        return buffer not in self._owners or self._owners[buffer] % self.ranks == self._place

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give this rank's weights and buffers the values of a whole model's, or of this rank's part. KeyError, before anything is changed, for a missing name."""
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise KeyError(
                f"the state has no {missing[0]}, which this rank's stages need (of {len(missing)} missing)"
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])

    def with_optimizer(self, optimizer: Optimizer) -> PipelineState:
        """This pipeline and the optimizer of its weights as one object to save, for other numbers of stages, too."""
        return PipelineState(self, optimizer)

    def names_by_weight(self) -> dict[nn.Parameter, list[str]]:
        """All names of each weight of the model; a tied one has several."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        return names

    def tell_first(self, value: Any) -> list[Any]:
        """What every rank of this pipeline tells its first rank, in order; [] on the others."""
        return gathered_on_first(value, self._line, self._place, self.ranks)

    def _hand(self, value: Tensor, owner: int) -> None:
        if self._place == owner:
            dist.send(value.contiguous(), dist.get_global_rank(self._line, 0), group=self._line)
        else:
            dist.recv(value, dist.get_global_rank(self._line, owner), group=self._line)

    # building ----------------------------------------------------------------------------------------------------------------

    def _cut(self, example: Any, split: str | Sequence[str]) -> list[Cut]:
        self._check_sizes()
        stages = self.ranks * self._stages_per_rank
        starts = choose_split_points(self.model, split, stages, None)
        self._form = BatchForm(example, self.microbatches)
        if any(p.is_meta for p in self.model.parameters()):
            raise PipelineError("the model has weights on the meta device: load them before it is cut")
        self.model.to(self.world.device)
        self._modes = _modes(self.model)
        if not self.model.training:
            logger.warning(
                "%s is in eval() while its stages are cut: they train without dropout and with fixed statistics; call train() before, unless you want that",
                type(self.model).__name__,
            )
        leaves = Leaves(self.model, self._form.spec, self._form.constants)
        self._outputs = leaves.outputs
        whole = trace(leaves, self._form.one(self.world.device))
        named: dict[str, Any] = dict(self.model.named_buffers(remove_duplicate=False))
        named.update(self.model.named_parameters(remove_duplicate=False))
        return cut(whole, starts, named)

    def _check_sizes(self) -> None:
        for name, value in (
            ("microbatches", self.microbatches),
            ("replicas", self._replicas),
            ("stages_per_rank", self._stages_per_rank),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if self._schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}, got {self._schedule!r}")
        if (self._schedule == "interleaved1f1b") != (self._stages_per_rank > 1):
            raise ValueError(
                f"schedule={self._schedule!r} with stages_per_rank={self._stages_per_rank}: interleaved1f1b runs 2 or more stages on a rank, the "
                "others one"
            )
        if self.world.size % self._replicas or self.ranks < 2:
            raise ValueError(
                f"replicas={self._replicas} leaves {self.world.size / self._replicas:g} of {self.world.size} processes for each pipeline: it needs 2 or "
                "more, and the same number for each"
            )
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != self.world.size:
            raise ValueError("a pipeline takes all processes of a torch.distributed group: use a launcher")

    def _check_same(self, cuts: Sequence[Cut]) -> None:
        """PipelineError on all ranks where one was asked for something else, or cut the model elsewhere."""
        asked = (self._schedule, self.microbatches, self._stages_per_rank, self._replicas)
        said = (type(self.model).__name__, *asked, [(one.batch, one.parameters) for one in cuts])
        told = self.world.comm.all_gather_object(said)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise PipelineError(
                    f"rank {rank} was asked for another pipeline than rank 0: {other} and {told[0]}"
                )

    def _make_runner(self, cuts: Sequence[Cut]) -> Any:
        count = len(cuts)
        made = []
        for number in self.stages:
            one = cuts[number]
            module = StageModule(one, self._outputs, self._mean_loss if number == count - 1 else None)
            gives = one.gives if number < count - 1 else (torch.empty(1, dtype=torch.float32),)
            made.append(
                PipelineStage(
                    module.to(self.world.device),
                    number,
                    count,
                    self.world.device,
                    input_args=_plain(one.takes),
                    output_args=_plain(gives),
                    group=self._line,
                )
            )
        schedule = _SCHEDULES[self._schedule]
        more = {"scale_grads": False} if "scale_grads" in inspect.signature(schedule).parameters else {}
        stages: Any = made if self._stages_per_rank > 1 else made[0]
        return schedule(stages, self.microbatches, loss_fn=lambda output, _: output.reshape(()), **more)

    def _mean_loss(self, output: Any, target: Any) -> Tensor:
        return self._loss(output, target) / self.microbatches

    def _drop_others(self) -> None:
        """Weights of other ranks' stages need no memory here."""
        others = {id(p) for p in self.model.parameters()} - {id(p) for p in self.parameters()}

        def without_memory(tensor: Tensor) -> Tensor:
            if id(tensor) not in others:
                return tensor
            return nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)

        replace_tensors(self.model, without_memory)

    # a step ------------------------------------------------------------------------------------------------------------------

    def _agreed(self, args: Any, kwargs: Any, target: Any) -> dict[str, Any]:
        """The batch as named tensors, once all ranks have one of the right form: one number tells that, the errors are exchanged where it does not."""
        given, error = tried(lambda: self._given(args, kwargs, target))
        # with and without a target on different ranks: the largest of both numbers is 1
        has = target is not None
        said = torch.tensor([error is not None, has, not has], dtype=torch.int64)
        failed, some, others = self.world.comm.all_reduce(
            said.to(self.world.comm.control_device), "max"
        ).tolist()
        if failed:
            raise_together(self.world, error)
        if some and others:
            raise PipelineError(
                "some ranks gave a target to step, others none: every rank gives the same batch"
            )
        assert given is not None
        return given

    def _given(self, args: Any, kwargs: Any, target: Any) -> dict[str, Any]:
        """The batch as named tensors. PipelineError for one of another form, and for a model in another mode than its stages."""
        now = _modes(self.model)
        if now != self._modes:
            name = next(name for name, training in now.items() if training != self._modes.get(name))
            was, is_now = ("train()", "eval()") if self._modes.get(name) else ("eval()", "train()")
            raise PipelineError(
                f"{name or 'the model'} was in {was} when the stages were cut, which they keep, and is in {is_now} now: put it back, or build the "
                "pipeline anew in the other mode"
            )
        return self._form.given(args, kwargs, target, self.world.device)

    def _shared_weights(self, cuts: Sequence[Cut]) -> list[tuple[nn.Parameter, int, Any]]:
        """Weights that stages on several ranks use, with the first of those ranks and a group of them; every rank makes the same groups."""
        known = dict(self.model.named_parameters(remove_duplicate=False))
        users: dict[nn.Parameter, set[int]] = {}
        for stage, one in enumerate(cuts):
            for name in one.parameters:
                users.setdefault(known[name], set()).add(stage % self.ranks)
        found = []
        for parameter, places in users.items():
            for replica in range(self._replicas) if len(places) > 1 else ():
                group = dist.new_group([replica * self.ranks + place for place in sorted(places)])
                if replica == self.world.rank // self.ranks and self._place in places:
                    found.append((parameter, min(places), group))
        return found

    def _answers_for(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a weight that others may have, too: the first of them does."""
        return all(parameter is not p or self._place == first for p, first, _ in self._shared)

    def _exchange(self, before: Sequence[Tensor | None]) -> None:
        """Shared weights get the sum of their stages' gradients, all weights the mean over the pipelines, and what there was before is added."""
        for (p, _, group), kept in zip(self._shared, before, strict=True):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            if kept is not None:
                p.grad += kept
        if self._replicas > 1:
            for p in self.parameters():
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad, group=self._copies)
                    p.grad /= self._replicas


def _modes(model: nn.Module) -> dict[str, bool]:
    """Which modules are in train()."""
    return {name: module.training for name, module in model.named_modules()}


def _plain(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of the meta device like these, which gradients flow through."""
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=True) for value in values
    )
