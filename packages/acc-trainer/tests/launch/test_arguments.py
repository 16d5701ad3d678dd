"""The command line ends at the script; unknown and unbuilt options are answered by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc_ops.options import options_of
from acc_trainer.launch.arguments import read_arguments
from acc_trainer.launch.errors import LaunchError
from acc_trainer.launch.options import LaunchOptions


def test_everything_after_the_script_belongs_to_the_script():
    found = read_arguments(
        ["--cpu", "--num_processes", "2", "train.py", "--num_processes", "9", "--config_file", "x", "-m"]
    )
    assert found.given == {"cpu": "true", "num_processes": "2"}
    assert found.script == "train.py"
    assert found.script_args == ["--num_processes", "9", "--config_file", "x", "-m"]


def test_dashes_and_underscores_and_equals_are_the_same():
    for words in (
        ["--num_processes", "3"],
        ["--num-processes", "3"],
        ["--num-processes=3"],
        ["--num_processes=3"],
    ):
        assert read_arguments([*words, "s.py"]).given == {"num_processes": "3"}


def test_short_options_stand_for_their_long_names():
    assert read_arguments(["-q", "-m", "-t", "3", "pkg.train"]).given == {
        "quiet": "true",
        "module": "true",
        "tee": "3",
    }


def test_a_boolean_takes_a_value_but_never_the_script():
    assert read_arguments(["--cpu", "false", "s.py"]).given == {"cpu": "false"}
    assert read_arguments(["--cpu=no", "s.py"]).given == {"cpu": "no"}
    assert read_arguments(["--no_python", "true"]).script == "true"


def test_two_dashes_end_the_options():
    assert read_arguments(["--cpu", "--", "-odd-name.py"]).script == "-odd-name.py"


def test_an_unknown_option_names_the_closest_known_one():
    with pytest.raises(LaunchError, match=r"--num_proceses; did you mean --num_processes\?"):
        read_arguments(["--num_proceses", "2", "s.py"])
    with pytest.raises(LaunchError, match="unknown option --zzzzqq; `acc launch --help` lists them"):
        read_arguments(["--zzzzqq", "s.py"])


def test_an_option_is_never_abbreviated():
    with pytest.raises(LaunchError, match="unknown option --num_proc"):
        read_arguments(["--num_proc", "2", "s.py"])


def test_an_option_without_its_value_is_an_error():
    with pytest.raises(LaunchError, match="--num_processes needs a value"):
        read_arguments(["--num_processes"])


@pytest.mark.parametrize(
    ("words", "thing"),
    [
        (["--use_deepspeed"], "DeepSpeed"),
        (["--use_megatron_lm"], "Megatron-LM"),
        (["--tpu"], "TPU"),
        (["--mpirun_hostfile", "hosts"], "MPI"),
        (["--aws_access_key_id", "x"], "SageMaker"),
    ],
)
def test_what_is_not_built_says_so_when_it_is_turned_on(words, thing):
    with pytest.raises(LaunchError, match=f"{words[0]}: {thing} is not built yet"):
        read_arguments([*words, "s.py"])


def test_settings_of_unbuilt_things_are_noted_and_the_script_is_still_found():
    found = read_arguments(
        ["--use_deepspeed=false", "--zero_stage", "3", "--mpirun_ccl", "2", "--tpu_use_sudo=false", "s.py"]
    )
    assert found.script == "s.py"
    assert "--zero_stage has no effect: DeepSpeed is not built yet" in found.notes
    assert len(found.notes) == 4


_WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=8)
_FLAGS = [chosen for chosen in options_of(LaunchOptions) if chosen.flag and not chosen.is_bool]


@given(
    values=st.dictionaries(st.sampled_from(_FLAGS).map(lambda chosen: chosen.flag), _WORDS, max_size=5),
    script=_WORDS.filter(lambda word: not word.startswith("-")),
    rest=st.lists(_WORDS, max_size=4),
)
def test_whatever_is_said_before_the_script_is_ours_and_the_rest_is_not(values, script, rest):
    words = [part for flag, value in values.items() for part in (f"--{flag}", value)]
    found = read_arguments([*words, script, *rest])
    assert (found.given, found.script, found.script_args) == (values, script, rest)
