"""The data law as a product: every way to read, times every size, times every place to stop, against index arithmetic done by hand."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync
from acc_trainer.metrics import gather_for_metrics

SEED = 5
KINDS = ["plain", "shuffled", "sampler", "batches", "stream", "sized stream"]
has_torchdata = importlib.util.find_spec("torchdata") is not None


@dataclass(frozen=True)
class Case:
    size: int
    share: int  # rows of one rank in one step
    ranks: int
    kind: str
    mode: str  # shard, split, dispatch, dispatch+split
    tail: str  # even, uneven, drop

    @property
    def batch_size(self):
        """What the user's loader is given."""
        return self.share * self.ranks if "split" in self.mode else self.share

    @property
    def is_stream(self):
        return "stream" in self.kind


# by hand ---------------------------------------------------------------------------------------------------------------------


def order_of(case, epoch):
    """The samples of an epoch, in order."""
    if case.kind == "plain":
        return list(range(case.size))
    if case.kind == "shuffled":
        generator = torch.Generator().manual_seed(SEED + epoch)
        return torch.randperm(case.size, generator=generator).tolist()
    turn = epoch % case.size if case.size else 0
    return [*range(turn, case.size), *range(turn)]


def steps_of(case, epoch):
    """For each step of an epoch what the ranks get: a list of (rows, how many of them are samples) in rank order."""
    order, ranks, share = order_of(case, epoch), case.ranks, case.share
    group = ranks * share
    whole = len(order) // group * group
    steps = [
        [(order[at + rank * share : at + (rank + 1) * share], share) for rank in range(ranks)]
        for at in range(0, whole, group)
    ]
    rest = order[whole:]
    if not rest or case.tail == "drop":
        return steps
    parts = [rest[rank * share : (rank + 1) * share] for rank in range(ranks)]
    if ranks == 1 or (case.tail == "uneven" and "dispatch" not in case.mode and not case.is_stream):
        return [*steps, [(part, len(part)) for part in parts]]
    spare = order[:group]
    if "dispatch" in case.mode:  # as many rows for each rank as there are, filled up from the first batch
        share = -(-len(rest) // ranks)
        spare = order[: case.batch_size]
        parts = [rest[rank * share : (rank + 1) * share] for rank in range(ranks)]
    filler = itertools.cycle(spare)
    return [*steps, [(part + [next(filler) for _ in range(share - len(part))], len(part)) for part in parts]]


# what is asked ---------------------------------------------------------------------------------------------------------------


class Turning(Sampler):
    """A sampler of the user's own, which begins one sample later in each epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        turn = self.epoch % self.size if self.size else 0
        return iter([*range(turn, self.size), *range(turn)])

    def __len__(self):
        return self.size


class Batches:
    """A batch sampler that is none of torch's: it has a batch size, and tells its own length."""

    def __init__(self, size, batch_size, drop_last):
        self.inner = BatchSampler(Turning(size), batch_size, drop_last)
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch):
        self.inner.sampler.set_epoch(epoch)

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Stream(IterableDataset):
    def __init__(self, size):
        self.sampler = Turning(size)

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        one_of = (0, 1) if info is None else (info.id, info.num_workers)
        assert one_of == (0, 1), "this stream is read by one worker"
        return iter(self.sampler)


class SizedStream(Stream):
    def __len__(self):
        return self.sampler.size


def loader_of(case, workers=0, persistent=False):
    size, batch, drop = case.size, case.batch_size, case.tail == "drop"
    common = {"num_workers": workers, "persistent_workers": persistent}
    if case.kind == "stream":
        return DataLoader(Stream(size), batch, drop_last=drop, **common)
    if case.kind == "sized stream":
        return DataLoader(SizedStream(size), batch, drop_last=drop, **common)
    data = list(range(size))
    if case.kind == "batches":
        return DataLoader(data, batch_sampler=Batches(size, batch, drop), **common)
    if case.kind == "sampler":
        return DataLoader(data, batch, sampler=Turning(size), drop_last=drop, **common)
    # torch makes no random sampler over nothing
    return DataLoader(data, batch, shuffle=case.kind == "shuffled" and size > 0, drop_last=drop, **common)


