"""How data loaders are shared out among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from acc_ops.options import option
from acc_plugins.options.checks import settle


@dataclass
class DataLoaderConfiguration:
    """Settings for preparing data loaders. Raises OptionError (a ValueError) for a value of the wrong type."""

    split_batches: bool = option(
        False, help="the loader's batch is the batch of all ranks together, not of each rank"
    )
    dispatch_batches: bool | None = option(
        None, help="rank 0 reads and sends the batches; none: only for datasets that can only be iterated"
    )
    even_batches: bool = option(
        True, help="repeat samples from the start so that all ranks get the same number of batches"
    )
    use_seedable_sampler: bool = option(
        False, help="shuffle by a permutation that follows from the seed and the epoch alone"
    )
    data_seed: int | None = option(None, help="seed of that permutation; none: drawn from torch's generator")
    non_blocking: bool = option(False, help="copy batches to the device asynchronously (from pinned memory)")
    use_stateful_dataloader: bool = option(
        False, help="use torchdata's StatefulDataLoader, which continues by itself after a resume"
    )

    def __post_init__(self) -> None:
        settle(self)
