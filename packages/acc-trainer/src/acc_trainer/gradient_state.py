"""GradientState: the public face over the accumulation counter, and which counter is whose."""

from __future__ import annotations

from typing import Any

from acc_plugins.options.accumulation import GradientAccumulationPlugin
from acc_trainer.grad_sync import GradSync
from acc_trainer.state import SharedState


class GradientState:
    """Where gradient accumulation stands; every Accelerator shows its own, `GradientState()` that of the newest one."""

    _shared_state = SharedState()

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        shared = self._shared_state
        if gradient_accumulation_plugin is not None:
            shared["grad_sync"] = sync_from_plugin(gradient_accumulation_plugin)
        elif "grad_sync" not in shared:
            shared["grad_sync"] = GradSync()
        self._own: GradSync | None = None

    @classmethod
    def of(cls, grad_sync: GradSync) -> GradientState:
        """The face of one GradSync, which becomes that of the newest Accelerator."""
        cls._shared_state["grad_sync"] = grad_sync
        made = cls()
        made._own = grad_sync
        return made

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Forget the newest Accelerator's; earlier Accelerators keep their own."""
        GradientState._shared_state.clear()

    @property
    def _sync(self) -> GradSync:
        return self._own if self._own is not None else current_grad_sync()

    @property
    def initialized(self) -> bool:
        """Whether there is something to show."""
        return "grad_sync" in GradientState._shared_state

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends a window."""
        return self._sync.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._sync.sync = bool(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._sync.sync = bool(sync_gradients)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """What a loop of the user's own noted about exchanging gradients by hand on XLA; ours are averaged in `backward`."""
        return self._sync.xla_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._sync.xla_synced = bool(value)

    @property
    def num_steps(self) -> int:
        """Micro-batches of a full window."""
        return self._sync.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """What the plugin says; either way a schedule moves with the steps that are made, and calls in between change nothing."""
        return self._sync.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the window."""
        return self._sync.sync_with_loader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What differs from the defaults of GradientAccumulationPlugin."""
        return self._sync.options

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._sync.loaders)

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders being iterated, the outermost first."""
        return [loader for position in self._sync.loaders if (loader := _loader_of(position)) is not None]

    @property
    def active_dataloader(self) -> Any:
        """The loader whose batch is in use, or None."""
        return _loader_of(self._sync.loaders[-1]) if self._sync.loaders else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in use is the last one of its loader."""
        return self._sync.end_of_loader

    @property
    def remainder(self) -> int:
        """Samples of the last group of batches; -1 outside a loader and where it is unknown."""
        return int(getattr(self._sync.loaders[-1], "remainder", -1)) if self._sync.loaders else -1


def _loader_of(position: Any) -> Any:
    reference = getattr(position, "loader", None)
    return reference() if reference is not None else None


def current_grad_sync() -> GradSync:
    """The GradSync of the newest Accelerator; one without accumulation where there is none."""
    sync: GradSync = GradientState._shared_state.setdefault("grad_sync", GradSync())
    return sync


def sync_from_plugin(plugin: GradientAccumulationPlugin) -> GradSync:
    """The counter that `plugin` describes."""
    made = GradSync(
        1 if plugin.num_steps is None else plugin.num_steps,
        sync_with_loader=plugin.sync_with_dataloader,
        sync_each_batch=plugin.sync_each_batch,
        adjust_scheduler=plugin.adjust_scheduler,
        average_short_window=plugin.average_short_window,
    )
    made.options = plugin.to_kwargs()
    return made
