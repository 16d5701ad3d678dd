"""Which trackers there are, and which of them `log_with` means."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from acc_ops.enums import LoggerType
from acc_ops.testing import run_threads
from acc_trainer import Accelerator
from acc_trainer.tracking import registry
from acc_trainer.tracking.registry import filter_trackers, get_available_trackers, register_tracker_class
from acc_trainer.tracking.tracker import GeneralTracker


def test_every_tracker_of_the_specification_is_there(table):
    assert {str(one) for one in LoggerType} - {"all"} <= set(table)
    assert all(kind.name == name for name, kind in table.items())


def test_a_registered_class_is_built_by_name(table, noting):
    register_tracker_class(noting)
    accelerator = Accelerator(log_with=["noting"])
    accelerator.init_trackers("run", init_kwargs={"noting": {"team": "a"}})
    made = accelerator.get_tracker("noting")
    assert (made.run_name, made.kwargs) == ("run", {"team": "a"})


@pytest.mark.parametrize(
    ("log_with", "error", "told"),
    [
        ("paper", ValueError, "unknown tracker 'paper'"),
        (["jsonl", "paper"], ValueError, "unknown tracker 'paper'"),
        (5, TypeError, "takes names, LoggerType members and GeneralTracker instances, got 5"),
        ([object], TypeError, "got <class 'object'>"),
    ],
)
def test_what_names_no_tracker_is_refused_on_every_rank(log_with, error, told):
    def work():
        with pytest.raises(error, match=told):
            Accelerator(log_with=log_with, project_dir="logs")

    run_threads(2, work)


def test_the_choice_is_made_once_each_and_knows_what_is_installed(table, noting, caplog):
    register_tracker_class(noting)
    noting.is_installed = classmethod(lambda cls: False)
    try:
        own = noting()
        assert filter_trackers([own, own, "noting"]) == [own]
        assert "tracker 'noting' is left out: its library is not installed" in caplog.text
    finally:
        del noting.is_installed
    assert filter_trackers(["noting", "noting"]) == ["noting"]
    assert "noting" in filter_trackers("all")
    assert filter_trackers(None) == []
    assert "noting" not in [str(one) for one in get_available_trackers()]


def test_all_means_the_given_instances_and_what_can_run_here(table, noting, tmp_path):
    register_tracker_class(noting)
    own = noting()
    chosen = filter_trackers([LoggerType.ALL, own], tmp_path)
    assert chosen[0] is own
    assert "noting" not in chosen
    assert {"jsonl", "csv"} <= set(chosen[1:])
    assert not {"jsonl", "csv"} & set(filter_trackers("all"))


def test_a_tracker_that_writes_files_needs_a_folder():
    with pytest.raises(ValueError, match="'jsonl' writes files: give logging_dir"):
        filter_trackers("jsonl")
    assert filter_trackers("jsonl", "logs") == ["jsonl"]


def test_a_class_without_the_essentials_is_refused():
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match="name, tracker"):
        Nameless()
    with pytest.raises(ValueError, match="needs the class attribute name"):
        register_tracker_class(Nameless)
    with pytest.raises(ValueError, match="derive from GeneralTracker"):
        register_tracker_class(dict)


def test_taking_a_name_over_is_said(table, noting, caplog):
    register_tracker_class(noting)
    register_tracker_class(noting)
    assert "tracker 'noting' was Noting" in caplog.text


class Offered(GeneralTracker):
    """What another package offers."""

    name = "offered"
    requires_logging_directory = False
    tracker = None


@pytest.fixture
def offer(monkeypatch, table):
    """`offer(name=value, ...)`: the entry points that other packages have."""

    def put(**points):
        made = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in points.items()]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: made if group == "acc_trainer.trackers" else []
        )
        module = type(sys)("offering")
        module.Offered = Offered
        monkeypatch.setitem(sys.modules, "offering", module)

    return put


def test_another_package_adds_a_tracker_by_an_entry_point(offer, table):
    offer(offered="offering:Offered", jsonl="offering:Offered")
    assert filter_trackers("offered") == ["offered"]
    assert table["offered"] is Offered
    assert table["jsonl"] is not Offered


def test_all_takes_what_entry_points_offer_and_says_which_are_broken(offer, caplog):
    offer(broken="nowhere:Nothing", misnamed="offering:Offered", offered="offering:Offered")
    assert "offered" in filter_trackers("all")
    assert "'broken' = 'nowhere:Nothing'" in caplog.text
    assert "has the name 'offered'" in caplog.text


def test_a_broken_entry_point_that_was_asked_for_raises(offer):
    offer(broken="nowhere:Nothing")
    with pytest.raises(
        ValueError, match=r"'broken' = 'nowhere:Nothing' of acc_trainer.trackers gives no tracker"
    ):
        filter_trackers("broken")


def test_the_table_is_filled_whoever_asks_first():
    code = "import acc_trainer; assert 'tensorboard' in acc_trainer.LOGGER_TYPE_TO_CLASS"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_accelerator_without_trackers_loads_none_of_their_files():
    code = (
        "import sys; from acc_trainer import Accelerator; Accelerator(cpu=True).log({'a': 1}); "
        "assert not [one for one in sys.modules if one.startswith('acc_trainer.tracking.') and not one.endswith('.run')], sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
