"""The dispatching loader: rank 0 reads, each rank gets its own part."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.collectives import gather
from acc_ops.exchange import MismatchError
from acc_ops.testing import count_calls, run_threads
from acc_ops.world import current_world
from acc_trainer.data.dispatch import DataLoaderDispatcher
from acc_trainer.data.prepare import prepare_data_loader, skip_first_batches
from acc_trainer.grad_sync import GradSync


def dispatched(loader, **options):
    return prepare_data_loader(
        loader, device=current_world().device, put_on_device=True, dispatch_batches=True, **options
    )


def rows(loader):
    return [batch.tolist() for batch in loader]


class Stream(IterableDataset):
    def __init__(self, size, fails_at=None):
        self.size, self.fails_at = size, fails_at

    def __iter__(self):
        for i in range(self.size):
            if i == self.fails_at:
                raise OSError("disk gone")
            yield i


def test_only_rank_0_reads():
    class Counting(torch.utils.data.Dataset):
        def __init__(self):
            self.read = 0

        def __len__(self):
            return 8

        def __getitem__(self, index):
            self.read += 1
            return index

    def ask():
        data = Counting()
        return rows(dispatched(DataLoader(data, 2))), data.read

    assert run_threads(2, ask) == [([[0, 1], [4, 5]], 8), ([[2, 3], [6, 7]], 0)]


def test_the_tail_is_completed_from_the_first_batch():
    def ask():
        made = dispatched(DataLoader(range(5), 2))
        tails = [
            (batch.tolist(), made.position.real, made.end_of_dataloader, made.remainder) for batch in made
        ]
        return len(made), tails

    (length, first), (_, second) = run_threads(2, ask)
    assert length == 2
    assert first == [([0, 1], None, False, 1), ([4], (1, 0), True, 1)]
    assert second[-1][0] == [0]


def test_split_batches_shares_out_each_batch():
    def ask():
        made = dispatched(DataLoader(range(6), 4), split_batches=True)
        return rows(made), len(made), made.total_batch_size

    assert run_threads(2, ask) == [([[0, 1], [4]], 2, 4), ([[2, 3], [5]], 2, 4)]


def test_the_users_slice_function_cuts_also_after_a_skip():
    def strided(data, piece, process_index=None, num_processes=None):
        return data[process_index::num_processes]

    def ask():
        made = dispatched(DataLoader(torch.arange(16), 4), slice_fn_for_dispatch=strided)
        return rows(made), rows(skip_first_batches(made, 1))

    (whole, rest), _ = run_threads(2, ask)
    assert whole == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert rest == whole[1:]


def test_batches_of_different_lengths_go_to_the_ranks_whole():
    def longest(items):
        return torch.zeros(len(items), max(items) + 1)

    def ask():
        return [tuple(b.shape) for b in dispatched(DataLoader(range(8), 2, collate_fn=longest))]

    assert run_threads(2, ask) == [[(2, 2), (2, 6)], [(2, 4), (2, 8)]]


def test_what_cannot_be_joined_is_an_error_on_every_rank():
    def longest(items):
        return torch.zeros(len(items), max(items) + 1)

    def ask():
        with pytest.raises(RuntimeError, match="cannot be joined"):
            list(dispatched(DataLoader(range(7), 2, collate_fn=longest)))
        return True

    assert run_threads(2, ask) == [True, True]


def test_a_failing_data_set_fails_on_every_rank():
    def ask():
        got = []
        try:
            for batch in dispatched(DataLoader(Stream(8, fails_at=5), 1)):
                got.append(batch.item())
        except (OSError, RuntimeError) as error:
            return type(error).__name__, "disk gone" in str(error)
        return got

    assert run_threads(2, ask, timeout_s=20) == [("OSError", True), ("RuntimeError", True)]


def test_an_empty_data_set_ends_on_every_rank():
    assert run_threads(2, lambda: rows(dispatched(DataLoader(Stream(0), 2)))) == [[], []]


def test_lists_of_words_are_shared_out_like_rows():
    def words(items):
        return {"x": torch.tensor(items), "word": [str(i) for i in items], "name": "set"}

    def ask():
        return [
            (b["x"].tolist(), b["word"], b["name"])
            for b in dispatched(DataLoader(range(6), 4, collate_fn=words))
        ]

    assert run_threads(2, ask) == [
        [([0, 1, 2], ["0", "1", "2"], "set")],
        [([3, 4, 5], ["3", "4", "5"], "set")],
    ]


def test_a_stream_is_dispatched_unless_told_otherwise():
    def ask():
        made = prepare_data_loader(DataLoader(Stream(4), 1), device=torch.device("cpu"), put_on_device=True)
        return isinstance(made, DataLoaderDispatcher) and type(made) is DataLoaderDispatcher, rows(made)

    assert run_threads(2, ask) == [(True, [[0], [2]]), (True, [[1], [3]])]


def test_one_process_dispatches_to_itself():
    made = dispatched(DataLoader(range(5), 2))
    assert type(made) is DataLoaderDispatcher
    assert rows(made) == [[0, 1], [2, 3], [4]]
    assert rows(skip_first_batches(made, 1)) == [[2, 3], [4]]


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_ranks_resume_in_the_middle(seedable, split):
    def make(seed):
        own = torch.Generator().manual_seed(seed)
        loader = DataLoader(range(20), 2, shuffle=True, generator=own)
        return dispatched(loader, use_seedable_sampler=seedable, split_batches=split)

    def ask():
        made = make(3)
        first, passed = rows(made), iter(made)
        next(passed)
        state = made.position.state_dict()
        wanted = [batch.tolist() for batch in passed], rows(made)
        again = make(4)
        again.position.load_state_dict(state)
        resumed = rows(skip_first_batches(again, 1)), rows(again)
        return resumed == wanted, first != wanted[1], len(wanted[0])

    left = 9 if split else 4
    assert run_threads(2, ask) == [(True, True, left)] * 2


def test_batches_without_rows_are_refused():
    def ask():
        with pytest.raises((ValueError, RuntimeError), match="with rows to share out"):
            list(dispatched(DataLoader(range(4), 2, collate_fn=lambda items: 5)))
        return True

    assert run_threads(2, ask) == [True, True]


class Items(IterableDataset):
    """A stream of the given samples, or of whole batches."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [4, 5, 8, 12, 13])
