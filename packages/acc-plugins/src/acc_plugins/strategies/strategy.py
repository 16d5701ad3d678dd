"""A strategy decides how a training step is spread over devices; this base is the single device.

[Note: who calls what] The trainer asks no "which strategy is this?": it makes the calls below, in this order, and each strategy overrides what
differs. `prepare` sees models, optimizers and schedulers together because sharding and engines must replace them together. Saving and loading
are called on every rank, also where only one rank writes, because sharded strategies must gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acc_ops.exchange import tried
from acc_ops.lazy import LazyModule
from acc_ops.unwrap import extract_model_from_parallel
from acc_ops.world import World
from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision
from acc_plugins.states.names import ParameterNames, plain_state
from acc_plugins.states.part import Part, TorchFilePart, WeightsPart
from acc_plugins.strategies import clip
from acc_plugins.strategies.agreement import (
    Facts,
    ModelFacts,
    OptimizerFacts,
    check_agreement,
    model_facts,
    optimizer_facts,
)
from acc_plugins.strategies.placing import follow, place
from acc_plugins.strategies.same_start import tie_what_is_empty

if TYPE_CHECKING:
    from acc_plugins.states.names import Names
    from acc_plugins.states.optimizers import SavedOptimizer
    from acc_plugins.strategies.gradients import GradientPlace, Places

__all__ = ["Bundle", "StepOutcome", "Strategy"]

files = LazyModule("acc_plugins.states.files")  # what reads files is loaded when it is first used
read = LazyModule("acc_plugins.states.read")
optimizers = LazyModule("acc_plugins.states.optimizers")
gradients = LazyModule("acc_plugins.strategies.gradients")

_NOTHING: AbstractContextManager[Any] = nullcontext()  # stateless, so one serves everybody
_SEEDED = (torch.float32, torch.float64)


@dataclass(kw_only=True)
class Bundle:
    """What one `prepare` hands over, and gets back in the same order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    place: bool = True  # move models to the device
    evaluation: bool = False  # no gradients will be asked for


