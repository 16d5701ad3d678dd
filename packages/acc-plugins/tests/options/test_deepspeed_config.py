"""DeepSpeed configurations: where they may stand, dotted keys, and which values are filled in."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from acc_ops.options import OptionError
from acc_plugins import HfDeepSpeedConfig
from acc_plugins.options.deepspeed_config import refuse

STAGE_3 = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "on": True,
    "off": 0,
    "empty": None,
}


def test_it_is_read_from_a_dictionary_a_file_text_or_base64(tmp_path: Path) -> None:
    text = json.dumps(STAGE_3)
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    read = [HfDeepSpeedConfig(source) for source in (STAGE_3, path, str(path), text, encoded)]
    assert all(one.config == STAGE_3 and one == read[0] for one in read)
    assert [one.path for one in read] == [None, str(path), str(path), None, None]


def test_a_dictionary_is_copied() -> None:
    config = HfDeepSpeedConfig(STAGE_3)
    config.set_value("zero_optimization.stage", 1)
    assert STAGE_3["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such.json", r"'/no/such.json' is neither an existing file"),
        ("{", "is no JSON"),
        (base64.b64encode(b"[1]").decode(), "must be a JSON object, got list"),
        (3, "got 3"),
        (None, "got None"),
    ],
)
def test_anything_else_is_refused(source: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HfDeepSpeedConfig(source)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("stage: 3")
    with pytest.raises(OptionError, match=r"ds\.json is no JSON"):
        HfDeepSpeedConfig(path)


def test_dotted_keys_find_values_and_the_nodes_that_hold_them() -> None:
    config = HfDeepSpeedConfig(STAGE_3)
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("zero_optimization") == STAGE_3["zero_optimization"]
    assert config.get_value("zero_optimization.stage.deeper", 7) == 7
    assert config.get_value("absent.key") is None
    assert config.find_config_node("zero_optimization.stage") == (config.config["zero_optimization"], "stage")
    assert config.find_config_node("absent.key") == (None, "key")
    assert [config.is_true(key) for key in ("on", "off", "empty", "absent")] == [True, False, False, False]
    assert [config.is_false(key) for key in ("on", "off", "empty", "absent")] == [False, True, False, False]


def test_a_sub_tree_is_removed_and_its_absence_may_be_an_error() -> None:
    config = HfDeepSpeedConfig(STAGE_3)
    config.del_config_sub_tree("zero_optimization.offload_param")
    assert config.config["zero_optimization"] == {"stage": 3}
    config.del_config_sub_tree("zero_optimization.offload_param")
    with pytest.raises(OptionError, match=r"no 'absent\.key'"):
        config.del_config_sub_tree("absent.key", must_exist=True)


@pytest.mark.parametrize(
    ("zero", "answers"),
    [
        ({"stage": 2}, (True, False, False)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, (False, True, True)),
        ({"stage": "auto", "offload_param": {"device": "none"}}, (False, False, False)),
    ],
)
def test_stage_and_offloading_are_told(zero: dict[str, Any], answers: tuple[bool, ...]) -> None:
    config = HfDeepSpeedConfig({"zero_optimization": zero})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == answers


def test_auto_is_filled_and_what_is_said_stays() -> None:
    config = HfDeepSpeedConfig({"a": {"b": "auto", "c": 1}, "d": None})
    found: list[str] = []
    assert config.fill("a.b", {"a.b": 5}, found)
    assert not config.fill("a.c", {"a.c": 2}, found)
    assert not config.fill("a.c", {"a.c": None}, found)
    assert not config.fill("d", {"d": 3}, found)
    assert not config.fill("no.such", {"no.such": 3}, found)
    assert config.config == {"a": {"b": 5, "c": 1}, "d": None}
    with pytest.raises(OptionError, match=r"a\.c is 1 in the DeepSpeed configuration, 2 here"):
        refuse(found)


def test_an_auto_that_nothing_answers_is_an_error_where_values_must_match() -> None:
    config = HfDeepSpeedConfig({"a": "auto"})
    with pytest.raises(OptionError, match='says "auto" for a'):
        config.fill("a", {}, [])
    assert not config.fill("a", {}, [], must_match=False)
    assert config.is_auto("a")
