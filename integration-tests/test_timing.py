"""The step timer over torch's DistributedDataParallel, on two real processes."""

from __future__ import annotations

from pathlib import Path

from acc_ops.testing import run_processes


def work(folder: str) -> list[bool]:
    import time

    import torch

    from acc_trainer import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.strategy.name == "ddp"
    turned = []
    with accelerator.time_steps() as timer:
        turn_to = timer.turn_to

        def noted(phase: int) -> None:
            turn_to(phase)
            turned.append(phase)
            Path(folder, f"rank {accelerator.process_index} waits {len(turned)}").touch()

        timer.turn_to = noted
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(torch.ones(4, 8)).mean()
                if accelerator.process_index == 1 and accelerator.sync_gradients:
                    # rank 0 cannot be through its backward: it must have told that it waits before it began to
                    deadline = time.monotonic() + 60
                    while not Path(folder, f"rank 0 waits {len(turned) + 1}").exists():
                        assert time.monotonic() < deadline, (
                            "rank 0 waits for gradients and does not call it sync"
                        )
                        time.sleep(0.01)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    made = [timer.steps == 2, all(one > 0 for one in timer.seconds("sync")), len(turned) == 4]
    made.append(type(accelerator.strategy).__name__ == "DDPStrategy")
    accelerator.end_training()
    return made


def test_waiting_for_gradients_of_another_process_is_sync_and_not_backward(tmp_path):
    assert run_processes(2, work, str(tmp_path)) == [[True] * 4] * 2
