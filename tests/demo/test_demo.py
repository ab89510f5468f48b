# SPDX-License-Identifier: BSD-3-Clause
"""The demo, run small; that it fails when something is not equal; that there is always a text."""

from __future__ import annotations

import argparse
import functools
from unittest import mock

import torch  # the child processes need it as well, so what runs without torch leaves this module out

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, run_python

demo = load("demo")
compare = load("demo._compare")
errors = load("_errors")
text = load("demo._text")

SMALL = ("--size", "4MB", "--steps", "3")


def story() -> object:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo._Story(parser.parse_args([]), mock.Mock())


class DemoTest(GuardedTestCase):
    limit_s = LONG_S

    def run_demo(self, *line: str) -> list[str]:
        done = run_python("-m", PACKAGE, "demo", *SMALL, *line, limit_s=LONG_S / 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout.splitlines()

    def test_it_heals_and_says_so(self) -> None:
        donor, joiner, heal, verify, train, ok = self.run_demo()
        self.assertRegex(donor, r"^donor   pid \d+: 3 training steps on .* of English text .*, loss [\d.]+ -> [\d.]+$")
        self.assertRegex(joiner, r"^joiner  pid \d+: another seed, 1 step, loss [\d.]+$")
        self.assertRegex(
            heal, r"^heal    [\d.]+ MB in [\d.]+ s \([\d.]+ GB/s\), (\d+) of \1 tensors in place, checksums"
        )
        self.assertRegex(
            verify, r"^verify  \d+ tensors and \d+ other values equal bit for bit .*; \d+ differed before\)$"
        )
        self.assertRegex(
            train, r"^train   both took 5 more steps: losses equal to the last bit, .* \(0x1\.\w+p[+-]\d+\)$"
        )
        self.assertRegex(ok, r"^OK in [\d.]+ s$")

    def test_a_joiner_without_optimizer_state_and_then_one_changed_bit(self) -> None:
        # the whole command; when all was found equal, one bit of the donor's state changes after it was read
        code = f"""
import sys
from {PACKAGE}.demo import _Story
from {PACKAGE}.__main__ import main
verify, go_on = _Story._verify, _Story._go_on
def noted(self, *args):
    self.verified = args
    verify(self, *args)
def spoilt(self, *workers):
    go_on(self, *workers)
    theirs, healed, before = self.verified
    path = next(iter(theirs))
    verify(self, {{**theirs, path: theirs[path] + "0"}}, healed, before)
_Story._verify, _Story._go_on = noted, spoilt
sys.exit(main(["demo", *{SMALL!r}, "--joiner-steps", "0"]))
"""
        done = run_python("-c", code, limit_s=LONG_S / 2)
        lines = done.stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["donor", "joiner", "heal", "verify", "train"], lines)
        self.assertIn("no step yet", lines[1])
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("IntegrityError: 1 of", done.stderr)
        self.assertNotIn("OK", done.stdout)

    def test_a_wrong_option(self) -> None:
        for line, said in (
            (("--steps", "0"), "--steps is 1 or more"),
            (("--size", "900TB"), "lower --size"),
            (("--size", "big"), "'big' is no size"),
        ):
            done = run_python("-m", PACKAGE, "demo", *line)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stderr)
            self.assertEqual(done.stdout, "")


