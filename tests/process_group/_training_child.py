# SPDX-License-Identifier: BSD-3-Clause
"""One rank of the training tests: ``python -m ..._training_child GROUP BACKEND RANK COMMAND:SIZE:PORT ...``.

GROUP is the group class in the package's door, BACKEND the name to register it under. The commands run in their
order in this one interpreter, each on the ranks below its SIZE; PORT is that of a TCPStore on this machine which no
other command uses. A command raises where something is wrong, and returns what has to be equal on all ranks. A line
of JSON tells of each: its name, that text, and the traceback of an error.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests import load

TIMEOUT = timedelta(seconds=60)
TORCH_26 = torch.__version__.startswith("2.6.")
# later torch has other names for what 2.6 has
warnings.simplefilter("ignore", FutureWarning)


@dataclass
class Rank:
    group_name: str
    backend: str
    port: int
    rank: int
    size: int

    def make(self) -> Any:
        return getattr(load("process_group"), self.group_name)(timeout=TIMEOUT)

    def configured(self, prefix: str, rank: int | None = None, size: int | None = None) -> Any:
        group = self.make()
        self.join(group, prefix, rank, size)
        return group

    def join(self, group: Any, prefix: str, rank: int | None = None, size: int | None = None) -> None:
        address = f"127.0.0.1:{self.port}/{prefix}"
        group.configure(
            address, f"r{self.rank}", self.rank if rank is None else rank, self.size if size is None else size
        )


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    if not torch.allclose(left, right):
        raise AssertionError(f"{left} and {right}")


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(wrapped: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def digest(module: nn.Module) -> str:
    return " ".join(f"{float(p.detach().double().sum()):.12f}" for p in module.parameters())


def data_parallel(me: Rank) -> str:
    group = me.configured("ddp")
    wrapped = DistributedDataParallel(model(), process_group=group)
    train(wrapped, me.rank)
    group.shutdown()
    return digest(wrapped)


def changing_size(me: Rank) -> str:
    """Three ranks, then without the last, then all again; the gradients are means over the ranks that are there."""
    group = me.configured("all")
    module = nn.Linear(4, 2)
    torch.manual_seed(1)
    nn.init.constant_(module.weight, 0.5)
    nn.init.constant_(module.bias, 0.0)
    wrapped = DistributedDataParallel(module, process_group=group)
    for turn, ranks in enumerate(([0, 1, 2], [0, 1], [0, 1, 2])):
        if me.rank in ranks:
            if turn:
                me.join(group, f"turn{turn}", ranks.index(me.rank), len(ranks))
            for _ in range(2):  # the reducer talks to the other ranks once more in the second step
                wrapped.zero_grad()
                wrapped(torch.full((1, 4), float(me.rank))).sum().backward()
            wanted = sum(float(rank) for rank in ranks) / len(ranks)
            same(module.weight.grad, torch.full((2, 4), wanted))
    group.shutdown()
    return digest(wrapped)


def comm_hook(me: Rank) -> str:
    group = me.configured("hook")

    def wide(state: Any, bucket: Any) -> Any:
        double = bucket.buffer().to(torch.float64)
        future = state.allreduce([double]).get_future()
        return future.then(lambda done: (done.value()[0] / state.size()).to(torch.float32))

    wrapped = DistributedDataParallel(model(), process_group=group)
    # torch compares annotations by identity, and here they are text
    wide.__annotations__.clear()
    wrapped.register_comm_hook(group, wide)
    train(wrapped, me.rank)
    group.shutdown()
    return digest(wrapped)


def failure_in_backward(me: Rank) -> None:
    """An allreduce that fails under the reducer is an error in Python, and no crash."""
    group = load("process_group").FakeProcessGroupWrapper(me.configured("failing"))
    wrapped = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    out = wrapped(torch.ones(2, 3)).sum()
    group.report_future_error(ValueError("the cable is out"))
    try:
        out.backward()
    except RuntimeError as error:
        if "the cable is out" not in str(error):
            raise
    else:
        raise AssertionError("backward() ended well")
    group.shutdown()


def _alone(me: Rank, name: str) -> Any:
    """A group of all ranks, registered as ``name``, in a process that torch thinks is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = me.configured("registered")
    if group.register(name) is not group:
        raise AssertionError("another group was registered")
    return group


def _done(group: Any, name: str) -> None:
    group.unregister()
    group.unregister()
    group.allreduce([torch.ones(1)]).wait()  # it goes on without torch's registry
    group.register(name)
    group.unregister()
    group.shutdown()
    dist.destroy_process_group()


def functional(me: Rank) -> None:
    group = _alone(me, "functional")
    mine = torch.full((4,), float(me.rank + 1))
    total = float(sum(range(1, me.size + 1)))
    same(funcol.all_reduce(mine, "sum", group) + 0, torch.full((4,), total))
    same(funcol.all_reduce(mine.view(2, 2).t(), "sum", group) + 0, torch.full((2, 2), total))
    gathered = funcol.all_gather_tensor(mine, 0, group) + 0
    same(gathered, torch.arange(1.0, me.size + 1).repeat_interleave(4))
    several = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
    same(several[0] + 0, torch.full((4,), total))
    same(several[1] + 0, torch.full((4,), 2 * total))
    same(funcol.broadcast(mine, 0, group) + 0, torch.ones(4))
    # many at once, some of them waited for long after they are done
    kept = [funcol.all_reduce(mine * index, "sum", group) for index in range(200)]
    for index in reversed(range(200)):
        same(kept[index] + 0, torch.full((4,), total * index))
    dist.all_reduce(mine, group=group)
    same(mine, torch.full((4,), total))
    work = dist.all_reduce(mine, group=group, async_op=True)
    work.wait()
    outs = [torch.zeros(2) for _ in range(me.size)]
    dist.all_gather(outs, torch.full((2,), float(me.rank)), group=group)
    same(torch.stack(outs), torch.arange(float(me.size)).view(-1, 1).expand(-1, 2))
    dist.barrier(group=group)
    _done(group, "functional")


