# SPDX-License-Identifier: BSD-3-Clause
"""PGTransport: the live state of a healthy replica over a process group, into the tensors of one that is behind.

See ``_pg_wire`` for the protocol, ``_layout`` for the byte space, ``_plan`` for what goes where. Rules: of the group
only ``send`` and ``recv`` are used, and it stays its owner's: nothing here configures, aborts or ends it. Threads: one
call of each kind at a time; a send and a receive may overlap. ``send_checkpoint`` to several ranks makes a thread for
each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._deadline import Deadline, Timeout, seconds
from .._errors import FtliteError, StateError
from ._device import HostStage
from ._pg_channel import Channel, Group
from ._pg_receive import Heal
from ._pg_send import WINDOW, Session, combined
from ._pg_wire import DONOR_TAG, RECEIVER_TAG, cut_messages
from ._snapshot import Snapshot, publish
from ._transport import CheckpointTransport, step_number
from ._tree import MISSING

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ONE_TRY_S = 0.05  # what a timeout of 0 allows: two sides that are there are through with a small state in 10 ms
# Sessions end at the deadline by themselves; a thread may be in the middle of a copy then.
_JOIN_S = 1.0


class PGTransport(CheckpointTransport[T]):
    """Moves a state between two ranks of a process group, both of which take part.

    Args:
        pg: any of torch's process groups, or of this package; ``send`` and ``recv`` by rank. Its own timeout bounds
            each of its ops as well. After an error in the middle of a transfer (``IncompleteTransfer``,
            ``DeadlineExceeded``) it has to be configured again; after any other one it goes on.
        timeout: for every call that gets none of its own; a timedelta or seconds.
        device: where tensors go that only the donor has; and where messages are, if the group takes that device (NCCL
            its own, Gloo the CPU alone). State on another device goes through host memory.
        state_dict: called at each receive for the receiver's own state, which is then healed in place: every tensor
            that both sides have, by its key path, is written where it is.
        weights_only: how leaves are handled that are neither tensors nor plain values: True lets torch's safe loader
            read them (from torch 2.10 on), False lets pickle, which trusts the donor with code. The sender refuses what
            would be refused.

    After a ``send_checkpoint``, ``stages`` has the seconds of its parts, of the slowest receiver's: "preparing
    state_dict", "send metadata" (until the receiver has found that it fits) and "send tensors" (until it has them,
    verified).

    Raises:
        ValueError, TypeError: a timeout that makes no sense.
    """

    def __init__(
        self,
        pg: Group,
        timeout: Timeout,
        device: torch.device | str,
        state_dict: Callable[[], T] | None = None,
        *,
        weights_only: bool = True,
    ) -> None:
        self._pg = pg
        self._timeout_s = seconds(timeout)
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._weights_only = weights_only
        self._stage = HostStage()
        self._is_shut = False
        self.stages: dict[str, float] = {}
        # a receive that some groups cannot take back is waited for again in the next call
        self._donors: dict[int, Channel] = {}
        self._receivers: dict[int, Channel] = {}

    def metadata(self) -> str:
        """A text that says nothing: the ranks are all that is needed."""
        return "<n/a>"

    # --- the donor ----------------------------------------------------------------------------------------

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: Timeout | None = None
    ) -> None:
        """Move ``state_dict`` of ``step`` to ``dst_ranks``, all at once; returns when each has it, verified.

        Meanwhile it must not be changed; a change is found by the receiver. One receiver that refuses or dies does not
        keep the others from theirs, unless the group breaks by it, as this package's own do by a peer's death.

        Args:
            timeout: for everything together, None for the constructor's; 0 tries once, for 50 ms.

        Raises:
            LayoutError: a leaf cannot be carried, which the receivers are told; or the state does not fit a receiver's.
            NotServing: a receiver asked for another step.
            TransferError: a receiver refused for another reason, or is gone. With several ranks one error names all
                that have no state, as the class that they have in common.
            DeadlineExceeded: the time was up.
            StateError: the transport was shut down.
            ValueError, TypeError: a timeout or a step that makes no sense.
        """
        deadline = self._begin("send_checkpoint", timeout)
        step = step_number(step)
        began_s = time.perf_counter()
        ranks = list(dict.fromkeys(dst_ranks))
        sessions = {rank: Session(self._receiver(rank), step, deadline, self._wire()) for rank in ranks}
        if not sessions:
            return
        try:
            snapshot = publish(
                state_dict,
                step,
                weights_only=self._weights_only,
                snapshot="gathered",
                num_chunks=None,
                stage=self._stage,
                cut_into=lambda flat: cut_messages(flat, all(each.is_straight for each in self._receivers.values())),
            )
            prepared_s = time.perf_counter() - began_s
        except Exception as e:
            for session in sessions.values():
                session.refuse(e)
            raise
        errors = _run_all(sessions, snapshot, deadline)
        if errors:
            raise combined(errors, len(sessions), step)
        took_s = time.perf_counter() - began_s
        self.stages = {"preparing state_dict": prepared_s}
        for stages in (session.stages for session in sessions.values()):
            for name, stage_s in stages.items():
                self.stages[name] = max(stage_s, self.stages.get(name, 0.0))
        logger.info(
            "sent step %d to ranks %s: %d bytes in %d messages to each, %.3f s, %.2f GB/s",
            step, ranks, snapshot.flat.total, len(snapshot.ends), took_s,
            snapshot.flat.total * len(ranks) / max(took_s, 1e-9) / 1e9,
        )  # fmt: skip

    def _receiver(self, rank: int) -> Channel:
        if rank not in self._receivers:
            self._receivers[rank] = Channel(self._pg, rank, (DONOR_TAG, RECEIVER_TAG), self._wire())
        return self._receivers[rank]

    def shutdown(self, wait: bool = True) -> None:
        """Take no more calls; the group is its owner's to end. Again is a no-op."""
        self._is_shut = True

    # --- the receiver -------------------------------------------------------------------------------------

    def recv_checkpoint(
        self, src_rank: int, metadata: str | Sequence[str], step: int, timeout: Timeout | None = None
    ) -> T:
        """Receive the state of ``step`` from ``src_rank``, verified, and return it.

        In place (``state_dict=``) the result's tensors are the receiver's own, as far as it has them; keys that only
        the receiver has are left alone and are not in the result. A donor that does not send yet is waited for.

        Args:
            metadata: not used.
            timeout: for everything together, None for the constructor's; 0 tries once, for 50 ms.

        Raises:
            NotServing: the donor sends another step, or has no state of it that can be carried.
            LayoutError: the state does not fit; nothing was written.
            IntegrityError, IncompleteTransfer: bytes were wrong, or the group failed. After these, and after
                DeadlineExceeded, ``destination_dirty`` says whether own tensors are undefined now.
            DeadlineExceeded: the time was up.
            StateError: the transport was shut down.
            ValueError, TypeError: a timeout or a step that makes no sense.
        """
        deadline = self._begin("recv_checkpoint", timeout)
        step = step_number(step)
        began_s = time.perf_counter()
        if src_rank not in self._donors:
            self._donors[src_rank] = Channel(self._pg, src_rank, (RECEIVER_TAG, DONOR_TAG), self._wire())
        heal = Heal(
            self._donors[src_rank],
            step,
            deadline,
            (lambda: MISSING) if self._state_dict is None else self._state_dict,
            weights_only=self._weights_only,
            device=self._device,
            wire=self._wire(),
        )
        state: T = heal.run()
        took_s = time.perf_counter() - began_s
        logger.info(
            "healed to step %d from rank %d: %d bytes in %.3f s, %.2f GB/s, checked",
            step, src_rank, heal.total, took_s, heal.total / max(took_s, 1e-9) / 1e9,
        )  # fmt: skip
        return state

    # --- inside -------------------------------------------------------------------------------------------

    def _begin(self, attempted: str, timeout: Timeout | None) -> Deadline:
        deadline = Deadline(seconds(timeout, self._timeout_s) or _ONE_TRY_S)
        if self._is_shut:
            raise StateError(f"{attempted}() after shutdown()", state="shut down", attempted=attempted)
        return deadline

    def _wire(self) -> torch.device:
        """The device that the group takes messages on."""
        if self._device.type == "cpu" or "gloo" in str(getattr(self._pg, "getBackendName", str)()).lower():
            return torch.device("cpu")
        return self._device


def _run_all(sessions: dict[int, Session], snapshot: Snapshot, deadline: Deadline) -> dict[int, Exception]:
    """Run all sessions, one here, several on a thread each; the errors of those that failed."""
    errors: dict[int, Exception] = {}
    window = max(1, WINDOW // len(sessions))

    def one(rank: int, session: Session) -> None:
        try:
            session.run(snapshot, window)
        except Exception as e:  # an error of the code as well: the caller gets it
            errors[rank] = e

    if len(sessions) == 1:
        one(*next(iter(sessions.items())))
        return errors
    threads: dict[int, Any] = {
        rank: threading.Thread(target=one, args=(rank, session), name=f"heal-send-{rank}", daemon=True)
        for rank, session in sessions.items()
    }
    for thread in threads.values():
        thread.start()
    for rank, thread in threads.items():
        thread.join(deadline.remaining_s() + _JOIN_S)
        if thread.is_alive() and rank not in errors:
            errors[rank] = _late(rank, deadline)
    return errors


def _late(rank: int, deadline: Deadline) -> FtliteError:
    return deadline.exceeded(f"sending to rank {rank}", "the group may have to be configured again")
