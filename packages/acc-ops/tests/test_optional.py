"""Libraries that may be missing."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.version import Version

from acc_ops import optional
from acc_ops.optional import (
    are_libraries_initialized,
    compare_versions,
    forget_answers,
    installed_version,
    is_available,
    is_torch_version,
    require,
    torchao_required,
)

ABSENT = "a_library_nobody_has"


@pytest.fixture(autouse=True)
def _fresh_answers():
    forget_answers()
    yield
    forget_answers()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Make a library importable and give it metadata: `install("aim", "3.9")`. The real one is back in its place afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)

    def add(module, version, distribution=None, code=""):
        folder = tmp_path.joinpath(*module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(code)
        info = tmp_path / f"{distribution or module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution or module}\nVersion: {version}\n"
        )
        forget_answers()

    yield add
    for name in _loaded():
        del sys.modules[name]


def _loaded():
    return [name for name in sys.modules if name.partition(".")[0] in ("aim", "brokenlib", "bitsandbytes")]


def test_an_installed_library_is_available():
    assert is_available("torch")
    assert is_available("torch", "1.0")
    assert is_available("packaging.version")
    assert not is_available("torch", "99.0")


def test_an_absent_library_is_not():
    assert not is_available(ABSENT)
    assert not is_available(f"{ABSENT}.inner")
    assert installed_version(ABSENT) is None


def test_a_folder_of_the_same_name_is_no_library(monkeypatch, tmp_path):
    (tmp_path / ABSENT).mkdir()
    (tmp_path / ABSENT / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert importlib.util.find_spec(ABSENT) is not None
    assert not is_available(ABSENT)


def test_a_module_that_was_blocked_is_not_available(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging", None)
    assert not is_available("packaging")


def test_an_absent_library_is_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr(optional, "_can_be_imported", lambda name: looked.append(name) or False)
    assert not is_available(ABSENT)
    assert not is_available(ABSENT)
    assert looked == [ABSENT]


def test_require_gives_the_module():
    assert require("packaging.version", "comparing").Version is Version


def test_require_says_what_for_and_how_to_install():
    with pytest.raises(ImportError, match=f'counting needs {ABSENT}.*pip install "{ABSENT}"'):
        require(ABSENT, "counting")
    with pytest.raises(ImportError, match=r'pip install "acc-bigmodel\[hub\]"'):
        require(ABSENT, "downloading", extra="acc-bigmodel[hub]")


def test_require_refuses_an_old_version_by_both_numbers():
    version = metadata.version("packaging")
    with pytest.raises(ImportError, match=f"needs packaging>=999, but {version} is installed"):
        require("packaging", "parsing", min_version="999")


def test_require_tells_broken_from_absent(install):
    install("brokenlib", "1.0", code="import a_library_nobody_has")
    with pytest.raises(ImportError, match="is installed but does not import"):
        require("brokenlib", "breaking")


@pytest.mark.parametrize(
    ("operation", "version", "expected"),
    [
        (">", "2.0", True),
        (">=", "2.5.1", True),
        ("==", "2.5.1", True),
        ("!=", "2.5.1", False),
        ("<=", "2.5", False),
        ("<", "2.5.1rc1", False),
    ],
)
def test_versions_compare_by_pep_440(operation, version, expected):
    assert compare_versions(Version("2.5.1"), operation, version) is expected


def test_a_local_version_is_newer_than_its_release():
    assert compare_versions(Version("2.5.1+cpu"), ">", "2.5.1")
    assert compare_versions(Version("2.5.1.dev3"), "<", "2.5.1")


def test_comparing_refuses_other_operations_and_absent_libraries():
    with pytest.raises(ValueError, match="'~='"):
        compare_versions("torch", "~=", "2.0")
    with pytest.raises(metadata.PackageNotFoundError):
        compare_versions(ABSENT, ">=", "1.0")


def test_the_version_of_torch_is_compared_without_importing_it():
    assert is_torch_version(">=", "2.6")
    assert is_torch_version("==", metadata.version("torch"))


def test_imported_libraries_are_listed_in_order():
    assert are_libraries_initialized("pytest", ABSENT, "sys") == ["pytest", "sys"]


def test_torchao_required_asks_when_called_and_keeps_the_signature():
    @torchao_required
    def quantize(model: int, bits: int = 8) -> int:
        """Quantize."""
        return model + bits

    assert list(inspect.signature(quantize).parameters) == ["model", "bits"]
    assert quantize.__doc__ == "Quantize."
    if optional.is_torchao_available():
        assert quantize(1) == 9
    else:
        with pytest.raises(ImportError, match=r"acc-plugins\[torchao\]"):
            quantize(1)


def test_every_check_answers_with_a_boolean():
    checks = [
        name
        for name in dir(optional)
        if name.startswith("is_") and name.endswith("_available") and name != "is_available"
    ]
    assert len(checks) > 40
    for name in checks:
        assert getattr(optional, name)() in (True, False), name
        assert getattr(optional, name).__doc__, name


def test_aim_four_is_another_program(install):
    if installed_version("aim") is not None:
        pytest.skip("the real aim is installed")
    install("aim", "4.0.1")
    assert is_available("aim")
    assert not optional.is_aim_available()


@pytest.mark.parametrize(
    ("version", "eight", "four"), [("0.37.1", False, False), ("0.37.2", True, False), ("0.39.0", True, True)]
)
def test_bitsandbytes_has_its_own_limits(install, version, eight, four):
    if installed_version("bitsandbytes") is not None:
        pytest.skip("the real bitsandbytes is installed")
    install("bitsandbytes", version, code="features = {'multi_backend'}")
    assert optional.is_8bit_bnb_available() is eight
    assert optional.is_4bit_bnb_available() is four
    assert optional.is_bnb_available() is True
    assert optional.is_bnb_available("99") is False
    assert optional.is_bitsandbytes_multi_backend_available() is True


def test_megatron_needs_its_variable_and_the_library(install, monkeypatch):
    if installed_version("megatron.core") is not None:
        pytest.skip("the real megatron is installed")
    install("megatron.core", "0.9.0", distribution="megatron_core")
    assert optional.is_megatron_lm_available() is False
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert optional.is_megatron_lm_available() is True


def test_numpy_has_a_minimum():
    assert optional.is_numpy_available() == is_available("numpy", "1.25.0")
    assert not optional.is_numpy_available("99")


def test_a_dotted_name_is_found_without_importing_its_parent(install):
    install("brokenlib", "1.0", code="raise RuntimeError('imported')")
    install("brokenlib.inner", "1.0")
    assert is_available("brokenlib.inner")
    assert not is_available("brokenlib.nothing")
    assert not is_available("brokenlib.inner.nothing")
    assert not is_available("a_library_nobody_has.inner")


OPTIONAL = [
    "aim",
    "amdsmi",
    "bitsandbytes",
    "boto3",
    "clearml",
    "comet_ml",
    "datasets",
    "deepspeed",
    "dvclive",
    "import_timer",
    "lomo_optim",
    "matplotlib",
    "megatron.core",
    "mlflow",
    "msamp",
    "numpy",
    "pandas",
    "peft",
    "pynvml",
    "pytest",
    "rich",
    "sagemaker",
    "schedulefree",
    "swanlab",
    "tensorboard",
    "timm",
    "torchao",
    "torchdata",
    "torchvision",
    "tqdm",
    "trackio",
    "transformer_engine",
    "transformers",
    "triton",
    "wandb",
]
IMPORT_IT = {
    "is_bitsandbytes_multi_backend_available",
    "is_transformer_engine_mxfp8_available",
    "is_habana_gaudi1",
}
ASKING = """
import json, sys

