"""How a model is trained by DeepSpeed: its configuration, from one that is given or from these options."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from acc_ops.optional import is_available, require
from acc_ops.options import OptionError, fill_from_env, from_env, note_source, option, sources
from acc_plugins.options.checks import require_at_least, settle
from acc_plugins.options.deepspeed_config import AUTO, HfDeepSpeedConfig, refuse
from acc_plugins.options.fsdp import classes_named

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
_ZERO = "zero_optimization"
_KEYS = {  # option -> where the configuration says the same
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO}.stage",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
_DEFAULTS = {  # of what is neither said here nor in a configuration; None: nothing is written
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_optimizer_nvme_path": None,
    "offload_param_device": "none",
    "offload_param_nvme_path": None,
    "zero3_save_16bit_model": False,
}
_OF_DEEPSPEED = {
    **_DEFAULTS,
    "gradient_accumulation_steps": 1,
    "zero_stage": 0,
}  # where a configuration has no such key


def _deepspeed(name: str, help: str, **more: Any) -> Any:
    """An option whose flag and key are `<name>`, and whose variable is `ACCELERATE_DEEPSPEED_<NAME>` unless given."""
    env = more.pop("env", f"ACCELERATE_DEEPSPEED_{name.upper()}")
    return option(None, env=env, flag=name, key=name, help=help, **more)


def _offloaded(part: str, what: str) -> Any:
    return _deepspeed(
        f"offload_{part}_device",
        f"where {what} are kept: none (the default: on the device), cpu, or nvme (stage 3)",
        parse=str.lower,
        choices=("none", "cpu", "nvme"),
    )


def _config_text(config: Any) -> Any:
    """The path or the JSON text that gives an equal configuration; None for one that the other options make."""
    if not isinstance(config, HfDeepSpeedConfig):
        return config
    return None if config.made_of_options else config.path or json.dumps(config.config)


@dataclass
class _Launcher:
    """What the launcher tells beside the options: which of them its configuration file set."""

    fields: list[str] | None = option(None, env="ACCELERATE_CONFIG_DS_FIELDS", flag=False, key=False)


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains; fields left None come from the environment, then from the configuration, then are the default named in their help.

    `deepspeed_config` is the configuration that results, as a dictionary. Needs no DeepSpeed. Raises OptionError (a ValueError) for values that
    cannot be, for a configuration without `zero_optimization`, and for an argument that contradicts it.
    """

    hf_ds_config: Any = _deepspeed(  # noqa: RUF009  only declares
        "deepspeed_config_file",
        "a configuration of DeepSpeed: path of a JSON file, JSON text, base64 of it, or a dictionary",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        parse=lambda text: None if text.strip().lower() in ("", "none") else text,
        plain=_config_text,
    )
    gradient_accumulation_steps: int | Literal["auto"] | None = _deepspeed(
        "gradient_accumulation_steps",
        "micro-batches per step; default: auto",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    gradient_clipping: float | Literal["auto"] | None = _deepspeed(
        "gradient_clipping",
        "largest norm of all gradients together; default: auto",
        env="ACCELERATE_GRADIENT_CLIPPING",
    )
    zero_stage: int | None = _deepspeed(
        "zero_stage",
        "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too; default: 2",
        choices=(0, 1, 2, 3),
    )
    is_train_batch_min: bool = option(
        True, flag=False, help="of several loaders' batch sizes the smaller one counts, else the larger"
    )
    offload_optimizer_device: str | None = _offloaded("optimizer", "optimizer states")
    offload_param_device: str | None = _offloaded("param", "parameters (stage 3)")
    offload_optimizer_nvme_path: str | None = _deepspeed(
        "offload_optimizer_nvme_path", "folder for optimizer states on nvme"
    )
    offload_param_nvme_path: str | None = _deepspeed(
        "offload_param_nvme_path", "folder for parameters on nvme"
    )
    zero3_init_flag: bool | None = _deepspeed(
        "zero3_init_flag",
        "stage 3: shard models while they are built; default: whether it is stage 3",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
    )
    zero3_save_16bit_model: bool | None = _deepspeed(
        "zero3_save_16bit_model", "stage 3: gather 16 bit weights to save them; default: false"
    )
    transformer_moe_cls_names: str | None = _deepspeed(
        "deepspeed_moe_layer_cls_names",
        "stage 3: classes of mixture-of-experts layers, with commas; each is gathered as one",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    )
    enable_msamp: bool | None = option(
        None,
        env="ACCELERATE_FP8_BACKEND",
        flag=False,
        parse=lambda text: text.strip().upper(),
        plain=lambda value: "MSAMP" if value else "NO",
        help="train in 8 bit by MS-AMP; default: whether the fp8 backend is MSAMP",
    )
    msamp_opt_level: Literal["O1", "O2"] | None = option(
        None, env="ACCELERATE_FP8_OPT_LEVEL", flag=False, help="how far MS-AMP goes; default: O1"
    )

    def __post_init__(self) -> None:
        fill_from_env(self)
        settle(self)
        for name, smallest in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0)):
            if getattr(self, name) != AUTO:
                require_at_least(self, name, smallest)
        # a variable holds the name of the fp8 backend
        self.enable_msamp = str(self.enable_msamp).upper() in ("MSAMP", "TRUE", "1")
        self.msamp_opt_level = self.msamp_opt_level or "O1"
        self._selected = False
        self.dschf: Any = None  # what transformers sees of this plugin, while it is selected
        self.hf_ds_config = self._configuration()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self._deepspeed_config_checks()
        self._merge()
        self._check_together()
        self.deepspeed_config.setdefault("steps_per_print", math.inf)
        if self.enable_msamp:
            self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})
        self.hf_ds_config.set_stage_and_offload()

    def _configuration(self) -> HfDeepSpeedConfig:
        given = self.hf_ds_config
        if isinstance(given, HfDeepSpeedConfig):
            return given
        if given is not None:
            return HfDeepSpeedConfig(given)
        made = HfDeepSpeedConfig({"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO})
        made.made_of_options = True
        for key in _KEYS.values():
            made.set_value(key, AUTO)
        return made

    def _deepspeed_config_checks(self) -> None:
        """Refuse a configuration without `zero_optimization`."""
        if not isinstance(self.deepspeed_config.get(_ZERO), dict):
            raise OptionError(
                'the DeepSpeed configuration has no "zero_optimization" section: add it, {"stage": 0} at the least'
            )

    def _merge(self) -> None:
        """Each of the options that the configuration knows: to the one from the other, or to both their default."""
        config, origins, mismatches = self.hf_ds_config, sources(self), []
        listed = from_env(_Launcher).fields or []
        for name, key in _KEYS.items():
            said, here = config.get_value(key), getattr(self, name)
            given = here not in (None, AUTO)
            if said not in (None, AUTO):
                if given and here != said:
                    by = "launcher's file" if name in listed else origins[name]
                    mismatches.append(
                        f"{name} is {said!r} in the DeepSpeed configuration, {here!r} by the {by}"
                    )
                setattr(self, name, said)
                note_source(self, name, "file")
                continue
            if here is None:
                here = (_DEFAULTS if said == AUTO else _OF_DEEPSPEED)[name]
                setattr(self, name, here)
            if said == AUTO or (given and here != _OF_DEEPSPEED[name]):
                config.set_value(key, here)
        if config.get_value(_KEYS["gradient_accumulation_steps"]) is None:
            config.set_value(_KEYS["gradient_accumulation_steps"], self.gradient_accumulation_steps)
        refuse(mismatches)
        settle(self)  # what the configuration said is checked like an argument

    def _check_together(self) -> None:
        for part in ("optimizer", "param"):
            device, path = getattr(self, f"offload_{part}_device"), getattr(self, f"offload_{part}_nvme_path")
            if device == "nvme" and path is None:
                raise OptionError(
                    f"offload_{part}_device=nvme needs a folder there: give offload_{part}_nvme_path"
                )
            if device == "nvme" and self.zero_stage != 3:
                raise OptionError(
                    f"offload_{part}_device=nvme needs zero_stage=3, got {self.zero_stage}: use cpu"
                )
        if self.offload_param_device != "none" and self.zero_stage != 3:
            logger.warning(
                "offload_param_device has no effect with zero_stage=%s: it needs 3", self.zero_stage
            )
        if self.zero3_init_flag and self.zero_stage != 3:
            logger.warning("zero3_init_flag has no effect with zero_stage=%s and is off", self.zero_stage)
            self.zero3_init_flag = False
        self.zero3_init_flag = self.zero_stage == 3 if self.zero3_init_flag is None else self.zero3_init_flag
        if self.enable_msamp and self.zero_stage == 3:
            raise OptionError("MS-AMP does not work with zero_stage=3: use 2, or leave enable_msamp out")

    # the "auto" values -------------------------------------------------------------------------------------------------------

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in one "auto" value from `kwargs`, by its dotted key.

        A value that the configuration says and that differs is added to `mismatches`, or raises OptionError without that list; `must_match=False`
        lets it be.
        """
        found: list[str] = []
        if self.hf_ds_config.fill(ds_key_long, kwargs, found, must_match=must_match):
            for name, key in _KEYS.items():
                if key == ds_key_long:
                    setattr(self, name, kwargs[ds_key_long])
        if mismatches is None:
            refuse(found)
        else:
            mismatches.extend(found)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every "auto" value from `kwargs`, by dotted keys. Raises OptionError for one without a value and for values that differ, with `must_match`."""
        found: list[str] = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{key}", found, must_match, **kwargs)
        if mismatches is None:
            self.hf_ds_config.set_stage_and_offload()
            refuse(found)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration, `default` where it is absent."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value of a dotted key is to be filled in."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def set_mixed_precision(self, mixed_precision: str | None) -> None:
        """Write the precision of the run into the configuration; fp8 computes the rest in bf16, None is "no".

        A configuration that turns fp16 or bf16 on keeps it with "no". Raises OptionError where it contradicts another precision.
        """
        wanted = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16", "no": None, None: None}
        if mixed_precision not in wanted:
            raise OptionError(f"mixed precision must be no, fp16, bf16 or fp8, got {mixed_precision!r}")
        chosen = wanted[mixed_precision]
        for kind in ("fp16", "bf16"):
            said = self.get_value(f"{kind}.enabled", AUTO)
            if chosen is not None and said != AUTO and bool(said) != (kind == chosen):
                raise OptionError(
                    f"mixed_precision={mixed_precision!r} contradicts {kind}.enabled={said!r} of the DeepSpeed configuration: change one, "
                    'or write "auto" there'
                )
        for kind in ("fp16", "bf16"):
            section = self.deepspeed_config.setdefault(
                kind, {"auto_cast": True} if kind == chosen == "fp16" else {}
            )
            if section.get("enabled", AUTO) == AUTO:
                section["enabled"] = kind == chosen

    # what an engine asks -----------------------------------------------------------------------------------------------------

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let ZeRO 3 gather each module of `transformer_moe_cls_names` as one. Raises OptionError for a class the model has not, ImportError without DeepSpeed."""
        if self.transformer_moe_cls_names is None:
            return
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",") if name.strip()]
        classes = classes_named(model, names, "transformer_moe_cls_names")
        utils = require("deepspeed.utils", "transformer_moe_cls_names", extra="acc-plugins[deepspeed]")
        utils.set_z3_leaf_modules(model, classes)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Inside the block models are sharded while they are built, or are not, whatever the plugin says."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        if before != enable:
            self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            if before != enable:
                self.set_deepspeed_weakref()

    # which of several plugins is in use --------------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Whether the run uses this plugin."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            "selected is set by AcceleratorState().select_deepspeed_plugin(name), not directly"
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Use this plugin: what `AcceleratorState().select_deepspeed_plugin(name)` calls. Raises ValueError for any other caller."""
        if not _from_accelerator_state:
            raise ValueError(
                "a DeepSpeed plugin is selected by AcceleratorState().select_deepspeed_plugin(name), not directly"
            )
        self._set_selected(True)
        self.set_deepspeed_weakref()

    def _set_selected(self, value: bool) -> None:
        self._selected = value

    def _unselect(self) -> None:
        self._selected = False
        self.dschf = None

    def set_deepspeed_weakref(self) -> None:
        """Show transformers, where it and DeepSpeed are installed, a configuration with which it shards models that it builds; none without `zero3_init_flag`.

        transformers keeps a weak reference, so that what it sees ends with this object.
        """
        self.dschf = None
        if not self.zero3_init_flag or not (is_available("transformers") and is_available("deepspeed")):
            return
        shown = copy.deepcopy(self.deepspeed_config)
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if shown.get(key, AUTO) == AUTO:
                shown[key] = 1  # building a model asks for a number and does not use it
        if shown.get("train_batch_size") == AUTO:
            del shown["train_batch_size"]
        self.dschf = require("transformers.integrations", "zero3_init_flag").HfDeepSpeedConfig(shown)
