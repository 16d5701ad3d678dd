"""A small decoder that can be split in every way, and how it trains in one process that has all of it, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, _HEADS, _KV_HEADS, _SIZE, TIME = 16, 16, 4, 2, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = _SIZE
        self.q = nn.Linear(WIDTH, _HEADS * _SIZE)
        self.k = nn.Linear(WIDTH, _KV_HEADS * _SIZE)
        self.v = nn.Linear(WIDTH, _KV_HEADS * _SIZE, bias=False)
        self.norm = nn.RMSNorm(_SIZE)
        self.out = nn.Linear(_HEADS * _SIZE, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = self.norm(self.q(x).view(shape)).transpose(1, 2)
        k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Tied embedding and head, learned places, grouped queries, a norm over single heads."""

    tp_plan = {  # noqa: RUF012 - as transformers' models carry it
        "tokens": "embedding_rowwise",
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.norm": "replicated_with_grad_allreduce",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(self.norm(x))


def make_decoder(seed: int = 0, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**options).double()


def batch_of(step: int, share: int = 0, shares: int = 1) -> dict[str, Tensor]:
    """Samples and targets, of which some do not count, unequally many in the two halves of the sequences."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (4, TIME), generator=generator)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    targets[:, -1] = -100
    targets[:, 5] = -100
    each = 4 // shares
    mine = slice(share * each, (share + 1) * each)
    return {"ids": ids[mine].clone(), "targets": targets[mine].clone()}


def plain_loss(model: nn.Module, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.cross_entropy(model(ids, mask=mask).flatten(0, 1), targets.flatten())


MASK = torch.ones(TIME, TIME, dtype=torch.bool).tril()
MASK[3, 1] = MASK[7, 2] = False


def trained_alone(
    steps: int = 10, mask: Tensor | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first gradients and the last weights of one process with all samples."""
    model, losses, gradients = make_decoder(), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = batch_of(step)
        loss = plain_loss(model, batch["ids"], batch["targets"], mask)
        loss.backward()
        gradients = gradients or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )
