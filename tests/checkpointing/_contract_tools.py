# SPDX-License-Identifier: BSD-3-Clause
"""What the contract's tests stand on: a donor and a receiver, and one move between them."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests import load
from tests._support import SCALE, WAIT_S
from tests.checkpointing import _transport_states as states
from tests.checkpointing._transport_states import noise
from tests.checkpointing._wire import OneThread

errors = load("_errors")

Transport = Any


class Sending:
    """``send_checkpoint`` on a thread."""

    def __init__(self, donor: Transport, step: int, state: Any, timeout: Any = None) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(donor, step, state, timeout), daemon=True)
        self._thread.start()

    def _run(self, donor: Transport, step: int, state: Any, timeout: Any) -> None:
        try:
            donor.send_checkpoint([1], step, state, timeout)
        except BaseException as e:
            self.error = e

    def join(self) -> Sending:
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            raise AssertionError(f"send_checkpoint() did not return within {WAIT_S:g} s")
        return self

    def finish(self) -> None:
        """Wait for the end, and raise what it raised."""
        self.join()
        if self.error is not None:
            raise self.error


class ContractTools(OneThread):
    """Mix into a ``GuardedTestCase``."""

    # whether send_checkpoint() returns only when the receiver has everything
    send_waits_for_receiver = False
    # names among the fresh states, where a format of another's carries less than ours
    not_carried: frozenset[str] = frozenset()

    def make_pair(self, **options: Any) -> tuple[Transport, Transport]:
        """A donor and a receiver that can reach each other; the caller shuts them down.

        Options: ``timeout`` for both, ``state_dict`` for the receiver.
        """
        raise NotImplementedError

    def pair(self, **options: Any) -> tuple[Transport, Transport]:
        donor, receiver = self.make_pair(**{"timeout": 20 * SCALE, **options})
        self.addCleanup(donor.shutdown)
        self.addCleanup(receiver.shutdown)
        return donor, receiver

    def move(self, pair: tuple[Transport, Transport], state: Any, step: int = 7) -> Any:
        """Move ``state`` once, and be ready for the next."""
        donor, receiver = pair
        sending = Sending(donor, step, state)
        result = receiver.recv_checkpoint(0, donor.metadata(), step)
        sending.finish()
        donor.disallow_checkpoint()
        return result

    def heal(self, state: Any, own: Any = None, **options: Any) -> Any:
        if own is not None:
            options["state_dict"] = lambda: own
        return self.move(self.pair(**options), state)

    def assert_same(self, a: Any, b: Any) -> None:
        found = list(states.differences(a, b))
        self.assertFalse(found, "\n" + "\n".join(found[:20]))

    def refused(self, state: Any, own: Any = None) -> tuple[BaseException | None, BaseException]:
        """Try to move ``state``; the errors of both sides, and that the receiver's came within a second."""
        pair = self.pair(**({} if own is None else {"state_dict": lambda: own}))
        sending = Sending(pair[0], 7, state)
        if not self.send_waits_for_receiver:
            sending.join()
        began_s = time.monotonic()
        with self.assertRaises(errors.TransferError) as caught:
            pair[1].recv_checkpoint(0, pair[0].metadata(), 7)
        self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)
        sending.join()
        pair[0].disallow_checkpoint()
        # it failed, and both can be used again
        pair[1].__dict__["_state_dict"] = None
        self.assert_same({"x": noise(3)}, self.move(pair, {"x": noise(3)}, step=8))
        return sending.error, caught.exception
