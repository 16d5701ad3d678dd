"""Loaders on real gloo processes: a selection of the data law, what a dispatching loader sends, and ranks with unequal numbers of batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from acc_ops.testing import run_processes
from acc_plugins.options.dataloader import DataLoaderConfiguration
from acc_trainer import Accelerator


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Files(IterableDataset):
    """A stream of files that ranks can share out."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @property
    def num_shards(self) -> int:
        return len(self.lengths)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.lengths[index::num_shards])

    def __iter__(self) -> Any:
        return itertools.chain.from_iterable(range(length) for length in self.lengths)


def _law() -> list[Any]:
    """For many sizes and ways to read: what this rank gathers, and whether a resumed pass goes on as the one before."""
    found: list[Any] = []
    for size, dispatch, split, kind in itertools.product(
        (5, 12), (False, True), (False, True), ("shuffled", "stream", "words")
    ):
        workers = int(kind == "shuffled" and split)
        options = DataLoaderConfiguration(
            dispatch_batches=dispatch, split_batches=split, use_seedable_sampler=True, data_seed=3
        )
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        batch = 2 * accelerator.num_processes if split else 2
        data: Any = Stream(size) if kind == "stream" else list(range(size))
        loader = accelerator.prepare(
            DataLoader(
                data,
                batch,
                shuffle=kind == "shuffled",
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
                collate_fn=_words if kind == "words" else None,
            )
        )
        gathered: list[int] = []
        batches: list[Any] = []
        state: Any = None
        for at, content in enumerate(loader, start=1):
            batches.append(content if isinstance(content, list) else content.tolist())
            gathered += [int(one) for one in accelerator.gather_for_metrics(content)]
            state = loader.position.state_dict() if at == 1 else state
        loader.position.load_state_dict(state)
        rest = [
            content if isinstance(content, list) else content.tolist()
            for content in accelerator.skip_first_batches(loader, 1)
        ]
        wanted = batches[1:] if len(batches) > 1 else None
        found.append((size, kind, sorted(gathered), gathered, wanted is None or rest == wanted))
        accelerator.free_memory()
    return found


def _words(items: list[int]) -> list[str]:
    return [str(item) for item in items]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_data_law_holds_between_processes(ranks: int) -> None:
    results = run_processes(ranks, _law)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 2 * 2 * 2 * 3
    for size, kind, seen, in_order, resumed in results[0]:
        assert seen == list(range(size)), (size, kind)
        assert kind == "shuffled" or in_order == seen, (size, kind)
        assert resumed, (size, kind)


def _count_collectives() -> Any:
    made: list[tuple[str, int]] = []
    for name in ("scatter", "broadcast", "all_reduce"):
        call = getattr(dist, name)

        def counted(tensor: Any, *args: Any, _call: Any = call, _name: str = name, **options: Any) -> Any:
            made.append((_name, tensor.numel() * tensor.element_size()))
            return _call(tensor, *args, **options)

        setattr(dist, name, counted)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    data = [{"x": torch.full((5,), float(at)), "y": at} for at in range(16)]
    loader = accelerator.prepare(DataLoader(data, 2))
    rows = [content["y"].tolist() for content in loader]
    return rows, made


def test_a_dispatched_step_is_one_scatter_of_what_a_rank_needs() -> None:
    (first, made), (second, also) = run_processes(2, _count_collectives)
    assert first == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert second == [[2, 3], [6, 7], [10, 11], [14, 15]]
    part = 2 * 5 * 4 + 2 * 8  # x in float32, y in int64
    assert made == also == [("scatter", 64 + part)] * 4


def _read_that_fails() -> str:
    class Failing(Stream):
        def __iter__(self) -> Any:
            yield from range(self.size)
            raise OSError("disk gone")

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Failing(6), 1))
    try:
        for _ in loader:
            pass
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failing_read_ends_every_process() -> None:
    first, second = run_processes(2, _read_that_fails, timeout_s=60)
    assert first == "OSError: disk gone"
    assert second == "RuntimeError: rank 0 failed while reading the next batch: OSError: disk gone"


def _uneven(size: int, own_files: bool) -> Any:
    options = DataLoaderConfiguration(dispatch_batches=False, even_batches=not own_files)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    rows = torch.arange(1.0, size + 1.0, dtype=torch.float64).unsqueeze(1)
    data: Any = Files([size, 2 * accelerator.num_processes]) if own_files else rows
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(data, 1)
    )
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=None if own_files else False):
        for batch in loader:
            steps += 1
            content = batch.double().reshape(-1, 1)
            accelerator.backward(model(content).sum())
            optimizer.step()
            optimizer.zero_grad()
    everybody = accelerator.gather(torch.tensor([steps])).tolist()
    return model.module.weight.item(), everybody, accelerator.even_batches


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_run_out_of_batches_join_the_others(ranks: int) -> None:
    size = 2 * ranks + 1  # rank 0 has one batch more
    results = run_processes(ranks, _uneven, size, False, timeout_s=90)
    # torch's Join divides by the number of ranks at the beginning, so each row weighs 1 / ranks
    weight = -sum(range(1, size + 1)) / ranks
    for value, steps, even in results:
        assert value == pytest.approx(weight, rel=1e-12)
        assert steps == [3] + [2] * (ranks - 1)
        assert even


def test_streams_of_unequal_files_join_too() -> None:
    results = run_processes(2, _uneven, 7, True, timeout_s=90)
    for value, steps, _ in results:
        assert value == pytest.approx(-(sum(range(7)) + sum(range(4))) / 2, rel=1e-12)
        assert steps == [7, 4]
