# SPDX-License-Identifier: BSD-3-Clause
"""What a measurement is made of: a fixed cost, a cost per tensor, a cost per byte, fitted to some measured shapes.

Rules of this file: arithmetic only, without torch; what is fitted is never told without how far it is from each
measurement. The squares are of relative errors, since a shape of 3 ms says as much as one of 300 ms; no cost is
negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

__all__ = ["Fit", "fit_op", "fit_transport", "least_squares"]

# Of columns of length 1: what is left of one that the others make up is rounding.
_SINGULAR = 1e-10
# Two sums of squares that are closer than that, per measurement, are equal.
_EQUAL = 1e-18


@dataclass(frozen=True)
class Fit:
    """Non-negative ``costs``, and what they say of each measurement.

    Attributes:
        costs: one for each column.
        fitted: what they add up to in each row.
        off: how far that is from the measurement, relative to it: 0.1 is 10 % too much.
        determined: the rows tell all costs apart; without that ``costs`` is one choice of many.
        exact: there are no more different rows than costs, so that a fit without error says nothing.
    """

    costs: tuple[float, ...]
    fitted: tuple[float, ...]
    off: tuple[float, ...]
    determined: bool
    exact: bool


def least_squares(rows: Sequence[Sequence[float]], measured: Sequence[float]) -> Fit:
    """The costs of the columns that come nearest to ``measured``, row by row.

    The best non-negative costs are the best unconstrained ones of those columns whose cost is not 0, and of so few
    columns each choice can be tried.

    Raises:
        ValueError: nothing was measured, or a measurement is not above 0.
    """
    if not rows or len(rows) != len(measured):
        raise ValueError(f"{len(measured)} measurements of {len(rows)} shapes: nothing to fit")
    if not all(value > 0 and math.isfinite(value) for value in measured):
        raise ValueError(f"a measurement is not above 0: {list(measured)}")
    width = len(rows[0])
    weighted = [[value / of for value in row] for row, of in zip(rows, measured)]
    best, least = (0.0,) * width, float(len(rows))
    for count in range(1, width + 1):
        for columns in combinations(range(width), count):
            found = _solve([[row[i] for i in columns] for row in weighted])
            if found is None or min(found) < 0:
                continue
            squares = sum((sum(c * row[i] for c, i in zip(found, columns)) - 1) ** 2 for row in weighted)
            if squares < least - _EQUAL * len(rows):
                costs = dict(zip(columns, found))
                best, least = tuple(costs.get(i, 0.0) for i in range(width)), squares
    fitted = tuple(sum(cost * value for cost, value in zip(best, row)) for row in rows)
    return Fit(
        costs=best,
        fitted=fitted,
        off=tuple((value - of) / of for value, of in zip(fitted, measured)),
        determined=_solve(weighted) is not None,
        exact=len({tuple(row) for row in rows}) <= width,
    )


def _solve(rows: list[list[float]]) -> list[float] | None:
    """The ``x`` for which the rows times ``x`` are nearest to 1; None where the columns depend on each other."""
    width = len(rows[0])
    norms = [math.sqrt(sum(row[i] ** 2 for row in rows)) for i in range(width)]
    if not all(norms):
        return None
    scaled = [[value / norm for value, norm in zip(row, norms)] for row in rows]
    matrix = [
        [*(sum(row[i] * row[j] for row in scaled) for j in range(width)), sum(row[i] for row in scaled)]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda j: abs(matrix[j][i]))
        if abs(matrix[pivot][i]) < _SINGULAR:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(width):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [value - factor * above for value, above in zip(matrix[j], matrix[i])]
    return [matrix[i][width] / matrix[i][i] / norms[i] for i in range(width)]


def fit_transport(shapes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> dict[str, Any]:
    """``seconds = fixed + per tensor * tensors + bytes / bandwidth`` for ``shapes`` of (tensors, bytes)."""
    fit = least_squares([(1.0, float(tensors), float(size)) for tensors, size in shapes], seconds)
    fixed_s, per_tensor_s, per_byte_s = fit.costs
    return {"fixed_s": fixed_s, "per_tensor_s": per_tensor_s, "GBps": _bandwidth(per_byte_s), **_quality(fit)}


def fit_op(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """``seconds = fixed + bytes / bandwidth`` for tensors of ``sizes`` bytes."""
    fit = least_squares([(1.0, float(size)) for size in sizes], seconds)
    fixed_s, per_byte_s = fit.costs
    return {"fixed_s": fixed_s, "GBps": _bandwidth(per_byte_s), **_quality(fit)}


def _bandwidth(per_byte_s: float) -> float | None:
    # no cost per byte was seen: that is no bandwidth, and JSON has no infinity
    return 1e-9 / per_byte_s if per_byte_s > 0 else None


def _quality(fit: Fit) -> dict[str, Any]:
    return {
        "fitted_s": list(fit.fitted),
        "off": list(fit.off),
        "largest_off": max(map(abs, fit.off)),
        "determined": fit.determined,
        "exact": fit.exact,
    }
