"""What every prepared loader is: a torch loader that is kept as the user made it, with a position beside it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_trainer.data.draws import as_then
from acc_trainer.data.position import LoaderPosition
from acc_trainer.data.samplers import has_trusted_length
from acc_trainer.data.torchdata_state import (
    batches_in,
    given_state,
    has_no_state,
    is_fresh,
    stateful_loader_class,
    was_asked,
)
from acc_trainer.grad_sync import GradSync
from acc_trainer.gradient_state import current_grad_sync


class DataLoaderAdapter:
    """Wraps a `DataLoader` (or torchdata's `StatefulDataLoader`) as `base_dataloader` and passes attributes on.

    `isinstance(prepared, DataLoader)` holds. With `use_stateful_dataloader=True` torchdata >= 0.8 is needed (`ImportError`).
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        loader_class = stateful_loader_class() if use_stateful_dataloader else DataLoader
        self._adopt(loader_class(dataset, batch_sampler=batch_sampler, **kwargs))

    def _adopt(self, base: Any) -> None:
        """Stand in front of `base`."""
        self.base_dataloader = base
        self.use_stateful_dataloader = callable(getattr(base, "load_state_dict", None))
        self._grad_sync: GradSync | None = None
        self._origin: tuple[weakref.ref[Any], Any] | None = None  # what it was prepared from, and how
        self._use_position(LoaderPosition())

    def _use_position(self, position: LoaderPosition) -> None:
        self.position = position
        position.loader = weakref.ref(self)
        if self.use_stateful_dataloader:
            position._inner = self._state_of_base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # not there yet: half built, or being copied
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_dataloader!r}, epoch={self.position.epoch}, batches={self.position.batches})"

    def _made_from(self, loader: Any, options: Any) -> bool:
        """Whether it was prepared from `loader` with these options."""
        return self._origin is not None and self._origin[0]() is loader and self._origin[1] == options

    @property
    def grad_sync(self) -> GradSync:
        """The accumulation counter that has to know this loader's last batch."""
        return self._grad_sync if self._grad_sync is not None else current_grad_sync()

    # state -------------------------------------------------------------------------------------------------------------------

    @property
    def dl_state_dict(self) -> dict[str, Any] | None:
        """The stateful loader's state where its own would tell of a batch that was read ahead, or of no load; twins have it together."""
        return self.position.inner_state

    @dl_state_dict.setter
    def dl_state_dict(self, state: dict[str, Any] | None) -> None:
        self.position.inner_state = state

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the batch in use; for a stateful loader its own state."""
        return self._state_of_base() if self.use_stateful_dataloader else self.position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was taken."""
        if self.use_stateful_dataloader:
            self.position.go_on_behind(self._steps_in(state_dict), self._give_to_base(state_dict))
        else:
            self.position.load_state_dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Called when `dl_state_dict` was taken, for subclasses that have to correct it.

        It is taken before a batch is read ahead, so there is nothing to correct here.
        """

    def _steps_in(self, state: Mapping[str, Any]) -> int:
        """The batches of this rank that were handed out in a state of the stateful loader below."""
        return batches_in(state)

    def _state_of_base(self) -> dict[str, Any]:
        """The stateful loader's state, before the one batch that may have been read ahead."""
        if self.dl_state_dict is not None:
            return self.dl_state_dict
        base = self.base_dataloader
        opens, loaded = getattr(base, "_iterator", None) is None, getattr(base, "next_iter_state", None)
        with as_then(
            {}
        ):  # it may open an iterator to answer, which draws, and which the next pass would find
            state: dict[str, Any] = base.state_dict()
        if opens:
            base._iterator, base.next_iter_state = None, loaded
            base._initial_iter_for_state_dict = False
        return state

    def _position_loaded(self, state: Mapping[str, Any]) -> None:
        """The position was restored from a checkpoint."""
        self._set_seed(self.position.seed)
        if not self.use_stateful_dataloader or "loader" not in state or state.get("finished"):
            return
        if is_fresh(state["loader"]) and not state.get("over"):  # a new pass draws as it would have drawn
            return
        self.position.goes_on = True
        if not state.get("over"):  # else this rank has no batch left of an epoch that others are in
            self.position.drops = self._give_to_base(state["loader"])

    def _give_to_base(self, state: Mapping[str, Any]) -> int | None:
        """Let the stateful loader go on from `state`; where it can only read from the beginning, the batches that are to be dropped.

        torchdata would do so by itself, and count what it drops twice, so that its next state is wrong.
        """
        self._forget_passes(workers=True)
        self.dl_state_dict = self.position.given = dict(state)  # until the next pass reads
        if is_stream(self.base_dataloader) and has_no_state(state):
            return batches_in(state)
        self.base_dataloader.load_state_dict(self.dl_state_dict)
        return None

    def _take_given(self) -> None:
        """A state that somebody gave to the stateful loader below counts as given to this one, whose next pass has to know where it stands."""
        base, position = self.base_dataloader, self.position
        given, ours = given_state(base), self.dl_state_dict if position.goes_on else None
        if not was_asked(base):
            if given is not None and given is not position.given:
                position.go_on_behind(self._steps_in(given), self._give_to_base(given))
        elif ours is not None:  # anew, as workers may have read ahead in the order of another epoch
            self._give_to_base(ours)
        elif given is not None:  # its iterator has that already; a stream may tell of it only when it is read
            position.go_on_behind(self._steps_in(given))
        else:
            self._forget_passes(workers=True)

    def _forget_passes(self, *, workers: bool) -> None:
        """The loader below keeps nothing of an earlier pass, or of a state that was loaded before, of which its own state would tell; `workers`
        that stay go as well."""
        base = self.base_dataloader
        self.dl_state_dict = None
        if self.use_stateful_dataloader:
            base.next_iter_state = None
        if keeps_workers(base) and not workers:
            return
        if self.use_stateful_dataloader:
            base._iterator, base._initial_iter_for_state_dict = None, False
        elif keeps_workers(base):
            base._iterator = None

    def _is_open(self) -> bool:
        """Whether torch has an iterator for the next pass already, or the saved run would have one."""
        base = self.base_dataloader
        opened = base._iterator is not None and not was_asked(base)
        return keeps_workers(base) and (self.position.was_open or opened)

    def _whole(self) -> Iterator[Any]:
        """An iterator over all of the base loader: the one that torch keeps, where workers stay."""
        base, position = self.base_dataloader, self.position
        if not keeps_workers(base):
            return iter(base)
        if position.reused is None:
            position.reused = self._is_open()
        if position.reused and base._iterator is None:
            base._iterator = opened_as_kept(base)
            return base._iterator
        return iter(base)

    def _layout(self) -> dict[str, Any] | None:
        """How it is split over the ranks, where that is known."""
        return None

    def _set_seed(self, seed: int | None) -> None:
        """Nothing here draws from a seed."""

    # copies ------------------------------------------------------------------------------------------------------------------

    def _twin(self, base: Any) -> Any:
        """Another loader of this kind over `base`, at the same position."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _origin=None)
        twin.base_dataloader = base
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        left = ("_grad_sync", "_origin", "position")
        kept = {k: v for k, v in self.__dict__.items() if k not in left}
        return _rebuild, (type(self), kept, self.position.state_dict())


def _rebuild(kind: type[DataLoaderAdapter], kept: dict[str, Any], state: dict[str, Any]) -> DataLoaderAdapter:
    made = object.__new__(kind)
    made.__dict__.update(kept, _grad_sync=None, _origin=None)
    made._use_position(LoaderPosition())
    made.position.load_state_dict(state)
    return made


class DataLoaderStateMixin:
    """The bookkeeping of a pass: which loader is in use, whether its batch is the last, how many samples that holds."""

    position: LoaderPosition
    _drop_last: bool

    @property
    def grad_sync(self) -> GradSync:
        """The accumulation counter that has to know this loader's last batch."""
        return current_grad_sync()

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in use is the last one."""
        return self.position.is_last

    @property
    def remainder(self) -> int:
        """Samples of the last group of batches (0: it is full); -1 outside a pass and where it is unknown."""
        return self.position.remainder

    @property
    def iteration(self) -> int:
        """The epoch of this pass or, between passes, of the next one."""
        return self.position.upcoming

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.position.set_epoch(epoch)

    def reset(self) -> None:
        """No batch is in use."""
        self.position.close()

    def begin(self) -> None:
        """A pass begins: this loader is the one in use."""
        if not self._drop_last:
            self.position.remainder = _rest_of(self)
        self.grad_sync.enter(self.position)

    def end(self, finished: bool = True) -> None:
        """The pass is over; `finished` is False when it was left early."""
        self.grad_sync.leave(self.position, finished=finished)
        if finished:
            self.position.finish()
        else:
            self.position.close()


def _rest_of(loader: Any) -> int:
    size = loader.total_batch_size
    try:
        return len(loader.dataset) % size if size else -1
    except TypeError:
        return -1


def exact_length(loader: Any) -> int | None:
    """The number of batches where it is certain, else None."""
    if is_stream(loader) or iterates_itself(loader) or not has_trusted_length(index_sampler(loader)):
        return None
    return len(index_sampler(loader))  # a subclass of the loader may have another opinion


def clone_loader(loader: Any, **replaced: Any) -> Any:
    """The same loader, of the same class with all its attributes, but with some of them `replaced`.

    A loader cannot be rebuilt from outside: subclasses have constructors of their own.
    """
    twin = copy.copy(loader)
    if hasattr(loader, "next_iter_state"):  # torchdata's
        twin.__dict__.update(next_iter_state=given_state(loader), _initial_iter_for_state_dict=False)
    twin.__dict__.update(replaced, _iterator=None)  # torch refuses these attributes by assignment
    return twin


def keeps_workers(loader: Any) -> bool:
    """Whether torch keeps one iterator of the loader for all passes, whose workers stay."""
    return bool(loader.num_workers and loader.persistent_workers) and not iterates_itself(loader)


def opened_as_kept(loader: Any) -> Any:
    """A new iterator that draws what one would have drawn that was kept from an earlier pass: the order alone. The seed for its workers comes out
    of a copy of the generator."""
    apart = torch.Generator()
    apart.set_state(torch.get_rng_state() if loader.generator is None else loader.generator.get_state())
    return iter(clone_loader(loader, generator=apart))


def is_stream(loader: Any) -> bool:
    """Whether the loader reads an iterable data set, which has no indices."""
    return isinstance(loader.dataset, IterableDataset)


def iterates_itself(loader: Any) -> bool:
    """Whether the loader's class iterates in a way of its own, so that its batches are not simply the sampler's."""
    kind = type(loader)
    return any(
        method not in (torchs, None) and not getattr(method, "__module__", "").startswith("torchdata.")
        for method, torchs in (
            (kind.__iter__, DataLoader.__iter__),
            (getattr(kind, "_get_iterator", None), DataLoader._get_iterator),
        )
    )


def has_deaf_workers(loader: Any, dataset: Any) -> bool:
    """Whether workers that stay have a copy of the data set that hears of no epoch but the first: one that keeps it in no shared memory."""
    alive = (
        loader.num_workers and loader.persistent_workers and getattr(loader, "_iterator", None) is not None
    )
    if not alive or not hasattr(dataset, "set_epoch"):
        return False
    held = getattr(dataset, "__dict__", {}).values()
    return not any(isinstance(value, torch.Tensor) and value.is_shared() for value in held)


def index_sampler(loader: Any) -> Any:
    """What gives the loader its indices: batches of them, or single ones without automatic batching."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def with_indices(loader: Any, indices: Any) -> Any:
    """The loader with another source of indices."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return clone_loader(loader, **{name: indices})


def replace_sampler(loader: Any, sampler: Any) -> Any:
    """A copy of the loader whose samples are ordered by `sampler`, under the same batches and the same share of a rank."""
    return (
        clone_loader(loader, sampler=sampler, batch_sampler=_over_sampler(loader.batch_sampler, sampler))
        if loader.batch_sampler is not None
        else clone_loader(loader, sampler=_over_sampler(loader.sampler, sampler))
    )


def _over_sampler(indices: Any, sampler: Any) -> Any:
    """`indices` with its innermost sampler replaced."""
    name = "batch_sampler" if hasattr(indices, "batch_sampler") else "sampler"
    if not hasattr(indices, name):
        return sampler
    twin = object.__new__(type(indices))
    twin.__dict__.update(indices.__dict__)
    twin.__dict__[name] = _over_sampler(getattr(indices, name), sampler)
    return twin
