"""Flags for argparse."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from acc_ops.enums import DynamoBackend
from acc_ops.options import NOT_GIVEN, add_flags, attach_values, option, resolve


@dataclass(frozen=True, kw_only=True)
class Launch:
    cpu: bool = option(False, env="ACCELERATE_USE_CPU", help="stay on the CPU, 100% of it")
    num_processes: int | None = option(None, help="processes in all")
    backend: DynamoBackend = option(DynamoBackend.NO, flag="--dynamo-backend", key="dynamo_backend")
    mode: str = option("no", choices=("no", "fp16"))
    gpu_ids: list[int] = option(factory=list)
    hidden: int = option(1, flag=False)
    seconds: int = option(60, parse=lambda text: int(text) * 60)


@pytest.fixture
def parser():
    made = argparse.ArgumentParser(prog="acc", exit_on_error=False)
    add_flags(made, Launch, title="launching")
    made.add_argument("script", nargs="?")
    return made


def launched(parser, *argv):
    return resolve(Launch, given=parser.parse_args(attach_values(argv, Launch)))


@pytest.mark.parametrize("flag", ["--num_processes", "--num-processes"])
def test_both_spellings_work(parser, flag):
    assert launched(parser, flag, "3").num_processes == 3


@pytest.mark.parametrize(
    ("argv", "cpu"),
    [
        (["--cpu"], True),
        (["--cpu", "false"], False),
        (["--cpu=no"], False),
        (["--cpu", "True"], True),
        ([], False),
    ],
)
def test_a_boolean_flag_takes_a_word_or_none(parser, argv, cpu):
    assert launched(parser, *argv).cpu is cpu


def test_a_script_after_a_boolean_flag_stays_the_script(parser):
    given = parser.parse_args(attach_values(["--cpu", "train.py"], Launch))
    assert (given.cpu, given.script) == (True, "train.py")


def test_words_of_the_script_are_not_touched():
    argv = ["--mode", "no", "--cpu", "train.py", "--cpu", "true", "--mode"]
    assert attach_values(argv, Launch) == [
        "--mode",
        "no",
        "--cpu=true",
        "train.py",
        "--cpu",
        "true",
        "--mode",
    ]
    assert attach_values(["--cpu", "--", "--cpu"], Launch) == ["--cpu=true", "--", "--cpu"]


def test_a_short_flag_stands_for_a_long_one_before_the_script():
    argv = ["-c", "-m", "no", "train.py", "-c"]
    assert attach_values(argv, Launch, short={"-c": "cpu", "-m": "mode"}) == [
        "--cpu=true",
        "--mode",
        "no",
        "train.py",
        "-c",
    ]


def test_what_is_left_out_is_known(parser):
    given = parser.parse_args(["--num_processes", "2"])
    assert given.cpu is NOT_GIVEN
    assert given.num_processes == 2


def test_values_have_their_types(parser):
    launch = launched(parser, "--dynamo-backend", "inductor", "--gpu_ids", "0,2", "--num_processes", "none")
    assert launch.backend is DynamoBackend.INDUCTOR
    assert launch.gpu_ids == [0, 2]
    assert launch.num_processes is None


def test_parse_is_applied_once(parser):
    assert launched(parser, "--seconds", "2").seconds == 120


def test_a_hidden_option_has_no_flag(parser):
    assert "hidden" not in vars(parser.parse_args([]))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--num_processes", "two"], "'two'"),
        (["--mode", "fp61"], "did you mean fp16"),
        (["--cpu=maybe"], "'maybe'"),
    ],
)
def test_a_bad_value_is_an_error_with_the_value(parser, argv, complaint):
    with pytest.raises(argparse.ArgumentError, match=complaint):
        parser.parse_args(argv)


def test_help_shows_choices_defaults_and_variables(parser):
    text = " ".join(parser.format_help().split())
    assert "100% of it (default: false; ACCELERATE_USE_CPU)" in text
    assert "no|fp16" in text
    assert "launching:" in text
