"""Rank 0 reads, and each rank receives its own part only.

[Note: one step] Rank 0 reads one batch for each rank (with `split_batches` one for all), makes a part for each, and sends it with a short
note (see `rows`): whether this is the last step, and how many rows are samples. Only at the end, when rows are missing to give every rank as many,
are rows of the first batch repeated. When reading fails, every rank raises.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from acc_trainer.data.adapter import exact_length
from acc_trainer.data.batch_rows import RowRule
from acc_trainer.data.batches import handing_out
from acc_trainer.data.loader import DataLoaderShard
from acc_trainer.data.rows import News, Note, Opening, Receiver, Sender, failure
from acc_trainer.data.shard import Tail
from acc_trainer.data.shares import share_of_each
from acc_trainer.data.skipping import END, Skipped, first_read
from acc_trainer.data.torchdata_state import batches_in


class _Parts(NamedTuple):
    """What one step sends: a part for each share, how many samples they are, and the rows that are samples where not all are."""

    parts: list[Any]
    samples: int
    tail: Tail | None


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that only rank 0 iterates.

    `slice_fn(data, slice, process_index, num_processes)` cuts the joined batch for a rank; by default the rows of the slice. A tail is
    completed from the first batch unless the loader drops it. Every rank sees as many batches: the loader's, over the ranks, rounded up (down
    with `drop_last`); with `split_batches` as many as the loader has. Raises `RuntimeError` when batches of one step cannot be joined.
    """

    reads_for_all = True

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.device = self.world.device

    @classmethod
    def over(
        cls,
        base: Any,
        split_batches: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> Any:
        """The same around a loader that exists already."""
        made = super().over(base, **settings)
        made.split_batches = split_batches
        made.slice_fn = slice_fn
        return made

    @property
    def shares(self) -> int:
        """How many shares of the samples there are."""
        if self.torch_device_mesh is None:
            return self.world.size
        return max(share_of_each(self.torch_device_mesh, self.world.size)) + 1

    @property
    def batches_per_step(self) -> int:
        """Batches that rank 0 reads for one step."""
        return 1 if self.split_batches else self.shares

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks together take in one step."""
        return super().total_batch_size * self.batches_per_step

    def _steps(self, batches: int) -> int:
        whole, rest = divmod(batches, self.batches_per_step)
        return whole if not rest or self._drop_last else whole + 1

    def _batches(self, skip: int, replay: bool, itself: bool) -> Iterator[Any]:
        if self.world.size == 1:
            return super()._batches(skip, replay, itself)
        return self._read_and_send(skip, replay, itself) if self.world.is_main else self._receive()

    def _steps_in(self, state: Mapping[str, Any]) -> int:
        return batches_in(state) // self.batches_per_step

    def _state_of_base(self) -> dict[str, Any]:
        return super()._state_of_base() if self.world.is_main else {}  # others read nothing

    def _give_to_base(self, state: Mapping[str, Any]) -> int | None:
        if self.world.is_main:
            return super()._give_to_base(state)
        self._forget_passes(workers=True)  # others read nothing
        return None

    # rank 0 ------------------------------------------------------------------------------------------------------------------

    def _read_and_send(self, skip: int, replay: bool, itself: bool) -> Iterator[Any]:
        sender, count, hand_out = Sender(self.world), skip, handing_out(self)
        try:
            steps = self._grouped(skip, replay, itself)
            following: Any = first_read(steps, self.position)
            step = None if following is END else sender.step(self._for_ranks(following.parts))
        except BaseException as error:
            with contextlib.suppress(
                RuntimeError
            ):  # an error while telling the others must not hide the first one
                sender.open(Opening(skip, None, error=_text_of(error)))
            raise
        sender.open(Opening(skip, None if step is None else step.form.text))
        while step is not None:
            made, sent, count = following, step, count + 1
            try:
                following = self._read_ahead(steps)
                step = None if following is END else sender.step(self._for_ranks(following.parts))
            except BaseException as error:
                with contextlib.suppress(RuntimeError):
                    sender.send(sent, Note(count, is_last=True), News(error=_text_of(error)))
                raise
            form = None if step is None or step.form is sent.form else step.form.text
            note = Note(count, step is None, made.samples if step is None else -1)
            sender.send(sent, note, News(tail=made.tail, form=form))
            self._note_samples(note)
            yield hand_out(made.parts[0], count, note.is_last, made.tail)

    def _grouped(self, skip: int, replay: bool, itself: bool) -> Iterator[_Parts]:
        """The parts of each step from step `skip` on."""
        per_step, ranks = self.batches_per_step, self.shares
        total = exact_length(self.base_dataloader)
        if total is not None and skip >= self._steps(total):
            return
        skipped = Skipped()
        batches = self._open(skip * per_step, replay, itself, skipped)
        read: list[Any] = []
        rule = RowRule.of(self.base_dataloader)

        def first() -> Any:
            """The first batch of the epoch, or the first with rows that was read."""
            if self.position.first is not None:
                return self.position.first
            known = bool(skipped.batches) or (skip and not itself)
            begin = skipped.first_batch(self.base_dataloader) if known else read[0]
            return begin if rule.count(begin) else read[0]

        while group := list(itertools.islice(batches, per_step)):
            if len(group) < per_step and self._drop_last:
                return
            read = read or [batch for batch in group if rule.count(batch)][:1]
            if (
                self.use_stateful_dataloader
                and not (itself and skip)
                and self.position.first is None
                and read
            ):
                self.position.first = read[0]  # a stateful loader that goes on does not meet it again
            yield self._divided(group, first, ranks, rule)

    def _divided(self, group: list[Any], first: Callable[[], Any], ranks: int, rule: RowRule) -> _Parts:
        rows = [rule.count(batch) for batch in group]
        total = sum(rows)
        if self.slice_fn is None and len(group) == ranks and len(set(rows)) == 1:
            return _Parts(group, total, None)
        share = -(-total // ranks)
        missing = share * ranks - total
        if total:
            group = [batch for batch, count in zip(group, rows, strict=True) if count]
            rows = [count for count in rows if count]
        begin = first() if missing else None
        try:
            joined = rule.join(group, rows)
            if missing:
                joined = self._completed(joined, total, missing, begin, rule)
        except (TypeError, RuntimeError) as error:
            raise RuntimeError(
                "dispatch_batches=True has to join the batches of one step, and these cannot be joined: make all batches the same shape "
                f"(pad in collate_fn), or use dispatch_batches=False or split_batches=True. {error}"
            ) from error
        real = tuple(min(share, max(0, total - rank * share)) for rank in range(ranks))
        return _Parts(
            [
                self._cut(joined, slice(rank * share, (rank + 1) * share), rank, share * ranks, rule)
                for rank in range(ranks)
            ],
            total,
            Tail(real=real, sizes=(share,) * ranks) if missing else None,
        )

    def _for_ranks(self, parts: list[Any]) -> list[Any]:
        """The part of each rank; some share one."""
        return [parts[share] for share in share_of_each(self.torch_device_mesh, self.world.size)]

    def _completed(self, joined: Any, total: int, missing: int, begin: Any, rule: RowRule) -> Any:
        """The joined batch with `missing` rows of the epoch's first batch, which may be repeated for that."""
        count = rule.count(begin)
        times = -(-missing // count)
        spare = rule.join([begin] * times, [count] * times)
        spare = rule.cut(spare, slice(0, missing), count * times)
        return rule.join([joined, spare], [total, missing])

    def _cut(self, joined: Any, rows: slice, rank: int, total: int, rule: RowRule) -> Any:
        if self.slice_fn is None:
            return rule.cut(joined, rows, total)
        return self.slice_fn(joined, rows, process_index=rank, num_processes=self.shares)

    # the others --------------------------------------------------------------------------------------------------------------

    def _receive(self) -> Iterator[Any]:
        receiver, hand_out = Receiver(self.world), handing_out(self)
        opening = receiver.open()
        if opening.error is not None:
            raise RuntimeError(failure(opening.error))
        stays = self.device is None or self.device.type == "cpu"
        count, is_last = opening.skipped, opening.form is None
        while not is_last:
            count += 1
            part, note, news = receiver.receive(count, copy=stays)
            is_last = note.is_last
            self._note_samples(note)
            yield hand_out(part, note.number, is_last, news.tail)

    def _note_samples(self, note: Note) -> None:
        """The last step tells how many samples it holds."""
        if note.samples >= 0:
            self.position.remainder = note.samples


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
