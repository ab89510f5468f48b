# SPDX-License-Identifier: BSD-3-Clause
"""A receiver in an interpreter of its own: ``python -m tests.checkpointing._pg_receiver GROUP STORE_ADDR``.

Prints "up" when it is about to meet the donor, "ready" when the group is up,
and "healed" when the state of step 1 is there.
"""

from __future__ import annotations

import sys

from tests import load


def main(group: str, address: str) -> None:
    pg = getattr(load("process_group"), group)(60.0)
    print("up", flush=True)
    pg.configure(address, "receiver", 1, 2)
    print("ready", flush=True)
    load("checkpointing").PGTransport(pg, 60.0, "cpu").recv_checkpoint(0, "", 1)
    print("healed", flush=True)
    pg.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
