"""Gradient clipping: torch's formula, with a short path for the plain case."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm before that, as a 0-dim tensor.

    The same numbers as `torch.nn.utils.clip_grad_norm_`, except that a parameter given twice counts once. Gradients that are plain
    tensors of one device and dtype are grouped once here and not twice as there; everything else goes to torch.
    """
    norm_type = float(norm_type)  # "inf", too, as torch takes it
    unique = unique_parameters(parameters)
    gradients = [p.grad for p in unique if p.grad is not None]
    if not gradients or not _alike_and_plain(gradients):
        return torch.nn.utils.clip_grad_norm_(unique, max_norm, norm_type)
    with torch.no_grad():
        norms = torch._foreach_norm(gradients, norm_type)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def unique_parameters(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters (one, or any iterable such as a generator) as a list, each once, in order."""
    if isinstance(parameters, Tensor):
        return [parameters]
    return list({id(p): p for p in parameters}.values())


def _alike_and_plain(gradients: list[Tensor]) -> bool:
    """Whether all are dense tensors of torch's own class with one device and one dtype."""
    device, dtype = gradients[0].device, gradients[0].dtype
    return all(
        type(g) is Tensor and g.device == device and g.dtype == dtype and g.layout is torch.strided
        for g in gradients
    )
