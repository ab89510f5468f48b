# SPDX-License-Identifier: BSD-3-Clause
"""The link. What must hold, whatever happens in whatever order:

every op that was submitted settles exactly once, and configure is answered exactly once; what is over stays over, and
what ended it first is what everybody is told; the child is killed before anything fails; nothing crosses an epoch; a
pair of state and event that is not in the table changes nothing, or breaks the link where the child should know better.
"""

from __future__ import annotations

import pickle
import random
import unittest
from collections.abc import Callable
from typing import Any

from tests import load

errors = load("_errors")
link = load("process_group._link")
says = load("process_group._messages")

State, Event = link.State, link.Event
Send, Settle, Kill, Configured = link.Send, link.Settle, link.Kill, link.Configured

CALLERS = {Event.SUBMIT, Event.ABORT, Event.CLOSE, Event.SUPERSEDE}
CHILDS = {Event.HELLO, Event.READY, Event.CONFIGURE_FAILED, Event.REPLY, Event.PHASE}
WATCHERS = {Event.BREAK, Event.TIMEOUT}


def configure(epoch: int = 3) -> Any:
    return says.Configure(epoch, "gloo", "host:29500/x", 0, 2, 30.0, ())


def submit(one: Any, name: str = "allreduce", after: int = -1) -> int:
    op_id, effects = one.submit(name, 4, ((),), (), 30.0, after)
    [send] = effects
    if type(send) is not Send or type(send.message) is not says.Run or send.message.op_id != op_id:
        raise AssertionError(effects)
    return int(op_id)


def link_in(state: Any, epoch: int = 3) -> Any:
    """A link that came to ``state`` as one does; with one pending op when it is up."""
    one = link.Link(configure(epoch))
    if state is State.STARTING:
        return one
    one.received(says.Hello(4242), epoch)
    if state is State.CONFIGURING:
        return one
    one.received(says.Ready(epoch), epoch)
    submit(one, "broadcast")
    if state is State.BROKEN:
        one.broke(EOFError("the pipe has ended"), "exit code 3")
    elif state is State.CLOSED:
        one.close()
    elif state is State.SUPERSEDED:
        one.supersede()
    return one


FIRE: dict[Any, Callable[[Any], Any]] = {
    Event.HELLO: lambda one: one.received(says.Hello(4242), one.epoch),
    Event.READY: lambda one: one.received(says.Ready(one.epoch), one.epoch),
    Event.CONFIGURE_FAILED: lambda one: one.received(says.ConfigureFailed("RuntimeError", "no", ""), one.epoch),
    Event.REPLY: lambda one: one.received(says.Done(0), one.epoch),
    Event.PHASE: lambda one: one.received(says.Phase("rendezvous"), one.epoch),
    Event.BREAK: lambda one: one.broke(EOFError("the pipe has ended")),
    Event.TIMEOUT: lambda one: one.timed_out(0, 30.0, 30.1),
    Event.SUBMIT: lambda one: one.submit("allreduce", 4, ((),), (), 30.0),
    Event.ABORT: lambda one: one.abort("a test"),
    Event.CLOSE: lambda one: one.close(),
    Event.SUPERSEDE: lambda one: one.supersede(),
}


