"""gather_for_metrics: every sample exactly once, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_threads
from acc_ops.world import current_world
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_trainer import Accelerator, DataLoaderDispatcher
from acc_trainer.data.prepare import prepare_data_loader
from acc_trainer.metrics import gather_for_metrics


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def gathered(loader, *, ranks, collect=None, **options):
    """What the ranks gather over one pass, and how many batches each saw."""

    def work():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        made = accelerator.prepare(loader)
        seen, batches = [], 0
        for batch in made:
            batches += 1
            got = accelerator.gather_for_metrics(batch if collect is None else collect(batch))
            seen += got.tolist() if isinstance(got, torch.Tensor) else list(got)
        return seen, batches

    results = run_threads(ranks, work)
    assert all(result == results[0] for result in results)
    return results[0]


@settings(max_examples=60)
@given(size=st.integers(1, 20), share=st.integers(1, 3), dispatch=st.booleans(), objects=st.booleans())
def test_ranks_that_share_their_samples_bring_them_in_once(size, share, dispatch, objects, mesh):
    def work():
        world = replace(current_world(), mesh=mesh)
        accelerator = Accelerator()
        made = prepare_data_loader(
            DataLoader(range(size), share),
            device=world.device,
            put_on_device=True,
            dispatch_batches=dispatch,
            torch_device_mesh=world.mesh,
        )
        made._grad_sync = accelerator.grad_sync
        seen = []
        for batch in made:
            told = [f"{number}" for number in batch.tolist()] if objects else {"numbers": batch}
            got = gather_for_metrics(told, accelerator.grad_sync, world)
            seen += [int(text) for text in got] if objects else got["numbers"].tolist()
            assert gather_for_metrics(batch[0] * 0 + 7, accelerator.grad_sync, world).tolist() in (
                [7],
                [7, 7],
            )
        return seen

    results = run_threads(4, work)
    assert results == [list(range(size))] * 4


@settings(max_examples=120)
@given(
    size=st.integers(0, 30),
    share=st.integers(1, 4),
    ranks=st.integers(1, 3),
    split=st.booleans(),
    drop_last=st.booleans(),
    dispatch=st.booleans(),
    stream=st.booleans(),
)
def test_every_sample_once_in_order(size, share, ranks, split, drop_last, dispatch, stream):
    batch = share * ranks if split else share
    loader = DataLoader(Stream(size) if stream else range(size), batch, drop_last=drop_last)
    seen, batches = gathered(loader, ranks=ranks, split_batches=split, dispatch_batches=dispatch)
    group = share * ranks
    assert seen == list(range(size // group * group if drop_last else size))
    assert batches == (size // group if drop_last else -(-size // group))


@pytest.mark.parametrize("size", [5, 7, 8])
def test_a_loader_without_batches_counts_items(size):
    def collect(item):
        return torch.as_tensor(item)

    assert gathered(DataLoader(range(size), None), ranks=2, collect=collect)[0] == list(range(size))


def test_uneven_ranks_gather_short_last_batches():
    assert gathered(DataLoader(range(7), 2), ranks=2, even_batches=False)[0] == list(range(7))


def test_drop_last_cuts_no_real_sample():
    assert gathered(DataLoader(range(11), 2, drop_last=True), ranks=2)[0] == list(range(8))


def test_pairs_of_lists_stay_pairs():
    def work():
        accelerator = Accelerator()
        predictions, references = [], []
        for batch in accelerator.prepare(DataLoader(range(7), 2)):
            pair = ([f"p{i}" for i in batch.tolist()], [f"r{i}" for i in batch.tolist()])
            got = accelerator.gather_for_metrics(pair)
            assert len(got) == 2
            predictions += got[0]
            references += got[1]
        return predictions, references

    wanted = [f"p{i}" for i in range(7)], [f"r{i}" for i in range(7)]
    assert run_threads(2, work) == [wanted, wanted]
    assert run_threads(1, work) == [wanted]


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.tensor(index), f"s{index}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("use_gather_object", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_texts_that_torch_collates_are_one_list_every_sample_once(ranks, use_gather_object, dispatch):
    def work():
        options = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator, got, pairs = Accelerator(dataloader_config=options), [], []
        for numbers, names in accelerator.prepare(DataLoader(Named(), 2)):
            assert type(names) is tuple
            got += accelerator.gather_for_metrics(names, use_gather_object=use_gather_object)
            numbers, names = accelerator.gather_for_metrics((numbers, names))
            pairs += zip(numbers.tolist(), names, strict=True)
        return got, pairs

    wanted = [f"s{i}" for i in range(7)]
    assert run_threads(ranks, work) == [(wanted, list(enumerate(wanted)))] * ranks


@pytest.mark.parametrize("size", [5, 7, 8])
def test_arrays_are_cut_too(size):
    pytest.importorskip("numpy")

    def work():
        accelerator, got = Accelerator(), []
        for batch in accelerator.prepare(DataLoader(range(size), 2)):
            got += [accelerator.gather_for_metrics({"x": batch.numpy(), "name": "y"})["x"]]
        return [[part.tolist() for part in parts] for parts in got]

    last = {5: [[4], []], 7: [[4, 5], [6]], 8: [[4, 5], [6, 7]]}[size]
    assert run_threads(2, work)[0] == [[[0, 1], [2, 3]], last]


def test_a_list_of_column_tensors_beside_texts_keeps_all_its_columns():
    def work():
        accelerator, last = Accelerator(), None
        for batch in accelerator.prepare(DataLoader([{"t": f"a{i}", "l": [i, i + 1]} for i in range(5)], 2)):
            last = accelerator.gather_for_metrics(batch)
        return last["t"], [column.tolist() for column in last["l"]]

    assert run_threads(2, work)[0] == (["a4"], [[4], [5]])


def test_objects_with_tensors_of_any_length_are_rows():
    def work(**options):
        accelerator, got = Accelerator(), []
        for batch in accelerator.prepare(DataLoader(range(5), 2)):
            boxes = [{"id": i, "boxes": torch.full((2, 4), i)} for i in batch.tolist()]
            got += accelerator.gather_for_metrics(boxes, use_gather_object=True)
        return [(one["id"], len(one["boxes"])) for one in got]

    assert run_threads(2, work)[0] == [(i, 2) for i in range(5)]


def test_nested_tensors_are_cut_leaf_by_leaf():
    def work():
        accelerator = Accelerator()
        logits, words, losses = [], [], 0
        for batch in accelerator.prepare(DataLoader(range(5), 2)):
            got = accelerator.gather_for_metrics(
                {
                    "logits": batch[:, None] * torch.ones(2),
                    "words": [str(i) for i in batch.tolist()],
                    "loss": batch.float().mean(),
                }
            )
            logits += got["logits"][:, 1].tolist()
            words += got["words"]
            losses += len(got["loss"])
        return logits, words, losses

    assert run_threads(2, work)[0] == ([0.0, 1.0, 2.0, 3.0, 4.0], ["0", "1", "2", "3", "4"], 3)


def test_objects_travel_when_they_are_asked_to():
    def work():
        accelerator = Accelerator()
        got = []
        for batch in accelerator.prepare(DataLoader(range(5), 2)):
            got += accelerator.gather_for_metrics([{"id": i} for i in batch.tolist()], use_gather_object=True)
        return got

    assert run_threads(2, work)[1] == [{"id": i} for i in range(5)]


def test_outside_a_loop_nothing_is_cut():
    def work():
        accelerator = Accelerator()
        return accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()

    assert run_threads(3, work)[0] == [0, 1, 2]


def test_the_evaluation_inside_a_training_loop_is_the_one_that_counts():
    def work():
        accelerator = Accelerator()
        train, evaluation = accelerator.prepare(DataLoader(range(8), 2), DataLoader(range(5), 2))
        got = []
        for _ in train:
            got.append([x for batch in evaluation for x in accelerator.gather_for_metrics(batch).tolist()])
        return got

    assert run_threads(2, work)[0] == [list(range(5))] * 2


def test_the_dispatching_loader_is_one():
    def work():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        return isinstance(accelerator.prepare(DataLoader(range(4), 2)), DataLoaderDispatcher)

    assert run_threads(2, work) == [True, True]
