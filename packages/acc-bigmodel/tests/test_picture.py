"""The SVG of a placement."""

from __future__ import annotations

from xml.etree import ElementTree

from acc_bigmodel.placement import plan

SVG = "{http://www.w3.org/2000/svg}"


def test_every_piece_is_drawn_on_its_device_and_within_the_picture() -> None:
    placement = plan({f"layers.{i}.w": 100 for i in range(6)}, {0: 350, "cpu": 200, "disk": None})
    root = ElementTree.fromstring(placement.svg("a model"))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    for i, home in enumerate(placement.homes):
        assert f"layers.{i}: 100 B on {home}" in titles
    width = float(root.get("width", "0"))
    for rectangle in root.iter(f"{SVG}rect"):
        assert float(rectangle.get("x", "0")) + float(rectangle.get("width", "0")) <= width


def test_shares_are_drawn_to_scale() -> None:
    placement = plan({"a.w": 300, "b.w": 100}, {"cpu": 400})
    root = ElementTree.fromstring(placement.svg())
    widths = {
        title.text: float(rectangle.get("width", "0"))
        for rectangle in root.iter(f"{SVG}rect")
        for title in rectangle.iter(f"{SVG}title")
    }
    assert widths["a: 300 B on cpu"] == 3 * widths["b: 100 B on cpu"]


def test_a_budget_far_larger_than_the_model_does_not_hide_it() -> None:
    root = ElementTree.fromstring(plan({"a.w": 100}, {"cpu": 10**12}).svg())
    widest = max(float(r.get("width", "0")) for r in root.iter(f"{SVG}rect") for _ in r.iter(f"{SVG}title"))
    assert widest > 300


def test_names_are_escaped() -> None:
    ElementTree.fromstring(plan({"<a&b>.w": 1}, {"cpu": 4}).svg('"<&>"'))


def test_thousands_of_layers_are_drawn_as_runs() -> None:
    placement = plan({f"layers.{i}.w": 1 for i in range(3000)}, {0: 1000, "cpu": None})
    assert len(placement.svg()) < 10_000