class Table(unittest.TestCase):
    def test_every_pair(self) -> None:
        self.assertEqual(CALLERS | CHILDS | WATCHERS, set(Event))
        for state in State:
            for event in Event:
                with self.subTest(state=state.name, event=event.name):
                    one = link_in(state)
                    self.assertIs(one.state, state)
                    if (state, event) in link.TRANSITIONS:
                        self.listed(one, event)
                    elif event in CALLERS:
                        self.refused(one, event)
                    elif event in WATCHERS or state in link.OVER:
                        self.late(one, event)
                    else:
                        self.violated(one, event)

    def listed(self, one: Any, event: Any) -> None:
        before = one.state
        effects = FIRE[event](one)
        self.assertIs(one.state, link.TRANSITIONS[before, event])
        self.assertEqual(one.dropped, 0)
        if before in link.OVER:
            self.assertEqual(effects, [])

    def refused(self, one: Any, event: Any) -> None:
        before = one.state
        with self.assertRaises(errors.FtliteError) as caught:
            FIRE[event](one)
        self.assertIs(one.state, before)
        if before not in link.OVER:
            self.assertIs(type(caught.exception), errors.StateError)
            self.assertEqual((caught.exception.state, caught.exception.attempted), (before.value, "allreduce"))

    def late(self, one: Any, event: Any) -> None:
        before = one.state
        self.assertEqual(FIRE[event](one), [])
        self.assertIs(one.state, before)
        self.assertEqual(one.dropped, 1)

    def violated(self, one: Any, event: Any) -> None:
        effects = FIRE[event](one)
        self.assertIs(one.state, State.BROKEN)
        self.assertIs(type(one.error), errors.ProtocolError)
        self.assertIs(type(effects[0]), Kill)

    def test_every_state_is_reached_and_the_last_ones_are_never_left(self) -> None:
        reached = {State.STARTING}
        while more := {to for (state, _), to in link.TRANSITIONS.items() if state in reached} - reached:
            reached |= more
        self.assertEqual(reached, set(State))
        for (state, _), to in link.TRANSITIONS.items():
            if state in link.OVER:
                self.assertIs(to, state)
        for state in set(State) - link.OVER:
            exits = {to for (before, _), to in link.TRANSITIONS.items() if before is state} & link.OVER
            self.assertEqual(exits, link.OVER)

    def test_what_only_the_trainer_says_is_no_word_of_the_childs(self) -> None:
        trainers = [configure(), says.Run(0, -1, 0, 1.0, (), ()), says.Segment(0, 1), says.DropSegment(0)]
        for message in [*trainers, says.Bye()]:
            one = link_in(State.UP)
            one.received(message, one.epoch)
            self.assertIn(f"{type(message).__name__} while it was up", str(one.error))


class Life(unittest.TestCase):
    def test_from_the_start_to_shutdown(self) -> None:
        one = link.Link(configure())
        self.assertEqual((one.phase, one.pid, one.last_op), ("starting", None, ""))
        self.assertEqual(one.received(says.Hello(4242), 3), [Send(configure())])
        self.assertEqual((one.phase, one.pid), ("configuring", 4242))
        self.assertEqual(one.received(says.Phase("rendezvous"), 3), [])
        self.assertEqual(one.phase, "rendezvous")
        self.assertEqual(one.received(says.Ready(3), 3), [Configured(None)])
        self.assertEqual(one.phase, "up")
        self.assertEqual([submit(one), submit(one, "barrier")], [0, 1])
        self.assertEqual((one.active, one.last_op), (2, "barrier (op 1)"))
        self.assertEqual(one.received(says.Done(1), 3), [Settle(1, None)])
        self.assertEqual(one.received(says.Done(0, 5), 3), [Settle(0, None, 5)])
        self.assertEqual(one.active, 0)
        self.assertEqual(one.close(), [Send(says.Bye())])
        self.assertEqual(one.close(), [])
        self.assertIsNone(one.error)

    def test_an_op_says_what_it_is_told(self) -> None:
        one = link_in(State.UP)
        tensor = ("t", 0, 64, 6, (2,))
        _, [send] = one.submit("reduce", 5, ((tensor,),), (0, 1), 2.5, 0)
        self.assertEqual(send.message, says.Run(1, 0, 5, 2.5, ((tensor,),), (0, 1)))

    def test_after_is_left_out_once_that_op_has_settled(self) -> None:
        one = link_in(State.UP)
        _, [send] = one.submit("allreduce", 4, (), (), 30.0, 0)
        self.assertEqual(send.message.after, 0)
        one.received(says.Done(0), 3)
        _, [send] = one.submit("allreduce", 4, (), (), 30.0, 0)
        self.assertEqual(send.message.after, -1)

    def test_an_op_that_fails_alone_leaves_the_others(self) -> None:
        one = link_in(State.UP)
        submit(one)
        [settle] = one.received(says.OpFailed(0, "ValueError", "bad root", "Traceback ...", False), 3)
        self.assertIs(type(settle.outcome), errors.RemoteFailure)
        text = str(settle.outcome)
        for part in ("broadcast (op 0)", "epoch 3", "pid 4242", "ValueError: bad root", "Traceback ..."):
            self.assertIn(part, text)
        self.assertEqual((one.state, one.active, one.error), (State.UP, 1, None))

    def test_an_op_that_the_backend_cannot_do(self) -> None:
        one = link_in(State.UP)
        [settle] = one.received(says.Unsupported(0, "gloo cannot do this with float8"), 3)
        self.assertIs(type(settle.outcome), errors.UnsupportedOp)
        self.assertEqual((settle.outcome.backend, settle.outcome.op), ("gloo", "broadcast"))
        self.assertIn("float8", str(settle.outcome))
        self.assertIs(one.state, State.UP)

    def test_late_replies_are_dropped_and_counted(self) -> None:
        one = link_in(State.UP)
        one.received(says.Done(0), 3)
        again = (says.Done(0), says.OpFailed(0, "E", "", "", False), says.Unsupported(0, ""))
        for number, message in enumerate(again, 1):
            self.assertEqual(one.received(message, 3), [])
            self.assertEqual(one.dropped, number)
        self.assertEqual(one.timed_out(0, 1.0, 1.1), [])
        self.assertIs(one.state, State.UP)

    def test_a_reply_to_what_was_never_asked_breaks_the_link(self) -> None:
        for message in (
            says.Done(1),
            says.Done(-1),
            says.OpFailed(1, "E", "", "", False),
            says.OpFailed(1, "E", "", "", True),
            says.Unsupported(7, ""),
        ):
            one = link_in(State.UP)
            kill, settle = one.received(message, 3)
            self.assertIs(type(kill), Kill)
            self.assertIs(type(settle.outcome), errors.ProtocolError)
            self.assertIn(f"op {message.op_id}, and 1 were submitted", str(one.error))

    def test_ready_for_another_epoch_breaks_the_link(self) -> None:
        one = link_in(State.CONFIGURING)
        kill, configured = one.received(says.Ready(2), 3)
        self.assertIs(type(kill), Kill)
        self.assertIs(type(configured.outcome), errors.ProtocolError)


