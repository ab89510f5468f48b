# SPDX-License-Identifier: BSD-3-Clause
"""The receiver's side over a process group: one heal, from the donor's offer to the result.

Rules: whatever is wrong here is told to the donor before it is raised, so that nobody waits for nothing; from the first
byte of state on all messages are taken to the end, right or wrong, so that both sides stay in step; nothing is returned
before every message was compared with its checksum, which the donor knows only when it has sent them all. Threads: the
receiving one only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._deadline import Deadline
from .._errors import DeadlineExceeded, FtliteError, IncompleteTransfer, IntegrityError, LayoutError, NotServing
from ._checksum import RowSum, checksum_of
from ._incoming import load_blob, plan_for
from ._interval import Interval, spread
from ._layout import FlatSpace
from ._manifest import MAX_MANIFEST_BYTES, Manifest, parse
from ._memory import byte_tensor, collector_paused, view_of
from ._pg_channel import Channel, Op
from ._pg_send import WINDOW
from ._pg_wire import MESSAGE_BYTES, Control, Kind, code_of, data_tag, largest_of, unpack_sums
from ._plan import Plan
from ._snapshot import BLOCK_BYTES
from ._stream import first_line

_CHANGED = "damaged on the way, or changed by the donor while it was sent"


class _Message(NamedTuple):
    """Flat bytes ``start`` to ``end``, on their way to ``target``; ``scratch`` says that they go on from there."""

    start: int
    end: int
    op: Op
    target: torch.Tensor
    scratch: torch.Tensor | None


class Heal:
    """``run`` once; afterwards ``total`` says how many bytes it was.

    Args:
        own: makes the receiver's state, or ``_tree.MISSING``; called when the donor has offered something.
        device: where new tensors go.
        wire: the device that the group's messages are on.
    """

    def __init__(
        self,
        channel: Channel,
        step: int,
        deadline: Deadline,
        own: Callable[[], Any],
        *,
        weights_only: bool,
        device: torch.device,
        wire: torch.device,
    ) -> None:
        self.total = 0
        self._channel = channel
        self._step = step
        self._deadline = deadline
        self._own = own
        self._weights_only = weights_only
        self._device = device
        self._wire = wire
        self._session = 0
        self._plan: Plan | None = None
        self._done = 0

    def run(self) -> Any:
        """Receive, verify and build the state.

        Raises:
            TransferError, DeadlineExceeded: with how far it got, and whether own tensors were written to.
        """
        try:
            return self._run()
        except FtliteError as e:
            if self._plan is not None:
                self._plan.mark(e, self._done, self.total)
            elif isinstance(e, DeadlineExceeded):
                e.__dict__.update(bytes_done=0, bytes_total=0, destination_dirty=False, keys=())
            raise

    def _run(self) -> Any:
        offer, own = self._agreed()
        try:
            document = self._bytes_of(offer, "the layout")
            with collector_paused():
                manifest = self._parsed(document, offer)
                plan = plan_for(manifest, own, weights_only=self._weights_only, device=self._device)
            plan.settle()
        except BaseException as e:
            self._refuse(e)
            raise
        self._plan = plan
        self._say_yes()
        try:
            self._receive(manifest, plan)
            with collector_paused():
                state = plan.finish(
                    lambda data, path: load_blob(data, path, weights_only=self._weights_only, device=self._device)
                )
        except BaseException as e:
            self._refuse(e)
            raise
        self._say_yes()
        self._channel.flush(self._deadline)
        return state

    # --- talking ------------------------------------------------------------------------------------------

    def _agreed(self) -> tuple[Control, Any]:
        """The offer that both sides have agreed on, and the receiver's own state."""
        offer: Control | None = None
        own: Any = None
        while True:
            try:
                said = self._channel.hear(self._deadline)
                if said.kind is Kind.OFFER:
                    offer, self._session = said, said.session
                    own = self._considered(offer)
                    self._say_yes()
                elif offer is not None and said.kind is Kind.GO and said.session == offer.session:
                    return offer, own
            except DeadlineExceeded:
                raise
            except BaseException as e:
                if offer is None or not offer.code:  # the donor knows its own refusal
                    self._refuse(e)
                raise

    def _considered(self, offer: Control) -> Any:
        peer = self._channel.peer
        if offer.code:
            raise NotServing(f"rank {peer} has no state of step {offer.step} to give: {offer.text}")
        if offer.step != self._step:
            raise NotServing(f"rank {peer} sends step {offer.step}, and step {self._step} was asked for")
        if offer.more_bytes > MAX_MANIFEST_BYTES:
            raise LayoutError(
                f"rank {peer} announces {offer.more_bytes} bytes of metadata, more than the {MAX_MANIFEST_BYTES} "
                "that are accepted"
            )
        return self._own()

    def _say_yes(self) -> None:
        self._channel.say(Control(Kind.REPLY, self._session, self._step))

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, (DeadlineExceeded, IncompleteTransfer)):
            return  # the group does not work any more, or will not
        text = str(error) if isinstance(error, FtliteError) else f"{type(error).__name__}: {first_line(error)}"
        self._channel.try_to_say(
            Control(Kind.REPLY, self._session, self._step, code=code_of(error), text=text), self._deadline
        )

    def _bytes_of(self, said: Control, what: str) -> bytes:
        """What follows ``said``, verified."""
        whole = torch.empty(said.more_bytes, dtype=torch.uint8, device=self._wire)
        where = f"receiving {what} of step {self._step} from rank {self._channel.peer}"
        parts = torch.split(whole, MESSAGE_BYTES) if said.more_bytes else ()
        for op in [self._channel.receive(part, data_tag(said.session), where) for part in parts]:
            op.wait(self._deadline)
        data = bytes(view_of(whole.cpu()))
        if checksum_of(data) != said.more_sum:
            raise IntegrityError(
                f"{what} from rank {self._channel.peer} ({len(data)} bytes) arrived with another checksum than "
                "announced: heal again"
            )
        return data

    def _parsed(self, document: bytes, offer: Control) -> Manifest:
        manifest = parse(document)
        fits = sum(manifest.sizes) == offer.total and largest_of(manifest.ends) <= MESSAGE_BYTES
        if manifest.step != self._step or not fits:
            raise IntegrityError(
                f"the layout from rank {self._channel.peer} is not that of its offer of step {offer.step} with "
                f"{offer.total} bytes in messages of at most {MESSAGE_BYTES}: heal again, or from another donor"
            )
        self.total = offer.total
        return manifest

    # --- the bytes ----------------------------------------------------------------------------------------

    def _receive(self, manifest: Manifest, plan: Plan) -> None:
        """Take all messages to where they belong, and then verify them."""
        flat = manifest.flat()
        what = f"of {flat.total} of step {self._step} from rank {self._channel.peer}"
        on_the_way: deque[_Message] = deque()
        spare: list[torch.Tensor] = []
        largest = largest_of(manifest.ends)
        sums: list[int] = []
        for start, end in zip([0, *manifest.ends], manifest.ends):
            if len(on_the_way) == WINDOW:
                sums.append(self._take(on_the_way.popleft(), flat, plan, spare))
            target, scratch = self._straight(plan, flat, start, end), None
            if target is None:
                scratch = spare.pop() if spare else self._channel.buffer(largest)
                target = scratch[: end - start]
            op = self._channel.receive(target, data_tag(self._session), f"receiving bytes {start} to {end} {what}")
            on_the_way.append(_Message(start, end, op, target, scratch))
        while on_the_way:
            sums.append(self._take(on_the_way.popleft(), flat, plan, spare))
        self._verify(manifest, sums)

    def _verify(self, manifest: Manifest, sums: list[int]) -> None:
        said = self._channel.hear(self._deadline)
        if said.kind is not Kind.END or said.session != self._session or said.more_bytes != 4 * len(sums):
            raise IntegrityError(f"rank {self._channel.peer} sent {said.kind.name} where its checksums were due")
        announced = unpack_sums(self._bytes_of(said, "the checksums"))
        for number, (ours, theirs) in enumerate(zip(sums, announced)):
            if ours != theirs:
                start = manifest.ends[number - 1] if number else 0
                raise IntegrityError(
                    f"message {number} of rank {self._channel.peer} (bytes {start} to {manifest.ends[number]} of "
                    f"{self.total}) arrived with another checksum than announced: {_CHANGED}"
                )

    def _straight(self, plan: Plan, flat: FlatSpace, start: int, end: int) -> torch.Tensor | None:
        """The memory where flat bytes ``start`` to ``end`` belong, if that is in one piece on the wire's device."""
        pieces = list(flat.pieces(start, end))
        extent, at, stop = pieces[0]
        if not self._channel.is_straight or len(pieces) > 1 or extent >= flat.large:
            return None
        interval: Interval | None = plan.intervals[extent]
        while interval is not None and at >= interval.end:
            interval = interval.next
        if interval is None or stop > interval.end or interval.owner.device != self._wire:
            return None
        return byte_tensor(
            interval.owner, interval.address - interval.owner.data_ptr() + at - interval.start, stop - at
        )

    def _take(self, message: _Message, flat: FlatSpace, plan: Plan, spare: list[torch.Tensor]) -> int:
        """Wait for ``message`` and put it where it belongs; its checksum."""
        message.op.wait(self._deadline)
        self._done = message.end
        here = message.target.cpu()
        view, sums, at = view_of(here), RowSum(), 0
        for extent, first, last in flat.pieces(message.start, message.end):
            while first < last:  # block by block: the copy finds in the cache what was summed
                n = min(last - first, BLOCK_BYTES)
                sums.feed(view[at : at + n])
                if message.scratch is not None:
                    spread(plan.intervals, flat, extent, first, here, at, n)
                first, at = first + n, at + n
            sums.restart()
        if message.scratch is not None:
            spare.append(message.scratch)
        return sums.value()
