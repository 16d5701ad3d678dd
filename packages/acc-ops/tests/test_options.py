"""Options declared once: layers, environment, files, docs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acc_ops.enums import DynamoBackend, PrecisionType
from acc_ops.options import (
    NOT_GIVEN,
    OptionError,
    as_table,
    check_options,
    closest,
    environment_is,
    fill_from_env,
    from_env,
    from_mapping,
    note_source,
    option,
    options_of,
    resolve,
    sources,
    to_env,
    to_mapping,
)


@dataclass(frozen=True, kw_only=True)
class Training:
    cpu: bool = option(False, env="ACCELERATE_USE_CPU", help="stay on the CPU")
    steps: int = option(1, env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", key="gradient_accumulation_steps")
    rate: float = option(0.1, env="RATE")
    precision: PrecisionType | None = option(None, env="ACCELERATE_MIXED_PRECISION")
    backend: DynamoBackend = option(DynamoBackend.NO, env="ACCELERATE_DYNAMO_BACKEND")
    classes: list[str] = option(factory=list, env="FSDP_TRANSFORMER_CLS_TO_WRAP")
    folder: Path | None = option(Path("runs"), env="FOLDER")
    extra: dict[str, Any] = option(factory=dict, env="EXTRA")
    mode: str = option("default", env="MODE", choices=("default", "max", "no"))
    seconds: int = option(60, env="SECONDS", parse=lambda text: int(text.removesuffix("s")))
    secret: str = option("", flag=False, key=False)
    label: str | None = option(None, env="LABEL")
    note: object = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Needy:
    port: int = option(env="MASTER_PORT")


@dataclass
class Plugin:
    stage: int | None = option(None, env="ACCELERATE_DEEPSPEED_ZERO_STAGE")
    name: str = option("x", choices=("x", "y"))

    def __post_init__(self) -> None:
        fill_from_env(self)
        check_options(self)


class Policy:
    """What a class makes of plain data; it has no text of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Made:
    policy: Any = option(None, env="POLICY", parse=str, plain=lambda value: value.name)
    rounds: int | None = option(None, env="ROUNDS")

    def __post_init__(self) -> None:
        fill_from_env(self)
        if isinstance(self.policy, str):
            self.policy = Policy(self.policy)
        self.rounds = 1 if self.rounds is None else self.rounds


trainings = st.builds(
    Training,
    cpu=st.booleans(),
    steps=st.integers(),
    rate=st.floats(allow_nan=False),
    precision=st.none() | st.sampled_from(PrecisionType),
    backend=st.sampled_from(DynamoBackend),
    classes=st.lists(st.text(st.characters(blacklist_characters="\0"))),
    folder=st.none() | st.sampled_from([Path("a b"), Path("/x/y"), Path("runs")]),
    extra=st.dictionaries(st.text(), st.integers() | st.booleans() | st.none() | st.text()),
    mode=st.sampled_from(["default", "max", "no"]),
    label=st.none()
    | st.text(st.characters(blacklist_characters="\0")).filter(lambda text: text.strip().lower() != "none"),
)


@settings(max_examples=50)
@given(trainings)
def test_the_environment_gives_an_equal_instance_back(training):
    assert from_env(Training, to_env(training)) == training


@settings(max_examples=50)
@given(trainings)
def test_a_file_gives_an_equal_instance_back(training):
    assert from_mapping(Training, to_mapping(training)) == training


