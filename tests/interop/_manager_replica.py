# SPDX-License-Identifier: BSD-3-Clause
"""One replica under torchft's Manager, with a process group and a transport of ours: a program of its own.

Arguments: the address of the lighthouse, the replica's name, the class of the group. It prints one JSON line per step
that was committed, with what tells the replicas' parameters apart, until its stdin ends: then its process does, for
its peers may do so at the same time and nobody can say when a step without them would be over.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager

from tests import load
from tests._support import SCALE

# How long a rank may wait for one that has failed and left, which Gloo does not tell it of.
OPS = timedelta(seconds=8 * SCALE)
# Longer, as a healthy replica is in the quorum meanwhile.
QUORUM = timedelta(seconds=60 * SCALE)


def digest(model: torch.nn.Module) -> str:
    """A short name for the very bits of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(bytes(parameter.detach().view(torch.uint8).reshape(-1).tolist()))
    return found.hexdigest()[:16]


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main(lighthouse: str, name: str, kind: str) -> None:
    threading.Thread(target=end_with_stdin, daemon=True).start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(sum(name.encode()))  # each its own: what is equal later was healed
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def adopt(found: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    group = getattr(load("process_group"), kind)(timeout=OPS)
    transport = load("checkpointing").HTTPTransport(OPS, host="127.0.0.1")
    manager = Manager(
        pg=group,
        load_state_dict=adopt,
        state_dict=state,
        min_replica_size=2,
        timeout=2 * OPS,
        quorum_timeout=QUORUM,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
        checkpoint_transport=transport,
    )
    data = torch.Generator().manual_seed(7)
    while True:
        inputs = torch.rand(8, 16, generator=data)
        optimizer.zero_grad()
        manager.start_quorum()
        loss = model(inputs).square().mean()
        loss.backward()
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            line = {"step": manager.current_step(), "peers": manager.num_participants(), "digest": digest(model)}
            print(json.dumps({"pid_of_child": getattr(group, "child_pid", lambda: None)(), **line}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
