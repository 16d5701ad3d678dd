"""What Megatron-LM is told about models of transformers, by the type of their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acc_ops.options import OptionError
from acc_plugins import MegatronLMPlugin, add_model_config_to_megatron_parser
from acc_plugins.options.megatron_models import MODEL_CONFIGS_TO_MEGATRON_PARSERS

COMMON = {"vocab_size": 100, "return_dict": True}
ENCODER = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 8, "n_head": 4, "n_positions": 16, "n_inner": None},
    "megatron-bert": {**ENCODER, "intermediate_size": 24, "num_labels": 3},
    "t5": {
        "num_layers": 3,
        "num_decoder_layers": 2,
        "d_model": 8,
        "num_heads": 4,
        "n_positions": 16,
        "d_ff": 24,
        "d_kv": 2,
    },
    "llama": {
        **ENCODER,
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    "glm4_moe": {
        **ENCODER,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
BATCH = {"input_ids": torch.zeros(2, 12), "labels": torch.zeros(2, 5)}


def told(model_type: str, batch: Any = None, name: str = "Model", **fields: Any) -> dict[str, Any]:
    model = type(name, (nn.Module,), {})()
    model.config = SimpleNamespace(model_type=model_type, **COMMON, **CONFIGS.get(model_type.lower(), {}))
    plugin = MegatronLMPlugin(**fields)
    plugin.set_network_size_args(model, batch)
    return plugin.megatron_lm_default_args


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_type_tells_its_sizes(model_type: str) -> None:
    found = told(model_type)
    assert (found["num_layers"], found["hidden_size"], found["num_attention_heads"]) == (3, 8, 4)
    assert (found["max_position_embeddings"], found["orig_vocab_size"], found["model_return_dict"]) == (
        16,
        100,
        True,
    )
    kinds = {"megatron-bert": "bert", "t5": "t5"}
    assert found["model_type_name"] == kinds.get(model_type, "gpt")


@pytest.mark.parametrize("model_type", ["gpt2", "megatron-bert", "llama", "glm4_moe"])
def test_sequences_are_as_long_as_a_field_says_else_the_batch_else_the_most(model_type: str) -> None:
    side = "encoder" if model_type == "megatron-bert" else "decoder"
    assert told(model_type)["seq_length"] == 16
    assert told(model_type, BATCH)["seq_length"] == 12
    assert told(model_type, BATCH, seq_length=7)["seq_length"] == 7
    assert told(model_type, BATCH, **{f"{side}_seq_length": 6})["seq_length"] == 6


def test_two_lengths_that_differ_are_said(caplog: pytest.LogCaptureFixture) -> None:
    assert told("gpt2", seq_length=7, decoder_seq_length=6)["seq_length"] == 6
    assert "seq_length=7 has no effect beside decoder_seq_length=6" in caplog.text


def test_t5_has_two_lengths_and_may_have_two_depths() -> None:
    assert (told("t5")["encoder_seq_length"], told("t5")["decoder_seq_length"]) == (16, 16)
    found = told("t5", BATCH)
    assert (found["encoder_seq_length"], found["decoder_seq_length"]) == (12, 5)
    assert (found["decoder_num_layers"], found["ffn_hidden_size"], found["kv_channels"]) == (2, 24, 2)
    found = told("t5", {"input_ids": BATCH["input_ids"]}, decoder_seq_length=3)
    assert (found["encoder_seq_length"], found["decoder_seq_length"]) == (12, 3)


@pytest.mark.parametrize(
    ("name", "pretraining"),
    [
        ("MegatronBertForMaskedLM", True),
        ("MegatronBertForPreTraining", True),
        ("MegatronBertForSequenceClassification", False),
    ],
)
def test_bert_is_pretrained_where_its_class_is_for_that(name: str, pretraining: bool) -> None:
    found = told("megatron-bert", name=name)
    assert (found["pretraining_flag"], found["num_labels"]) == (pretraining, 3)


@pytest.mark.parametrize("model_type", ["gpt2", "megatron-bert", "t5"])
def test_positions_are_rotary_only_where_the_model_or_somebody_says_so(model_type: str) -> None:
    assert told("llama")["use_rotary_position_embeddings"] is True
    found = told(model_type)
    assert found["use_rotary_position_embeddings"] is False
    assert found["position_embedding_type"] == "learned_absolute"
    assert told(model_type, use_rotary_position_embeddings=True)["use_rotary_position_embeddings"] is True


def test_llama_is_told_as_what_it_is_and_not_as_gpt2() -> None:
    found = told("llama", return_logits=True)
    assert found["normalization"] == "RMSNorm"
    assert found["norm_epsilon"] == 1e-5
    assert found["rotary_base"] == 5e5
    assert found["num_query_groups"] == 2
    assert found["ffn_hidden_size"] == 24
    assert (found["swiglu"], found["group_query_attention"], found["return_logits"]) == (True, True, True)
    assert (found["add_bias_linear"], found["add_qkv_bias"]) == (False, False)
    assert found["untie_embeddings_and_output_weights"] is True


def test_experts_come_after_the_dense_layers_and_shared_ones_add_up() -> None:
    found = told("glm4_moe")
    assert found["moe_layer_freq"] == [0, 1, 1]
    assert found["moe_shared_expert_intermediate_size"] == 24
    assert (found["num_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (6, 2, 12)
    assert (found["rotary_base"], found["rotary_percent"]) == (1e6, 0.25)
    assert (found["add_qkv_bias"], found["untie_embeddings_and_output_weights"]) == (True, False)


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(MODEL_CONFIGS_TO_MEGATRON_PARSERS)
    yield
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.clear()
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.update(before)


def test_an_own_type_is_registered_and_other_arguments_still_win(registry: None) -> None:
    @add_model_config_to_megatron_parser("Own")
    def parse(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
        megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.vocab_size

    assert told("own")["num_layers"] == 100
    assert told("OWN", other_megatron_args={"num_layers": 1})["num_layers"] == 1
    assert parse.__name__ == "parse"


def test_an_unknown_type_and_a_model_without_one_say_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"'gpt_2'.*did you mean gpt2.*add_model_config_to_megatron_parser"):
        told("gpt_2")
    with pytest.raises(OptionError, match=r"Linear has no config\.model_type"):
        MegatronLMPlugin().set_network_size_args(nn.Linear(1, 1))
