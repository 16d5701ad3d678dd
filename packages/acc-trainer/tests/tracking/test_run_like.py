"""Weights & Biases, SwanLab and Trackio: what their trackers call."""

from __future__ import annotations

import enum

import pytest
import torch

from acc_ops.testing import run_threads
from acc_trainer import SwanLabTracker, TrackioTracker, WandBTracker

KINDS = [WandBTracker, SwanLabTracker, TrackioTracker]


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_reaches_the_library_in_order(kind, stand_in):
    library = stand_in(kind.name)
    tracker = kind("project", team="ours")
    tracker.start()
    tracker.store_init_configuration({"colour": Colour.RED, "sizes": (1, 2)})
    tracker.log({"loss": torch.tensor(0.5)}, step=3, extra=True)
    tracker.finish()
    assert library.calls("init") == [((), {"project": "project", "team": "ours"})]
    (args, _) = library.calls("init().config.update")[0]
    assert args == ({"colour": "red", "sizes": [1, 2]},)
    assert library.calls("init().log") == [(({"loss": 0.5},), {"step": 3, "extra": True})]
    assert library.calls("init().finish") == [((), {})]


@pytest.mark.parametrize("kind", KINDS)
def test_finishing_twice_ends_the_run_once(kind, stand_in):
    library = stand_in(kind.name)
    tracker = kind("project")
    tracker.start()
    tracker.finish()
    tracker.finish()
    assert len(library.calls("init().finish")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_may_run_them_on_every_rank_itself(kind, stand_in):
    library = stand_in(kind.name)
    run_threads(2, lambda: kind("project").start())
    assert len(library.calls("init")) == 2


@pytest.mark.parametrize("kind", [WandBTracker, SwanLabTracker])
def test_images_become_a_list_of_the_librarys_images(kind, stand_in):
    library = stand_in(kind.name, **{"Image()": "an image"})
    tracker = kind("project")
    tracker.start()
    tracker.log_images({"faces": ["a", "b"]}, step=1, caption="c")
    assert library.calls("Image") == [(("a",), {"caption": "c"}), (("b",), {"caption": "c"})]
    assert library.calls("init().log") == [(({"faces": ["an image", "an image"]},), {"step": 1})]


def test_trackio_gets_one_image_a_name(stand_in):
    library = stand_in("trackio", **{"Image()": "an image"})
    tracker = TrackioTracker("project")
    tracker.start()
    tracker.log_images({"faces": ["a", "b"]}, step=1)
    assert library.calls("init().log") == [(({"faces/0": "an image", "faces/1": "an image"},), {"step": 1})]


@pytest.mark.parametrize("kind", [WandBTracker, TrackioTracker])
def test_a_table_is_the_librarys_table(kind, stand_in):
    library = stand_in(kind.name, **{"Table()": "a table"})
    tracker = kind("project")
    tracker.start()
    tracker.log_table("scores", columns=["x"], data=[[1]], step=2)
    assert library.calls("Table") == [((), {"columns": ["x"], "data": [[1]], "dataframe": None})]
    assert library.calls("init().log") == [(({"scores": "a table"},), {"step": 2})]


def test_wandb_lets_settings_of_a_resumed_run_change(stand_in):
    library = stand_in("wandb")
    tracker = WandBTracker("project")
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    assert library.calls("init().config.update")[0][1] == {"allow_val_change": True}


def test_swanlab_shows_strings_as_texts(stand_in):
    library = stand_in("swanlab", **{"Text()": "a text"})
    tracker = SwanLabTracker("project")
    tracker.start()
    tracker.log({"note": "hello", "loss": 1.0})
    assert library.calls("init().log") == [(({"note": "a text", "loss": 1.0},), {"step": None})]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_library_is_named_with_the_remedy(kind, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, kind.name, None)
    with pytest.raises(ImportError, match=rf'pip install "acc-trainer\[{kind.name}\]"'):
        kind("project").start()


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_are_no_text_are_sent_as_text(kind, stand_in):
    library = stand_in(kind.name)
    tracker = kind("project")
    tracker.start()
    tracker.log({1: 2.0})
    assert library.calls("init().log") == [(({"1": 2.0},), {"step": None})]
