"""What Megatron-LM has to be told about a transformers model: a parser for each type of configuration.

A parser takes `(megatron_lm_plugin, model, batch_data)` and adds Megatron's arguments to `megatron_lm_plugin.megatron_lm_default_args`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from acc_ops.options import OptionError, closest, sources

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
Parser = TypeVar("Parser", bound=Callable[..., None])
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Callable[..., None]] = {}  # model_type -> parser


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Decorator: the function tells Megatron-LM about models whose `config.model_type` is this one."""

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type.lower()] = parser
        return parser

    return register


def parser_of(model: nn.Module) -> Callable[..., None]:
    """The parser for that model. Raises OptionError for one without a configuration and for an unknown type."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise OptionError(
            f"{type(model).__name__} has no config.model_type, from which Megatron-LM's arguments follow: give a model of transformers, or "
            "the arguments by other_megatron_args and a custom_model_provider_function"
        )
    known = MODEL_CONFIGS_TO_MEGATRON_PARSERS
    if str(model_type).lower() not in known:
        near = closest(str(model_type), known)
        raise OptionError(
            f"Megatron-LM is not told about models of type {model_type!r}, only about {', '.join(known)}"
            + (f" (did you mean {near}?)" if near else "")
            + ": register a parser with add_model_config_to_megatron_parser"
        )
    return known[str(model_type).lower()]


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Arguments for Megatron-BERT; it is pretrained where the class is one for masked words or for pretraining."""
    config = model.config
    pretraining = any(word in type(model).__name__ for word in ("MaskedLM", "PreTraining"))
    found = _sizes(config, "bert", pretraining, *_usual_sizes(config))
    found |= _not_rotary(megatron_lm_plugin)
    found |= _some(config, ffn_hidden_size="intermediate_size", num_labels="num_labels")
    found["seq_length"] = _length(megatron_lm_plugin, "encoder", batch_data, config.max_position_embeddings)
    megatron_lm_plugin.megatron_lm_default_args.update(found)


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Arguments for GPT-2."""
    config = model.config
    found = _sizes(config, "gpt", True, config.n_layer, config.n_embd, config.n_head, config.n_positions)
    found |= _not_rotary(megatron_lm_plugin)
    found |= _some(config, ffn_hidden_size="n_inner")
    found |= {"return_logits": megatron_lm_plugin.return_logits, "tokenizer_type": "GPT2BPETokenizer"}
    found["seq_length"] = _length(megatron_lm_plugin, "decoder", batch_data, config.n_positions)
    megatron_lm_plugin.megatron_lm_default_args.update(found)


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Arguments for T5; the decoder's sequences are as long as the labels."""
    config, plugin = model.config, megatron_lm_plugin
    most = getattr(config, "n_positions", 512)
    found = _sizes(config, "t5", True, config.num_layers, config.d_model, config.num_heads, most)
    found |= _not_rotary(megatron_lm_plugin)
    found |= _some(
        config, decoder_num_layers="num_decoder_layers", ffn_hidden_size="d_ff", kv_channels="d_kv"
    )
    batch = batch_data or {}
    for side, key in (("encoder", "input_ids"), ("decoder", "labels")):
        said = getattr(plugin, f"{side}_seq_length")
        tokens = batch[key].shape[1] if key in batch else most
        found[f"{side}_seq_length"] = tokens if said is None else said
    megatron_lm_plugin.megatron_lm_default_args.update(found)


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Arguments for Llama."""
    found = _rotary_decoder(megatron_lm_plugin, model.config, batch_data)
    found |= {"pretraining_flag": True, "tokenizer_type": "Llama2Tokenizer"}
    found["add_bias_linear"] = bool(getattr(model.config, "mlp_bias", False))
    megatron_lm_plugin.megatron_lm_default_args.update(found)


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Arguments for GLM-4 with experts: sigmoid routing with a bias that is not trained, dense layers first."""
    config = model.config
    dense = config.first_k_dense_replace
    found = _rotary_decoder(megatron_lm_plugin, config, batch_data)
    found |= _some(
        config,
        qk_layernorm="use_qk_norm",
        moe_router_topk="num_experts_per_tok",
        moe_router_topk_scaling_factor="routed_scaling_factor",
        moe_router_num_groups="n_group",
        moe_router_group_topk="topk_group",
        num_experts="n_routed_experts",
        moe_ffn_hidden_size="moe_intermediate_size",
        eos_token_id="eos_token_id",
    )
    found |= {
        "pretraining_flag": False,
        "tokenizer_type": "HuggingFaceTokenizer",
        "original_model_type": "glm4_moe",
        "add_bias_linear": False,
        "rotary_percent": _rope(config, "partial_rotary_factor", 0.5),
        "moe_shared_expert_intermediate_size": config.n_shared_experts * config.moe_intermediate_size,
        "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }
    megatron_lm_plugin.megatron_lm_default_args.update(found)


def _sizes(config: Any, name: str, pretraining: bool, *sizes: int) -> dict[str, Any]:
    """What Megatron wants to know about every model; `sizes` are layers, width, heads and positions."""
    layers, width, heads, positions = sizes
    return {
        "model_type_name": name,
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "pretraining_flag": pretraining,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": getattr(config, "return_dict", True),
    }


def _usual_sizes(config: Any) -> tuple[int, int, int, int]:
    """The sizes by the names that most configurations have."""
    return (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.max_position_embeddings,
    )


def _not_rotary(plugin: Any) -> dict[str, Any]:
    """For models that learn their positions: rotary ones, Megatron's arguments' default, only where somebody asked for them."""
    asked = sources(plugin)["use_rotary_position_embeddings"] != "default"
    return (
        {}
        if asked
        else {"use_rotary_position_embeddings": False, "position_embedding_type": "learned_absolute"}
    )


def _rotary_decoder(plugin: Any, config: Any, batch_data: Any) -> dict[str, Any]:
    """What decoders with rotary positions, RMSNorm, gated feed-forwards and grouped queries have in common."""
    found = _sizes(config, "gpt", True, *_usual_sizes(config))
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    most = getattr(config, "max_sequence_length", None) or config.max_position_embeddings
    return found | {
        **_some(config, ffn_hidden_size="intermediate_size", kv_channels="head_dim"),
        "return_logits": plugin.return_logits,
        "seq_length": _length(plugin, "decoder", batch_data, most),
        "position_embedding_type": "rope",
        "rotary_base": _rope(config, "rope_theta", 10000.0),
        "normalization": "RMSNorm",
        "norm_epsilon": getattr(config, "rms_norm_eps", 1e-6),
        "swiglu": True,
        "group_query_attention": groups != config.num_attention_heads,
        "num_query_groups": groups,
        "add_qkv_bias": bool(getattr(config, "attention_bias", False)),
        "untie_embeddings_and_output_weights": not getattr(config, "tie_word_embeddings", False),
    }


def _some(config: Any, **names: str) -> dict[str, Any]:
    """Megatron's argument -> value, of the attributes that the configuration has and that are not None."""
    found = {argument: getattr(config, name, None) for argument, name in names.items()}
    return {argument: value for argument, value in found.items() if value is not None}


def _rope(config: Any, name: str, default: float) -> Any:
    """A setting of the rotary positions: transformers keeps them in `rope_parameters` since version 5."""
    together = getattr(config, "rope_parameters", None) or {}
    return together.get(name, getattr(config, name, default))


def _length(plugin: Any, side: str, batch_data: Any, most: int) -> int:
    """Tokens of a sequence: of the fields, else of the batch, else the model's most."""
    own = getattr(plugin, f"{side}_seq_length")
    if own is not None:
        if plugin.seq_length is not None and plugin.seq_length != own:
            logger.warning(
                "seq_length=%s has no effect beside %s_seq_length=%s", plugin.seq_length, side, own
            )
        return int(own)
    if plugin.seq_length is not None:
        return int(plugin.seq_length)
    return int(most if batch_data is None else batch_data["input_ids"].shape[1])
