# SPDX-License-Identifier: BSD-3-Clause
"""The training loop of the demo, as anybody would write it, and its state, as anybody would hand it to a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ._model import CONTEXT, CharTransformer, width_for
from ._text import corpus

__all__ = ["Trainer"]

# Samples of a step: a step of the default size takes half a second on one core.
_BATCH = 4
_LEARNING_RATE = 1e-3
# Without a warm-up the first steps of AdamW throw such a model off.
_WARM_UP = 6


class Trainer:
    """A model, its optimizer, its scheduler and the number of the next step."""

    def __init__(self, size: int, seed: int) -> None:
        """``size``: bytes of the whole state, about; ``seed``: where the weights come from."""
        # equal bits need equal sums: the number of threads decides how a sum is split
        torch.set_num_threads(1)
        self.text, self.source = corpus()
        letters = sorted(set(self.text))
        numbers = {letter: i for i, letter in enumerate(letters)}
        self._data = torch.tensor([numbers[letter] for letter in self.text])
        torch.manual_seed(seed)
        self.model = CharTransformer(len(letters), width_for(size, len(letters)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.1, total_iters=_WARM_UP)
        self.step = 0

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on; the tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Tensors that were received in place are copied onto themselves: nothing changes."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])

    def train(self, steps: int, after: Callable[[int], None] | None = None) -> list[float]:
        """Take ``steps`` steps and return their losses; ``after`` is told how many were taken."""
        losses = []
        for i in range(steps):
            x, y = self._batch()
            loss = functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
            if after:
                after(i + 1)
        return losses

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of this step: its number alone decides, so that every replica reads the same."""
        generator = torch.Generator().manual_seed(self.step)
        starts = torch.randint(len(self._data) - CONTEXT - 1, (_BATCH,), generator=generator).tolist()
        rows = torch.stack([self._data[start : start + CONTEXT + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]