def test_pairs_of_texts_are_shared_out_by_rows(size, split):
    def ask():
        pairs = Items([(f"s{i}", f"t{i}") for i in range(size)])
        return list(dispatched(DataLoader(pairs, 4), split_batches=split))

    seen = []
    for parts in zip(*run_threads(2, ask), strict=True):
        sources, targets = ([text for part in parts for text in part[column]] for column in (0, 1))
        assert [text[1:] for text in sources] == [text[1:] for text in targets]
        assert len(parts[0][0]) == len(parts[1][0])
        seen += sources
    assert seen[:size] == [f"s{i}" for i in range(size)]
    assert seen[size:] == [f"s{i}" for i in range(size % 2)]


def test_pairs_of_texts_of_the_users_own_are_rows():
    def ask():
        pairs = Items([(f"s{i}", f"t{i}") for i in range(3)])
        return list(dispatched(DataLoader(pairs, 4, collate_fn=list)))

    assert run_threads(2, ask) == [[[("s0", "t0"), ("s1", "t1")]], [[("s2", "t2"), ("s0", "t0")]]]


def test_a_dict_of_lists_alone_is_shared_out():
    def ask():
        return list(
            dispatched(DataLoader(range(3), 3, collate_fn=lambda items: {"text": [str(i) for i in items]}))
        )

    assert run_threads(2, ask) == [[{"text": ["0", "1"]}], [{"text": ["2", "0"]}]]


def test_rows_of_unequal_length_stay_whole_in_a_tail():
    batches = [
        {"x": torch.arange(2), "m": [["a"], ["b", "e"]]},
        {"x": torch.tensor([9]), "m": [["c"]]},
    ]

    def ask():
        return [
            (batch["x"].tolist(), batch["m"])
            for batch in dispatched(DataLoader(Items(batches), batch_size=None))
        ]

    assert run_threads(2, ask) == [[([0, 1], [["a"], ["b", "e"]])], [([9, 0], [["c"], ["a"]])]]


def test_a_tail_is_completed_from_the_first_batch_with_rows():
    batches = [torch.zeros(0), torch.arange(2.0), torch.arange(3.0)]

    def ask():
        made = dispatched(DataLoader(Items(batches), batch_size=None))
        return rows(made), rows(skip_first_batches(made, 1))

    assert run_threads(2, ask) == [
        ([[0.0], [0.0, 1.0]], [[0.0, 1.0]]),
        ([[1.0], [2.0, 0.0]], [[2.0, 0.0]]),
    ]


