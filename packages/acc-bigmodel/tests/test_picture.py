"""The SVG of a placement."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import example, given, settings
from hypothesis import strategies as st

from acc_bigmodel import picture
from acc_bigmodel.placement import Placement, plan

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


def test_characters_that_xml_does_not_know_are_question_marks() -> None:
    root = ElementTree.fromstring(plan({"a\x00b\ud800\x1f.w": 1}, {"cpu": 4}).svg("\x07 title"))
    assert root.find(f"{SVG}title").text == "? title"


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    names = draw(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=30, unique=True))
    sizes = {f"{name}.w": draw(st.integers(0, 10**10)) for name in names}
    devices = draw(st.lists(st.integers(0, 127), unique=True, max_size=8))
    budgets = {device: draw(st.integers(0, 10**11)) for device in devices}
    return plan(sizes, {**budgets, "cpu": draw(st.integers(0, 10**11)), "disk": None})


@settings(max_examples=100)
@given(placements(), st.text(max_size=300))
@example(plan({"a.w": 7857391, "b.w": 842432}, {"cpu": 0, "disk": None}), "")  # two texts that touch
def test_texts_fit_and_overlap_nothing(placement: Placement, title: str) -> None:
    root = ElementTree.fromstring(placement.svg(title))
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    boxes = [box(text) for text in root.iter(f"{SVG}text") if text.text]
    for left, top, right, bottom in boxes:
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
    for one, other in itertools.combinations(boxes, 2):
        gaps = (other[0] - one[2], one[0] - other[2], other[1] - one[3], one[1] - other[3])
        assert max(gaps) >= -1e-6


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text whose characters have their usual width in a sans-serif font."""
    size = float(text.get("font-size", "12"))
    width = len(text.text or "") * size * (0.62 if text.get("font-weight") == "bold" else 0.55)
    x, y = float(text.get("x", "0")), float(text.get("y", "0"))
    left = {"middle": x - width / 2, "end": x - width}.get(text.get("text-anchor", ""), x)
    return left, y - 0.75 * size, left + width, y + 0.25 * size


def test_labels_can_be_read_on_their_colours() -> None:
    for fill, ink in (*picture._ACCELERATORS, picture._CPU, picture._DISK):
        light, dark = sorted((luminance(fill), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, contrast for text


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_device_says_from_where_to_where_it_goes() -> None:
    placement = plan({f"layers.{i}.w": 1 for i in range(3000)}, {0: 1000, "cpu": None})
    texts = [text.text for text in ElementTree.fromstring(placement.svg()).iter(f"{SVG}text")]
    assert "layers.0 … layers.998" in texts
    assert "layers.999 … layers.2999" in texts
    placement = plan({f"l{i}.w": size for i, size in enumerate([9, 1, 30, 1])}, {0: 20, 1: 30})
    texts = [text.text for text in ElementTree.fromstring(placement.svg()).iter(f"{SVG}text")]
    assert "l0 … l1, l3" in texts


def test_the_picture_in_the_readme_is_the_one_of_its_example() -> None:
    kept = Path(__file__).parent.parent / "placement.svg"
    sizes = {f"{i}.0.{name}": size for i in range(12) for name, size in (("weight", 2**20), ("bias", 2048))}
    assert plan(sizes, {"cpu": 6 * 2**20, "disk": None}).svg() == kept.read_text(encoding="utf-8")
