# SPDX-License-Identifier: BSD-3-Clause
"""The page of ``bench all``: whole, escaped, with units, in both colour schemes, whatever the figures are."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

from tests import load
from tests._support import GuardedTestCase

page = load("bench._page")
plot = load("bench._plot")

# These have no end tag.
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that each tag is closed in turn, and keeps what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"left open: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def figures(seconds: float = 0.1, speed: float | None = 2.0, off: float = 0.05) -> dict[str, Any]:
    """What ``bench all`` would hand over, all of it about alike."""
    shape = {"tensors": 4000, "tensor_bytes": 4000, "state_bytes": 16_000_000, "first_s": seconds, "median_s": seconds}
    shape |= {"fitted_s": seconds * (1 + off), "off": off, "GBps": speed or 0.0, "of_socket": 0.5, "of_copy": 0.25}
    fit = {"fixed_s": seconds, "GBps": speed, "largest_off": abs(off), "determined": True, "exact": False}
    ratios = {"of_socket": speed and 0.5, "of_copy": speed and 0.25}
    limit = {"bytes": 256_000_000, "seconds": seconds, "GBps": speed or 1e-9}
    trip = {"bytes": 64, "seconds": seconds}
    op = {"sizes": [4, 2000], "seconds": [seconds] * 2, "fit": {**fit, "fitted_s": [seconds] * 2, "off": [off] * 2}}
    return {
        "bench": "all",
        "package": "acme.heal",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"system": "Linux 6", "cpu": "Abacus", "cores": 2, "memory_bytes": 8_000_000_000},
        "torch": "2.13.0",
        "python": "3.11.7",
        "quick": False,
        "runs": 5,
        "took_s": 99.0,
        "limits": {"copy": limit, "socket": limit, "round_trip": trip, "gloo_float": trip, "gloo_large": limit},
        "transports": [{"name": "http", "shapes": [shape, shape], "fit": {**fit, **ratios, "per_tensor_s": 1e-5}}],
        "pg": {
            "latency": [
                {"part": "1 float, wait", "child_s": seconds, "in_process_s": seconds},
                {"part": "configure after kill -9", "child_s": seconds},
            ],
            "ops": [{"op": "same", "kind": "child", **op}, {"op": "same", "kind": "in_process", **op}],
        },
    }


class PageTest(GuardedTestCase):
    def test_it_stands_alone(self) -> None:
        text = page.page(figures())
        read = Reader(text)
        self.assertNotIn("script", read.tags)
        self.assertFalse({"link", "img", "iframe", "object", "use", "image"} & set(read.tags))
        self.assertFalse([name for name, _ in read.attributes if name in {"src", "href", "xlink:href"}])
        self.assertFalse([name for name, _ in read.attributes if name.startswith("on")])
        for word in ("http://", "https://", "url(", "@import"):
            self.assertNotIn(word, text.replace("http://www.w3.org/2000/svg", ""))
        self.assertEqual(read.tags.count("title"), 1)
        self.assertGreaterEqual(read.tags.count("svg"), 4)

    def test_what_when_and_where(self) -> None:
        read = " ".join(Reader(page.page(figures())).texts)
        for part in ("acme.heal bench all, 2026-01-02 03:04:05 UTC", "Abacus, 2 cores, 8 GB of memory, Linux 6",
                     "torch 2.13.0, Python 3.11.7", "5 runs each", "every byte was verified"):  # fmt: skip
            self.assertIn(part, read)
        self.assertNotIn("Quick run", read)
        self.assertIn("Quick run", page.page({**figures(), "quick": True}))

    def test_each_axis_has_a_name_and_units(self) -> None:
        text = page.page(figures())
        self.assertEqual(len(re.findall('<text class="axis"[^>]*>[^<]+</text>', text)), text.count('class="plot"'))
        ticks = re.findall('<text class="tick"[^>]*>([^<]+)</text>', text)
        self.assertTrue(ticks)
        for tick in ticks:
            self.assertRegex(tick, r"^0$|[0-9.]+ (us|ms|s|(bytes|KB|MB|GB)/s)$")

    def test_both_colour_schemes_have_all_colours(self) -> None:
        text = page.page(figures())
        light, dark = re.findall(r":root \{([^}]*)\}", text)
        names = [sorted(re.findall(r"--\w+", part)) for part in (light, dark)]
        self.assertEqual(names[0], names[1])
        self.assertEqual(set(names[0]), set(re.findall(r"var\((--\w+)\)", text)))
        self.assertIn("prefers-color-scheme: dark", text)

    def test_the_colours_of_text_can_be_read(self) -> None:
        for scheme in re.findall(r":root \{([^}]*)\}", page.page(figures())):
            colours = dict(re.findall(r"(--\w+): #(\w{6})", scheme))
            for name in ("--ink", "--soft", "--one", "--two"):
                self.assertGreater(contrast(colours[name], colours["--paper"]), 4.5, name)
            self.assertGreater(contrast(colours["--socket"], colours["--paper"]), 3)

    def test_texts_are_escaped(self) -> None:
        nasty = '<script>alert("1")</script>&\''
        found = figures()
        found |= {"package": nasty, "torch": nasty, "python": nasty, "date": nasty}
        found["machine"] |= {"cpu": nasty, "system": nasty}
        found["transports"][0]["name"] = nasty
        found["pg"]["latency"][0]["part"] = nasty
        found["pg"]["ops"][0]["op"] = nasty
        read = Reader(page.page(found))
        self.assertNotIn("script", read.tags)
        self.assertGreaterEqual("".join(read.texts).count(nasty), 8)

    def test_extreme_values(self) -> None:
        for seconds, speed, off in ((1e-9, 1e4, 0.0), (1e6, 1e-9, -1.0), (0.1, None, 12.0), (1.0, 1.0, 0.0)):
            with self.subTest(seconds):
                text = page.page(figures(seconds, speed, off))
                Reader(text)
                self.assertNotRegex(text, r"\b(nan|inf|None)\b")
                for place in re.findall(r'="(-?[0-9.]+)%"', text):
                    self.assertTrue(0 <= float(place) <= 100, place)

    def test_what_a_fit_cannot_tell_is_said(self) -> None:
        found = figures()
        found["transports"][0]["fit"]["exact"] = True
        self.assertIn("as many shapes as costs", page.page(found))
        found["transports"][0]["fit"]["determined"] = False
        self.assertIn("costs not told apart", page.page(found))


class AxisTest(GuardedTestCase):
    def test_decades(self) -> None:
        axis = plot.Axis.decades([0.004, 0.3], "time", str)
        self.assertEqual((axis.at(0.001), axis.at(1.0)), (0, 100))
        self.assertAlmostEqual(axis.at(0.1), 200 / 3)
        self.assertEqual((axis.at(0.0), axis.at(1e9)), (0, 100))

    def test_linear(self) -> None:
        axis = plot.Axis.linear([0.3, 9.4], "speed", str)
        self.assertEqual((axis.at(0.0), axis.ticks[0]), (0, 0))
        self.assertLess(axis.at(9.4), 100)

    def test_few_ticks_and_all_of_them_on_the_axis(self) -> None:
        for make in (plot.Axis.decades, plot.Axis.linear):
            for most in (0.0, 1e-9, 0.99, 1.0, 1.01, 7.3, 2e9):
                axis = make([most], "", str)
                self.assertTrue(2 <= len(axis.ticks) <= 5, (make, most, axis.ticks))
                self.assertTrue(all(axis.low * 0.999 <= tick <= axis.high * 1.001 for tick in axis.ticks))
                self.assertTrue(math.isfinite(axis.at(most)))


def contrast(one: str, other: str) -> float:
    """How far two colours are apart, as WCAG counts it."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
