"""What processes tell each other through the Accelerator."""

from __future__ import annotations

import torch

from acc_ops.testing import run_threads
from acc_trainer import Accelerator


def test_collectives_speak_for_the_run():
    def work():
        accelerator = Accelerator()
        rank = accelerator.process_index
        return (
            accelerator.gather(torch.tensor([rank])).tolist(),
            accelerator.reduce(torch.tensor(1.0 + rank)).item(),
            accelerator.reduce(torch.tensor(1.0 + rank), "mean").item(),
            accelerator.pad_across_processes(torch.ones(1 + rank), pad_index=-1).tolist(),
        )

    assert run_threads(2, work) == [([0, 1], 3.0, 1.5, [1.0, -1.0]), ([0, 1], 3.0, 1.5, [1.0, 1.0])]


def test_a_trigger_is_seen_once_by_everybody():
    def work():
        accelerator = Accelerator()
        seen = [accelerator.check_trigger()]
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]

    assert run_threads(2, work) == [[False, True, False]] * 2