def test_a_defaultdict_is_dispatched_with_a_short_tail():
    batches = [defaultdict(list, x=torch.ones(size)) for size in (2, 1)]

    def ask():
        return [(type(one), len(one["x"])) for one in dispatched(DataLoader(Items(batches), batch_size=None))]

    assert run_threads(2, ask) == [[(defaultdict, 2)]] * 2


def counted(work):
    """How often each collective is called while `work` runs on this rank."""
    comm, made = current_world().comm, Counter()
    for name in ("scatter", "broadcast", "all_gather", "all_reduce", "broadcast_object", "scatter_object"):
        call = getattr(comm, name)
        setattr(comm, name, lambda *args, _call=call, _name=name: (made.update([_name]), _call(*args))[1])
    work()
    return made


@pytest.mark.parametrize("size", [8, 80])
def test_a_step_takes_one_collective(size):
    def ask():
        made = dispatched(DataLoader([{"x": torch.ones(3), "y": i} for i in range(size)], 2))
        return dict(counted(lambda: list(made)))

    # one more begins the pass
    assert run_threads(2, ask) == [{"scatter": size // 4, "all_gather": 1}] * 2


def test_words_and_changing_shapes_take_two():
    def words(items):
        return {"x": torch.zeros(len(items), max(items) + 1), "word": [str(i) for i in items]}

    def ask():
        made = dispatched(DataLoader(range(16), 2, collate_fn=words))
        return dict(counted(lambda: list(made)))

    assert run_threads(2, ask) == [{"scatter": 4, "broadcast": 3, "all_gather": 1}] * 2


def test_one_process_does_what_it_does_without_dispatching():
    def calls(**options):
        made = prepare_data_loader(
            DataLoader(list(range(64)), 2), device=torch.device("cpu"), put_on_device=True, **options
        )
        made._grad_sync = GradSync()
        rows(made)
        return count_calls(lambda: rows(made))

    assert calls(dispatch_batches=True) - calls(dispatch_batches=False) < 8  # of 32 batches


def test_a_prepared_loader_adds_few_calls_to_a_batch():
    def calls(loader):
        list(loader)
        return count_calls(lambda: list(loader))

    plain = DataLoader([{"x": torch.ones(1)} for _ in range(200)], 1)
    made = prepare_data_loader(plain, device=torch.device("cpu"), put_on_device=True)
    made._grad_sync = GradSync()
    # for each batch: this loader's two generators, the look at the batch and at its values
    assert calls(made) - calls(plain) < 200 * 6


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_is_left_leaves_the_next_one_whole(how):
    def ask():
        made = dispatched(DataLoader(Stream(8), 1))
        made._grad_sync = GradSync()
        try:
            for _ in made:
                if how == "break":
                    break
                raise KeyError(how)
        except KeyError:
            pass
        assert made.grad_sync.loaders == []
        return rows(made), made.iteration

    assert run_threads(2, ask) == [([[0], [2], [4], [6]], 2), ([[1], [3], [5], [7]], 2)]


def test_loops_inside_loops_do_not_disturb_each_other():
    def ask():
        outer, inner = dispatched(DataLoader(Stream(4), 1)), dispatched(DataLoader(Stream(3), 1))
        outer._grad_sync = inner._grad_sync = sync = GradSync()
        seen = []
        for batch in outer:
            inside = [(one.item(), sync.end_of_loader) for one in inner]
            seen.append((batch.item(), inside, outer.end_of_dataloader))
        return seen

    first, second = run_threads(2, ask)
    assert first == [(0, [(0, False), (2, True)], False), (2, [(0, False), (2, True)], True)]
    assert second == [(1, [(1, False), (0, True)], False), (3, [(1, False), (0, True)], True)]


def test_ranks_that_begin_different_loops_are_told():
    def ask():
        if current_world().is_main:
            with pytest.raises(MismatchError, match="broadcast_object_list"):
                rows(dispatched(DataLoader(Stream(4), 1)))
        else:
            with pytest.raises(MismatchError, match="broadcast_object_list"):
                gather(torch.ones(1), world=current_world())
        return True

    assert all(run_threads(2, ask))
