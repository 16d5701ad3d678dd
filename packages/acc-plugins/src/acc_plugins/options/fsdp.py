"""How a model is sharded by torch's FSDP, version 1 (`FullyShardedDataParallel`) or 2 (`fully_shard`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acc_ops.lazy import LazyLogger
from acc_ops.options import OptionError, closest, fill_from_env, option, sources
from acc_plugins.options import fsdp_values as values
from acc_plugins.options.checks import require_at_least, settle

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = LazyLogger(__name__)
_ONLY_V1 = {  # field -> why version 2 has none
    "sharding_strategy": "say it by reshard_after_forward",
    "backward_prefetch": "version 2 prefetches by itself",
    "sync_module_states": "version 2 sends weights from rank 0 while it loads them",
    "use_orig_params": "version 2 always keeps the original parameters",
    "param_init_fn": "version 2 starts from the meta device by itself",
}


def _fsdp(name: str, help: str, *, env: str | None = None, **more: Any) -> Any:
    """An option whose flag and key are `fsdp_<name>` and whose variable is `FSDP_<NAME>`."""
    spelled = f"fsdp_{name}"
    return option(None, env=env or spelled.upper(), flag=spelled, key=spelled, help=help, **more)


@dataclass
class FullyShardedDataParallelPlugin:
    """How FSDP shards a model; fields left None come from the environment, then are the default named in their help.

    Policies, strategies and state dict types may be given by name or number, and are torch's objects once built. Building one writes nothing to
    the environment. Raises OptionError (a ValueError) for values that cannot be, alone or together or in that version.
    """

    fsdp_version: int | None = _fsdp("version", "1 or 2; default: 1", choices=(1, 2))
    sharding_strategy: Any = _fsdp(  # noqa: RUF009  only declares
        "sharding_strategy",
        "version 1: what is sharded (deprecated: reshard_after_forward); default: FULL_SHARD",
        parse=str,
        plain=values.name_of,
    )
    reshard_after_forward: Any = _fsdp(  # noqa: RUF009  only declares
        "reshard_after_forward",
        "version 2: free gathered weights after forward, default true; version 1: a sharding strategy",
        parse=values.truth_or_text,
        plain=values.name_of,
    )
    backward_prefetch: Any = _fsdp(  # noqa: RUF009  only declares
        "backward_prefetch",
        "version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH (the default)",
        parse=str,
        plain=values.name_of,
    )
    mixed_precision_policy: Any = option(
        None,
        flag=False,
        key=False,
        help="formats of parameters and gradients: fp16, bf16, fp32, fp8, a dtype, a dictionary, or torch's policy",
    )
    auto_wrap_policy: Any = _fsdp(  # noqa: RUF009  only declares
        "auto_wrap_policy",
        "transformer_based_wrap, size_based_wrap, no_wrap (the default), or a function",
        parse=str,
        plain=values.policy_name,
    )
    cpu_offload: Any = _fsdp(  # noqa: RUF009  only declares
        "offload_params",
        "keep shards in CPU memory between their uses; default: false",
        parse=values.truth,
        plain=values.offloads,
    )
    ignored_modules: Any = _fsdp(  # noqa: RUF009  only declares
        "ignored_modules",
        "modules that are not sharded: a list, or a regular expression that matches their whole names",
        parse=str,
    )
    state_dict_type: Any = _fsdp(  # noqa: RUF009  only declares
        "state_dict_type",
        "FULL_STATE_DICT (default of version 1), SHARDED_STATE_DICT (of version 2) or LOCAL_STATE_DICT (version 1)",
        parse=str,
        plain=values.name_of,
    )
    state_dict_config: Any = option(
        None, flag=False, key=False, help="torch's settings of the state dict; default: follows its type"
    )
    optim_state_dict_config: Any = option(
        None, flag=False, key=False, help="the same for optimizer states; default: follows state_dict_type"
    )
    limit_all_gathers: bool = option(
        True, flag=False, key=False, help="version 1: hold the CPU back so that few gathered weights exist"
    )
    use_orig_params: bool | None = _fsdp(
        "use_orig_params", "version 1: keep the original parameters; default: false"
    )
    param_init_fn: Callable[[nn.Module], None] | None = option(
        None,
        flag=False,
        key=False,
        parse=str,
        help="version 1: how a module on the meta device is given memory",
    )
    sync_module_states: bool | None = _fsdp(
        "sync_module_states", "version 1: send rank 0's weights to the others at the start; default: false"
    )
    forward_prefetch: bool | None = _fsdp(
        "forward_prefetch", "version 1: gather the next weights during forward; default: false"
    )
    activation_checkpointing: bool | None = _fsdp(
        "activation_checkpointing", "compute the wrapped blocks again in backward; default: false"
    )
    activation_checkpointing_offload: bool | None = _fsdp(
        "activation_checkpointing_offload",
        "version 2: keep the inputs of those blocks in CPU memory; default: false",
    )
    cpu_ram_efficient_loading: bool | None = _fsdp(
        "cpu_ram_efficient_loading", "rank 0 reads the checkpoint, others start empty; default: false"
    )
    transformer_cls_names_to_wrap: list[str] | None = _fsdp(  # noqa: RUF009  only declares
        "transformer_layer_cls_to_wrap",
        "class names of the blocks to wrap; default: the model's _no_split_modules",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
    )
    min_num_params: int | None = _fsdp(
        "min_num_params", "size_based_wrap: parameters from which a module is wrapped; default: 0"
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        require_at_least(self, "min_num_params", 0)
        self.fsdp_version = 1 if self.fsdp_version is None else self.fsdp_version
        if self.fsdp_version == 2:
            self._settle_version_2()
        else:
            self._settle_version_1()
        self._settle_policy()
        self._settle_checkpointing()
        if isinstance(self.ignored_modules, str):
            values.check_pattern(self.ignored_modules)
        elif isinstance(self.ignored_modules, Iterator):  # asked more than once
            self.ignored_modules = list(self.ignored_modules)
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        self.cpu_ram_efficient_loading = bool(self.cpu_ram_efficient_loading)
        if self.fsdp_version == 1 and self.cpu_ram_efficient_loading and not self.sync_module_states:
            logger.warning(
                "sync_module_states is turned on: with cpu_ram_efficient_loading only rank 0 has the weights"
            )
            self.sync_module_states = True
        if self.sync_module_states:
            self.param_init_fn = values.to_empty

    def _settle_version_1(self) -> None:
        # accelerate's launcher always writes its default, which is version 2's
        if self.reshard_after_forward is True and sources(self)["reshard_after_forward"] == "environment":
            self.reshard_after_forward = None
        if isinstance(self.reshard_after_forward, bool):
            raise OptionError(
                f"reshard_after_forward={self.reshard_after_forward} is for fsdp_version=2: give a sharding strategy such as "
                "FULL_SHARD, or fsdp_version=2"
            )
        strategy = values.sharding_strategy
        if self.sharding_strategy is not None:
            self.sharding_strategy = strategy(self.sharding_strategy, "sharding_strategy")
        if self.reshard_after_forward is not None:
            self.reshard_after_forward = strategy(self.reshard_after_forward, "reshard_after_forward")
        both = (self.sharding_strategy, self.reshard_after_forward)
        if both[0] is not None and both[1] is not None and both[0] != both[1]:
            raise OptionError(
                f"sharding_strategy={both[0].name} and reshard_after_forward={both[1].name} contradict each other: "
                "leave out sharding_strategy"
            )
        # both names tell the same, whichever was used
        self.sharding_strategy = self.reshard_after_forward = both[1] or both[0] or strategy("FULL_SHARD", "")
        self.backward_prefetch = values.backward_prefetch(self.backward_prefetch)
        for name in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            setattr(self, name, bool(getattr(self, name)))

    def _settle_version_2(self) -> None:
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        elif isinstance(self.reshard_after_forward, str):
            self.reshard_after_forward = values.truth(self.reshard_after_forward, "reshard_after_forward")
        if not isinstance(self.reshard_after_forward, bool):
            raise OptionError(
                f"reshard_after_forward must be true or false with fsdp_version=2, got {self.reshard_after_forward!r}"
            )
        if self.forward_prefetch:
            raise OptionError("forward_prefetch is for fsdp_version=1: leave it out, or give fsdp_version=1")
        self.forward_prefetch = None
        told = sources(self)
        for name, why in _ONLY_V1.items():
            if getattr(self, name) is not None and told[name] != "default":
                logger.warning("%s has no effect with fsdp_version=2: %s", name, why)
            setattr(self, name, None)

    def _settle_policy(self) -> None:
        self.auto_wrap_policy = values.auto_wrap_policy(self.auto_wrap_policy)
        kind = values.policy_name(self.auto_wrap_policy)
        if self.transformer_cls_names_to_wrap and kind != values.BY_CLASS:
            logger.warning("transformer_cls_names_to_wrap has no effect without %s", values.BY_CLASS)
        if self.min_num_params and kind != values.BY_SIZE:
            logger.warning("min_num_params has no effect without %s", values.BY_SIZE)
        if kind == values.BY_SIZE:
            self.min_num_params = self.min_num_params or 0

    def _settle_checkpointing(self) -> None:
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)
        if self.activation_checkpointing_offload and self.fsdp_version != 2:
            raise OptionError(
                "activation_checkpointing_offload=True needs fsdp_version=2: give it, or leave the offload out"
            )
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise OptionError("activation_checkpointing_offload=True needs activation_checkpointing=True")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how states are saved, by name, number or torch's enum, and derive the two configs; without it, those left None only."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
            self.state_dict_config = self.optim_state_dict_config = None
        if self.state_dict_type is None:
            self.state_dict_type = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.state_dict_type = values.state_dict_type(self.state_dict_type)
        if self.fsdp_version == 2 and self.state_dict_type.name == "LOCAL_STATE_DICT":
            raise OptionError(
                "state_dict_type=LOCAL_STATE_DICT is for fsdp_version=1: use SHARDED_STATE_DICT"
            )
        derived = values.state_dict_configs(self.state_dict_type)
        self.state_dict_config = self.state_dict_config or derived[0]
        self.optim_state_dict_config = self.optim_state_dict_config or derived[1]

    def set_cpu_offload(self) -> None:
        """Make a boolean `cpu_offload` torch's policy for this version. Raises OptionError as `validate_cpu_offload` does."""
        if self.cpu_offload is None or isinstance(self.cpu_offload, bool):
            self.cpu_offload = values.offload_policy(bool(self.cpu_offload), self.fsdp_version)
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Raise OptionError unless `cpu_offload` is torch's policy for this version."""
        allowed = values.offload_types(self.fsdp_version)
        if not isinstance(self.cpu_offload, allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise OptionError(
                f"cpu_offload must be true, false or {names} with fsdp_version={self.fsdp_version}, got {self.cpu_offload!r}"
            )

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in `mixed_precision` (fp16, bf16, fp32, or the dtype; fp8 computes the rest in bf16) unless a policy is set already, or with `override`.

        `buffer_autocast` keeps the buffers of version 1 in float32. Raises OptionError for another name.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = values.precision_policy(
                mixed_precision, self.fsdp_version, buffer_autocast
            )

    def validate_mixed_precision_policy(self) -> None:
        """Make a name or a dictionary torch's policy. Raises OptionError for another type, and for keys or formats it has not."""
        self.mixed_precision_policy = values.checked_precision(self.mixed_precision_policy, self.fsdp_version)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Give the policy what it needs from `model`: the classes to wrap, or the size from which to wrap.

        Raises OptionError for a class name that no module of the model has.
        """
        kind = values.policy_name(self.auto_wrap_policy)
        if isinstance(self.auto_wrap_policy, functools.partial):
            return
        if kind == values.BY_CLASS:
            names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or []
            classes = set(classes_named(model, names, "transformer_cls_names_to_wrap"))
            self.auto_wrap_policy = functools.partial(self.auto_wrap_policy, transformer_layer_cls=classes)
        elif kind == values.BY_SIZE:
            if self.min_num_params:
                self.auto_wrap_policy = functools.partial(
                    self.auto_wrap_policy, min_num_params=self.min_num_params
                )
            else:
                self.auto_wrap_policy = None


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class called `name` of `module` or of any module in it, depth first; None where there is none."""
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)


def classes_named(model: nn.Module, names: Iterable[str], option: str) -> list[type[nn.Module]]:
    """The classes of those names in `model`. Raises OptionError naming the `option` for a name that no module of it has."""
    found = []
    for name in names:
        kind = get_module_class_from_name(model, name)
        if kind is None:
            near = closest(name, {type(part).__name__ for part in model.modules()})
            hint = f": did you mean {near}?" if near else f": set {option}"
            raise OptionError(f"the model has no module of a class {name!r}{hint}")
        found.append(kind)
    return found