class Ends(unittest.TestCase):
    """Each way to end: the class, the words, the chain, the order."""

    def ends(self, effects: list[Any], one: Any, expected: type, *words: str) -> list[Exception]:
        """Two ops were pending: check what they are told, and what the link keeps."""
        self.assertEqual([type(effect) for effect in effects], [Kill, Settle, Settle])
        self.assertEqual([effect.op_id for effect in effects[1:]], [0, 1])
        outcomes = [effect.outcome for effect in effects[1:]]
        ended = outcomes[0].__cause__
        for outcome, name in zip(outcomes, ("broadcast (op 0)", "allreduce (op 1)")):
            self.assertIs(type(outcome), expected)
            self.assertIs(outcome.__cause__, ended)
            self.assertTrue(str(outcome).startswith(f"{name}: "), outcome)
            for word in ("epoch 3", "pid 4242", *words):
                self.assertIn(word, str(outcome))
                self.assertIn(word, str(ended))
        self.assertIsNot(outcomes[0], outcomes[1])
        self.assertEqual(one.active, 0)
        self.asked_later(one, expected, ended)
        return outcomes

    def asked_later(self, one: Any, expected: type, ended: Any) -> None:
        """Whoever asks later is told the same, at once; and nothing brings it back."""
        with self.assertRaises(expected) as caught:
            one.submit("barrier", 1, (), (), 30.0)
        self.assertIs(type(caught.exception), expected)
        self.assertIs(caught.exception.__cause__, ended)
        self.assertIn("barrier (epoch 3): ", str(caught.exception))
        state = one.state
        for event in set(Event) - {Event.SUBMIT}:
            self.assertEqual(FIRE[event](one), [])
            self.assertIs(one.state, state)
        self.assertIs(one.error, ended if state is State.BROKEN else None)

    def up(self) -> Any:
        one = link_in(State.UP)
        submit(one)
        return one

    def test_the_child_dies(self) -> None:
        one = self.up()
        one.received(says.Phase("in gloo"), 3)
        cause = EOFError("the pipe has ended")
        words = ("killed by SIGSEGV", "phase: in gloo", "last op: allreduce (op 1)", "pending: 2", "terminate called")
        effects = one.broke(cause, "killed by SIGSEGV", "terminate called\n")
        self.ends(effects, one, errors.ChildDied, *words)
        self.assertIs(one.error.__cause__, cause)

    def test_of_a_long_stderr_an_op_has_the_end_and_the_cause_all(self) -> None:
        one = self.up()
        [_, settle, _] = one.broke(EOFError(), "exit code 3", "first\n" + "x" * 8000 + "\nlast")
        self.assertIn("first", str(one.error))
        self.assertNotIn("first", str(settle.outcome))
        self.assertIn("\nlast", str(settle.outcome))
        self.assertLess(len(str(settle.outcome)), 1500)
        self.assertIn("exit code 3", str(settle.outcome))

    def test_a_cause_without_words_has_its_class(self) -> None:
        one = self.up()
        self.ends(one.broke(EOFError()), one, errors.ChildDied, "EOFError")

    def test_a_write_that_did_not_end_in_time(self) -> None:
        late = errors.DeadlineExceeded("writing to the pipe", limit_s=5.0, elapsed_s=5.1)
        broken = ValueError(str(late))
        broken.__cause__ = late
        one = self.up()
        outcomes = self.ends(one.broke(broken), one, errors.DeadlineExceeded, "limit 5 s")
        self.assertEqual((outcomes[0].limit_s, outcomes[0].elapsed_s), (5.0, 5.1))
        self.assertIs(one.error.__cause__, broken)

    def test_a_frame_that_is_none(self) -> None:
        one = self.up()
        self.ends(one.broke(errors.ProtocolError("Done.op_id is a str")), one, errors.ProtocolError, "Done.op_id")

    def test_causes_in_a_circle(self) -> None:
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        one = self.up()
        self.ends(one.broke(first), one, errors.ChildDied, "first")

    def test_the_child_says_that_it_is_broken(self) -> None:
        one = self.up()
        effects = one.received(says.Broken("MemoryError", "no more", "Traceback (most recent\n  in loop"), 3)
        self.ends(effects, one, errors.RemoteFailure, "MemoryError: no more", "in loop")

    def test_an_op_breaks_the_group(self) -> None:
        one = self.up()
        effects = one.received(says.OpFailed(1, "RuntimeError", "connection closed by peer", "in allreduce", True), 3)
        words = ("allreduce (op 1) failed", "connection closed by peer", "in allreduce", "pending: 2")
        self.ends(effects, one, errors.RemoteFailure, *words)

    def test_an_op_that_has_settled_breaks_the_group(self) -> None:
        one = self.up()
        self.assertEqual(submit(one), 2)
        one.received(says.Done(2), 3)
        effects = one.received(says.OpFailed(2, "RuntimeError", "late", "", True), 3)
        self.ends(effects, one, errors.RemoteFailure, "an op that had settled (op 2)")

    def test_an_op_reaches_the_groups_timeout(self) -> None:
        one = self.up()
        words = ("allreduce (op 1) in the gloo child", "30.1", "limit 30 s", "call configure()")
        outcomes = self.ends(one.timed_out(1, 30.0, 30.1), one, errors.DeadlineExceeded, *words)
        self.assertEqual((outcomes[0].limit_s, outcomes[0].elapsed_s), (30.0, 30.1))
        self.assertIsInstance(outcomes[0], TimeoutError)

    def test_abort(self) -> None:
        for reason, words in (
            ("the peer r1 is dead", "was aborted: the peer r1 is dead"),
            (None, "no reason was given"),
            (KeyError("x"), "KeyError: 'x'"),
        ):
            with self.subTest(words):
                one = self.up()
                self.ends(one.abort(reason), one, errors.ChildError, words)
                self.assertIs(one.error.__cause__, reason if isinstance(reason, Exception) else None)

    def test_shutdown_with_ops_pending(self) -> None:
        one = self.up()
        self.ends(one.close(), one, errors.StateError, "was shut down")
        self.assertIs(one.state, State.CLOSED)

    def test_shutdown_of_an_idle_child(self) -> None:
        one = link_in(State.UP)
        one.received(says.Done(0), 3)
        self.assertEqual(one.close(), [Send(says.Bye())])
        with self.assertRaisesRegex(errors.StateError, r"barrier \(epoch 3\): .* was shut down"):
            one.submit("barrier", 1, (), (), 30.0)

    def test_a_later_configure(self) -> None:
        one = self.up()
        outcomes = self.ends(one.supersede(), one, errors.StateError, "is stale")
        self.assertEqual(outcomes[0].state, "superseded")

    def test_before_it_is_up_configure_is_told(self) -> None:
        late = errors.DeadlineExceeded("the rendezvous", limit_s=1.0, elapsed_s=1.1)
        cases: list[tuple[Callable[[Any], list[Any]], type, type]] = [
            (lambda one: one.broke(EOFError(), "exit code 1"), errors.ChildStartFailed, errors.ChildDied),
            (lambda one: one.broke(late), errors.DeadlineExceeded, errors.DeadlineExceeded),
            (lambda one: one.broke(errors.ChildStartFailed("no")), errors.ChildStartFailed, errors.ChildStartFailed),
            (lambda one: one.abort("enough"), errors.ChildError, errors.ChildError),
            (lambda one: one.close(), errors.StateError, errors.StateError),
            (lambda one: one.supersede(), errors.StateError, errors.StateError),
            (lambda one: one.received(says.Broken("E", "no", ""), 3), errors.RemoteFailure, errors.RemoteFailure),
            (lambda one: one.received(says.Done(0), 3), errors.ProtocolError, errors.ProtocolError),
        ]
        for number, (end, *expected) in enumerate(cases):
            for state, kind in zip((State.STARTING, State.CONFIGURING), expected):
                with self.subTest(number=number, state=state.name):
                    one = link_in(state)
                    kill, configured = end(one)
                    self.assertEqual([type(kill), type(configured)], [Kill, Configured])
                    self.assertIs(type(configured.outcome), kind)
                    self.assertTrue(str(configured.outcome).startswith("configure (epoch 3): "))
                    self.asked_later(one, kind, configured.outcome.__cause__)

    def test_configure_fails_in_the_child(self) -> None:
        one = link_in(State.CONFIGURING)
        _, configured = one.received(says.ConfigureFailed("ValueError", "no backend 'x'", "in make"), 3)
        self.assertIs(type(configured.outcome), errors.RemoteFailure)
        for word in ("ValueError: no backend 'x'", "pid 4242", "in make", "phase: configuring"):
            self.assertIn(word, str(configured.outcome))

    def test_the_errors_survive_pickling(self) -> None:
        late = errors.DeadlineExceeded("x", limit_s=1.0, elapsed_s=2.0)
        for cause in (EOFError("x"), late, errors.ProtocolError("y"), errors.RemoteFailure("z")):
            one = self.up()
            for outcome in (effect.outcome for effect in one.broke(cause)[1:]):
                again = pickle.loads(pickle.dumps(outcome))
                self.assertEqual((type(again), str(again)), (type(outcome), str(outcome)))
                self.assertEqual(again.__dict__, outcome.__dict__)


