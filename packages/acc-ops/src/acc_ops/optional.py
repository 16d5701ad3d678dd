"""Libraries that may be missing: whether one is there, which version it has, and `require` where one is used.

A library counts as available when it can be imported AND its distribution is installed, so that a folder of the same name in the
working directory is not taken for it. Answers are kept: looking for an absent module costs 26 us each time. Nothing here imports the
library it is asked about, nor torch; `forget_answers()` after an installation. Checks that need a device are in
`device_checks.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from packaging.version import Version

P = ParamSpec("P")
R = TypeVar("R")

# module -> the distributions that provide it, where the name differs or several do
_DISTRIBUTIONS = {
    "comet_ml": ("comet-ml",),
    "habana_frameworks.torch": ("habana-torch-plugin",),
    "huggingface_hub": ("huggingface-hub",),
    "import_timer": ("import-timer",),
    "lomo_optim": ("lomo-optim",),
    "megatron.core": ("megatron-core",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "msamp": ("ms-amp", "msamp"),
    "pynvml": ("pynvml", "nvidia-ml-py"),
    "tensorboardX": ("tensorboardX",),
    "transformer_engine": ("transformer-engine",),
    "triton": ("triton", "triton-xpu", "pytorch-triton", "pytorch-triton-xpu", "pytorch-triton-rocm"),
    "yaml": ("PyYAML",),
}

_OPERATIONS: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@functools.cache
def is_available(name: str, min_version: str | None = None) -> bool:
    """Whether the module `name` can be imported and is installed, in `min_version` or later if given."""
    if not _can_be_imported(name):
        return False
    version = installed_version(name)
    if version is None:
        return False
    return min_version is None or compare_versions(_parsed(version), ">=", min_version)


def forget_answers() -> None:
    """Look for every library anew: after one was installed in this process."""
    importlib.invalidate_caches()
    is_available.cache_clear()
    _metadata_version.cache_clear()


def require(
    name: str, purpose: str, *, extra: str | None = None, min_version: str | None = None
) -> ModuleType:
    """The module `name`, imported; ImportError saying what it is for and how to install it.

    `extra` is the requirement that brings it, such as `acc-bigmodel[hub]`.

    >>> hub = require("huggingface_hub", "downloading a checkpoint", extra="acc-bigmodel[hub]")
    """
    distribution = _DISTRIBUTIONS.get(name, (name.partition(".")[0],))[0]
    wanted = f"{distribution}>={min_version}" if min_version else distribution
    remedy = f'pip install "{extra or wanted}"'
    if not _can_be_imported(name):
        raise ImportError(f"{purpose} needs {wanted}, which is not installed: {remedy}", name=name)
    if min_version is not None:
        version = installed_version(name)
        if version is not None and not compare_versions(_parsed(version), ">=", min_version):
            raise ImportError(f"{purpose} needs {wanted}, but {version} is installed: {remedy}", name=name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {wanted}, which is installed but does not import ({error}): {remedy}", name=name
        ) from error


def installed_version(name: str) -> str | None:
    """The installed version of a module's or distribution's name, None when there is no such distribution."""
    for distribution in _DISTRIBUTIONS.get(name, (name, name.partition(".")[0])):
        version = _metadata_version(distribution)
        if version is not None:
            return version
    return None


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether an installed distribution (by name), or a Version, stands in `operation` (> >= == != <= <) to a version, by PEP 440.

    ValueError for another operation or a malformed version; ImportError (PackageNotFoundError) for a distribution that is not installed.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation must be one of {' '.join(_OPERATIONS)}, got {operation!r}")
    if isinstance(library_or_version, str):
        version = installed_version(library_or_version)
        if version is None:
            from importlib.metadata import PackageNotFoundError  # noqa: PLC0415  a lazy start is the point

            raise PackageNotFoundError(library_or_version)
        library_or_version = _parsed(version)
    return _OPERATIONS[operation](library_or_version, _parsed(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """`compare_versions` with the installed torch, without importing it."""
    return compare_versions("torch", operation, version)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the top-level modules that are imported already, in the order given."""
    return [name for name in library_names if name in sys.modules]


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calling `func` without torchao raises ImportError with the remedy."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_torchao_available():
            require("torchao", f"{func.__qualname__}", extra="acc-plugins[torchao]", min_version="0.6.1")
        return func(*args, **kwargs)

    return checked


