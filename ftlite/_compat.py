# SPDX-License-Identifier: BSD-3-Clause
"""Every gate on the version of torch, each with its reason and when it can go."""

from __future__ import annotations

import warnings
from typing import Any

import torch

try:
    from torch.distributed import _serialization as _streaming
except ImportError:  # torch 2.6, and builds without torch.distributed
    _streaming = None  # type: ignore[assignment]

TORCH: tuple[int, ...] = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])

# torch.load(weights_only=True) could be made to run code until 2.10, as the torch project's advisories say.
# Goes when 2.10 is the oldest torch that is supported.
SAFE_LOADER_IS_SOUND = TORCH >= (2, 10)

# torch's streaming save came with 2.7. Goes (with the writer in checkpointing/_stream.py) when that is the oldest.
streaming_save: Any | None = getattr(_streaming, "_streaming_save", None)

# Its streaming load fails on an empty storage before 2.10; all versions read the table of entries with the safe
# loader, so nothing else is wrong with it. Goes (with the reader in checkpointing/_stream.py) when 2.10 is the oldest.
streaming_load: Any | None = getattr(_streaming, "_streaming_load", None) if TORCH >= (2, 10) else None

# What torch.save and torch.load stand on. Where a later torch has moved them, the stream falls back to those two.
save_records: Any | None = getattr(torch.serialization, "_save", None)
load_records: Any | None = getattr(torch.serialization, "_load", None)
safe_unpickler: Any | None = getattr(torch, "_weights_only_unpickler", None)

# Before torch 2.7, C++ that gets a Work made in Python drops the Python half: who has it waits for ever on the
# native half. Where this is true a group keeps its Works alive by itself. Goes when 2.7 is the oldest; keeping them
# where there is no need costs one dictionary entry, so the bound is on the safe side.
WORK_LOSES_ITS_PYTHON_HALF = TORCH < (2, 8)


def quiet_rebuilding() -> None:
    """Keep torch from warning of what its own loader does: it rebuilds quantized tensors over a deprecated storage,
    and compressed sparse ones by functions that say "beta". Call it before a load.

    Only warnings that name ``torch._utils``, where that is done, as their place. For good, since putting the filters
    back (``warnings.catch_warnings``) would undo what another thread has set meanwhile. Goes when torch has none of
    them any more.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._utils\Z")


def storage_ipc(kind: str) -> tuple[Any, Any, Any] | None:
    """How torch exports a storage on a device of ``kind``, opens one, and releases its counter; None where it cannot.

    By private names, which torch.multiprocessing stands on; 2.6 to 2.13 have them for CUDA alone. Goes when torch has a
    public way.
    """
    share = getattr(torch.UntypedStorage, f"_share_{kind}_", None)
    new = getattr(torch.UntypedStorage, f"_new_shared_{kind}", None)
    release = getattr(torch.UntypedStorage, f"_release_ipc_counter_{kind}", None)
    if None in (share, new, release) or not hasattr(getattr(torch, kind, None), "ipc_collect"):
        return None
    return share, new, release