def compiled(me: Rank) -> None:
    group = _alone(me, "compiled")

    def twice_and_one(mine: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(mine * 2, "sum", group) + 1

    # traced and functionalized in one graph, as by default, but run without a C++ compiler
    faster = torch.compile(twice_and_one, backend="aot_eager", fullgraph=True)
    for step in range(3):
        total = float(sum(range(1, me.size + 1)) + me.size * step)
        same(faster(torch.full((4,), float(me.rank + 1 + step))), torch.full((4,), 2 * total + 1))
    _done(group, "compiled")


def device_mesh(me: Rank) -> None:
    group = _alone(me, "replicas")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("replicas",))
    # torch 2.6 looks for a group of as many ranks as its tables have, which is one
    found = group if TORCH_26 else mesh.get_group("replicas")
    if found is not group:
        raise AssertionError(f"the mesh has {found!r}")
    mine = torch.full((3,), float(me.rank + 1))
    same(funcol.all_reduce(mine, "sum", (mesh, 0)) + 0, torch.full((3,), float(sum(range(1, me.size + 1)))))
    wrapped = DistributedDataParallel(model(), process_group=found)
    train(wrapped, me.rank)
    _done(group, "replicas")


def _init(me: Rank) -> None:
    package = load("process_group")
    for _ in range(2):  # the second time is a no-op
        package.register_backend(me.backend, getattr(package, me.group_name), devices=["cpu"])
    store = dist.TCPStore("127.0.0.1", me.port, is_master=False, wait_for_workers=False)
    dist.init_process_group(me.backend, store=store, rank=me.rank, world_size=me.size, timeout=TIMEOUT)


def backend(me: Rank) -> None:
    for _ in range(2):  # again over the same store
        _init(me)
        mine = torch.full((4,), float(me.rank + 1))
        dist.all_reduce(mine)
        same(mine, torch.full((4,), float(sum(range(1, me.size + 1)))))
        if importlib.util.find_spec("numpy") is not None:  # torch 2.6 cannot do without
            objects: list[Any] = [None] * me.size
            dist.all_gather_object(objects, {"rank": me.rank})
            if objects != [{"rank": rank} for rank in range(me.size)]:
                raise AssertionError(objects)
        if me.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            got = torch.zeros(2)
            dist.recv(got, 0)
            same(got, torch.ones(2))
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), float(me.rank)), 1 - me.rank),
                dist.P2POp(dist.irecv, incoming := torch.zeros(2), 1 - me.rank),
            ]
        )
        for request in requests:
            request.wait()
        same(incoming, torch.full((2,), float(1 - me.rank)))
        wide = torch.zeros(2 * me.size)
        dist.all_gather_into_tensor(wide, torch.full((2,), float(me.rank)))
        same(wide, torch.arange(float(me.size)).repeat_interleave(2))
        wrapped = DistributedDataParallel(model())
        train(wrapped, me.rank)
        dist.barrier()
        if dist.get_backend() != me.backend or dist.get_world_size() != me.size:
            raise AssertionError(f"{dist.get_backend()} of {dist.get_world_size()}")
        dist.destroy_process_group()


def new_group(me: Rank) -> None:
    _init(me)
    pair = dist.new_group([0, 2], backend=me.backend)
    if me.rank != 1:
        mine = torch.full((3,), float(me.rank))
        dist.all_reduce(mine, group=pair)
        same(mine, torch.full((3,), 2.0))
        dist.broadcast(mine, src=2, group=pair)
        same(funcol.all_reduce(mine, "sum", pair) + 0, torch.full((3,), 4.0))
    dist.barrier()
    dist.destroy_process_group()


def exit_at_once(me: Rank) -> None:
    """Leave with a group that has work in flight."""
    group = me.configured("exit")
    group.allreduce([torch.ones(3)]).wait()
    if me.rank == 0:
        group.recv([torch.ones(1)], 1, 7)
        work = group.recv([torch.ones(1)], 1, 8)
        work.get_future()


def outcome(me: Rank, command: str) -> dict[str, str]:
    """Run ``command``, which is another's failure no longer when it is over."""
    try:
        return {"command": command, "said": globals()[command](me) or ""}
    except Exception:
        return {"command": command, "error": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    name, backend_name, my_rank, *commands = sys.argv[1:]
    # never configured and never shut down: what the groups of a process share lasts from one command to the next
    kept = getattr(load("process_group"), name)(timeout=TIMEOUT)
    for command, size, port in (text.split(":") for text in commands):
        if int(my_rank) < int(size):
            me = Rank(name, backend_name, int(port), int(my_rank), int(size))
            print(json.dumps(outcome(me, command)), flush=True)
