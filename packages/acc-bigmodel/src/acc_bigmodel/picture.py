"""A placement as an SVG picture: the model in its order, then one bar for every device. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from acc_bigmodel.text import in_units

if TYPE_CHECKING:
    from acc_bigmodel.placement import Device, Placement

# colours that stay apart for colour-blind readers (Okabe and Ito); each with the text colour that has more contrast
_ACCELERATORS = (
    *(("#0072b2", "#fff"), ("#56b4e9", "#000"), ("#009e73", "#000")),
    *(("#cc79a7", "#000"), ("#f0e442", "#000"), ("#d55e00", "#000")),
)
_CPU, _DISK = ("#e69f00", "#000"), ("#9a9a9a", "#000")

_WIDTH, _LEFT, _BAR, _ROW, _BAR_HEIGHT = 960, 120, 600, 64, 34
_CHARACTER, _BOLD_14, _BOLD_17 = (
    7.0,
    9.2,
    11.0,
)  # width of a character at the size of labels, and bold at 14 and 17
_MOST_PARTS = 400  # more separate rectangles than this say no more than runs do


def draw(placement: Placement, title: str = "") -> str:
    """The SVG text of `placement`; the same placement gives the same text."""
    colours = _colours(placement)
    devices = list(placement.budgets)
    total = sum(placement.atoms.nbytes)
    height = 176 + _ROW * len(devices)
    heading = title or f"Where {in_units(total)} of weights are"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{_text(heading)}</title>",
        f"<desc>{_text(placement.table())}</desc>",
        _HATCH,
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="24" y="32" font-size="17" font-weight="bold" fill="#222">'
        f"{_text(_shortened(heading, (_WIDTH - 48) / _BOLD_17))}</text>",
        *_model_strip(placement, colours, total),
    ]
    scale = _scale(placement)
    for row, device in enumerate(devices):
        body += _device_row(placement, device, colours[device], 134 + row * _ROW, scale)
    body += _legend(placement, 134 + len(devices) * _ROW + 16)
    return "\n".join([*body, "</svg>"]) + "\n"


_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#fff"/><rect width="2" height="6" fill="#888"/></pattern></defs>'
)


def _legend(placement: Placement, y: int) -> list[str]:
    swatch = f'y="{y - 10}" width="14" height="12" stroke="#555"'
    lines = [
        f'<rect x="{_LEFT}" fill="#f4f4f4" {swatch}/><text x="{_LEFT + 22}" y="{y}" fill="#222">free</text>'
    ]
    if placement.reserve_bytes:
        kept = f"{in_units(placement.reserve_bytes)} kept free on {_named(placement.main)} for what is streamed there"
        lines.append(
            f'<rect x="{_LEFT + 70}" fill="url(#hatch)" {swatch}/>'
            f'<text x="{_LEFT + 92}" y="{y}" fill="#222">{_text(kept)}</text>'
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Neighbouring atoms drawn as one rectangle."""

    first: str
    last: str
    nbytes: int
    home: Device

    @property
    def name(self) -> str:
        return self.first if self.first == self.last else f"{self.first} … {self.last}"


def _model_strip(placement: Placement, colours: dict[Device, tuple[str, str]], total: int) -> list[str]:
    lines = ['<text x="24" y="77" fill="#222">in model order</text>']
    x = float(_LEFT)
    for part in _runs(placement, range(len(placement.atoms))):
        width = part.nbytes / max(total, 1) * _BAR
        lines += _rectangle(part, x, 56, width, 30, colours[part.home], _named(part.home))
        x += width
    return lines


