"""How the parts of a step travel from rank 0: each rank receives one row of bytes, whose form it knows from the step before.

[Note: one collective a step] A rank must know how long its row is before it can receive it. Rank 0 reads one step ahead, so with each row it
tells whether the next one has the same form: the structure around the tensors, their shapes and dtypes. Only when it has not, or when there is
something else to tell (a tail, an error), a second collective brings the `News`. A row is a note of fixed size, the tensors, and filling
up to the longest row. What begins a pass is told by a verified collective; within a pass each row tells its number, and `acc_ops` names the ranks
that do not come.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acc_ops.object_collectives import broadcast_object_list
from acc_ops.prepared import check_dense
from acc_ops.tree import flatten, recursively_apply
from acc_ops.wire import as_bytes, as_typed, from_bytes, to_bytes
from acc_ops.world import World
from acc_trainer.data.shard import Tail


class Note(NamedTuple):
    """What every row begins with."""

    number: int  # of the step, from 1
    is_last: bool
    samples: int = -1  # of the last step, over all ranks
    news_bytes: int = 0


class Opening(NamedTuple):
    """What begins a pass: the steps that were left out, and the form of the first step's rows (None: there is none), or why there is no pass."""

    skipped: int
    form: bytes | None
    error: str | None = None


class News(NamedTuple):
    """What a note has no room for."""

    tail: Tail | None = None
    form: bytes | None = None  # of the next step's rows, where it is another one
    error: str | None = None  # why rank 0 cannot go on: the step is not handed out


class Form:
    """What the rows of a step look like: for each rank the part with slots instead of tensors, and the bytes of the longest row."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._skeletons, self.num_bytes = pickle.loads(text)  # one skeleton, pickled, where all are the same
        self._read: dict[int, _Skeleton] = {}

    def skeleton(self, rank: int) -> _Skeleton:
        """That of a rank's part; a new one each time where the user will be handed objects of it."""
        place = 0 if len(self._skeletons) == 1 else rank
        made = self._read.get(place)
        if made is None:
            made = pickle.loads(self._skeletons[place])
            if made.is_flat:
                self._read[place] = made
        return made


class Step(NamedTuple):
    """What rank 0 sends in one step: a row for each rank, whose note is yet to be written, and their form."""

    rows: list[Tensor]
    form: Form


class Sender:
    """Rank 0's end of a pass."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._form: Form | None = None  # of the step before

    def open(self, opening: Opening) -> None:
        """Begin a pass on every rank."""
        broadcast_object_list([opening], world=self._world)

    def step(self, parts: Sequence[Any]) -> Step:
        """The parts, one for each rank, ready to travel.

        Raises TypeError for tensors that are not dense or have no data of their own, and whatever keeps a leaf from being pickled.
        """
        form, leaves = self._form, self._leaves_as_before(parts)
        if form is None or leaves is None:
            form, leaves = self._new_form(parts)
        rows = [torch.empty(form.num_bytes, dtype=torch.uint8)]  # this rank keeps its part
        for found in leaves[1:]:
            content = [_NO_NOTE, *map(as_bytes, found)]
            if filling := form.num_bytes - sum(map(Tensor.numel, content)):
                content.append(_NO_NOTE.new_empty(filling))
            rows.append(torch.cat(content))
        self._form = form
        return Step(rows, form)

    def send(self, step: Step, note: Note, news: News) -> None:
        """Give every other rank its row."""
        text = b"" if news == _NO_NEWS else pickle.dumps(news)
        head = from_bytes(_pack_note(note._replace(news_bytes=len(text))))
        for row in step.rows[1:]:
            row[:_NOTE_BYTES] = head
        comm = self._world.comm
        comm.scatter(step.rows, step.rows[0], 0)
        if text:
            comm.broadcast(from_bytes(text), 0)

    def _leaves_as_before(self, parts: Sequence[Any]) -> list[list[Tensor]] | None:
        """The tensors of each part in the order of its row, where they are seen to have the form of the step before."""
        if self._form is None:
            return None
        found: list[list[Tensor]] = []
        for rank, part in enumerate(parts):
            leaves = self._form.skeleton(rank).leaves_of(part)
            if leaves is None:
                return None
            found.append(leaves)
        return found

    def _new_form(self, parts: Sequence[Any]) -> tuple[Form, list[list[Tensor]]]:
        """The form of these parts, the last one where it is the same, and the tensors of each in the order of its row."""
        leaves = [sorted(flatten(part)[0], key=_widest_first) for part in parts]
        for found in leaves:
            check_dense("dispatch_batches", found)
        skeletons = [pickle.dumps(_Skeleton.of(part)) for part in parts]
        if all(one == skeletons[0] for one in skeletons):
            skeletons = skeletons[:1]
        longest = max(sum(leaf.numel() * leaf.itemsize for leaf in found) for found in leaves)
        text = pickle.dumps((skeletons, _NOTE_BYTES + longest))
        same = self._form is not None and self._form.text == text
        form = self._form if same and self._form is not None else Form(text)
        return form, [[leaf.cpu() for leaf in found] for found in leaves]


class Receiver:
    """Another rank's end of a pass."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._form: Form | None = None

    def open(self) -> Opening:
        """What rank 0 said when it began."""
        opening: Opening
        (opening,) = broadcast_object_list([None], world=self._world)
        self._form = None if opening.form is None else Form(opening.form)
        return opening

    def receive(self, number: int, *, copy: bool) -> tuple[Any, Note, News]:
        """This rank's part of step `number`. Raises `RuntimeError` when the ranks are not in step or rank 0 cannot go on."""
        comm, form = self._world.comm, self._form
        if form is None:
            raise AssertionError("there is a step only where a form was told")
        row = torch.empty(form.num_bytes, dtype=torch.uint8)
        comm.scatter(None, row, 0)
        note, news = _read_note(to_bytes(row[:_NOTE_BYTES])), _NO_NEWS
        if note is None or note.number != number:
            raise RuntimeError(
                f"rank {self._world.rank} waits for step {number} of a dispatching loader, rank 0 sends "
                f"{'something else' if note is None else f'step {note.number}'}: let all ranks begin and leave the loop together"
            )
        if note.news_bytes:
            text = torch.empty(note.news_bytes, dtype=torch.uint8)
            news = pickle.loads(to_bytes(comm.broadcast(text, 0)))
        if news.error is not None:
            raise RuntimeError(failure(news.error))
        part = form.skeleton(self._world.rank).filled(row[_NOTE_BYTES:], copy=copy)
        if news.form is not None:
            self._form = Form(news.form)
        return part, note, news


