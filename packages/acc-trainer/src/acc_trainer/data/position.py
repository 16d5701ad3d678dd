"""Where a loader stands: epoch, batches handed out, padding in this batch.

[Note: one epoch, one order] The order of an epoch is a function of (seed, epoch), or, for a sampler that draws from torch's global
generator, of that generator's state when the epoch began, which is kept here. So a position is all that a resumed run needs.

[Note: when an epoch is over] Every pass over a loader is an epoch of its own, as every `iter()` of a torch loader draws a new order. A
pass that ended, or was left after at least one batch, is behind us. A position that was loaded stays where it was until the next
pass: that pass is the saved epoch, whole or without its first batches, unless the saved batch was the epoch's last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from acc_ops.arguments import at_least_0
from acc_trainer.data.draws import drawn_so_far, put_back, to_save


class LoaderPosition:
    """The three numbers of a loader, and what its current batch consists of.

    `real` and `sizes` hold, for the batch in use and in rank order, the rows that are samples and the rows there are; None means
    that every row of every rank is a sample. Rows that repeat samples only to make the ranks even come last on each rank.
    """

    __slots__ = (
        "__weakref__",
        "_at_end",
        "_inner",
        "_loaded",
        "_reopens",
        "_start",
        "ahead",
        "apart",
        "batches",
        "dealt",
        "drops",
        "ends_window",
        "epoch",
        "first",
        "following",
        "generator",
        "given",
        "goes_on",
        "inner_state",
        "is_last",
        "loader",
        "not_dealt",
        "outlasted",
        "padding",
        "reader",
        "real",
        "remainder",
        "replay",
        "resumed",
        "reused",
        "rng",
        "saved_batches",
        "seed",
        "sizes",
        "waiting",
        "was_open",
    )

    def __init__(self, epoch: int = 0, seed: int | None = None) -> None:
        self.epoch = epoch
        self.batches = 0
        self.padding = 0  # rows of this rank's batch that are no samples of their own
        self.is_last = False
        # it is the last batch of some rank, so gradients are exchanged on all of them
        self.ends_window = False
        self.remainder = -1
        self.real: tuple[int, ...] | None = None
        self.sizes: tuple[int, ...] | None = None
        self.seed = seed
        self.generator: torch.Generator | None = None  # the user's, when samples are drawn from it directly
        self.rng: dict[str, Any] | None = None  # generator states when this epoch began
        # the same, before the batch behind the one in use was read ahead
        self.ahead: Mapping[str, Any] | None = None
        # `ahead` of the saved run: this pass begins with that batch
        self.resumed: Mapping[str, Any] | None = None
        # what gives the indices of this pass, where it reads one batch of them ahead, and that batch of the saved run
        self.reader: Any = None
        self.following: Any = None
        # workers that stay: whether torch had an iterator already when this pass began (one that is made draws a seed for them), and whether
        # the loaded run would have one for its next pass
        self.reused: bool | None = None
        self.was_open = False
        self.replay = False  # the next pass repeats a saved epoch: use `rng`
        # a stateful loader was given a state, from which its next pass continues by itself
        self.goes_on = False
        # batches of the loader below that it then has to read and drop, as its stream has no state of its own
        self.drops: int | None = None
        self.apart = False  # in some pass the ranks got unequal numbers of batches, or may have
        self.outlasted = False  # at the end of this rank's epoch another rank has batches left
        self.first: Any = None  # the epoch's first batch, where a stateful loader that dispatches may have to repeat rows of it
        # what was read of this epoch by runs that were split in another way, and the seed of its order (see `dealing`)
        self.dealt: dict[str, Any] | None = None
        self.not_dealt: str | None = None  # why the loaded epoch begins anew
        self.saved_batches = 0  # of the loaded pass, as the run that saved it counted them
        self.waiting: weakref.ref[Any] | None = None  # the pass that was begun last and has read nothing yet
        self.loader: weakref.ref[Any] | None = None
        self._inner: Callable[[], dict[str, Any]] | None = None  # state of a stateful loader
        # that state before a batch was read ahead, or as it was loaded; None: the loader tells it. It is here, as twins read one loader
        self.inner_state: dict[str, Any] | None = None
        self.given: Mapping[str, Any] | None = None  # the state that we gave the stateful loader last
        self._start = 0
        self._loaded = False
        self._at_end = False  # the pass was left at its last batch
        # the saved pass had been begun, but nothing was read: the next one begins as it did
        self._reopens = False

    @property
    def is_dealt(self) -> bool:
        """Whether the next pass may be the rest of an epoch that was dealt out anew."""
        return self.dealt is not None and self._loaded and not self._at_end

    @property
    def seen(self) -> int:
        """The batches of its epoch that a loaded pass has handed out; 0 where there is none to go on with, or it does so by itself."""
        return self.batches if self._loaded and not (self._at_end or self.goes_on) else 0

    @property
    def upcoming(self) -> int:
        """The epoch of this pass or, after a load, of the next one."""
        return self.epoch + 1 if self._loaded and self._at_end else self.epoch

    def begin(self, skip: int = 0, *, deals: bool = False, itself: bool = False) -> bool:
        """A pass begins that leaves out `skip` batches; True when it repeats a saved epoch. It has read nothing until `start`.

        `deals`: it is the rest of an epoch that was dealt out anew. `itself`: a stateful loader goes on by itself.
        """
        # (`zip(loader, loader)` begins two passes, so two epochs, before it reads)
        behind = self._is_waiting() or self._at_end or self.batches > self._start
        if self._loaded and skip and skip >= self.batches:
            behind = False  # the rest of the saved epoch, of which nothing is left
        if behind:
            self.epoch += 1
        again = (self._reopens or self.replay) and not behind
        if again and self._reopens:
            self.put_back(self.rng or {})
        if not again:
            self.reused = None
        self.waiting, self._reopens = None, False
        self.outlasted = False
        if behind or not deals:
            self.dealt = None
        if behind or not itself:
            self.first = None
        self.replay = replay = self.replay and not behind
        self.resumed = self.ahead if replay and skip == self.batches else None
        self.ahead = self.reader = None
        if not (replay and skip == self.batches):
            self.following = None
        self._loaded = self._at_end = False
        self._start = self.batches = skip
        self.is_last = self.ends_window = False
        self.padding = 0
        self.real = self.sizes = None
        if not replay:
            self.rng = self.generator_states()
        return replay

    def start(self) -> None:
        """The pass reads its first batch. One that never does, and is gone, leaves the saved epoch to the next."""
        self.waiting = None
        self.replay = False

    def go_on_behind(self, batches: int, drops: int | None = None) -> None:
        """The next pass goes on behind so many batches, as the stateful loader that is read was told, or by reading and dropping."""
        self.batches = self._start = batches
        self.drops = drops
        self._loaded = self.goes_on = True
        self.replay = self._at_end = False

    def finish(self) -> None:
        """The pass came to the end of the data: the next one is the next epoch."""
        self.epoch += 1
        self.batches = self._start = 0
        self.is_last = False
        self.close()
        self.rng = self.ahead = self.dealt = self.first = self.reader = self.following = None
        self.outlasted = False

    def note_reading_ahead(self) -> None:
        """The batch behind the one that is handed out next is read now: a saved position must know with which draws."""
        self.ahead = drawn_so_far(self.ahead)

    def close(self) -> None:
        """No batch is in use any more."""
        self._at_end = self.is_last
        self.is_last = self.ends_window = False
        self.remainder = -1
        self.padding = 0
        self.real = self.sizes = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`, from its first batch unless it is told to skip. In the middle of a saved one nothing changes.

        TypeError for what is no whole number, ValueError for one below 0.
        """
        epoch = at_least_0(epoch, "epoch")
        self.waiting, self._reopens = None, False
        if self.goes_on:  # where it goes on from is in the stateful loader
            self.epoch = epoch
            return
        if epoch == self.epoch and (not self.batches or (self._loaded and not self._at_end)):
            return
        self.epoch = epoch
        self.batches = self._start = 0
        self._loaded = self.replay = self._at_end = False
        self.ahead = self.dealt = self.reader = self.following = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to continue this loader; plain numbers and tensors."""
        finished = (self.is_last or self._at_end) and not self.outlasted
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "batches": self.batches,
            "padding": self.padding,
            "finished": finished,
            "over": self.outlasted,
            "seed": self.seed,
        }
        loader = self._owner()
        if loader is not None:
            state["layout"] = loader._layout()
            if loader._is_open():
                state["was_open"], state["reused"] = True, bool(self.reused)
        if self.apart:
            state["apart"] = True
        if self.dealt is not None:
            state["dealt"] = self.dealt
        if self.first is not None and not finished and _is_plain(self.first):
            state["first"] = self.first
        waiting = self._is_waiting()
        # a rest that was dealt out anew has an order from its beginning, though nothing was read of it
        if (self.batches or waiting or self.dealt is not None) and not finished:
            state["reopens"] = waiting and not self.replay
            state["rng"] = None if self.rng is None else to_save(self.rng)
            if self.ahead is not None:
                state["ahead"] = to_save(self.ahead)
            following = self.following if self.reader is None else self.reader.following
            if loader is not None and following is not None and _is_plain(following):
                state["following"] = {"rank": loader.world.rank, "indices": following}
        elif self.generator is not None:
            state["generator"] = self.generator.get_state()
        if self._inner is not None:
            state["loader"] = self._inner()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was taken.

        Raises `ValueError` when `state` is not the state of a loader.
        """
        missing = {"epoch", "batches"} - set(state)
        if missing:
            raise ValueError(
                f"not the state of a data loader: {sorted(missing)} missing, it has {sorted(state)}"
            )
        self.epoch = int(state["epoch"])
        self.batches = int(state["batches"])
        self._start = self.batches
        self._loaded, self.saved_batches = True, self.batches
        self.dealt, self.not_dealt, self.first = state.get("dealt"), None, state.get("first")
        self.goes_on, self.drops = False, None
        self.apart = bool(state.get("apart"))
        loader = self._owner()
        if state.get("seed") is not None and (loader is None or self.seed is not None):
            self.seed = int(state["seed"])
        self.rng = state.get("rng")
        self.ahead = state.get("ahead")
        self.reader, self.following = None, None
        following = state.get("following")
        if loader is not None and following is not None and following["rank"] == loader.world.rank:
            self.following = following["indices"]
        self.waiting, self._reopens = None, bool(state.get("reopens"))
        self.was_open, self.reused = bool(state.get("was_open")), bool(state.get("reused"))
        self.replay = self.rng is not None and not self._reopens
        if self.generator is not None and state.get("generator") is not None:
            self.generator.set_state(state["generator"])
        self.is_last = self.ends_window = False
        self._at_end = bool(state.get("finished"))
        if loader is not None:
            loader._position_loaded(state)

    def begin_anew(self, why: str | None) -> None:
        """The loaded epoch, of a run that was split in another way, begins with its first batch; `why` says that this cannot be mended."""
        self.not_dealt = why
        self.batches = self._start = 0
        self.ahead = self.dealt = self.following = None
        self.replay = self._reopens = self.goes_on = False

    def deal(self, before: list[Any], seed: int | None) -> None:
        """The next pass may be the rest of the loaded epoch behind what was read `before`, in the order of `seed` or of the saved generators."""
        self.begin_anew(None)
        self.dealt = {"before": before, "seed": seed}
        self.replay = self.rng is not None

    def _owner(self) -> Any:
        """The loader that stands here."""
        return self.loader() if self.loader is not None else None

    def _is_waiting(self) -> bool:
        """Whether a pass was begun that has read nothing yet, and still can."""
        waiting = None if self.waiting is None else self.waiting()
        return waiting is not None and waiting.gi_frame is not None

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Let the generators go on from `states`."""
        put_back(states)
        if self.generator is not None and "generator" in states:
            self.generator.set_state(states["generator"])

    def generator_states(self) -> dict[str, Any]:
        """Where the generators are that the order of a pass may be drawn from."""
        states = drawn_so_far()
        if self.generator is not None:
            states["generator"] = self.generator.get_state()
        return states


def _is_plain(value: Any) -> bool:
    """Whether torch loads it from a file that it does not trust."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (torch.Tensor, bool, int, float, str, bytes)
