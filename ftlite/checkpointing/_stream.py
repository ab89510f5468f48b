# SPDX-License-Identifier: BSD-3-Clause
"""The whole state as one stream: the format of torch's streaming save, or the nearest thing to it.

torch's own writer and reader are used where they exist and are sound (see ``_compat``). Otherwise the same
format is read and written here, over the two functions that ``torch.save`` and ``torch.load`` stand on; and
where a torch has neither, ``torch.save`` and ``torch.load`` do it, with a warning, at twice the memory.
The format is good between equal torch versions only.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from typing import Any, Protocol

import torch

from .. import _compat
from ._checksum import RowSum
from ._memory import unlocked, view_at

logger = logging.getLogger(__name__)

# The table of entries that our own writer makes, in place of torch's pickled one.
_MAX_TABLE_BYTES = 64 << 20
# torch's safe loader gives its reason within advice that is none here, some of it in bold type.
_LOADERS_REASON = re.compile(r"WeightsUnpickler error: (.+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Sink(Protocol):
    """What a stream is written to."""

    def write(self, data: Any, /) -> Any:
        """Take all of ``data`` (bytes or a memoryview)."""


def save(state: Any, sink: Sink) -> None:
    """Write ``state`` to ``sink``; the same state gives the same bytes."""
    if _compat.streaming_save is not None:
        _compat.streaming_save(state, sink)
    elif _compat.save_records is not None:
        records = _Records()
        _compat.save_records(
            state, zip_file=records, pickle_module=pickle, pickle_protocol=2, _disable_byteorder_record=False
        )
        records.write_to(sink)
    else:
        _warn()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        sink.write(buffer.getbuffer())


def load(source: io.BufferedIOBase, *, weights_only: bool) -> Any:
    """Read a state from ``source``, whose ``read(n)`` gives exactly ``n`` bytes or raises."""
    _compat.quiet_rebuilding()
    if _compat.streaming_load is not None:
        return _compat.streaming_load(source, map_location="cpu", weights_only=weights_only)
    if _compat.load_records is not None and _compat.safe_unpickler is not None:
        records = _Records()
        records.read_from(source)
        unpickler = _compat.safe_unpickler if weights_only else pickle
        return _compat.load_records(zip_file=records, map_location="cpu", pickle_module=unpickler, encoding="utf-8")
    _warn()
    return torch.load(io.BytesIO(source.read()), map_location="cpu", weights_only=weights_only)


def load_object(data: bytes, *, weights_only: bool, device: torch.device | str | None = None) -> Any:
    """The object of which ``torch.save`` made ``data``; its tensors on ``device``, None for where they were."""
    _compat.quiet_rebuilding()
    return torch.load(io.BytesIO(data), map_location=device, weights_only=weights_only)


def _warn() -> None:
    logger.warning(
        "torch %s offers no streaming save: the single stream goes through torch.save and twice the memory; "
        "num_chunks=None needs neither",
        torch.__version__,
    )


class Meter:
    """A sink that keeps nothing but the length and the checksum."""

    def __init__(self) -> None:
        self.sums = RowSum()

    def write(self, data: Any, /) -> int:
        """Add ``data``."""
        self.sums.feed(unlocked(data))
        return len(data)


class _Records:
    """What torch's save and load expect of an archive: records by name."""

    def __init__(self) -> None:
        self._records: dict[str, Any] = {}

    # --- for torch.serialization._save

    def write_record(self, name: str, data: Any, _length: int) -> None:
        self._records[name] = data.encode() if isinstance(data, str) else data

    def write_to(self, sink: Sink) -> None:
        table = [
            [name, isinstance(data, torch.UntypedStorage), data.nbytes() if hasattr(data, "nbytes") else len(data)]
            for name, data in self._records.items()
        ]
        head = json.dumps(table).encode()
        sink.write(len(head).to_bytes(8, "little") + head)
        for data in self._records.values():
            if isinstance(data, torch.UntypedStorage):
                data = view_at(data.data_ptr(), data.nbytes())
            sink.write(data)

    # --- for torch.serialization._load

    def read_from(self, source: io.BufferedIOBase) -> None:
        for name, is_storage, length in self._table(source):
            if not is_storage:
                self._records[name] = bytes(source.read(length))
                continue
            data = source.read(length)  # memory of its own, which the storage takes over
            storage = (
                torch.frombuffer(data, dtype=torch.uint8) if length else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            self._records[name] = storage

    def _table(self, source: io.BufferedIOBase) -> list[tuple[str, bool, int]]:
        if _compat.streaming_save is not None and _compat.safe_unpickler is not None:
            return [(e.key, e.is_storage, e.length) for e in _compat.safe_unpickler.load(source)]
        length = int.from_bytes(source.read(8), "little")
        if length > _MAX_TABLE_BYTES:
            raise ValueError(f"a table of {length} bytes")
        return [(str(name), bool(is_storage), int(n)) for name, is_storage, n in json.loads(bytes(source.read(length)))]

    def has_record(self, name: str) -> bool:
        return name in self._records

    def get_record(self, name: str) -> Any:
        return self._records[name]

    def get_storage_from_record(self, name: str, _length: int, _type: Any) -> torch.Tensor:
        found: torch.Tensor = self._records[name]
        return found

    def serialization_id(self) -> str:
        return ""


def first_line(error: BaseException) -> str:
    """What ``error`` says, in one line of up to 200 characters: of torch's safe loader's text the one that counts."""
    text = _COLORS.sub("", str(error)).strip()
    reason = _LOADERS_REASON.search(text)
    lines = [reason[1]] if reason else text.splitlines()
    return lines[0][:200] if lines else type(error).__name__