class Watched:
    """A link and all that it ever said, checked at each step."""

    def __init__(self, test: unittest.TestCase, epoch: int) -> None:
        self.test = test
        self.link = link.Link(configure(epoch))
        self.epoch = epoch
        self.submitted: set[int] = set()
        self.settled: dict[int, Exception | None] = {}
        self.configured: list[Exception | None] = []
        self.over: Any = None
        self.error: Exception | None = None

    def perform(self, effects: list[Any]) -> None:
        test, one = self.test, self.link
        killed = False
        for place, effect in enumerate(effects):
            if isinstance(effect, Kill):
                test.assertEqual(place, 0, "the kill comes first")
                killed = True
            elif isinstance(effect, Settle):
                test.assertIn(effect.op_id, self.submitted)
                test.assertNotIn(effect.op_id, self.settled, "settled twice")
                self.settled[effect.op_id] = effect.outcome
            elif isinstance(effect, Configured):
                self.configured.append(effect.outcome)
        if self.over is None and one.state in link.OVER:
            self.over, self.error = one.state, one.error
            test.assertTrue(killed or effects == [Send(says.Bye())], "a child that nobody ends")
            test.assertEqual(set(self.settled), self.submitted, "pending at the end")
            test.assertEqual(one.error is not None, one.state is State.BROKEN)
        elif self.over is not None:
            test.assertEqual(effects, [], "an effect after the end")
        if self.over is not None:
            test.assertIs(one.state, self.over)
            test.assertIs(one.error, self.error)
        test.assertEqual(one.active, len(self.submitted) - len(self.settled))

    def finish(self) -> None:
        self.perform(self.link.close())
        self.test.assertEqual(set(self.settled), self.submitted)
        self.test.assertEqual(len(self.configured), 1)


