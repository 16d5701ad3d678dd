"""How a model is trained by Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from acc_ops.options import OptionError, fill_from_env, option, sources
from acc_plugins.options import megatron_args as args
from acc_plugins.options.checks import require_at_least, settle
from acc_plugins.options.megatron_models import parser_of

if TYPE_CHECKING:
    import torch
    from torch import nn

_AT_LEAST_1 = (
    "tp_degree",
    "pp_degree",
    "num_micro_batches",
    "recompute_num_layers",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "train_iters",
    "train_samples",
    "seq_length",
    "encoder_seq_length",
    "decoder_seq_length",
)
_AT_LEAST_0 = (
    "gradient_clipping",
    "attention_dropout",
    "hidden_dropout",
    "lr_warmup_fraction",
    "min_lr",
    "eval_iters",
    "eval_interval",
)
_DEFAULTS: dict[str, Any] = {  # of fields that neither an argument nor a variable gives; False for switches
    **dict.fromkeys(("tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers"), 1),
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"), 1
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    "gradient_clipping": 1.0,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    **dict.fromkeys(("attention_backend", "attention_softmax_in_fp32"), True),
    **dict.fromkeys(("calculate_per_token_loss", "use_rotary_position_embeddings"), True),
    **dict.fromkeys(
        ("use_custom_fsdp", "overlap_cpu_optimizer_d2h_h2d", "no_load_optim", "eod_mask_loss"), False
    ),
    **dict.fromkeys(("no_save_optim", "optimizer_cpu_offload", "use_precision_aware_optimizer"), False),
    **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"), False),
}


_PYTHON: Any = {"flag": False, "key": False}  # an option that only a script can give: a function or a class


def _megatron(name: str, help: str, **more: Any) -> Any:
    """An option whose flag and key are `megatron_lm_<name>` and whose variable is `MEGATRON_LM_<NAME>`."""
    spelled = f"megatron_lm_{name}"
    if name in _DEFAULTS:
        default = _DEFAULTS[name]
        help = f"{help}; default: {str(default).lower() if isinstance(default, bool) else default}"
    return option(None, env=spelled.upper(), flag=spelled, key=spelled, help=help, **more)


def _plain(default: Any, help: str, **more: Any) -> Any:
    """An option for scripts and files only."""
    return option(default, flag=False, help=help, **more)


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM trains; fields left None come from the environment, then are the default named in their help.

    `megatron_lm_default_args` are Megatron's arguments that result; the `set_...` methods add what is known later. Needs no Megatron-LM, but
    for `set_all_logging_options`. Raises OptionError (a ValueError) for values that cannot be, alone or together.
    """

    tp_degree: int | None = _megatron("tp_degree", "ranks that split each layer")
    pp_degree: int | None = _megatron("pp_degree", "ranks that each hold some layers")
    use_custom_fsdp: bool | None = _megatron("use_custom_fsdp", "shard by Megatron's own FSDP")
    overlap_cpu_optimizer_d2h_h2d: bool | None = _megatron(
        "overlap_cpu_optimizer_d2h_h2d", "copy to and from the optimizer in CPU memory while it computes"
    )
    no_load_optim: bool | None = _megatron("no_load_optim", "leave optimizer states out when loading")
    eod_mask_loss: bool | None = _megatron("eod_mask_loss", "count no loss at the ends of documents")
    no_save_optim: bool | None = _megatron("no_save_optim", "leave optimizer states out when saving")
    optimizer_cpu_offload: bool | None = _megatron(
        "optimizer_cpu_offload", "keep the optimizer in CPU memory"
    )
    use_precision_aware_optimizer: bool | None = _megatron(
        "use_precision_aware_optimizer", "optimizer states in lower precision"
    )
    decoder_last_pipeline_num_layers: int | None = _megatron(
        "decoder_last_pipeline_num_layers",
        "layers of the last pipeline stage; default: as many as the others",
    )
    recompute_granularity: Literal["full", "selective"] | None = _megatron(
        "recompute_granularity", "what is computed again in backward: full, or selective (attention)"
    )
    recompute_method: Literal["uniform", "block"] | None = _megatron(
        "recompute_method",
        "full recomputation: of all layers in groups (uniform), or of the first ones (block)",
    )
    recompute_num_layers: int | None = _megatron("recompute_num_layers", "layers of a group, or of the block")
    attention_backend: bool | None = _megatron("attention_backend", "use a fused attention")
    expert_model_parallel_size: int | None = _megatron(
        "expert_model_parallel_size", "ranks that share the experts of a layer"
    )
    context_parallel_size: int | None = _megatron("context_parallel_size", "ranks that split each sequence")
    attention_dropout: float | None = _megatron("attention_dropout", "dropout of attention")
    hidden_dropout: float | None = _megatron("hidden_dropout", "dropout of hidden states")
    attention_softmax_in_fp32: bool | None = _megatron(
        "attention_softmax_in_fp32", "compute the softmax of attention in float32"
    )
    expert_tensor_parallel_size: int | None = _megatron(
        "expert_tensor_parallel_size", "ranks that split each expert"
    )
    calculate_per_token_loss: bool | None = _megatron(
        "calculate_per_token_loss", "average the loss over tokens, not over micro-batches"
    )
    use_rotary_position_embeddings: bool | None = _megatron(
        "use_rotary_position_embeddings", "rotary positions instead of learnt ones"
    )
    num_micro_batches: int | None = _megatron("num_micro_batches", "micro-batches per step")
    gradient_clipping: float | None = _megatron(
        "gradient_clipping", "largest norm of all gradients together, 0 for none"
    )
    sequence_parallelism: bool | None = _megatron(
        "sequence_parallelism", "split activations between layers along the sequence, too"
    )
    recompute_activations: bool | None = _megatron(
        "recompute_activations", "compute attention again in backward: selective recomputation"
    )
    use_distributed_optimizer: bool | None = _megatron(
        "use_distributed_optimizer", "shard optimizer states over the data parallel ranks"
    )
    pipeline_model_parallel_split_rank: int | None = _plain(None, "first pipeline stage of the decoder")
    num_layers_per_virtual_pipeline_stage: int | None = _plain(None, "layers of an interleaved stage")
    is_train_batch_min: bool = _plain(
        True, "of several loaders' batch sizes the smaller one counts, else the larger"
    )
    train_iters: int | None = _plain(None, "steps to train")
    train_samples: int | None = _plain(None, "samples to train on, instead of train_iters")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = _plain(
        "constant", "how weight decay grows"
    )
    start_weight_decay: float | None = _plain(None, "weight decay at the start, where it grows")
    end_weight_decay: float | None = _plain(None, "weight decay at the end, where it grows")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = _plain(
        "linear", "how the learning rate falls"
    )
    lr_decay_iters: int | None = _plain(None, "steps until it is at its lowest; default: train_iters")
    lr_decay_samples: int | None = _plain(None, "samples until then; default: train_samples")
    lr_warmup_iters: int | None = _plain(None, "steps in which it rises linearly")
    lr_warmup_samples: int | None = _plain(None, "samples in which it rises")
    lr_warmup_fraction: float | None = _plain(None, "part of the decay in which it rises")
    min_lr: float = _plain(0, "lowest learning rate")
    consumed_samples: list[int] | None = option(
        None, flag=False, help="samples already seen, by loader in the order of prepare"
    )
    no_wd_decay_cond: Callable[..., bool] | None = option(
        None, help="whether a parameter has no weight decay", **_PYTHON
    )
    scale_lr_cond: Callable[..., bool] | None = option(
        None, help="whether lr_mult counts for a parameter", **_PYTHON
    )
    lr_mult: float = _plain(1.0, "factor of the learning rate for those")
    megatron_dataset_flag: bool = _plain(False, "the data sets are in Megatron's format")
    seq_length: int | None = _plain(
        None, "tokens of a sequence; default: of the batch, else the model's most"
    )
    encoder_seq_length: int | None = _plain(None, "tokens for the encoder")
    decoder_seq_length: int | None = _plain(None, "tokens for the decoder")
    tensorboard_dir: str | None = _plain(None, "folder of TensorBoard's files")
    set_all_logging_options: bool = _plain(False, "write all that Megatron can write to TensorBoard")
    eval_iters: int = _plain(100, "steps of an evaluation")
    eval_interval: int = _plain(1000, "steps between two evaluations")
    return_logits: bool = _plain(False, "the model returns logits, too")
    custom_train_step_class: Any = option(
        None, help="class of the training step instead of the model's", **_PYTHON
    )
    custom_train_step_kwargs: dict[str, Any] | None = option(None, flag=False, help="arguments of that class")
    custom_model_provider_function: Callable[..., Any] | None = option(
        None, help="builds the model", **_PYTHON
    )
    custom_prepare_model_function: Callable[..., Any] | None = option(
        None, help="prepares the model", **_PYTHON
    )
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = option(
        None, help="builds the data sets", **_PYTHON
    )
    custom_get_batch_function: Callable[..., Any] | None = option(None, help="takes a batch", **_PYTHON)
    custom_loss_function: Callable[..., Any] | None = option(None, help="computes the loss", **_PYTHON)
    other_megatron_args: dict[str, Any] | None = option(
        None, flag=False, help="more arguments of Megatron's; they win over all"
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        for name in _AT_LEAST_1:
            require_at_least(self, name, 1)
        for name in _AT_LEAST_0:
            require_at_least(self, name, 0)
        given = {name for name, origin in sources(self).items() if origin != "default"}
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        args.check_together(self, given)
        args.settle_recomputation(self, given)
        if self.consumed_samples is not None:
            missing = 3 - len(self.consumed_samples)
            self.consumed_samples = [*self.consumed_samples, *([0] * missing)]
        self.DDP_impl = "local" if self.pp_degree != 1 or self.use_distributed_optimizer else "torch"
        self.megatron_lm_default_args: dict[str, Any] = {}
        self._put(args.first_args(self))
        if self.tensorboard_dir is not None and self.set_all_logging_options:
            self.set_tensorboard_logging_options()

    def _put(self, found: dict[str, Any]) -> None:
        self.megatron_lm_default_args.update({**found, **(self.other_megatron_args or {})})

    def set_network_size_args(self, model: nn.Module, batch_data: Any = None) -> None:
        """Take sizes from the configuration of a transformers model, and sequence lengths from `batch_data` where no field gives them.

        Raises OptionError for a model without a configuration and for a type that has no parser.
        """
        parser_of(model)(self, model, batch_data)
        self._put({})

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compute in fp16 or bf16; "no" leaves float32. Raises OptionError for another name."""
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise OptionError(
                f"mixed precision must be no, fp16 or bf16 with Megatron-LM, got {mixed_precision!r}"
            )
        if mixed_precision == "bf16":
            self.DDP_impl = "local"  # Megatron's own adds up bf16 gradients in float32
        self._put({mixed_precision: True, "DDP_impl": self.DDP_impl} if mixed_precision != "no" else {})

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Take the samples of a micro-batch on each of `dp_degree` data parallel ranks; a step is `num_micro_batches` of them on each."""
        assert self.num_micro_batches is not None
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        sizes = ("data_parallel_size", "micro_batch_size", "global_batch_size")
        self._put({name: getattr(self, name) for name in sizes})

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Let Megatron use its own optimizer with the settings of this one. Raises OptionError for anything but Adam, AdamW and SGD."""
        self._put(args.optimizer_args(optimizer))

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take how long is trained and warmed up from a dummy scheduler, where no field says it; its steps are those of all data parallel ranks together.

        Raises OptionError before `set_training_args`, and where nothing says how long.
        """
        self._put(args.scheduler_args(self, scheduler))

    def set_tensorboard_logging_options(self) -> None:
        """Turn on every logging switch that Megatron-LM declares. Raises ImportError without it."""
        self._put(args.logging_args())
