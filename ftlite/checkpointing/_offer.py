# SPDX-License-Identifier: BSD-3-Clause
"""What a donor serves: a published state, and the single stream of it once somebody wants that.

The whole stream has to be added up before its first byte can go, since its head announces the checksum. At 100 GB
that takes longer than a reader waits for a silent donor. So a thread of its own does it, and who asks meanwhile is
told to ask again.
"""

from __future__ import annotations

import threading
from typing import Any

from .._errors import IntegrityError, LayoutError, TransferError
from . import _stream
from ._snapshot import Snapshot

# What is added up between two looks at whether it is still wanted: some milliseconds, and whole rows of the checksum.
_SLICE_BYTES = 64 << 20


class _Halted(Exception):
    """The stream is not wanted any more."""


class _Meter:
    """A sink that keeps nothing but the length and the checksum, until it is halted."""

    def __init__(self, halted: threading.Event) -> None:
        self.meter = _stream.Meter()
        self._halted = halted

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        for at in range(0, len(view), _SLICE_BYTES):
            if self._halted.is_set():
                raise _Halted
            self.meter.write(view[at : at + _SLICE_BYTES])
        return len(view)


class Offer:
    """``snapshot`` and its stream. Any number of threads may use it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._halted = threading.Event()
        # the object that is written, its length and its checksum
        self._found: tuple[Any, int, int] | None = None
        self._refusal: tuple[type[TransferError], str] | None = None

    def head(self, wait_s: float | None) -> tuple[int, int] | None:
        """The length and checksum of the stream; None if they are not known ``wait_s`` seconds from now.

        Raises:
            LayoutError: this state cannot be one stream.
            IntegrityError: it is not what was published any more.
        """
        with self._changed:
            if self._found is None and self._refusal is None and self._thread is None:
                self._halted = threading.Event()
                self._thread = threading.Thread(
                    target=self._measure, args=(self._halted,), name="heal-sum", daemon=True
                )
                self._thread.start()
            self._changed.wait_for(lambda: self._thread is None, wait_s)
            if self._refusal is not None:
                kind, text = self._refusal
                raise kind(text)
            return None if self._found is None else self._found[1:]

    def write(self, sink: _stream.Sink) -> None:
        """Write the stream to ``sink``; after ``head`` has found it."""
        found = self._found
        if found is not None:
            _stream.save(found[0], sink)

    def halt(self, wait_s: float) -> None:
        """Stop adding up, and wait up to ``wait_s`` seconds until that has stopped. Who asks again begins anew."""
        with self._changed:
            self._halted.set()
            self._changed.wait_for(lambda: self._thread is None, wait_s)

    def _measure(self, halted: threading.Event) -> None:
        found: tuple[Any, int, int] | None = None
        refusal: tuple[type[TransferError], str] | None = None
        try:
            whole, sink = self.snapshot.whole(), _Meter(halted)
            _stream.save(whole, sink)
            # afterwards: what was added up is the state of publish if that is still there
            self.snapshot.require_unchanged()
            found = whole, sink.meter.sums.nbytes, sink.meter.sums.value()
        except (LayoutError, IntegrityError) as e:
            refusal = type(e), str(e)
        except Exception as e:  # whatever a state that torch cannot save makes it raise
            if not halted.is_set():
                text = f"torch cannot write this state as one stream ({type(e).__name__}: {e!s:.200})"
                refusal = LayoutError, f"{text}; num_chunks=None at the receiver carries it"
        with self._changed:
            self._found, self._refusal, self._thread = found, refusal, None
            self._changed.notify_all()
