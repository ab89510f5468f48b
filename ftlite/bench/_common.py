# SPDX-License-Identifier: BSD-3-Clause
"""What the benches and the demo share: sizes in words, stages with their seconds, a bar, the memory of a process.

Rules of this file: no torch, no state of its own, nothing that knows what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = [
    "Bar",
    "MemoryPeak",
    "Stages",
    "available_bytes",
    "counted",
    "in_bytes",
    "in_percent",
    "in_time",
    "largest",
    "parse_size",
    "positive",
    "rate",
    "require_memory",
]

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*([0-9.]+(?:E[0-9]+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)

# What a process needs beside its state: the interpreter and torch.
_PROCESS_BYTES = 400_000_000

# Characters of a bar: it and its text fit into 80 columns.
_BAR_WIDTH = 28


def parse_size(text: str) -> int:
    """Bytes of "300MB", "2 GB", "64MiB", "2e9" or "4096"; for ``argparse``."""
    found = _SIZE.fullmatch(text)
    try:
        size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, as 300MB, 2GB, 64MiB or 2e9")
    return size


def positive(text: str) -> int:
    """A whole number of at least 1; for ``argparse``."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0; for ``argparse``."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def counted(number: int, what: str) -> str:
    """``number`` things in words, as "1 run" or "3 runs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def largest(values: Iterable[int | None]) -> int | None:
    """The largest of those that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def in_bytes(count: float) -> str:
    """``count`` bytes with three digits and a decimal unit, as "301 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(count) >= size * 0.9995:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"
    return f"{count:.0f} bytes"


def in_percent(part: float) -> str:
    """``part`` of 1 with its sign, as "+12%"."""
    return f"{round(part, 2) + 0.0:+.0%}"  # no "-0%"


def in_time(seconds: float | None) -> str:
    """``seconds`` with three digits at most and a unit, as "12.3 ms"; "-" where there are none."""
    if seconds is None:
        return "-"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us" if seconds >= 9.95e-6 else f"{seconds * 1e6:.2g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def rate(count: float, seconds: float) -> str:
    """``count`` bytes in ``seconds``, as "2.71 GB/s"."""
    return f"{count / seconds / 1e9:.2f} GB/s" if seconds > 0 else "- GB/s"


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def require_memory(processes: int, state_bytes: int, hint: str) -> None:
    """End with a plain word before the system kills something; ``hint`` is what to change.

    Raises:
        ValueError: ``processes`` with such a state each need more than there is.
    """
    needed = (state_bytes + _PROCESS_BYTES) * processes
    there = available_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"{processes} processes with a state of {in_bytes(state_bytes)} each need about {in_bytes(needed)} of "
            f"memory and {in_bytes(there)} are available: {hint}"
        )


class Stages:
    """The named parts of a run and the seconds that each took, logged as they are added."""

    def __init__(self, log: Callable[[str], None] | None = None) -> None:
        """``log`` gets one line per stage; None logs nothing."""
        self.seconds: dict[str, list[float]] = {}
        self._log = log

    def add(self, name: str, seconds: float, size: int = 0, note: str = "") -> None:
        """Record that ``name`` took ``seconds``; ``size`` is the bytes of it that are known to be right."""
        self.seconds.setdefault(name, []).append(seconds)
        if self._log:
            figures = f"{seconds:9.4f} s" + (f"  {rate(size, seconds)}" if size else "")
            self._log(f"{name:32s} {figures}{'  ' + note if note else ''}")


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """``with stopwatch() as seconds:`` - what it yields gives the seconds so far, and the whole after the end."""
    start_s = time.perf_counter()
    end_s: list[float] = []
    try:
        yield lambda: (end_s[0] if end_s else time.perf_counter()) - start_s
    finally:
        end_s.append(time.perf_counter())


class Bar:
    """A progress bar on a terminal; on anything else nothing at all."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """``stream`` is where it is drawn, stderr by default."""
        self._stream = stream or sys.stderr
        self._shown = False
        self._on = self._stream.isatty()

    def show(self, what: str, done: int, total: int, unit: str = "") -> None:
        """Draw ``done`` of ``total``; ``unit`` "B" prints them as bytes."""
        if not self._on or total <= 0:
            return
        filled = _BAR_WIDTH * min(done, total) // total
        figures = f"{in_bytes(done)} of {in_bytes(total)}" if unit == "B" else f"{done} of {total}{unit}"
        self._stream.write(f"\r\x1b[K{what:24s} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {figures}")
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Take it away, before a line is printed."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


class MemoryPeak:
    """How far this process's resident memory rises above what it is now.

    Linux tells the peak since the last reset. Elsewhere, and where a container forbids the reset, nothing is told:
    the peak since the process began hides every rise below it, and a figure that may be too good is none.
    """

    def __init__(self) -> None:
        """Give unused memory back to the system, so that its reuse counts as growth, and take the baseline."""
        gc.collect()
        _trim()
        self._baseline = _status("VmRSS") if _reset_peak() else None

    def growth(self) -> int | None:
        """Bytes from the baseline to the peak so far; None where the system does not tell."""
        peak = _status("VmHWM")
        return None if peak is None or self._baseline is None else max(0, peak - self._baseline)


def _trim() -> None:
    # glibc's; another C library keeps less, or has no such call
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    # some containers accept the write and ignore it
    peak, now = _status("VmHWM"), _status("VmRSS")
    # the kernel counts in batches per thread: a megabyte of difference is no sign
    return peak is not None and now is not None and peak - now < 1 << 20


def _status(name: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
