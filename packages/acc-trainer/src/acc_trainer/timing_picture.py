"""Where the time of training steps goes, as an SVG picture: the mean step as a bar, and every step as a column. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

# colours that stay apart for colour-blind readers (Okabe and Ito)
_COLOURS = ("#e69f00", "#56b4e9", "#0072b2", "#cc79a7", "#009e73", "#bbbbbb")
_WIDTH, _LEFT, _PLOT = 960, 80, 850
_BAR_TOP, _BAR_HEIGHT, _COLUMNS_TOP, _COLUMNS_HEIGHT = 60, 46, 170, 220
_KEYS_A_ROW = 3
_MOST_COLUMNS = 425  # two pixels each; more steps share columns


def draw(seconds: Mapping[str, Sequence[float]], title: str) -> str:
    """The SVG text; the same figures give the same text. `seconds` has a number for every step under each phase."""
    colours = dict(zip(seconds, _COLOURS, strict=True))
    means = {phase: statistics.fmean(values or [0.0]) for phase, values in seconds.items()}
    height = _COLUMNS_TOP + _COLUMNS_HEIGHT + 50
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
                'font-family="Helvetica, Arial, sans-serif" font-size="12">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
                f'<text x="24" y="32" font-size="17" font-weight="bold" fill="#222">{escape(title)}</text>',
                *_mean_step(means, colours),
                *_every_step(seconds, colours),
                "</svg>",
            ]
        )
        + "\n"
    )


def _mean_step(means: Mapping[str, float], colours: Mapping[str, str]) -> list[str]:
    """One bar, with a key to the colours below it."""
    whole = sum(means.values())
    lines, x = [], float(_LEFT)
    for number, (phase, mean) in enumerate(means.items()):
        share = mean / whole if whole else 0.0
        told = f"{phase} {mean * 1e3:.3g} ms, {share:.0%}"
        key_row, key_column = divmod(number, _KEYS_A_ROW)
        key_x = _LEFT + key_column * _PLOT // _KEYS_A_ROW
        key_y = _BAR_TOP + _BAR_HEIGHT + 14 + 20 * key_row
        lines += [
            f'<rect x="{x:.1f}" y="{_BAR_TOP}" width="{share * _PLOT:.1f}" height="{_BAR_HEIGHT}" fill="{colours[phase]}">'
            f"<title>{told}</title></rect>",
            f'<rect x="{key_x}" y="{key_y}" width="12" height="12" fill="{colours[phase]}"/>',
            f'<text x="{key_x + 17}" y="{key_y + 10}" fill="#222">{told}</text>',
        ]
        x += share * _PLOT
    return lines


def _every_step(seconds: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> list[str]:
    """A column for each step, or for several together, stacked by phase, up to the longest."""
    count = max(map(len, seconds.values()), default=0)
    if not count:
        return []
    together = -(-count // _MOST_COLUMNS)
    columns = [
        {phase: statistics.fmean(values[at : at + together]) for phase, values in seconds.items()}
        for at in range(0, count, together)
    ]
    longest = max(sum(column.values()) for column in columns) or 1.0
    bottom = _COLUMNS_TOP + _COLUMNS_HEIGHT
    width = _PLOT / len(columns)
    lines = []
    for number, column in enumerate(columns):
        y = float(bottom)
        for phase, one in column.items():
            high = one / longest * _COLUMNS_HEIGHT
            y -= high
            if high >= 0.05:
                lines.append(
                    f'<rect x="{_LEFT + number * width:.1f}" y="{y:.1f}" width="{width:.2f}" height="{high:.1f}" '
                    f'fill="{colours[phase]}"/>'
                )
    each = "a step" if together == 1 else f"the mean of {together} steps"
    return [
        *lines,
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _PLOT}" y2="{bottom}" stroke="#555"/>',
        f'<text x="{_LEFT - 8}" y="{_COLUMNS_TOP + 10}" fill="#222" text-anchor="end">{longest * 1e3:.3g} ms</text>',
        f'<text x="{_LEFT - 8}" y="{bottom}" fill="#222" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{bottom + 22}" fill="#222">step 1 to {count}; a column is {each}</text>',
    ]