def test_to_env_leaves_the_process_alone_and_speaks_the_specification():
    variables = to_env(Training(cpu=True, classes=["Block", "Head"]))
    assert variables["ACCELERATE_USE_CPU"] == "true"
    assert variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block,Head"
    assert variables["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert "ACCELERATE_MIXED_PRECISION" not in variables


def test_a_value_that_its_variable_could_not_give_back_is_refused():
    with pytest.raises(OptionError, match=r"LABEL.*'none'"):
        to_env(Training(label="none"))
    with pytest.raises(OptionError, match="LABEL"):
        to_env(Training(label="a\0b"))


def test_arguments_beat_the_file_beats_the_environment_beats_the_default():
    training = resolve(
        Training,
        given={"cpu": True, "steps": NOT_GIVEN},
        file={"gradient_accumulation_steps": 4, "rate": 0.5},
        environ={"RATE": "0.7", "ACCELERATE_USE_CPU": "false", "MODE": "max"},
    )
    assert (training.cpu, training.steps, training.rate, training.mode) == (True, 4, 0.5, "max")
    origin = sources(training)
    assert origin["cpu"] == "argument"
    assert origin["steps"] == "file"
    assert origin["rate"] == "file"
    assert origin["mode"] == "environment"
    assert origin["folder"] == "default"


def test_a_layer_that_is_not_handed_in_takes_no_part(monkeypatch):
    monkeypatch.setenv("RATE", "0.7")
    assert resolve(Training).rate == 0.1
    assert resolve(Training, environ=True).rate == 0.7
    assert from_env(Training).rate == 0.7
    assert from_env(Training, {}).rate == 0.1


def test_explicit_values_beat_the_environment():
    assert from_env(Training, {"RATE": "0.7"}, rate=0.2).rate == 0.2


def test_an_empty_variable_counts_as_unset_except_for_text_and_lists():
    training = from_env(Training, {"RATE": "", "ACCELERATE_USE_CPU": "", "LABEL": "", "SECONDS": ""})
    assert (training.rate, training.cpu, training.label, training.seconds) == (0.1, False, "", 60)


def test_parse_reads_text_from_every_layer_and_leaves_values_alone():
    assert from_env(Training, {"SECONDS": "5s"}).seconds == 5
    assert from_mapping(Training, {"seconds": 7}).seconds == 7


@pytest.mark.parametrize(
    ("mapping", "complaint"),
    [
        ({"gradient_accumulation_step": 2}, "did you mean 'gradient_accumulation_steps'"),
        ({"zzz": 2}, "unknown key 'zzz'"),
        ({"secret": "x"}, "unknown key 'secret'"),
        ({"rate": "fast"}, "key rate: expected a number, got 'fast'"),
        ({"mode": "mxa"}, "did you mean max"),
        ({"cpu": None}, "expected bool, got None"),
    ],
)
def test_a_bad_file_is_refused_by_key(mapping, complaint):
    with pytest.raises(OptionError, match=complaint):
        from_mapping(Training, mapping)


def test_a_bad_variable_is_refused_by_its_name():
    with pytest.raises(OptionError, match=r"environment variable ACCELERATE_USE_CPU.*'maybe'"):
        from_env(Training, {"ACCELERATE_USE_CPU": "maybe"})


def test_an_unknown_argument_names_the_closest_one():
    with pytest.raises(OptionError, match="has no option 'step': did you mean 'steps'"):
        resolve(Training, given={"step": 1})


def test_fields_that_are_no_options_pass_through_but_have_no_spelling():
    assert resolve(Training, given={"note": 5}).note == 5
    assert "note" not in {chosen.name for chosen in options_of(Training)}


def test_a_bare_no_of_yaml_is_the_choice_of_that_name():
    assert from_mapping(Training, {"mode": False, "precision": False}).mode == "no"
    assert from_mapping(Training, {"precision": False}).precision is PrecisionType.NO


def test_a_required_option_that_nobody_gives_says_how_to_give_it():
    with pytest.raises(OptionError, match="port must be given: --port or MASTER_PORT"):
        resolve(Needy)
    assert resolve(Needy, environ={"MASTER_PORT": "1"}).port == 1


def test_a_plugin_fills_what_is_none_from_the_environment():
    with environment_is({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}):
        plugin = Plugin()
        assert plugin.stage == 3
        assert sources(plugin)["stage"] == "environment"
        assert Plugin(stage=1).stage == 1
    assert Plugin().stage is None


def test_what_a_plugin_fills_at_construction_obeys_the_layers(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert resolve(Plugin).stage is None
    plugin = resolve(Plugin, environ=True, given={"name": "y"})
    assert plugin.stage == 3
    assert sources(plugin) == {"stage": "environment", "name": "argument"}


def test_a_default_that_the_class_puts_in_itself_is_no_argument():
    assert sources(Made()) == {"policy": "default", "rounds": "default"}
    assert sources(Made(rounds=1)) == {"policy": "default", "rounds": "argument"}
    with environment_is({"ROUNDS": "1"}):
        assert sources(Made(policy="own")) == {"policy": "argument", "rounds": "environment"}


def test_a_class_can_tell_that_a_value_comes_from_a_file_of_its_own():
    @dataclass
    class WithFile(Made):
        def __post_init__(self) -> None:
            super().__post_init__()
            note_source(self, "rounds", "file")

    assert sources(WithFile(policy="own")) == {"policy": "argument", "rounds": "file"}
    assert sources(from_env(WithFile, {"ROUNDS": "3"})) == {"policy": "default", "rounds": "file"}


def test_an_object_that_the_class_made_goes_out_as_plain_data_and_comes_back():
    made = Made(policy="own", rounds=3)
    assert made.policy == Policy("own")
    assert to_env(made) == {"POLICY": "own", "ROUNDS": "3"}
    assert to_mapping(made) == {"policy": "own", "rounds": 3}
    assert from_env(Made, to_env(made)) == from_mapping(Made, to_mapping(made)) == made
    assert "POLICY" not in to_env(Made())
    assert to_mapping(Made()) == {"policy": None, "rounds": 1}


def test_an_object_whose_plain_form_would_not_come_back_is_refused():
    @dataclass
    class Lossy:
        policy: Any = option(None, env="POLICY", parse=str, plain=lambda value: value)

    with pytest.raises(OptionError, match="POLICY"):
        to_env(Lossy(policy=Policy("own")))


def test_a_bound_environment_hides_the_process_and_ends_with_the_block(monkeypatch):
    monkeypatch.setenv("RATE", "0.7")
    with pytest.raises(KeyError), environment_is({"RATE": "0.3"}):
        assert from_env(Training).rate == 0.3
        raise KeyError
    assert from_env(Training).rate == 0.7


def test_a_choice_is_checked_at_construction_where_the_class_asks():
    with pytest.raises(OptionError, match=r"Plugin.name: expected one of x, y, got 'z'"):
        Plugin(name="z")


def test_the_source_of_a_constructed_value_is_its_difference_from_the_default():
    origin = sources(Training(steps=3))
    assert origin["steps"] == "argument"
    assert origin["cpu"] == "default"


def test_a_replaced_instance_is_still_an_options_instance():
    training = dataclasses.replace(resolve(Training, given={"steps": 3}), rate=2.0)
    assert from_env(Training, to_env(training)) == training


def test_option_refuses_contradictions():
    with pytest.raises(OptionError, match="not both"):
        option(1, factory=int)
    with pytest.raises(OptionError, match="factory"):
        option([])


def test_a_type_that_cannot_be_found_is_named():
    @dataclass
    class Local:
        value: Nowhere = option(None)  # noqa: F821  that is the point

    with pytest.raises(OptionError, match=r"'Nowhere' of Local\.value"):
        options_of(Local)


def test_the_table_lists_every_option():
    table = as_table(Training)
    assert "| `cpu` | `--cpu` | `cpu` | `ACCELERATE_USE_CPU` | bool | `false` | stay on the CPU |" in table
    assert table.count("\n") == len(options_of(Training)) + 2
    assert "required" in as_table(Needy)


def test_the_table_has_the_columns_asked_for_in_that_order():
    lines = as_table(Training, columns=("meaning", "option")).splitlines()
    assert lines[:2] == ["| meaning | option |", "| --- | --- |"]
    assert "| stay on the CPU | `cpu` |" in lines
    with pytest.raises(OptionError, match="unknown column 'colour'"):
        as_table(Training, columns=("colour",))


def test_closest_ignores_dashes_and_case():
    assert closest("--Num-Process", ["num_processes", "cpu"]) == "num_processes"
    assert closest("qqq", ["num_processes"]) is None


def test_importing_options_loads_neither_torch_nor_argparse():
    code = (
        "import sys, acc_ops.options, acc_ops.enums, acc_ops.optional, acc_ops.handlers;"
        "print([m for m in ('torch', 'argparse', 'json', 'difflib', 'importlib.metadata', 'packaging') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "[]"