class Finder:  # first in line: sees every look-up
    seen = []
    def find_spec(self, name, path=None, target=None):
        self.seen.append(name)

import {module} as module
checks = [name for name in vars(module) if name.startswith("is_") and name.endswith("_available")]
checks = [name for name in checks if name not in {leave}]
first = {{name: getattr(module, name)() for name in checks}}
sys.meta_path.insert(0, Finder())
assert first == {{name: getattr(module, name)() for name in checks}}
torch = sys.modules.get("torch")
print(json.dumps({{
    "answers": first,
    "looked for again": Finder.seen,
    "loaded": [name for name in {libraries} if name in sys.modules],
    "torch": torch is not None,
    "awake": torch is not None and (torch.cuda.is_initialized() or torch.xpu.is_initialized()),
}}))
"""


@pytest.mark.parametrize(
    ("module", "libraries"),
    [("acc_ops.optional", OPTIONAL), ("acc_ops.device_checks", ["torch_xla", "transformer_engine"])],
)
def test_questions_import_no_library_wake_no_driver_and_look_once(tmp_path, module, libraries):
    for name in libraries:  # each is installed, and fails when it is imported; `megatron`, a parent, too
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')")
        (folder.parent / "__init__.py").write_text(f"raise RuntimeError('the parent of {name} was imported')")
        info = tmp_path / f"{name}-3.99.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('.', '-')}\nVersion: 3.99\n"
        )
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            ASKING.format(module=module, leave={"is_available", *IMPORT_IT}, libraries=libraries),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
            "ACCELERATE_USE_MEGATRON_LM": "true",
            "ACCELERATE_ENABLE_RICH": "true",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    said = json.loads(made.stdout)
    assert said["looked for again"] == said["loaded"] == []
    assert not said["awake"]
    if module == "acc_ops.optional":
        assert not said["torch"]
        assert [name for name, answer in said["answers"].items() if answer is not True] == []
    else:
        assert said["answers"]["is_torch_xla_available"] is True
