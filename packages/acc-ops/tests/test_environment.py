"""The process's environment."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from acc_ops.environment import (
    CPUInformation,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


@pytest.mark.parametrize(
    ("text", "expected"), [("Yes", 1), ("t", 1), ("ON", 1), ("n", 0), ("False", 0), ("0", 0)]
)
def test_words_become_numbers_or_booleans(text, expected):
    assert str_to_bool(text) == expected
    assert type(str_to_bool(text)) is int
    assert str_to_bool(text, to_bool=True) is bool(expected)


def test_a_boolean_passes_through():
    assert str_to_bool(True, to_bool=True) is True


def test_an_odd_word_is_refused():
    for odd in (None, 2, 1.5):
        with pytest.raises(ValueError, match=f"got '{odd}'"):
            str_to_bool(odd)
    assert str_to_bool(1) == 1
    with pytest.raises(ValueError, match="'perhaps'"):
        str_to_bool("perhaps")


def test_a_flag_is_read_by_name(monkeypatch):
    assert parse_flag_from_env("ACCELERATE_TEST_FLAG") is False
    assert parse_flag_from_env("ACCELERATE_TEST_FLAG", True) is True
    monkeypatch.setenv("ACCELERATE_TEST_FLAG", "off")
    assert parse_flag_from_env("ACCELERATE_TEST_FLAG", True) is False
    monkeypatch.setenv("ACCELERATE_TEST_FLAG", "2")
    with pytest.raises(ValueError, match="ACCELERATE_TEST_FLAG"):
        parse_flag_from_env("ACCELERATE_TEST_FLAG")


def test_a_choice_is_its_text(monkeypatch):
    assert parse_choice_from_env("ACCELERATE_TEST_CHOICE") == "no"
    assert parse_choice_from_env("ACCELERATE_TEST_CHOICE", None) == "None"
    monkeypatch.setenv("ACCELERATE_TEST_CHOICE", "fp16")
    assert parse_choice_from_env("ACCELERATE_TEST_CHOICE") == "fp16"


def test_the_first_number_that_is_not_negative_counts():
    with patch_environment(first=-1, second=0, third=7):
        assert get_int_from_env(["FIRST", "SECOND", "THIRD"], 5) == 0
        assert get_int_from_env(["FIRST", "MISSING"], 5) == 5


def test_text_that_is_no_number_is_named():
    with (
        patch_environment(first="abc"),
        pytest.raises(ValueError, match="FIRST must be a whole number, got 'abc'"),
    ):
        get_int_from_env(["FIRST"], 0)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
        {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
        {
            "OMPI_COMM_WORLD_RANK": 3,
            "OMPI_COMM_WORLD_SIZE": 4,
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        },
        {
            "MV2_COMM_WORLD_RANK": 3,
            "MV2_COMM_WORLD_SIZE": 4,
            "MV2_COMM_WORLD_LOCAL_RANK": 1,
            "MV2_COMM_WORLD_LOCAL_SIZE": 2,
        },
    ],
)
def test_every_launcher_is_understood(variables):
    with clear_environment(), patch_environment(**variables):
        assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)


def test_without_a_launcher_there_is_one_process():
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)


def test_a_patch_is_undone_also_on_errors(monkeypatch):
    monkeypatch.setenv("ACCELERATE_OLD", "old")
    with pytest.raises(KeyError), patch_environment(accelerate_old="x", accelerate_new=3):
        assert (os.environ["ACCELERATE_OLD"], os.environ["ACCELERATE_NEW"]) == ("x", "3")
        del os.environ["ACCELERATE_OLD"]
        raise KeyError
    assert os.environ["ACCELERATE_OLD"] == "old"
    assert "ACCELERATE_NEW" not in os.environ


def test_a_cleared_environment_comes_back_exactly():
    before = dict(os.environ)
    with pytest.raises(KeyError), clear_environment():
        assert not os.environ
        os.environ["NEW"] = "1"
        raise KeyError
    assert dict(os.environ) == before


def test_blocks_nest_and_undo_each_only_their_own(monkeypatch):
    monkeypatch.setenv("X", "outside")
    before = dict(os.environ)
    with patch_environment(x=1, y=2):
        with clear_environment(), patch_environment(x=3):
            assert dict(os.environ) == {"X": "3"}
        assert (os.environ["X"], os.environ["Y"]) == ("1", "2")
        with patch_environment(y="inner"):
            os.environ["Z"] = "kept"
        assert (os.environ["Y"], os.environ["Z"]) == ("2", "kept")
    assert dict(os.environ) == {**before, "Z": "kept"}
    del os.environ["Z"]


def test_a_variable_that_cannot_be_set_leaves_none_of_its_block(monkeypatch):
    monkeypatch.delenv("GOOD", raising=False)
    with pytest.raises(ValueError, match="null"), patch_environment(good=1, bad="a\0b"):
        pass
    assert "GOOD" not in os.environ


def test_a_generator_or_a_decorated_function_may_hold_the_block():
    @patch_environment(inside=1)
    def read():
        return os.environ["INSIDE"]

    assert (read(), read()) == ("1", "1")
    assert "INSIDE" not in os.environ


def test_lines_for_a_file_leave_out_what_a_shell_would_read(caplog):
    with caplog.at_level(logging.WARNING):
        lines = convert_dict_to_env_variables(
            {"A": "1", "B": "x y", "C": "", "": "z", "D": "a;b", "E": "a<b", "F": "2"}
        )
    assert lines == ["A=1\n", "F=2\n"]
    assert len(caplog.records) == 5
    assert "'B'" in caplog.text


def change_environment():
    os.environ["ACCELERATE_OLD"] = "changed"
    os.environ["ACCELERATE_NEW"] = "new"
    os.environ["OTHER_NEW"] = "kept"


@pytest.fixture
def _old(monkeypatch):
    monkeypatch.setenv("ACCELERATE_OLD", "old")
    yield
    os.environ.pop("OTHER_NEW", None)


def assert_purged():
    assert os.environ["ACCELERATE_OLD"] == "old"
    assert "ACCELERATE_NEW" not in os.environ


@pytest.mark.usefixtures("_old")
def test_a_purged_function_leaves_its_own_variables_as_they_were():
    @purge_accelerate_environment
    def work():
        change_environment()
        raise KeyError

    with pytest.raises(KeyError):
        work()
    assert_purged()
    assert os.environ["OTHER_NEW"] == "kept"


@pytest.mark.usefixtures("_old")
def test_a_purged_coroutine_too():
    @purge_accelerate_environment
    async def work():
        await asyncio.sleep(0)
        change_environment()
        return 5

    assert asyncio.run(work()) == 5
    assert_purged()


@pytest.mark.usefixtures("_old")
def test_a_purged_class_and_its_subclasses_purge_their_tests_only():
    seen = []

    class Base:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    @purge_accelerate_environment
    class Case(Base):
        def test_one(self):
            change_environment()
            return self

        def helper(self):
            change_environment()

    class Inherited(Case):
        def test_two(self):
            change_environment()

    Case().test_one()
    assert_purged()
    Inherited().test_two()
    assert_purged()
    Inherited().test_one()
    assert_purged()
    assert seen == ["Case", "Inherited"]
    Case().helper()
    assert os.environ.pop("ACCELERATE_NEW") == "new"