class Schedules(unittest.TestCase):
    """A user, a child that is sometimes wrong, a watcher and a clock, each doing what it may at random."""

    def test_the_invariants_hold(self) -> None:
        ended = dict.fromkeys(link.OVER, 0)
        for seed in range(10_000):
            rng = random.Random(seed)
            one, other = Watched(self, 1), Watched(self, 2)
            try:
                for _ in range(rng.randint(1, 30)):
                    self.step(rng, one, other)
                    one, other = other, one
                for both in (one, other):
                    both.finish()
                    ended[both.over] += 1
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        # the schedules reach all of it, and do not all end at once
        self.assertGreater(min(ended.values()), 1000, ended)

    def step(self, rng: random.Random, one: Watched, other: Watched) -> None:
        what = rng.random()
        if what < 0.4:
            self.submit(rng, one)
        elif what < 0.92:
            message = self.message(rng, one)
            before = other.link.state, other.link.active, other.link.dropped
            # another epoch's link does not care what it is
            other.perform(other.link.received(message, one.epoch))
            self.assertEqual((other.link.state, other.link.active, other.link.dropped), (*before[:2], before[2] + 1))
            one.perform(one.link.received(message, one.epoch))
        else:
            one.perform(self.end(rng, one))

    def submit(self, rng: random.Random, one: Watched) -> None:
        try:
            op_id, [send] = one.link.submit("allreduce", 4, (), (), 1.0, rng.randint(-1, 5))
        except errors.FtliteError as error:
            self.assertIsNot(one.link.state, State.UP)
            if one.link.state is State.BROKEN:
                self.assertIs(type(error), type(one.link.error))
                self.assertIs(error.__cause__, one.link.error)
            else:
                self.assertIs(type(error), errors.StateError)
            return
        self.assertEqual(op_id, len(one.submitted))
        after = send.message.after
        self.assertTrue(after == -1 or (after in one.submitted and after not in one.settled))
        one.submitted.add(op_id)

    def message(self, rng: random.Random, one: Watched) -> Any:
        """What is due, mostly."""
        if rng.random() < 0.97:
            if one.link.state is State.STARTING:
                return says.Hello(1000 + one.epoch)
            if one.link.state is State.CONFIGURING:
                failed = rng.random() < 0.1
                return says.ConfigureFailed("E", "no", "") if failed else says.Ready(one.epoch)
            op_id = rng.randrange(len(one.submitted)) if one.submitted else -1
            if op_id >= 0:
                return rng.choice(
                    [says.Done(op_id)] * 6
                    + [
                        says.OpFailed(op_id, "E", "no", "", rng.random() < 0.1),
                        says.Unsupported(op_id, "no"),
                        says.Phase("x"),
                    ]
                )
            return says.Phase("x")
        return rng.choice(
            [
                says.Hello(1),
                says.Ready(rng.randint(1, 2)),
                says.Done(len(one.submitted) + rng.randint(0, 2)),
                says.Broken("E", "no", ""),
                says.ConfigureFailed("E", "no", ""),
                says.Bye(),
            ]
        )

    def end(self, rng: random.Random, one: Watched) -> list[Any]:
        late = rng.randint(-1, len(one.submitted) + 1)
        ways: list[Callable[[], list[Any]]] = [
            lambda: one.link.broke(EOFError("end"), "exit code 3", "tail"),
            lambda: one.link.broke(errors.ProtocolError("a frame")),
            lambda: one.link.timed_out(late, 1.0, 1.1),
            lambda: one.link.abort("enough"),
            lambda: one.link.close(),
            lambda: one.link.supersede(),
        ]
        return rng.choice(ways)()


if __name__ == "__main__":
    unittest.main()