def prepared(case, loader, stateful=False, **share):
    made = prepare_data_loader(
        loader,
        device=current_world().device,
        put_on_device=True,
        split_batches="split" in case.mode,
        dispatch_batches="dispatch" in case.mode,
        even_batches=case.tail != "uneven",
        use_seedable_sampler=True,
        data_seed=SEED,
        use_stateful_dataloader=stateful,
        **share,
    )
    made._grad_sync = GradSync()
    return made


def seen_of(passed, made, rank):
    """(rows, how many are samples, whether it is the last) for each batch."""
    seen = []
    for batch in passed:
        real = made.position.real
        seen.append((batch.tolist(), len(batch) if real is None else real[rank], made.end_of_dataloader))
    return seen


def without_fillers(seen):
    return [(rows[:real], real, is_last) for rows, real, is_last in seen]


def wanted_of(case, epoch, rank, begin=0):
    """The same by hand; a rank without a row in the last step is not given it."""
    mine = [step[rank] for step in steps_of(case, epoch)]
    mine = [(rows, real) for rows, real in mine if rows]
    return [(rows, real, at == len(mine) - 1) for at, (rows, real) in enumerate(mine)][begin:]


MODES = ["shard", "split", "dispatch", "dispatch+split"]
TAILS = ["even", "uneven", "drop"]


@st.composite
def cases(draw, mode, tail):
    """A case of this mode and tail: whole steps and a rest, so that long runs are as frequent as short ones."""
    ranks, share = draw(st.sampled_from([2, 3, 1, 4])), draw(st.integers(1, 3))
    steps, rest = draw(st.sampled_from([2, 3, 1, 4, 0])), draw(st.integers(0, ranks * share - 1))
    kind = draw(st.sampled_from(KINDS))
    return Case(steps * ranks * share + rest, share, ranks, kind, mode, tail)


def everywhere(max_examples):
    """A test of one `data` for every mode and tail."""

    def decorate(test):
        test = settings(max_examples=max_examples)(given(data=st.data())(test))
        test = pytest.mark.parametrize("tail", TAILS)(test)
        return pytest.mark.parametrize("mode", MODES)(test)

    return decorate


@everywhere(40)
def test_each_rank_gets_its_samples_also_after_a_resume(mode, tail, data):
    case, left = data.draw(cases(mode, tail)), data.draw(st.booleans())
    epoch, done = data.draw(st.sampled_from([1, 0, 2])), data.draw(st.sampled_from([1, 2, 3, 0, 5]))

    def work():
        rank = current_world().rank
        made = prepared(case, loader_of(case))
        for past in range(epoch):
            assert seen_of(made, made, rank) == wanted_of(case, past, rank)
        wanted = wanted_of(case, epoch, rank)
        if case.kind == "batches" and (case.mode, case.tail) == ("split", "uneven"):
            assert len(made) - len(wanted) in (0, 1)  # how short the last batch is, nobody says
        elif case.kind != "stream":
            assert len(made) == len(wanted)
        stop = min(done, min(len(wanted_of(case, epoch, other)) for other in range(case.ranks)))
        passed = iter(made)
        assert seen_of(itertools.islice(passed, stop), made, rank) == wanted[:stop]
        state = made.position.state_dict()
        if left:
            passed.close()
            assert made.position.state_dict()["batches"] == state["batches"]
            state = made.position.state_dict()
        else:
            assert seen_of(passed, made, rank) == wanted[stop:]
        if stop or not left:  # a pass that was begun is over; a generator that never ran has begun nothing
            assert seen_of(made, made, rank) == wanted_of(case, epoch + 1, rank)

        again = prepared(case, loader_of(case))
        again.position.load_state_dict(state)
        following = epoch
        most = max(len(wanted_of(case, epoch, other)) for other in range(case.ranks))
        if (
            stop < most
        ):  # all ranks begin as many passes, though one of them may have nothing left of this one
            rest = skip_first_batches(again, stop) if stop else again
            assert seen_of(rest, rest, rank) == wanted_of(case, epoch, rank, stop)
            following += 1
        elif not most:
            return True  # nothing was read: the epoch is still to come, and as empty
        else:
            following += 1
        assert seen_of(again, again, rank) == wanted_of(case, following, rank)
        return True

    assert all(run_threads(case.ranks, work))