def _device_row(
    placement: Placement, device: Device, colour: tuple[str, str], y: int, scale: float
) -> list[str]:
    mine = placement.numbers_on(device)
    budget, used = placement.budgets[device], placement.used_bytes[device]
    shown = used if budget is None else budget
    outline = min(shown * scale, float(_BAR))
    of_budget = ", no limit" if budget is None else f" of {in_units(budget)}"
    count = f"{len(mine)} piece{'s' if len(mine) != 1 else ''}"
    streamed = ", streamed" if placement.streams(device) and mine else ""
    lines = [
        f'<text x="24" y="{y + 22}" font-size="14" font-weight="bold" fill="#222">'
        f"{_text(_shortened(_named(device), (_LEFT - 30) / _BOLD_14))}</text>",
        f'<rect x="{_LEFT}" y="{y}" width="{outline:.1f}" height="{_BAR_HEIGHT}" fill="#f4f4f4" stroke="#555"/>',
    ]
    if device == placement.main and placement.reserve_bytes:
        width = min(placement.reserve_bytes * scale, outline)
        lines.append(
            f'<rect x="{_LEFT + outline - width:.1f}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" '
            'fill="url(#hatch)" stroke="#555"/>'
        )
    x = float(_LEFT)
    for part in _parts(placement, mine):
        width = part.nbytes * scale
        lines += _rectangle(part, x, y, width, _BAR_HEIGHT, colour, part.name)
        x += width
    if shown * scale > _BAR:  # the budget is far larger than anything in it
        lines.append(
            f'<text x="{_LEFT + _BAR - 18}" y="{y + 22}" font-size="14" fill="#555" text-anchor="end">…</text>'
        )
    lines.append(
        f'<text x="{_LEFT + _BAR + 16}" y="{y + 15}" fill="#222">{in_units(used)}{of_budget}</text>'
        f'<text x="{_LEFT + _BAR + 16}" y="{y + 31}" fill="#555">{count}{streamed}</text>'
    )
    if mine:
        extent = _text(_shortened(_extent(placement, mine), _BAR / _CHARACTER))
        lines.append(f'<text x="{_LEFT}" y="{y + _BAR_HEIGHT + 14}" fill="#555">{extent}</text>')
    return lines


def _rectangle(
    part: _Part, x: float, y: int, width: float, height: int, colour: tuple[str, str], label: str
) -> list[str]:
    fill, ink = colour
    edge = ' stroke="#fff" stroke-width="1"' if width > 4 else ""
    lines = [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"{edge}>'
        f"<title>{_text(part.name)}: {in_units(part.nbytes)} on {_text(str(part.home))}</title></rect>"
    ]
    text = _fitting(label, width - 8)
    if text:
        lines.append(
            f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" fill="{ink}" text-anchor="middle" '
            f'pointer-events="none">{_text(text)}</text>'
        )
    return lines


def _fitting(label: str, width: float) -> str:
    """The label, its last part, or nothing: whichever fits."""
    parts = label.split(".")
    for text in (label, ".".join(parts[-2:]), parts[-1]):
        if len(text) * _CHARACTER <= width:
            return text
    return ""


def _shortened(text: str, characters: float) -> str:
    """The text, or its two ends when it is longer than so many characters."""
    if len(text) <= characters:
        return text
    half = int(characters - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _text(text: str) -> str:
    """The text as XML; characters that XML does not know are question marks."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _parts(placement: Placement, numbers: Sequence[int]) -> Iterable[_Part]:
    if len(numbers) > _MOST_PARTS:
        return _runs(placement, numbers)
    return [_part(placement, [number]) for number in numbers]


def _runs(placement: Placement, numbers: Sequence[int]) -> Iterable[_Part]:
    for _, group in itertools.groupby(numbers, key=placement.homes.__getitem__):
        yield _part(placement, list(group))


def _extent(placement: Placement, numbers: Sequence[int]) -> str:
    """From where to where the atoms go, without what lies elsewhere in between."""
    runs = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    return ", ".join(_part(placement, [number for _, number in run]).name for _, run in runs)


def _part(placement: Placement, numbers: Sequence[int]) -> _Part:
    atoms = placement.atoms
    return _Part(
        first=atoms.name(numbers[0]),
        last=atoms.name(numbers[-1]),
        nbytes=sum(atoms.nbytes[number] for number in numbers),
        home=placement.homes[numbers[0]],
    )


def _scale(placement: Placement) -> float:
    """Pixels a byte: the same for all bars, and such that the fullest one is well visible."""
    most_used = max([*placement.used_bytes.values(), 1])
    widest = max(
        used if budget is None else min(max(budget, used), 1.5 * most_used)
        for used, budget in (
            (placement.used_bytes[device], budget) for device, budget in placement.budgets.items()
        )
    )
    return _BAR / max(widest, 1)


def _named(device: Device) -> str:
    return f"device {device}" if isinstance(device, int) else device


def _colours(placement: Placement) -> dict[Device, tuple[str, str]]:
    special = {"cpu": _CPU, "disk": _DISK}
    accelerators = itertools.cycle(_ACCELERATORS)
    return {
        device: special[str(device)] if str(device) in special else next(accelerators)
        for device in placement.budgets
    }
