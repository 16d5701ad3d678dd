"""Both spellings of an option, the names of what was said, and how a command ends."""

from __future__ import annotations

import argparse

import pytest

from acc_trainer.cli.parsing import CustomArgumentParser, parser_for, run_command


@pytest.fixture
def parser() -> CustomArgumentParser:
    made = CustomArgumentParser("program")
    made.add_argument("--one_two", type=int, default=3)
    made.add_argument("-q", "--be-quiet", action="store_true")
    made.add_argument_group("more").add_argument("--in_group", dest="inside")
    made.add_argument("script")
    return made


@pytest.mark.parametrize("dash", ["-", "_"])
def test_dashes_and_underscores_are_the_same(parser: CustomArgumentParser, dash: str) -> None:
    words = [f"--one{dash}two=4", f"--be{dash}quiet", f"--in{dash}group", "a", "x.py"]
    given = parser.parse_args(words)
    assert (given.one_two, given.be_quiet, given.inside, given.script) == (4, True, "a", "x.py")
    assert given.nondefault == {"one_two", "be_quiet", "inside", "script"}


def test_what_was_not_said_has_its_default_and_is_not_in_the_list(parser: CustomArgumentParser) -> None:
    given = parser.parse_args(["x.py"])
    assert (given.one_two, given.be_quiet, given.nondefault) == (3, False, {"script"})
    again = parser.parse_args(["--one_two", "3", "x.py"])
    assert again.nondefault == {"script", "one_two"}


def test_a_command_of_a_larger_program_behaves_the_same() -> None:
    program = argparse.ArgumentParser(prog="large")
    commands = program.add_subparsers()
    parser_for(commands, "go", "Go away.", print).add_argument("--far_away", action="store_true")
    commands.add_parser("stay").add_argument("--far_away")
    assert vars(program.parse_args(["go", "--far-away"])) == {
        "far_away": True,
        "func": print,
        "nondefault": {"far_away"},
    }
    assert "Go away." in program.format_help()
    assert vars(program.parse_args(["stay", "--far_away", "1"])) == {"far_away": "1"}


def test_a_command_tells_by_its_exit_code_how_it_ended(capsys):
    parser = CustomArgumentParser(prog="acc try")
    parser.add_argument("--error")

    def command(args):
        if args.error == "disk":
            raise OSError("it is full")
        raise ValueError(args.error)

    assert run_command(parser, ["--other"], command, OSError) == 2
    assert run_command(parser, ["--help"], command, OSError) == 0
    assert run_command(parser, [], lambda _: None) == 0
    assert "acc try: it is full" not in capsys.readouterr().err
    assert run_command(parser, ["--error", "disk"], command, OSError) == 1
    assert capsys.readouterr().err == "acc try: it is full\n"
    with pytest.raises(ValueError, match="mine"):
        run_command(parser, ["--error", "mine"], command, OSError)
