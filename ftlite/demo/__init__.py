# SPDX-License-Identifier: BSD-3-Clause
"""``demo``: a late replica copies the live state of a training one over HTTP, and both go on as one.

Rules of this folder: real processes, a real model and real text; every claim that is printed was checked by the
parent from what both children reported; the command's own process needs no torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._deadline import Deadline
from .._errors import IntegrityError
from ..bench._common import Bar, available_bytes, in_bytes, parse_size, rate
from ..bench._workers import Crew, Worker

__all__ = ["add_arguments", "run", "unequal"]

_MODULE = f"{__package__}._worker"
_SIZE = 300_000_000
_STEPS = 12
# The further steps that both take: enough for a difference in any part of the state to reach the loss.
_FURTHER = 5
# Starting: importing torch takes 2 s, from a cold and busy disk a minute.
_START_S = 120.0
# A step takes 1.6 ns per byte of state on one core: twenty times that for a slow and busy one.
_STEP_S_PER_BYTE = 35e-9
# What a process needs beside weights, moments and gradients: the interpreter, torch and the activations.
_PROCESS_BYTES = 400_000_000
# Unequal parts that are named before the rest is counted.
_NAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo to ``parser``."""
    parser.add_argument(
        "--size", type=parse_size, default=_SIZE, metavar="SIZE", help="of the training state, about (300MB)"
    )
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help="that the donor trains before the heal (12)"
    )
    parser.add_argument(
        "--joiner-steps", type=int, default=1, metavar="N",
        help="that the joiner took before (1); with 0 it has no optimizer state yet, which is then allocated",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 means that everything that it prints was verified.

    Raises:
        FtliteError: a check failed (IntegrityError), or a child failed, died, or did not answer in time.
        ValueError: a wrong option, or more memory is needed than there is.
    """
    start_s = time.monotonic()
    _check(args)
    bar = Bar()
    story = _Story(args, bar)
    try:
        with Crew(story.progress) as crew:
            story.tell(crew)
    finally:
        bar.clear()
    print(f"OK in {time.monotonic() - start_s:.1f} s", flush=True)
    return 0


def unequal(mine: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The names whose values differ, or that one side lacks."""
    missing = object()
    return [name for name in {**mine, **theirs} if mine.get(name, missing) != theirs.get(name, missing)]


@dataclass
class _Story:
    """The demo from the start to the end, told line by line."""

    args: argparse.Namespace
    bar: Bar

    def tell(self, crew: Crew) -> None:
        """Start both, let one heal from the other, and check.

        Raises:
            IntegrityError: a check failed.
            ChildError, DeadlineExceeded: a child failed, died, or did not answer in time.
        """
        options = self._options()
        donor = crew.start("donor", _MODULE, {**options, "role": "donor", "seed": 1})
        joiner = crew.start("joiner", _MODULE, {**options, "role": "joiner", "seed": 2})
        serving, ready = self._train(crew, donor, joiner)
        joiner.send("heal", metadata=serving["metadata"], step=serving["step"])
        healed = self._expect(crew, joiner, "healed")
        donor.send("stop serving")
        stopped = self._expect(crew, donor, "stopped")
        self._say(
            "heal",
            f"{in_bytes(healed['bytes'])} in {healed['seconds']:.3f} s ({rate(healed['bytes'], healed['seconds'])}), "
            f"{healed['in_place']} of {healed['tensors']} tensors in place, checksums verified; "
            f"the donor was ready to serve in {serving['seconds']:.3f} s",
        )
        self._verify(stopped["leaves"], healed, ready["leaves"])
        self._go_on(crew, donor, joiner)

    def progress(self, worker: Worker, message: dict[str, Any]) -> None:
        """Draw how far a child is."""
        unit = "B" if message["what"] == "heal" else " steps"
        self.bar.show(f"{worker.name}: {message['what']}", message["done"], message["total"], unit)

    def _options(self) -> dict[str, Any]:
        names = ("size", "steps", "joiner_steps")
        limit_s = _START_S + self.args.size * _STEP_S_PER_BYTE * (self.args.steps + self.args.joiner_steps + _FURTHER)
        return {**{name: getattr(self.args, name) for name in names}, "further": _FURTHER, "limit_s": limit_s}

    def _train(self, crew: Crew, donor: Worker, joiner: Worker) -> tuple[dict[str, Any], dict[str, Any]]:
        trained = self._expect(crew, donor, "trained")
        losses = trained["losses"]
        self._say(
            "donor",
            f"pid {donor.pid}: {len(losses)} training steps on {in_bytes(trained['text_bytes'])} of {trained['text']} "
            f"in {trained['seconds']:.1f} s, loss {losses[0]:.2f} -> {losses[-1]:.2f}",
        )
        ready = self._expect(crew, joiner, "ready")
        own = ready["losses"]
        took = f"{len(own)} step{'s' if len(own) > 1 else ''}, loss {own[-1]:.2f}" if own else "no step yet"
        self._say("joiner", f"pid {joiner.pid}: another seed, {took}")
        return self._expect(crew, donor, "serving"), ready

    def _verify(self, theirs: dict[str, str], healed: dict[str, Any], before: dict[str, str]) -> None:
        mine = healed["leaves"]
        _demand_equal(mine, theirs, "parts of the state")
        changed = len(unequal(before, mine))
        if not changed:
            raise IntegrityError("verify: the joiner had the donor's state before it healed, so that nothing was shown")
        values = len(mine) - healed["tensors"]
        self._say(
            "verify",
            f"{healed['tensors']} tensors and {values} other values equal bit for bit (SHA-256 in both processes; "
            f"{changed} differed before)",
        )

    def _go_on(self, crew: Crew, donor: Worker, joiner: Worker) -> None:
        for worker in (donor, joiner):
            worker.send("go on")
        losses = [self._expect(crew, worker, "went on")["losses"] for worker in (donor, joiner)]
        first, second = ({f"step +{i + 1}": loss for i, loss in enumerate(side)} for side in losses)
        _demand_equal(second, first, "losses")
        if len(first) != _FURTHER:
            raise IntegrityError(f"train: {len(first)} further steps were reported and {_FURTHER} asked for")
        last = losses[0][-1]
        self._say(
            "train",
            f"both took {_FURTHER} more steps: losses equal to the last bit, "
            f"{float.fromhex(losses[0][0]):.4f} -> {float.fromhex(last):.4f} ({last})",
        )

    def _expect(self, crew: Crew, worker: Worker, event: str) -> dict[str, Any]:
        return crew.expect(worker, event, Deadline(self._options()["limit_s"]))

    def _say(self, who: str, text: str) -> None:
        self.bar.clear()
        print(f"{who:7s} {text}", flush=True)


def _demand_equal(mine: Mapping[str, object], theirs: Mapping[str, object], what: str) -> None:
    names = unequal(mine, theirs)
    if names or not mine:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise IntegrityError(f"{len(names)} of {len(mine)} {what} differ: {', '.join(names[:_NAMED])}{more}")


def _check(args: argparse.Namespace) -> None:
    if args.steps < 1 or args.joiner_steps < 0:
        raise ValueError("--steps is 1 or more, --joiner-steps 0 or more")
    # weights, two moments, and gradients, in two processes
    needed = 2 * (args.size * 4 // 3 + _PROCESS_BYTES)
    there = available_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"two processes that train with a state of {in_bytes(args.size)} need about {in_bytes(needed)} of memory "
            f"and {in_bytes(there)} are available: lower --size"
        )
