"""A GAN, two models and two optimizers in one loop: a generator learns to put points on a ring.

    python docs/examples/gan.py

Prints how far the generated points are from the ring, and how much of it they cover. Both models accumulate over two micro-batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acc_trainer import Accelerator, set_seed

NOISE = 4  # numbers that the generator makes a point from


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def ring(points: int) -> Tensor:
    """Points (points, 2) at distance 1 from the origin, give or take 0.02."""
    angle = torch.rand(points) * 2 * math.pi
    radius = 1 + 0.02 * torch.randn(points)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_step = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_step = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    points = DataLoader(TensorDataset(ring(4096)), batch_size=128, shuffle=True, drop_last=True)
    generator, critic, generator_step, critic_step, points = accelerator.prepare(
        generator, critic, generator_step, critic_step, points
    )
    for _ in range(60):
        for (real,) in points:
            with accelerator.accumulate(generator, critic):
                made = generator(torch.randn(len(real), NOISE, device=accelerator.device))
                # the critic: real points up, made ones down; one forward for both
                said = critic(torch.cat([real, made.detach()]))
                aim = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(said.device)
                accelerator.backward(nn.functional.binary_cross_entropy_with_logits(said, aim))
                critic_step.step()
                critic_step.zero_grad()
                # the generator: made points that the critic takes for real
                critic.requires_grad_(
                    False
                )  # it only judges here, so nothing of it is exchanged between processes
                said = accelerator.unwrap_model(critic)(made)
                critic.requires_grad_(True)
                accelerator.backward(nn.functional.softplus(-said).mean())
                generator_step.step()
                generator_step.zero_grad()
    with torch.no_grad():
        made = generator(torch.randn(500, NOISE, device=accelerator.device))
    made = accelerator.gather(made)
    sector = ((torch.atan2(made[:, 1], made[:, 0]) / math.pi + 1) * 8).long().clamp(0, 15)
    covered = int((torch.bincount(sector, minlength=16) > 0.01 * len(made)).sum())
    off = (made.norm(dim=1) - 1).abs().mean().item()
    accelerator.print(f"mean distance from the ring {off:.3f}, covered {covered} of 16 sectors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
