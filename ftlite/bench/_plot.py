# SPDX-License-Identifier: BSD-3-Clause
"""Plots as SVG: rows of bars or dots over one axis, for a page that is read on a telephone too.

Rules of this file: numbers in, text out; every text is escaped here. Places along the axis are percentages and the
rest is pixels, so that a plot takes the width it gets while its letters stay as large as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Axis", "Row", "legend", "plot"]

# Pixels: a row's line of text, a bar, the room below it; a group's heading; the axis with its labels and its name.
_TEXT, _BAR, _GAP = 18, 10, 9
_HEADING, _AXIS = 26, 42
# More labels than these run into each other at a telephone's width.
_TICKS = 4
# Beyond that the labels at the ends would be cut.
_NEAR_END = 8.0
# A value that is closer to a decade's beginning than by this factor gets one more decade, or its mark is at the edge.
_NEAR_DECADE = 2.0
# What is so short that nothing would be seen, in percent of the width.
_SLIVER = 0.4
# What a logarithm can be taken of.
_TINY = 1e-12


@dataclass(frozen=True)
class Axis:
    """Where a value lies, in percent of the width.

    Attributes:
        low: at the left end; above 0 on a log scale.
        high: at the right end.
        name: what is shown, with the unit or "log scale".
        label: a value in words, with its unit.
        log: whether it is a log scale.
        ticks: the values that are labelled.
    """

    low: float
    high: float
    name: str
    label: Callable[[float], str]
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def decades(cls, values: Sequence[float], name: str, label: Callable[[float], str]) -> Axis:
        """A log scale over ``values``, from a power of ten to one."""
        known = [max(value, _TINY) for value in values] or [1.0]
        first = math.floor(math.log10(min(known) / _NEAR_DECADE))
        last = max(math.ceil(math.log10(max(known)) - 1e-9), first + 1)
        step = math.ceil((last - first) / _TICKS)
        ticks = tuple(10.0**power for power in range(first, last + 1, step))
        return cls(10.0**first, 10.0**last, name, label, True, ticks)

    @classmethod
    def linear(cls, values: Sequence[float], name: str, label: Callable[[float], str]) -> Axis:
        """From 0 to beyond ``values``, with round ticks."""
        most = max([*values, _TINY])
        power = 10.0 ** math.floor(math.log10(most / _TICKS))
        step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * _TICKS >= most)
        count = math.ceil(most / step - 1e-9)
        return cls(0.0, count * step, name, label, False, tuple(step * i for i in range(count + 1)))

    def at(self, value: float) -> float:
        """Percent from the left; what lies outside is put at the end."""
        if self.log:
            part = math.log(max(value, _TINY) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return 100 * min(max(part, 0.0), 1.0)


@dataclass(frozen=True)
class Row:
    """One line of a plot.

    Attributes:
        name: at the left, above the marks.
        values: at the right: texts, each with the class that colours it ("" is plain).
        bars: from the left end to a value, each with its class.
        dots: at a value, each with its class, joined by a line.
    """

    name: str
    values: Sequence[tuple[str, str]]
    bars: Sequence[tuple[float, str]] = ()
    dots: Sequence[tuple[float, str]] = field(default=())

    @property
    def height(self) -> int:
        return _TEXT + _BAR * max(len(self.bars), 1) + _GAP


def plot(
    axis: Axis, groups: Sequence[tuple[str, Sequence[Row]]], lines: Sequence[tuple[float, str]], about: str
) -> str:
    """The SVG of ``groups`` of rows under their headings; ``about`` says what it shows.

    ``lines`` mark a value, with a class, beside each row's marks: through the texts they would be hard to read.
    """
    bottom = sum((_HEADING if name else 0) + sum(row.height for row in rows) for name, rows in groups)
    parts = [_line(axis.at(tick), 0, bottom, "grid") for tick in axis.ticks]
    y = 0
    for name, rows in groups:
        if name:
            parts.append(f'<text class="head" x="0" y="{y + 16}">{escape(name)}</text>')
            y += _HEADING
        for row in rows:
            parts += _row(axis, row, y)
            ends = y + _TEXT - 2, y + row.height - _GAP + 1
            parts += [_line(axis.at(value), *ends, f"limit {kind}") for value, kind in lines]
            y += row.height
    for tick in axis.ticks:
        x = axis.at(tick)
        anchor = "start" if x < _NEAR_END else "end" if x > 100 - _NEAR_END else "middle"
        parts.append(_text(f"{x:.2f}%", y + 16, anchor, "tick", escape(axis.label(tick))))
    parts.append(_text("50%", y + 34, "middle", "axis", escape(axis.name)))
    return (
        f'<svg class="plot" role="img" aria-label="{escape(about)}" width="100%" height="{y + _AXIS}">'
        + "".join(parts)
        + "</svg>"
    )


def legend(keys: Sequence[tuple[str, str, str]]) -> str:
    """What the marks mean: for each its form ("bar", "dot" or "limit"), its class and a text."""
    forms = {
        "bar": '<rect class="{}" x="0" y="1" width="18" height="10" rx="2"/>',
        "dot": '<circle class="{}" cx="9" cy="6" r="5"/>',
        "limit": '<line class="limit {}" x1="0" x2="18" y1="6" y2="6"/>',
    }
    items = [
        f'<span><svg class="key" width="18" height="12" aria-hidden="true">{forms[form].format(kind)}</svg> '
        f"{escape(text)}</span>"
        for form, kind, text in keys
    ]
    return f'<p class="legend">{"".join(items)}</p>'


def _row(axis: Axis, row: Row, y: int) -> list[str]:
    parts = [_text("0", y + 12, "start", "", escape(row.name))]
    pieces = [
        f'<tspan class="{kind}">{escape(text)}</tspan>' if kind else f"<tspan>{escape(text)}</tspan>"
        for text, kind in row.values
    ]
    parts.append(_text("100%", y + 12, "end", "value", " ".join(pieces)))
    for i, (value, kind) in enumerate(row.bars):
        width = f"{max(axis.at(value), _SLIVER):.2f}%"
        parts.append(
            f'<rect class="{kind}" x="0" y="{y + _TEXT + _BAR * i}" width="{width}" height="{_BAR - 2}" rx="1"/>'
        )
    places = [axis.at(value) for value, _ in row.dots]
    middle = y + _TEXT + _BAR // 2
    if places:
        ends = f'x1="0" x2="100%" y1="{middle}" y2="{middle}"'
        parts.append(f'<line class="track" {ends}/>')
    for place, (_, kind) in zip(places, row.dots):
        parts.append(f'<circle class="{kind}" cx="{place:.2f}%" cy="{middle}" r="5"/>')
    return parts


def _line(x: float, top: int, bottom: int, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{bottom}"/>'


def _text(x: str, y: int, anchor: str, kind: str, inner: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{inner}</text>'