def failure(error: str) -> str:
    """What the other ranks say when rank 0 fails."""
    return f"rank 0 failed while reading the next batch: {error}"


class _Slot(NamedTuple):
    """Where a tensor goes, and in which order the bytes of the tensors lie in a row."""

    dtype: torch.dtype
    shape: torch.Size
    place: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


class _Skeleton(NamedTuple):
    """A part with slots instead of tensors; `slots` has them in the order of the row, the widest first, so that each is aligned for its dtype."""

    structure: Any
    slots: list[_Slot]
    is_flat: bool  # a tensor, or a plain container of nothing but tensors

    @classmethod
    def of(cls, part: Any) -> _Skeleton:
        places = itertools.count()
        slots: list[_Slot] = []

        def slot_for(tensor: Tensor) -> _Slot:
            slot = _Slot(tensor.dtype, tensor.shape, next(places))
            slots.append(slot)
            return slot

        structure = recursively_apply(slot_for, part)
        values = [part]
        if type(part) is dict and all(
            type(key) is str for key in part
        ):  # other keys may equal one that is not the same
            values = list(part.values())
        elif type(part) in (list, tuple):
            values = part
        is_flat = bool(values) and all(isinstance(value, Tensor) for value in values)
        return cls(structure, sorted(slots, key=_widest_first), is_flat)

    def leaves_of(self, part: Any) -> list[Tensor] | None:
        """The tensors of `part` in the order of the row, when it is flat and fits these slots exactly; else None, without having looked far."""
        kind = type(self.structure)
        if not self.is_flat or (kind is not _Slot and type(part) is not kind):
            return None
        if kind is dict:
            if list(part) != list(self.structure):
                return None
            part = list(part.values())
        elif kind is _Slot:
            part = [part]
        if len(part) != len(self.slots):
            return None
        leaves = []
        for dtype, shape, place in self.slots:
            leaf = part[place]
            if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.shape != shape:
                return None
            if not leaf.is_cpu or leaf.layout is not torch.strided:
                return None
            leaves.append(leaf)
        return leaves

    def filled(self, content: Tensor, *, copy: bool) -> Any:
        """The part, its tensors cut out of the bytes; without `copy` they may be views of them."""
        sizes = [slot.num_bytes for slot in self.slots]
        pieces = content[: sum(sizes)].split(sizes) if sizes else ()
        leaves: list[Any] = [None] * len(sizes)
        for slot, piece in zip(self.slots, pieces, strict=True):
            leaves[slot.place] = as_typed(piece.clone() if copy else piece, slot.dtype, slot.shape)
        if self.is_flat:
            kind = type(self.structure)
            if kind is dict:
                return dict(zip(self.structure, leaves, strict=True))
            return leaves[0] if kind is _Slot else kind(leaves)
        return recursively_apply(lambda slot: leaves[slot.place], self.structure, test_type=_is_slot)


_NO_NEWS = News()
_NOTE = struct.Struct("=8s3q?")
_NOTE_BYTES = 64  # so that the tensors behind it are aligned
_NAME = b"acc row1"
_NO_NOTE = torch.zeros(_NOTE_BYTES, dtype=torch.uint8)


def _pack_note(note: Note) -> bytes:
    return _NOTE.pack(_NAME, note.number, note.samples, note.news_bytes, note.is_last).ljust(
        _NOTE_BYTES, b"\0"
    )


def _read_note(text: bytes) -> Note | None:
    name, number, samples, news_bytes, is_last = _NOTE.unpack_from(text)
    return Note(number, is_last, samples, news_bytes) if name == _NAME else None


def _widest_first(leaf: Tensor | _Slot) -> int:
    return -leaf.dtype.itemsize


def _is_slot(data: Any) -> bool:
    return isinstance(data, _Slot)