class Strategy:
    """One device. Strategies over several override what differs; the comments number the calls in order."""

    name: ClassVar[str] = "single"
    synchronises: ClassVar[bool] = False  # whether without_sync and sync_next_backward do anything
    changes_modules_in_place: ClassVar[bool] = False  # a copy of a prepared model would not be one
    why_not_compiled: str = ""  # where torch.compile leaves all as it is; what to do instead
    gathers: ClassVar[bool] = False  # whether `state` is a call for every rank
    waits_for_all: ClassVar[bool] = False  # a step that some rank leaves out would keep the others waiting

    def __init__(self, world: World, precision: Precision, *, save_on_each_node: bool = False) -> None:
        """`save_on_each_node`: the first rank of every node writes, not only rank 0 (for disks that are not shared)."""
        self.world = world
        self.precision = precision
        self.save_on_each_node = save_on_each_node
        self.names = ParameterNames()
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    # 1
    def prepare(self, bundle: Bundle) -> Bundle:
        """Models placed, in the strategy's precision and wrapped for training; optimizers keep their parameters; order kept.

        Where gradients are exchanged, every rank calls it, and nothing is changed before the ranks agree. Raises ValueError, on all of them, where
        they do not, and for a model that cannot be placed.
        """
        if self.world.size > 1 and self.synchronises and self._must_agree(bundle):
            self._agree(bundle)
        self.names.note(bundle.models, bundle.optimizers)
        made = self._make(bundle)
        self.names.add(made.models)
        return made

    def _agree(self, bundle: Bundle) -> None:
        facts, error = tried(lambda: self._facts(bundle))  # it calls functions of the user's
        models, optimizers = facts or ([], [])
        kinds = ", ".join(type(one).__name__ for one in bundle.optimizers)
        options = {**self.options_of_all_ranks(), "the optimizers": kinds or "none"}
        check_agreement(self.world.comm, options, models, optimizers, error=error)

    def _facts(self, bundle: Bundle) -> tuple[list[ModelFacts], list[OptimizerFacts]]:
        """What this rank tells the others about the bundle."""
        for model in bundle.models:
            tie_what_is_empty(model)
        models = [model_facts(model, self.treatment(model)) for model in bundle.models]
        named = self.names.about(bundle.models, bundle.optimizers)
        optimizers = [
            optimizer_facts(one, names) for one, names in zip(bundle.optimizers, named, strict=True)
        ]
        return models, optimizers

    def options_of_all_ranks(self) -> dict[str, str]:
        """By name, what must be the same on every rank, since it decides what is sent or what files hold."""
        return {"the strategy": self.name, "mixed_precision": self.precision.name}

    def treatment(self, model: nn.Module) -> Facts:  # noqa: ARG002
        """How the options would treat this model, likewise. What it raises, every rank raises."""
        return []

    def _must_agree(self, bundle: Bundle) -> bool:
        """A model for evaluation alone is one rank's own matter."""
        return bool(bundle.models or bundle.optimizers) and not bundle.evaluation

    def _make(self, bundle: Bundle) -> Bundle:
        """What `prepare` does once the ranks agree."""
        before = [p for model in bundle.models for p in model.parameters()]
        models = [self._prepare_model(model, bundle) for model in bundle.models]
        follow(bundle.optimizers, before, [p for model in models for p in model.parameters()])
        return replace(
            bundle, models=models, optimizers=list(bundle.optimizers), schedulers=list(bundle.schedulers)
        )

    def _prepare_model(self, model: nn.Module, bundle: Bundle) -> nn.Module:
        if bundle.place:
            model = place(model, self.world.device)
        return self.precision.wrap(model)

    # 2
    def without_sync(
        self,
        model: nn.Module,  # noqa: ARG002  same signature everywhere
        apart: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Around forward AND backward of a micro-batch that only accumulates: gradients stay on this rank.

        A step, inside or later, first exchanges what is still held; `apart`: not inside, where ranks with whole models train for themselves.
        """
        return _NOTHING

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around a backward whose forward ran under `without_sync`: gradients are exchanged after all."""
        return _NOTHING

    # 3
    def backward(self, loss: Tensor, *, divisor: float = 1, **kwargs: Any) -> None:
        """Differentiate `loss / divisor`; `kwargs` go to `Tensor.backward`. Raises TypeError when `loss` is no tensor."""
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"backward needs the loss as a tensor, got {type(loss).__name__}: {loss!r}. Pick it out of the model's output first "
                "(outputs.loss, outputs['loss'])"
            )
        if divisor == 1:
            self.precision.scale(loss).backward(**kwargs)
        elif not kwargs and type(loss) is Tensor and loss.dim() == 0 and loss.dtype in _SEEDED:
            # the same gradients without a division node (8 us a step): d(loss / n) = 1/n * d(loss)
            self.precision.scale(loss).backward(gradient=self._seed(loss, divisor))
        else:
            self.precision.scale(loss / divisor).backward(**kwargs)

    def _seed(self, loss: Tensor, divisor: float) -> Tensor:
        key = (divisor, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            seed = self._seeds[key] = torch.tensor(1 / divisor, dtype=loss.dtype, device=loss.device)
        return seed

    # 4
    def exchange_held(self) -> None:
        """Average what micro-batches under `without_sync` have left on each rank and no backward has exchanged: before somebody looks at gradients.

        `step` does it. Nothing where a window has ended as usual. Every rank calls it.
        """

    def drop_held(self, optimizer: Optimizer) -> None:
        """Forget, with the optimizer's `zero_grad`, what is held back of its parameters where it cannot reach it."""

    def note_held(self, model: nn.Module, held: bool) -> None:
        """`held`: gradients of this rank alone are put into the model's `gradient_places`; else nothing is held there. Every rank calls it, before."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Give gradients their true size before somebody looks at them; any number of times per step."""
        self.precision.unscale(optimizer)

    def clip_norm(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2.0
    ) -> Tensor:
        """Clip gradients (unscaled before by `unscale`) to a common norm of `max_norm`; the true global norm before clipping."""
        return clip.clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip every gradient element (unscaled before by `unscale`) to [-clip_value, clip_value]."""
        clip.clip_value(parameters, clip_value)

    # 5
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepOutcome:
        """Step the optimizer; the outcome says whether it really did."""
        return self.precision.step(optimizer, closure)

    # 6
    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights by the names the user's own module gives them, without those of torch.compile, and with its `_metadata`; at least on rank 0."""
        return plain_state(self.unwrap(model).state_dict())

    def state_for_hooks(self, model: nn.Module) -> Mapping[str, Any]:
        """What hooks before a save are shown and `model_part` is given: the weights, in shards where they are saved in shards."""
        return self.state(model)

    def model_part(
        self, model: nn.Module, state: Mapping[str, Any] | None, name: str, safe: bool = True
    ) -> Part | None:
        """`state` (the model's own when None) as it is written under `name`; None on a rank that writes nothing. Call it on every rank."""
        if not self.writes:
            return None
        return WeightsPart(name=name, state=self.state(model) if state is None else state, safe=safe)

    def optimizer_part(self, optimizer: Optimizer, name: str) -> Part | None:
        """The optimizer's state as it is written under `name`; None on a rank that writes nothing. Call it on every rank."""
        return TorchFilePart(name=name, state=optimizer.state_dict()) if self.writes else None

    def save_model(
        self,
        model: nn.Module,
        state: Mapping[str, Any] | None,
        folder: str | Path,
        name: str,
        safe: bool = True,
    ) -> list[str]:
        """Write `state` (the model's own when None) as `<name>.safetensors`, or as torch file `pytorch_<name>.bin`; the file names written.

        Call it on every rank; only a rank that writes returns names.
        """
        part = self.model_part(model, state, name, safe)
        return [] if part is None else part.write(folder)

    def open_model(
        self,
        model: nn.Module,
        folder: str | Path,
        name: str,
        map_location: Any = "cpu",  # noqa: ARG002  for strategies that build new tensors
        strict: bool = True,
    ) -> Callable[[], Any]:
        """Compare the weights called `name`, whatever strategy wrote them, with those of the model; the call that loads them, and returns what
        `load_state_dict` returned. Until it is called nothing of the model is changed, and no tensor read.

        The values go from the mapped file straight into the model's own tensors, wherever those are, so `map_location` changes nothing here.
        Raises FileNotFoundError when there is no such file, OSError, ValueError or RuntimeError for one that cannot be read, and DoesNotFitError (both
        a RuntimeError and a ValueError) naming missing or unexpected weights (when `strict`) and those of another shape. Call it on every rank.
        """
        load: Callable[[], Any] = read.ready_to_load(
            self.unwrap(model), files.open_weights(folder, name), strict
        )
        return load

    def load_model(
        self, model: nn.Module, folder: str | Path, name: str, map_location: Any = "cpu", strict: bool = True
    ) -> Any:
        """Load the weights called `name`; what `load_state_dict` returned. Errors as of `open_model`."""
        return self.open_model(model, folder, name, map_location, strict)()

    def save_optimizer(self, optimizer: Optimizer, folder: str | Path, name: str) -> list[str]:
        """Write the optimizer's state as `<name>.bin`; the file names written. Call it on every rank."""
        part = self.optimizer_part(optimizer, name)
        return [] if part is None else part.write(folder)

    def open_optimizer(
        self, optimizer: Optimizer, folder: str | Path, name: str, map_location: Any = "cpu"
    ) -> Callable[[], None]:
        """Compare the state called `name`, whatever strategy wrote it, with the optimizer; the call that loads it. Until then nothing is changed.

        Raises FileNotFoundError when there is none, DoesNotFitError (a ValueError) for other parameters or groups, ValueError for a file with more than
        plain data and tensors in it. Call it on every rank.
        """
        saved: SavedOptimizer = optimizers.open_optimizer(folder, name)
        names = self.names.of(optimizer)
        optimizers.check_fits(saved, optimizer, names, shapes=self._shows_shapes(optimizer))
        return lambda: optimizer.load_state_dict(
            self._state_to_load(saved.latest(folder, name), optimizer, names, map_location)
        )

    def load_optimizer(
        self, optimizer: Optimizer, folder: str | Path, name: str, map_location: Any = "cpu"
    ) -> None:
        """Load the state called `name`. Errors as of `open_optimizer`."""
        self.open_optimizer(optimizer, folder, name, map_location)()

    def _shows_shapes(self, optimizer: Optimizer) -> bool:  # noqa: ARG002
        """Whether the optimizer's parameters have the shapes of the user's own."""
        return True

    def _state_to_load(
        self, saved: SavedOptimizer, optimizer: Optimizer, names: Names, map_location: Any
    ) -> dict[str, Any]:
        """What the optimizer's `load_state_dict` takes."""
        state: dict[str, Any] = optimizers.state_to_load(saved, optimizer, names, map_location)
        return state

    def exchange_order(self, model: nn.Module) -> list[list[str]] | None:  # noqa: ARG002
        """In which groups, by name, gradients are added up over the ranks, where that is chosen in training: a resumed run needs it to get the
        same last digits. None: there is nothing to keep. Call it on every rank, between two steps."""
        return None

    def restore_exchange_order(self, model: nn.Module, order: list[list[str]] | None) -> bool:  # noqa: ARG002
        """Add up as `exchange_order` told; whether that is what happens from now on. Call it on every rank."""
        return order is None

    def gradient_places(self, model: nn.Module) -> Places:
        """Where this rank's gradients of the model lie between two micro-batches, by name, also those that no parameter shows: a checkpoint
        inside an accumulation window keeps them. UnsupportedError where this torch does not let anybody at some of them."""
        places: Places = gradients.of_parameters(self.unwrap(model))
        return places

    def held_gradients(self) -> Iterable[GradientPlace]:
        """Where gradients may lie, of all models, that were held back in a window and that no parameter shows: no optimizer can empty them."""
        return ()

    def gradient_layout(self, model: nn.Module) -> str:  # noqa: ARG002
        """Equal where the places of one run take what was in those of another."""
        return "whole gradients"

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files that only one rank (of the run, or of each node) writes."""
        return self.world.is_local_main if self.save_on_each_node else self.world.is_main

    # 7
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module, out of what this strategy and torch.compile put around it. The precision's `unwrap` undoes the rest."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    # 8
    def close(self) -> None:
        """Let go of everything that was prepared."""
        self._seeds.clear()
        self.names.clear()
