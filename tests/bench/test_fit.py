# SPDX-License-Identifier: BSD-3-Clause
"""Fitting costs: known ones are found again, none is negative, what cannot be told is said."""

from __future__ import annotations

from tests import load
from tests._support import GuardedTestCase

fit = load("bench._fit")

# Tensors and bytes of four states.
SHAPES = [(1, 4_000), (4_000, 16_000_000), (1_000, 100_000_000), (100, 300_000_000)]


def seconds(fixed_s: float, per_tensor_s: float, per_byte_s: float) -> list[float]:
    return [fixed_s + per_tensor_s * tensors + per_byte_s * size for tensors, size in SHAPES]


class TransportTest(GuardedTestCase):
    def test_known_costs_are_found_again(self) -> None:
        for costs in ((5e-3, 1e-5, 5e-10), (5e-3, 1e-5, 1e-13), (1e-6, 2e-3, 5e-10)):
            with self.subTest(costs):
                found = fit.fit_transport(SHAPES, seconds(*costs))
                got = (found["fixed_s"], found["per_tensor_s"], 1e-9 / found["GBps"])
                for known, value in zip(costs, got):
                    self.assertAlmostEqual(value / known, 1, places=5)
                self.assertLess(found["largest_off"], 1e-6)
                self.assertEqual((found["determined"], found["exact"]), (True, False))

    def test_no_cost_is_negative(self) -> None:
        found = fit.fit_transport(SHAPES, seconds(5e-3, -1e-6, 5e-10))
        self.assertEqual(found["per_tensor_s"], 0)
        self.assertGreater(found["fixed_s"], 0)
        self.assertGreater(found["GBps"], 0)
        self.assertGreater(found["largest_off"], 0.001)

    def test_a_cost_of_nothing_is_no_bandwidth(self) -> None:
        found = fit.fit_transport(SHAPES, seconds(1e-3, 1e-5, 0))
        self.assertIsNone(found["GBps"])
        self.assertAlmostEqual(found["per_tensor_s"], 1e-5)

    def test_how_far_off_is_relative_to_each_measurement(self) -> None:
        measured = seconds(5e-3, 1e-5, 5e-10)
        measured[2] *= 1.5
        found = fit.fit_transport(SHAPES, measured)
        for fitted_s, of, off in zip(found["fitted_s"], measured, found["off"]):
            self.assertAlmostEqual(off, fitted_s / of - 1)
        self.assertEqual(found["largest_off"], max(map(abs, found["off"])))
        self.assertLess(found["off"][2], -0.1)

    def test_small_and_large_shapes_weigh_alike(self) -> None:
        # by absolute errors the one of a millisecond would be lost beside those of a second
        measured = seconds(1e-3, 1e-5, 1e-8)
        measured[3] *= 1.02
        found = fit.fit_transport(SHAPES, measured)
        self.assertLess(abs(found["off"][0]), 0.02)

    def test_as_many_shapes_as_costs(self) -> None:
        found = fit.fit_transport(SHAPES[:3], seconds(5e-3, 1e-5, 5e-10)[:3])
        self.assertEqual((found["determined"], found["exact"]), (True, True))
        self.assertLess(found["largest_off"], 1e-9)

    def test_too_few_shapes_to_tell_the_costs_apart(self) -> None:
        for count in (1, 2):
            found = fit.fit_transport(SHAPES[:count], seconds(5e-3, 1e-5, 5e-10)[:count])
            self.assertEqual((found["determined"], found["exact"]), (False, True))
            self.assertEqual(len(found["fitted_s"]), count)

    def test_the_same_shape_again_and_again(self) -> None:
        found = fit.fit_transport([SHAPES[0]] * 5, [1.0, 1.1, 0.9, 1.0, 1.0])
        self.assertFalse(found["determined"])
        self.assertTrue(all(0.8 < fitted_s < 1.2 for fitted_s in found["fitted_s"]))

    def test_nothing_to_fit(self) -> None:
        for shapes, measured in (([], []), (SHAPES, [1.0]), (SHAPES[:1], [0.0]), (SHAPES[:1], [float("nan")])):
            with self.subTest(measured), self.assertRaises(ValueError):
                fit.fit_transport(shapes, measured)


class OpTest(GuardedTestCase):
    def test_known_costs_are_found_again(self) -> None:
        sizes = [4, 200_000, 20_000_000]
        found = fit.fit_op(sizes, [1e-4 + size / 2e9 for size in sizes])
        self.assertAlmostEqual(found["fixed_s"], 1e-4)
        self.assertAlmostEqual(found["GBps"], 2.0)

    def test_faster_when_larger_has_no_bandwidth(self) -> None:
        found = fit.fit_op([4, 400], [2e-4, 1e-4])
        self.assertIsNone(found["GBps"])
        self.assertTrue(1e-4 < found["fixed_s"] < 2e-4)