def _checks(name: str, min_version: str | None = None) -> Callable[[], bool]:
    """A check without parameters for one library."""

    def check() -> bool:
        return is_available(name, min_version)

    check.__doc__ = f"Whether {name} is installed" + (f", {min_version} or later." if min_version else ".")
    return check


is_8bit_bnb_available = _checks("bitsandbytes", "0.37.2")
is_4bit_bnb_available = _checks("bitsandbytes", "0.39.0")
is_amdsmi_available = _checks("amdsmi")
is_boto3_available = _checks("boto3")
is_clearml_available = _checks("clearml")
is_comet_ml_available = _checks("comet_ml")
is_datasets_available = _checks("datasets")
is_deepspeed_available = _checks("deepspeed")
is_dvclive_available = _checks("dvclive")
is_import_timer_available = _checks("import_timer")
is_lomo_available = _checks("lomo_optim")
is_matplotlib_available = _checks("matplotlib")
is_mlflow_available = _checks("mlflow")
is_msamp_available = _checks("msamp")
is_pandas_available = _checks("pandas")
is_peft_available = _checks("peft")
is_pynvml_available = _checks("pynvml")
is_pytest_available = _checks("pytest")
is_sagemaker_available = _checks("sagemaker")
is_schedulefree_available = _checks("schedulefree")
is_swanlab_available = _checks("swanlab")
is_timm_available = _checks("timm")
is_torchao_available = _checks("torchao", "0.6.1")
is_torchdata_available = _checks("torchdata")
is_torchdata_stateful_dataloader_available = _checks("torchdata", "0.8.0")
is_torchvision_available = _checks("torchvision")
is_tqdm_available = _checks("tqdm")
is_trackio_available = _checks("trackio")
is_transformer_engine_available = _checks("transformer_engine")
is_transformers_available = _checks("transformers")
is_triton_available = _checks("triton")
is_wandb_available = _checks("wandb")


def is_aim_available() -> bool:
    """Whether aim is installed, older than 4 (4 is another program)."""
    return is_available("aim") and compare_versions("aim", "<", "4.0.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in `min_version` or later if given."""
    return is_available("bitsandbytes", min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether this build of bitsandbytes serves more than CUDA. Imports it."""
    if not is_available("bitsandbytes"):
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_fp8_available() -> bool:
    """Whether one of the 8-bit floating point libraries is installed: MS-AMP, TransformerEngine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_megatron_lm_available() -> bool:
    """Whether ACCELERATE_USE_MEGATRON_LM asks for Megatron-LM and megatron-core 0.8.0 or later is installed."""
    return _is_asked_for("ACCELERATE_USE_MEGATRON_LM") and is_available("megatron.core", "0.8.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, in `min_version` or later."""
    return is_available("numpy", min_version)


def is_pippy_available() -> bool:
    """Whether torch has pipeline parallelism of its own (2.4 or later)."""
    return is_torch_version(">=", "2.4.0")


def is_rich_available() -> bool:
    """Whether rich is installed and ACCELERATE_ENABLE_RICH asks for it."""
    return is_available("rich") and _is_asked_for("ACCELERATE_ENABLE_RICH")


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return is_available("tensorboard") or is_available("tensorboardX")


def is_weights_only_available() -> bool:
    """Whether torch.load can be limited to weights and allowed further classes (2.4 or later)."""
    return is_torch_version(">=", "2.4.0")


def _is_asked_for(variable: str) -> bool:
    from acc_ops.environment import parse_flag_from_env  # noqa: PLC0415  a lazy start is the point

    return parse_flag_from_env(variable)


def _can_be_imported(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return _spec(name) is not None
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return False


def _spec(name: str) -> ModuleSpec | None:
    """Like importlib's `find_spec`, which would import the parent of a dotted name."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        return importlib.util.find_spec(name)
    above = _spec(parent)
    folders = None if above is None else above.submodule_search_locations
    return None if folders is None else PathFinder.find_spec(name, list(folders))


@functools.cache
def _metadata_version(distribution: str) -> str | None:
    from importlib import metadata  # noqa: PLC0415  a lazy start is the point

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=256)
def _parsed(version: str) -> Version:
    from packaging.version import Version  # noqa: PLC0415  a lazy start is the point

    return Version(version)
