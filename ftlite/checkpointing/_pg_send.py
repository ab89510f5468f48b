# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side over a process group: one session with one receiver.

Rules: the receiver is listened to whenever it may speak; messages go from the state's own memory where they lie in one
piece. Threads: a session is one thread's; several of one snapshot may run beside each other.
"""

from __future__ import annotations

import secrets
import time
from collections import deque

import torch

from .._deadline import Deadline
from .._errors import TransferError
from ._checksum import RowSum, checksum_of
from ._memory import unlocked, view_of
from ._pg_channel import Channel, Op
from ._pg_wire import MESSAGE_BYTES, Control, Kind, code_of, data_tag, error_of, largest_of, pack_sums
from ._snapshot import Snapshot

# Messages on their way to one receiver: one that the wire is at, one behind it, one each that is prepared and finished.
WINDOW = 4


class Session:
    """The offer of ``step`` to the peer of ``channel``."""

    def __init__(self, channel: Channel, step: int, deadline: Deadline, device: torch.device) -> None:
        self._channel = channel
        self._step = step
        self._deadline = deadline
        self._device = device
        self._number = secrets.randbits(63)
        self.stages: dict[str, float] = {}  # what each took, in seconds

    def refuse(self, error: Exception) -> None:
        """Tell the receiver that there is no state of this step, and why; it is not waited for longer than a second."""
        text = f"{type(error).__name__}: {error}"
        offer = Control(Kind.OFFER, self._number, self._step, code=code_of(error), text=text)
        self._channel.try_to_say(offer, self._deadline)

    def run(self, snapshot: Snapshot, window: int) -> None:
        """Move the state, with ``window`` messages on their way at a time.

        Raises:
            TransferError: the receiver refused it, as the error that it had itself, or is gone.
            DeadlineExceeded: the time was up.
        """
        document, total = snapshot.document, snapshot.flat.total
        began_s = time.perf_counter()
        self._say(Kind.OFFER, total, document, snapshot.document_sum)
        self._hear_yes("took the offer")
        self._say(Kind.GO)
        written = self._send_bytes(document, "the layout")
        self._hear_yes("took the layout")
        agreed_s = time.perf_counter()
        sums = self._send_state(snapshot, window)
        self._say(Kind.END, total, sums, checksum_of(sums))
        written += self._send_bytes(sums, "the checksums")
        self._hear_yes("had the last byte")
        for op in written:
            op.wait(self._deadline)
        self._channel.flush(self._deadline)
        self.stages = {"send metadata": agreed_s - began_s, "send tensors": time.perf_counter() - agreed_s}

    def _say(self, kind: Kind, total: int = 0, more: bytes = b"", more_sum: int = 0) -> None:
        self._channel.say(Control(kind, self._number, self._step, total, len(more), more_sum))

    def _hear_yes(self, what: str) -> None:
        while True:
            reply = self._channel.hear(self._deadline)
            if reply.kind is Kind.REPLY and reply.session in (self._number, 0):
                break  # else it is about a session that was given up
        if reply.code:
            raise error_of(reply.code)(
                f"rank {self._channel.peer} refused step {self._step} before it {what}: {reply.text}"
            )

    def _send_bytes(self, data: bytes, what: str) -> list[Op]:
        if not data:
            return []
        # a send never writes to the bytes object
        whole = torch.frombuffer(unlocked(data), dtype=torch.uint8)
        return [self._send(part.to(self._device), what) for part in torch.split(whole, MESSAGE_BYTES)]

    def _send(self, tensor: torch.Tensor, what: str) -> Op:
        where = f"sending {what} of step {self._step} to rank {self._channel.peer}"
        return self._channel.send(tensor, data_tag(self._number), where)

    def _send_state(self, snapshot: Snapshot, window: int) -> bytes:
        """Send all messages; returns their checksums. Each is summed as it goes, for then the send finds it cached."""
        sums: list[int] = []
        on_the_way: deque[tuple[Op, torch.Tensor | None]] = deque()
        spare: list[torch.Tensor] = []
        largest = largest_of(snapshot.ends)
        for start, end in zip([0, *snapshot.ends], snapshot.ends):
            if len(on_the_way) == window:
                self._finish(on_the_way.popleft(), spare)
            message = snapshot.memory_of(start, end) if self._channel.is_straight else None
            scratch = None
            if message is not None:
                sums.append(snapshot.sum_of(start, end))
            else:
                scratch = spare.pop() if spare else self._channel.buffer(largest)
                message = scratch[: end - start]
                sums.append(_gather(snapshot, start, end, view_of(message)))
            what = f"bytes {start} to {end} of {snapshot.flat.total}"
            on_the_way.append((self._send(message.to(self._device), what), scratch))
        while on_the_way:
            self._finish(on_the_way.popleft(), spare)
        return pack_sums(sums)

    def _finish(self, oldest: tuple[Op, torch.Tensor | None], spare: list[torch.Tensor]) -> None:
        op, scratch = oldest
        op.wait(self._deadline)
        if scratch is not None:
            spare.append(scratch)


def _gather(snapshot: Snapshot, start: int, end: int, view: memoryview) -> int:
    """Put the flat bytes ``start`` to ``end`` side by side into ``view``; their checksum. A block's sum is taken first:
    the copy then finds it in the cache."""
    sums, filled = RowSum(), 0
    for block, ends in snapshot.blocks(start, end):
        sums.feed(block)
        if ends:
            sums.restart()
        view[filled : filled + len(block)] = block
        filled += len(block)
    return sums.value()


def combined(errors: dict[int, Exception], count: int, step: int) -> Exception:
    """One error for the ranks that did not get the state, of ``count`` in all."""
    first = next(iter(errors.values()))
    if count == 1:
        return first
    kinds = {type(error) for error in errors.values()}
    kind = kinds.pop() if len(kinds) == 1 else TransferError
    whys = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
    text = f"step {step} did not reach {len(errors)} of {count} ranks (the others have it): {whys}"
    found = kind(text) if issubclass(kind, TransferError) else TransferError(text)
    found.__cause__ = first
    return found
