# SPDX-License-Identifier: BSD-3-Clause
"""What every checkpoint transport does; the shape is the field's, so that a manager accepts any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from .._deadline import Timeout

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """Moves the live state of a healthy replica to one that is behind."""

    @abstractmethod
    def metadata(self) -> str:
        """A text that the receiver's ``recv_checkpoint`` needs to find this sender."""

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: Timeout | None = None
    ) -> None:
        """Offer ``state_dict`` of ``step`` to ``dst_ranks``; may return before anybody has fetched it."""

    @abstractmethod
    def recv_checkpoint(
        self, src_rank: int, metadata: str | Sequence[str], step: int, timeout: Timeout | None = None
    ) -> T:
        """Fetch the state of ``step`` from the sender behind ``metadata`` and return it, verified."""

    def allow_checkpoint(self, step: int) -> None:
        """Let receivers in again for ``step``."""

    def disallow_checkpoint(self) -> None:
        """Once this returns the state may be changed: nothing is read from it any more. Raises nothing."""

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and free everything; again is a no-op."""
