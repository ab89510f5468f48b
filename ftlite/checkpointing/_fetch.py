# SPDX-License-Identifier: BSD-3-Clause
"""Fetching the ranges of a state over several connections at once.

Each stream takes a range from the queue, receives it to where the plan says, checks it, and takes the next. A
stream whose connection breaks goes on with the same range, with what it has, over a new connection; one that
gives up puts the range back for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._deadline import Deadline
from .._errors import FtliteError, IncompleteTransfer, IntegrityError, NotServing
from ._client import CHANGED, Broken, Later, Link, lost
from ._device import pinned
from ._interval import Interval, spread
from ._layout import FlatSpace
from ._manifest import Manifest
from ._memory import view_of
from ._plan import Plan
from ._range_queue import Range, RangeQueue
from ._watch import TICK_S, Watch

# What is received before it is added to the sum: enough for few calls, little enough to be still in the cache.
BLOCK_BYTES = 1 << 20
# A donor that fails so many times in a row without a byte in between is gone: a process that was killed refuses at
# once, and the caller wants to know within two seconds.
TRIES = 4
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5


class Transfer:
    """One receive of ``manifest`` over ``links``."""

    def __init__(self, links: Sequence[Link], manifest: Manifest, plan: Plan, deadline: Deadline) -> None:
        self._links = links
        self._manifest = manifest
        self._plan = plan
        self._deadline = deadline
        self._flat = manifest.flat()
        self._queue = RangeQueue(manifest.ends)
        self._watch = Watch(links, deadline)
        self._streams = len(links)

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Fetch everything, or raise the first failure with how far it got.

        Raises:
            TransferError, DeadlineExceeded: ``destination_dirty`` says whether own tensors were written to.
        """

        def tick() -> None:
            if progress is not None:
                progress(self._done_bytes(), self._queue.total)

        try:
            self._watch.run([lambda link=link: self._stream(link) for link in self._links], tick, self._late)  # type: ignore[misc]
        except FtliteError as e:
            self._plan.mark(e, self._done_bytes(), self._queue.total)
            raise

    def _done_bytes(self) -> int:
        with self._watch.changed:
            return self._queue.done_bytes

    def _late(self) -> FtliteError:
        return self._deadline.exceeded(
            f"receiving step {self._manifest.step} from {self._links[0].donor.shown}, {self._done_bytes()} of "
            f"{self._queue.total} bytes so far",
            "this was the limit for the whole transfer",
        )

    def _stream(self, link: Link) -> None:
        sinks = _Sinks(self._plan, self._flat)
        while (taken := self._take()) is not None:
            try:
                self._receive(link, taken, sinks)
            except (IncompleteTransfer, NotServing):
                with self._watch.changed:
                    self._queue.give_back(taken)
                    self._streams -= 1
                    if not self._streams:
                        raise
                return  # the others go on with what this one leaves

    def _take(self) -> Range | None:
        with self._watch.changed:
            while not self._watch.over and not self._queue.finished:
                taken = self._queue.take()
                if taken is not None:
                    return taken
                self._watch.changed.wait(TICK_S)  # a range may come back from another stream
            return None

    def _receive(self, link: Link, taken: Range, sinks: _Sinks) -> None:
        tries, pause_s = 0, FIRST_PAUSE_S
        link.hear()
        while taken.at < taken.end and not self._watch.over:
            before = taken.at
            try:
                self._receive_rest(link, taken, sinks)
            except (Broken, Later, IncompleteTransfer) as e:
                moved = taken.at > before
                # a donor that says "later" in the middle has withdrawn the state: that is waited for no longer than a
                # connection that fails
                tries = 0 if moved else tries + 1
                if tries >= TRIES or link.silent:
                    raise lost(link.donor, e, self._done_bytes(), self._queue.total) from e
                pause_s = FIRST_PAUSE_S if moved else min(pause_s * 2, LONGEST_PAUSE_S)
                self._watch.pause(pause_s)
        if taken.at < taken.end:
            return
        if taken.sums.value() != self._manifest.sums[taken.number]:
            raise IntegrityError(
                f"chunk {taken.number} of {link.donor.shown} (bytes {taken.start} to {taken.end} of "
                f"{self._queue.total}) arrived with another checksum than announced: {CHANGED}"
            )
        with self._watch.changed:
            self._queue.finish(taken)
            self._watch.changed.notify_all()

    def _receive_rest(self, link: Link, taken: Range, sinks: _Sinks) -> None:
        answer = link.get(self._manifest.step, str(taken.number), taken.at - taken.start)
        if answer.length != taken.end - taken.at:
            raise IntegrityError(
                f"{link.donor.shown} sends {answer.length} bytes of chunk {taken.number} from byte {taken.at} on, and "
                f"announced {taken.end - taken.at}"
            )
        for extent, at, stop in self._flat.pieces(taken.at, taken.end):
            while at < stop:
                if self._watch.over:
                    return  # own tensors are the caller's again
                view = sinks.buffer(extent, at, stop)
                before = answer.done
                try:
                    answer.fill(view)
                finally:  # what came before a break counts, and is not asked for again
                    n = answer.done - before
                    taken.sums.feed(view[:n])
                    sinks.commit(extent, at, n)
                    at += n
                    if at == stop:
                        taken.sums.restart()
                    taken.at += n


class _Sinks:
    """Where one stream's bytes go: straight to host memory where that is in one piece, else through a buffer."""

    def __init__(self, plan: Plan, flat: FlatSpace) -> None:
        self._intervals = plan.intervals
        self._flat = flat
        self._scratch: torch.Tensor | None = None
        self._view = memoryview(b"")

    def buffer(self, extent: int, at: int, stop: int) -> memoryview:
        """Memory for the bytes of ``extent`` from ``at`` on, at most to ``stop``."""
        n = min(stop - at, BLOCK_BYTES)
        if extent >= self._flat.large:
            return self._scratch_for(torch.device("cpu"))[:n]
        interval = self._interval(extent, at)
        n = min(n, interval.end - at)
        return interval.host_view(at, n) if interval.on_host else self._scratch_for(interval.owner.device)[:n]

    def commit(self, extent: int, at: int, n: int) -> None:
        """Move what went to the buffer to where it belongs."""
        scratch = self._scratch
        if scratch is None:
            return
        if extent >= self._flat.large or not self._interval(extent, at).on_host:
            spread(self._intervals, self._flat, extent, at, scratch, 0, n)

    def _interval(self, region: int, at: int) -> Interval:
        interval = self._intervals[region]
        while interval is not None and at >= interval.end:
            interval = interval.next
        if interval is None:
            raise IntegrityError(f"byte {at} of region {region} has no place here")  # the plan covers every region
        return interval

    def _scratch_for(self, device: torch.device) -> memoryview:
        if self._scratch is None or (device.type != "cpu" and not self._scratch.is_pinned()):
            self._scratch = pinned(BLOCK_BYTES, device)
            self._view = view_of(self._scratch)
        return self._view
