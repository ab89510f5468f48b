# SPDX-License-Identifier: BSD-3-Clause
"""What every checkpoint transport does; the shape is the field's, so that a manager accepts any of them."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from .._deadline import Timeout

T = TypeVar("T")

_STEP_END = 10**18  # as many digits as a request may have, and a number of 64 bits


def step_number(step: Any) -> int:
    """``step`` as an int; numpy's and torch's whole numbers are taken as well.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or has more than 18 digits.
    """
    try:
        number = operator.index(step)
    except TypeError as e:
        raise TypeError(f"step is {step!r:.100}, a {type(step).__name__}: give a whole number") from e
    if not 0 <= number < _STEP_END:
        raise ValueError(f"step is {step!r:.100}: give a number from 0 to 10**18 - 1")
    return number


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
