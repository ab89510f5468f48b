# SPDX-License-Identifier: BSD-3-Clause
"""The serving gate. What must hold, whatever happens in whatever order:

at most ``max_readers`` readers are in; nobody new comes in while it drains; a closed gate has no readers; a
transition that is not in the table is a StateError and changes nothing; ``close`` ends by its deadline.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import unittest
from collections.abc import Callable

from tests import load
from tests._support import WAIT_S, GuardedTestCase, wait_until

deadline = load("_deadline")
errors = load("_errors")
gate = load("checkpointing._gate")

State, Event, Answer = gate.State, gate.Event, gate.Answer
# far longer than any wait here lasts when all is well
LONG_WAIT_S = 6 * WAIT_S


class Table(unittest.TestCase):
    def test_every_pair_is_listed_or_refused(self) -> None:
        for state in State:
            for event in Event:
                with self.subTest(state=state.name, event=event.name):
                    one = gate.Gate(2, state=state)
                    if (state, event) in gate.TRANSITIONS:
                        one.apply(event)
                        self.assertIs(one.state, gate.TRANSITIONS[state, event])
                        continue
                    with self.assertRaises(errors.StateError) as caught:
                        one.apply(event)
                    self.assertEqual(caught.exception.state, state.value)
                    self.assertEqual(caught.exception.attempted, event.value)
                    self.assertIs(one.state, state)

    def test_every_state_can_be_reached_and_left_for_closed(self) -> None:
        reached = {State.CLOSED}
        while more := {to for (state, _), to in gate.TRANSITIONS.items() if state in reached} - reached:
            reached |= more
        self.assertEqual(reached, set(State))
        ends = {State.CLOSED}
        while more := {state for (state, _), to in gate.TRANSITIONS.items() if to in ends} - ends:
            ends |= more
        self.assertEqual(ends, set(State))


class Asking(unittest.TestCase):
    def answer(self, state: gate.State, *, step: int = 3, asked: int = 3, refusal: str = "") -> gate.Answer:
        return gate.Gate(1, state=state, step=step, refusal=refusal).ask(asked, "new")

    def test_what_a_new_reader_is_told(self) -> None:
        self.assertIs(self.answer(State.SERVING), Answer.ENTER)
        self.assertIs(self.answer(State.SERVING, asked=4), Answer.NEVER)
        for state in (State.CLOSED, State.STAGING, State.DRAINING):
            self.assertIs(self.answer(state), Answer.WAIT)
            self.assertIs(self.answer(state, asked=4), Answer.WAIT)

    def test_a_refused_step_never_comes_and_another_may(self) -> None:
        self.assertIs(self.answer(State.CLOSED, refusal="a lambda"), Answer.NEVER)
        self.assertIs(self.answer(State.CLOSED, refusal="a lambda", asked=4), Answer.WAIT)

    def test_who_is_in_may_go_on(self) -> None:
        one = gate.Gate(1, state=State.SERVING, step=3)
        one.enter("a", 1)
        self.assertIs(one.ask(3, "b"), Answer.WAIT)
        for state in (State.SERVING, State.DRAINING):
            one.state = state
            self.assertIs(one.ask(3, "a"), Answer.ENTER)

    def test_a_reader_counts_until_its_last_connection_has_closed(self) -> None:
        one = gate.Gate(1, state=State.SERVING, step=3)
        for connection in (1, 2, 1):
            one.enter("a", connection)
        one.leave(1)
        one.leave(1)
        one.leave(99)
        self.assertIs(one.ask(3, "b"), Answer.WAIT)
        one.leave(2)
        self.assertEqual(one.readers, {})
        self.assertIs(one.ask(3, "b"), Answer.ENTER)


class Schedules(unittest.TestCase):
    """A donor and readers, each doing what it may at random."""

    def test_the_invariants_hold(self) -> None:
        for seed in range(300):
            with self.subTest(seed=seed):
                self.walk(random.Random(seed))

    def walk(self, rng: random.Random) -> None:
        one = gate.Gate(rng.randint(1, 3))
        connections = iter(range(10_000))
        opened: list[int] = []
        step = 0
        for _ in range(120):
            before = copy.deepcopy(one)
            what = rng.randrange(4)
            if what == 0 and one.state is not State.STAGING and rng.random() < 0.5:
                # as the shell closes: drain, wait or cut, close
                one.apply(Event.DRAIN)
                if rng.random() < 0.5:
                    one.readers.clear()
                if not one.readers:
                    one.apply(Event.CLOSE)
            elif what == 0:
                event = rng.choice([event for event in Event if (one.state, event) in gate.TRANSITIONS])
                if event is Event.CLOSE and one.readers:
                    continue
                step += event is Event.STAGE
                one.apply(event)
                one.step = step
            elif what == 1:
                reader, wanted = rng.choice("abcde"), step + rng.choice((0, 0, 0, 1))
                if one.ask(wanted, reader) is Answer.ENTER:
                    self.assertEqual(wanted, one.step)
                    opened.append(next(connections))
                    one.enter(reader, opened[-1])
            elif what == 2 and opened:
                one.leave(rng.choice(opened))
            self.check(before, one)

    def check(self, before: gate.Gate, one: gate.Gate) -> None:
        self.assertLessEqual(len(one.readers), one.max_readers)
        self.assertTrue(all(one.readers.values()), "a reader without a connection")
        if one.state in (State.CLOSED, State.STAGING):
            self.assertFalse(one.readers)
        if one.state is State.DRAINING and before.state is State.DRAINING:
            self.assertLessEqual(one.readers.keys(), before.readers.keys())


class Shell(GuardedTestCase):
    """``ServingGate`` with real threads."""

    def setUp(self) -> None:
        super().setUp()
        self.gate = gate.ServingGate(2)
        self.threads: list[threading.Thread] = []
        self.addCleanup(self.join)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)

    def start(self, job: Callable[[], object]) -> list[object]:
        """Run ``job`` on a thread; its result, once there is one."""
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(job()))
        self.threads.append(thread)
        thread.start()
        return found

    def serve(self, step: int = 1, what: str = "state") -> None:
        self.gate.stage(step)
        self.gate.publish(what)

    def enter(
        self, step: int = 1, reader: str = "a", connection: int = 1, wait_s: float = 0.0
    ) -> tuple[object, object, str]:
        return self.gate.enter(step, reader, connection, lambda: self.cuts.append(connection), wait_s)

    cuts: list[int]

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        self.cuts = []
        return super().run(result)

    def waiting(self, count: int = 1) -> None:
        """Wait until ``count`` threads wait for the gate to change."""
        wait_until(lambda: len(self.gate._changed._waiters) >= count, f"{count} waiting")

    def state(self) -> gate.State:
        return self.gate._gate.state

    def test_a_reader_gets_what_was_published(self) -> None:
        self.serve()
        self.assertEqual(self.enter(), ("state", Answer.ENTER, ""))
        self.assertEqual(self.enter(connection=2), ("state", Answer.ENTER, ""))

    def test_reasons(self) -> None:
        self.assertEqual(self.enter(), (None, Answer.WAIT, "the donor is closed"))
        self.gate.stage(1)
        self.assertEqual(self.enter(), (None, Answer.WAIT, "the donor is staging"))
        self.gate.publish("state")
        self.assertEqual(self.enter(step=7), (None, Answer.NEVER, "step 1 is served here, not step 7"))
        self.enter(reader="a", connection=1)
        self.enter(reader="b", connection=2)
        self.assertEqual(
            self.enter(reader="c", connection=3)[1:], (Answer.WAIT, "2 readers (max_readers) are being served")
        )

    def test_a_refusal_reaches_those_who_wait_at_once(self) -> None:
        self.gate.stage(5)
        told = self.start(lambda: self.enter(step=5, wait_s=LONG_WAIT_S))
        self.waiting()
        self.gate.refuse("LayoutError: ['f']: a lambda")
        wait_until(lambda: told, "the reader is told")
        self.assertEqual(told, [(None, Answer.NEVER, "LayoutError: ['f']: a lambda")])
        self.assertIs(self.state(), State.CLOSED)

    def test_a_refusal_is_final_whatever_its_text(self) -> None:
        self.gate.stage(5)
        self.gate.refuse("wait: this is the text of an error")
        self.assertEqual(self.enter(step=5), (None, Answer.NEVER, "wait: this is the text of an error"))

    def test_a_publish_wakes_those_who_wait(self) -> None:
        told = [self.start(lambda n=n: self.enter(reader=str(n), connection=n, wait_s=LONG_WAIT_S)) for n in range(2)]
        self.waiting(2)
        self.serve()
        wait_until(lambda: all(told), "both are in")
        self.assertEqual(told, [[("state", Answer.ENTER, "")], [("state", Answer.ENTER, "")]])

    def test_a_place_that_becomes_free_wakes_who_waits_for_it(self) -> None:
        self.serve()
        self.enter(reader="a", connection=1)
        self.enter(reader="b", connection=2)
        told = self.start(lambda: self.enter(reader="c", connection=3, wait_s=LONG_WAIT_S))
        self.waiting()
        self.gate.leave(1)
        wait_until(lambda: told, "the third is in")
        self.assertEqual(told, [("state", Answer.ENTER, "")])

    def test_allow_opens_again_and_wakes(self) -> None:
        self.serve()
        self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 0)
        told = self.start(lambda: self.enter(wait_s=LONG_WAIT_S))
        self.waiting()
        self.gate.allow(1)
        wait_until(lambda: told, "the reader is in")
        self.assertEqual(told, [("state", Answer.ENTER, "")])
        self.gate.allow(1)  # again is a no-op

    def test_allow_of_what_was_not_published(self) -> None:
        with self.assertRaisesRegex(errors.StateError, "nothing was published"):
            self.gate.allow(1)
        self.serve(step=1)
        with self.assertRaisesRegex(errors.StateError, r"allow_checkpoint\(2\): step 1 was published"):
            self.gate.allow(2)
        self.gate.close(deadline.Deadline(0.0))
        self.gate.drop()
        with self.assertRaises(errors.StateError):
            self.gate.allow(1)
        self.gate.stage(2)
        self.gate.refuse("no")
        with self.assertRaises(errors.StateError):
            self.gate.allow(2)

    def test_stage_over_readers_is_refused(self) -> None:
        self.serve()
        with self.assertRaises(errors.StateError):
            self.gate.stage(2)
        self.assertEqual(self.enter(), ("state", Answer.ENTER, ""))

    def test_close_waits_for_who_is_in(self) -> None:
        self.serve()
        self.enter(connection=1)
        self.enter(connection=2)
        late = self.start(lambda: self.gate.close(deadline.Deadline(LONG_WAIT_S)))
        self.waiting()
        self.assertEqual(self.enter(reader="new", connection=3)[1:], (Answer.WAIT, "the donor is draining"))
        self.assertEqual(self.enter(connection=4), ("state", Answer.ENTER, ""))  # one more connection of who is in
        for connection in (1, 2, 4):
            self.assertEqual(late, [])
            self.gate.leave(connection)
        wait_until(lambda: late, "closed")
        self.assertEqual((late, self.cuts, self.state()), ([0], [], State.CLOSED))

    def test_close_cuts_who_is_left_at_the_deadline(self) -> None:
        self.serve()
        self.enter(reader="a", connection=1)
        self.enter(reader="a", connection=2)
        self.enter(reader="b", connection=3)
        began_s = time.monotonic()
        self.assertEqual(self.gate.close(deadline.Deadline(0.05)), 2)
        took_s = time.monotonic() - began_s
        self.assertGreaterEqual(took_s, 0.05)
        self.assertLess(took_s, WAIT_S)
        self.assertEqual(sorted(self.cuts), [1, 2, 3])
        for connection in (1, 2, 3):
            self.gate.leave(connection)  # as each handler does when its connection ends
        self.serve(step=2, what="next")
        self.assertEqual(self.enter(step=2, connection=4), ("next", Answer.ENTER, ""))

    def test_a_cut_that_fails_does_not_keep_the_gate_open(self) -> None:
        self.serve()

        def broken() -> None:
            raise OSError("already gone")

        self.gate.enter(1, "a", 1, broken, 0.0)
        self.enter(reader="b", connection=2)
        self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 2)
        self.assertEqual((self.cuts, self.state()), ([2], State.CLOSED))

    def test_close_in_every_state(self) -> None:
        self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 0)
        self.assertIs(self.state(), State.CLOSED)
        self.gate.stage(1)
        self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 0)
        self.assertIs(self.state(), State.STAGING)
        self.gate.publish("state")
        for _ in range(2):
            self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 0)
            self.assertIs(self.state(), State.CLOSED)

    def test_two_close_at_once(self) -> None:
        self.serve()
        self.enter()
        late = [self.start(lambda: self.gate.close(deadline.Deadline(LONG_WAIT_S))) for _ in range(2)]
        self.waiting(2)
        self.gate.leave(1)
        wait_until(lambda: all(late), "both are back")
        self.assertEqual((late, self.state()), ([[0], [0]], State.CLOSED))

    def test_close_does_not_take_the_next_state_for_its_own(self) -> None:
        self.serve()
        self.enter()
        late = self.start(lambda: self.gate.close(deadline.Deadline(LONG_WAIT_S)))
        self.waiting()
        with self.gate._changed:  # another thread closes, and offers the next state, before the first one wakes
            self.gate.leave(1)
            self.gate.close(deadline.Deadline(0.0))
            self.serve(step=2, what="next")
            self.enter(step=2, reader="b", connection=2)
        wait_until(lambda: late, "the first is back")
        self.assertEqual((late, self.cuts, self.state()), ([0], [], State.SERVING))
        self.assertEqual(self.gate.close(deadline.Deadline(0.0)), 1)

    def test_many_readers_and_a_donor_that_closes(self) -> None:
        steps, readers = 12, 6
        inside: set[int] = set()
        lock = threading.Lock()
        wrong: list[str] = []
        over = threading.Event()

        def read(number: int) -> None:
            rng = random.Random(number)
            connection = 1000 * (number + 1)
            while not over.is_set():
                connection += 1
                step = self.gate._gate.step
                if step is None:
                    continue
                served, *_ = self.gate.enter(step, f"r{number}", connection, lambda: None, 0.002)
                if served is not None:
                    with lock:
                        inside.add(number)
                        if len(inside) > 2:
                            wrong.append(f"{len(inside)} inside")
                    if served != f"state {step}":
                        wrong.append(f"asked for {step}, got {served}")
                    over.wait(rng.random() * 0.002)
                    with lock:
                        inside.discard(number)
                self.gate.leave(connection)

        for number in range(readers):
            self.start(lambda number=number: read(number))
        try:
            for step in range(steps):
                self.serve(step, f"state {step}")
                over.wait(0.005)
                late = self.gate.close(deadline.Deadline(LONG_WAIT_S))
                with lock:
                    if late or inside:
                        wrong.append(f"{late} late, {inside} inside after close")
        finally:
            over.set()
        self.join()
        self.assertEqual(wrong, [])