@everywhere(20)
def test_metrics_see_every_sample_once_and_in_order(mode, tail, data):
    case = data.draw(cases(mode, tail))

    def work():
        world = current_world()
        made = prepared(case, loader_of(case))
        got = []
        for batch in made:
            got += gather_for_metrics(batch, made.grad_sync, world).tolist()
        return got

    steps = steps_of(case, 0)
    if any(not rows for step in steps for rows, _ in step):
        return  # a rank without a batch does not gather: these ranks cannot meet
    wanted = [row for step in steps for rows, real in step for row in rows[:real]]
    assert wanted == order_of(case, 0)[: len(wanted)]
    assert case.tail == "drop" or len(wanted) == case.size
    assert run_threads(case.ranks, work) == [wanted] * case.ranks


@everywhere(2)
def test_workers_change_nothing(mode, tail, data):
    case, persistent = data.draw(cases(mode, tail)), data.draw(st.booleans())
    done = data.draw(st.integers(0, 2))

    def work(rank, **share):
        made = prepared(case, loader_of(case, workers=1, persistent=persistent), **share)
        assert seen_of(made, made, rank) == wanted_of(case, 0, rank)
        stop = min(done, len(wanted_of(case, 1, rank)))
        if stop and not (persistent and case.is_stream):  # a worker that stays does not hear of an epoch
            rest = skip_first_batches(made, stop)
            assert seen_of(rest, rest, rank) == wanted_of(case, 1, rank, stop)
        return True

    if "dispatch" in case.mode:
        assert all(run_threads(case.ranks, lambda: work(current_world().rank)))
    else:  # nobody speaks, so the ranks can come one after the other: forking beside threads is no good idea
        for rank in range(case.ranks):
            work(rank, num_processes=case.ranks, process_index=rank)


@pytest.mark.skipif(not has_torchdata, reason="needs torchdata")
@pytest.mark.filterwarnings("ignore")
@everywhere(15)
def test_stateful_loaders_go_on_by_themselves(mode, tail, data):
    case, by_itself, left = data.draw(cases(mode, tail)), data.draw(st.booleans()), data.draw(st.booleans())
    epoch, done = data.draw(st.sampled_from([1, 0])), data.draw(st.sampled_from([1, 2, 3, 0, 5]))

    def work():
        rank = current_world().rank
        made = prepared(case, loader_of(case), stateful=True)
        for past in range(epoch):
            assert seen_of(made, made, rank) == wanted_of(case, past, rank)
        wanted = wanted_of(case, epoch, rank)
        stop = min(done, min(len(wanted_of(case, epoch, other)) for other in range(case.ranks)))
        passed = iter(made)
        assert seen_of(itertools.islice(passed, stop), made, rank) == wanted[:stop]
        if left:
            passed.close()
        state = made.position.state_dict()
        if not left:
            assert seen_of(passed, made, rank) == wanted[stop:]

        again = prepared(case, loader_of(case), stateful=True)
        again.position.load_state_dict(state)
        most = max(len(wanted_of(case, epoch, other)) for other in range(case.ranks))
        if not most:
            return True
        if 0 < stop < most:
            rest = again if by_itself and stop < len(wanted) else skip_first_batches(again, stop)
            again_seen, again_wanted = seen_of(rest, rest, rank), wanted_of(case, epoch, rank, stop)
            if (
                "dispatch" in case.mode
            ):  # the first batch of the epoch cannot be read again: what fills up is another
                again_seen, again_wanted = without_fillers(again_seen), without_fillers(again_wanted)
            assert again_seen == again_wanted
        elif not stop:
            assert seen_of(again, again, rank) == wanted
        assert seen_of(again, again, rank) == wanted_of(case, epoch + 1, rank)
        return True

    assert all(run_threads(case.ranks, work))
