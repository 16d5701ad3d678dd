"""What bench_compile.py starts: one training step of a model of twelve layers, `compile_step.py MODEL WAY`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from acc_plugins import TorchDynamoPlugin
from acc_trainer import Accelerator

LAYERS, WIDTH, HEADS, WORDS = 12, 256, 4, 1000


class Block(
    nn.Module
):  # none of torch's own: torch.compile leaves those eager when they are compiled in place, as by hand below
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.queries(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(x).square().mean()}


class Smallest(nn.Module):
    """What any first graph costs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, **_: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.scale.sin().mean()}


def made(model: str) -> tuple[Any, Any]:
    """A model, and its blocks."""
    if model == "plain":
        plain = Plain()
        return plain, plain.blocks
    import transformers  # noqa: PLC0415  optional, and slow to import

    sizes = {"vocab_size": WORDS, "max_position_embeddings": 128}
    if model == "gpt2":
        config = transformers.GPT2Config(
            n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=128, vocab_size=WORDS, use_cache=False
        )
        gpt2 = transformers.GPT2LMHeadModel(config)
        return gpt2, gpt2.transformer.h
    sizes.update(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS)
    if model == "bert":
        bert = transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=4 * WIDTH, **sizes))
        return bert, bert.bert.encoder.layer
    config = transformers.LlamaConfig(
        num_key_value_heads=2, intermediate_size=2 * WIDTH, use_cache=False, **sizes
    )
    llama = transformers.LlamaForCausalLM(config)
    return llama, llama.model.layers


def main() -> None:
    name, way = sys.argv[1:]
    model, blocks = made(name)
    if way == "start of inductor":
        model, blocks = Smallest(), []
    plugin = None
    if way in ("whole", "regional", "start of inductor"):
        plugin = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=way == "regional")
    if way == "by hand":
        for block in blocks:
            block.compile()
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    ids = torch.randint(WORDS, (2, 64))
    accelerator.backward(model(input_ids=ids, labels=ids)["loss"])
    optimizer.step()


if __name__ == "__main__":
    main()