class VerifyTest(GuardedTestCase):
    def test_one_unequal_part_is_enough(self) -> None:
        theirs = {f"part{i}": f"sha {i}" for i in range(9)}
        for mine in ({**theirs, "part4": "sha 0"}, {**theirs, "more": ""}, dict(list(theirs.items())[1:]), {}):
            with self.assertRaises(errors.IntegrityError):
                story()._verify(theirs, {"leaves": mine, "tensors": 9}, {})

    def test_the_message_names_some_and_counts_the_rest(self) -> None:
        theirs = {f"part{i}": "" for i in range(9)}
        with self.assertRaisesRegex(errors.IntegrityError, "9 of 9 parts .*: part0, .*part4 and 4 more"):
            story()._verify(theirs, {"leaves": dict.fromkeys(theirs, "x"), "tensors": 9}, {})

    def test_a_joiner_that_was_equal_before_shows_nothing(self) -> None:
        with self.assertRaisesRegex(errors.IntegrityError, "before it healed"):
            story()._verify({"a": "1"}, {"leaves": {"a": "1"}, "tensors": 1}, {"a": "1"})

    def test_equal_ones_pass(self) -> None:
        with mock.patch("builtins.print") as printed:
            story()._verify({"a": "1", "b": "2"}, {"leaves": {"b": "2", "a": "1"}, "tensors": 1}, {"a": "0", "b": "2"})
        self.assertIn("1 tensors and 1 other values equal bit for bit", printed.call_args.args[0])
        self.assertIn("1 differed before", printed.call_args.args[0])

    def test_losses_that_differ_in_the_last_bit(self) -> None:
        crew = mock.Mock()
        crew.expect.side_effect = [
            {"losses": ["0x1.0p+1"] * 5},
            {"losses": ["0x1.0p+1"] * 4 + ["0x1.0000000000001p+1"]},
        ]
        with self.assertRaisesRegex(errors.IntegrityError, r"1 of 5 losses differ: step \+5"):
            story()._go_on(crew, mock.Mock(), mock.Mock())


class FingerprintTest(GuardedTestCase):
    def test_what_makes_two_states_unequal(self) -> None:
        fingerprint = compare.fingerprint
        t = torch.arange(6.0).reshape(2, 3)
        other = t.clone()
        other.view(torch.int32)[1, 2] ^= 1
        base = fingerprint({"a": t, "n": [1, 0.1], "e": {}})
        self.assertEqual(base, fingerprint({"a": t.t().contiguous().t(), "n": [1, 0.1], "e": {}}))
        for unequal in (
            {"a": other, "n": [1, 0.1], "e": {}},
            {"a": t.reshape(3, 2), "n": [1, 0.1], "e": {}},
            {"a": t.double(), "n": [1, 0.1], "e": {}},
            {"a": t, "n": (1, 0.1), "e": {}},
            {"a": t, "n": [True, 0.1], "e": {}},
            {"a": t, "n": [1, 0.1 + 2**-56], "e": {}},
            {"a": t, "n": [1, 0.1], "e": []},
            {"a": t, "n": [1, 0.1]},
        ):
            self.assertNotEqual(base, fingerprint(unequal), unequal)
        self.assertNotEqual(fingerprint({0: 1}), fingerprint({"0": 1}))
        some = {"z": torch.zeros(0), "s": torch.tensor(1.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
        self.assertNotEqual(fingerprint(some), {})


class TextTest(GuardedTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """To read the library's docstrings takes a second, and they stay what they are."""
        super().setUpClass()
        patch = mock.patch.object(text, "docstrings", functools.cache(text.docstrings))
        patch.start()
        cls.addClassCleanup(patch.stop)

    def test_the_same_text_every_time(self) -> None:
        found, what = text.corpus()
        self.assertGreater(len(found), 20_000)
        self.assertIn("English", what)
        self.assertEqual(text.corpus(), (found, what))

    def test_docstrings_where_the_topics_are_stripped(self) -> None:
        for stripped in ("", "too little"):
            with mock.patch.object(text, "_topics", return_value=stripped):
                found, what = text.corpus()
            self.assertIn("docstrings", what)
            self.assertGreater(len(found), 100_000)

    def test_no_topics_module(self) -> None:
        with mock.patch.dict("sys.modules", {"pydoc_data.topics": None}):
            self.assertEqual(text._topics(), "")
            self.assertIn("docstrings", text.corpus()[1])

    def test_a_module_without_source_is_passed_over(self) -> None:
        self.assertEqual(text.docstrings(("sys", "no_such_module_here")), "")

    def test_no_text_at_all(self) -> None:
        with (
            mock.patch.object(text, "_topics", return_value=""),
            mock.patch.object(text, "docstrings", return_value=""),
            self.assertRaisesRegex(errors.StateError, "no text to train on"),
        ):
            text.corpus()
