# SPDX-License-Identifier: BSD-3-Clause
"""The two child processes of the demo: the donor, which trains, and the joiner, which comes late.

Rules of this file: each is what a trainer would write with the public transport; what they report is judged by the
parent, so neither can pass by itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ..bench._link import Link, serve
from ..checkpointing import HTTPTransport
from ._compare import fingerprint, tensors
from ._training import Trainer

Options = dict[str, Any]


def main(link: Link, options: Options) -> None:
    """Be the donor or the joiner, as ``options["role"]`` says."""
    (_donor if options["role"] == "donor" else _joiner)(link, options)


def _donor(link: Link, options: Options) -> None:
    trainer = Trainer(options["size"], options["seed"])
    steps, limit_s = options["steps"], options["limit_s"]
    start_s = time.perf_counter()
    losses = trainer.train(steps, lambda done: link.progress("train", done, steps))
    link.send(
        "trained",
        losses=losses,
        seconds=time.perf_counter() - start_s,
        text=trainer.source,
        text_bytes=len(trainer.text.encode()),
    )
    transport: HTTPTransport[Any] = HTTPTransport(limit_s, host="127.0.0.1")
    try:
        start_s = time.perf_counter()
        transport.send_checkpoint([1], trainer.step, trainer.state(), limit_s)
        publish_s = time.perf_counter() - start_s
        link.send("serving", metadata=transport.metadata(), step=trainer.step, seconds=publish_s)
        link.expect("stop serving", limit_s)
        # from here on the tensors may change again
        transport.disallow_checkpoint()
        link.send("stopped", leaves=fingerprint(trainer.state()))
        _further(link, trainer, options)
    finally:
        transport.shutdown(wait=False)


def _joiner(link: Link, options: Options) -> None:
    trainer = Trainer(options["size"], options["seed"])
    limit_s = options["limit_s"]
    losses = trainer.train(options["joiner_steps"])
    link.send("ready", losses=losses, leaves=fingerprint(trainer.state()))
    command = link.expect("heal", limit_s)
    own = trainer.state()
    transport: HTTPTransport[Any] = HTTPTransport(
        limit_s,
        state_dict=lambda: own,
        host="127.0.0.1",
        progress=lambda done, total: link.progress("heal", done, total),
    )
    try:
        start_s = time.perf_counter()
        state = transport.recv_checkpoint(0, command["metadata"], command["step"], limit_s)
        seconds = time.perf_counter() - start_s
        trainer.load(state)
    finally:
        transport.shutdown(wait=False)
    had, got = tensors(own), tensors(state)
    link.send(
        "healed",
        seconds=seconds,
        bytes=sum(tensor.nbytes for tensor in got.values()),
        tensors=len(got),
        in_place=sum(path in had and had[path] is tensor for path, tensor in got.items()),
        # of what it trains with from now on, and not of what the transport returned
        leaves=fingerprint(trainer.state()),
    )
    _further(link, trainer, options)


def _further(link: Link, trainer: Trainer, options: Options) -> None:
    link.expect("go on", options["limit_s"])
    # in hex, which has all the bits
    link.send("went on", losses=[loss.hex() for loss in trainer.train(options["further"])])


if __name__ == "__main__":
    sys.exit(serve(main))
