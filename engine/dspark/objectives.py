"""What is trained: the weights of a head and the gradients of its loss on a batch. The draft's, and the MTP head's.

Nothing here waits for the device: which slots count follows from lengths that the host knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import ModelConfig
from ..models.decoder import CausalLM
from ..spec_decode import mtp_checkpoint
from ..spec_decode.mtp_training import mtp_hidden
from .checkpoint import Weights, init_weights, write_draft
from .config import DSparkConfig
from .contiguous import draft_hidden
from .loss import (
    Blocks,
    LossSums,
    LossWeights,
    StepReport,
    block_labels,
    block_losses,
    sample_anchors,
    vocabulary_terms,
    weight_of_slots,
)

_ROWS_AT_ONCE = {"cuda": 8192, "cpu": 1024}
"""Slots whose logits over the whole vocabulary are in memory together."""


class TrainingError(ValueError):
    """A training that cannot be run or taken up again; says why and what to do."""


@dataclass(frozen=True)
class Batch:
    """b sequences of at most s tokens, and the target's states of them."""

    # i64 [b, s], zeros behind the end
    tokens: Tensor
    # [b, s, n * d] of the injected layers, [b, s, d] behind the last norm
    chosen: Tensor
    last: Tensor
    # i64 [b] each, on the host
    lengths: np.ndarray
    starts: np.ndarray
    rng: np.random.Generator


class Outcome(NamedTuple):
    """Of a batch: its sums, on the device, and the weight of all its slots."""

    sums: LossSums
    weight: float

    def report(self, weights: LossWeights) -> StepReport:
        """Waits for the device."""
        return StepReport.of(self.sums, self.weight, weights)


class Objective(ABC):
    """A head to train. ``weights`` are f32 leaves on the target's device."""

    title: str
    weights: Weights
    layer_ids: tuple[int, ...]

    def __init__(self, target: CausalLM, weights: Weights, loss: LossWeights) -> None:
        self.device, self.loss = target.device, loss
        self.embedding, self.head = shared_weights(target)
        # So that logits start with a standard deviation of one: with ones they are as far apart as the head's rows are
        # long, and the first hundreds of steps only bring them together.
        scale = float(self.head.square().sum(-1).mean().rsqrt())
        weights = {**weights, "norm.weight": torch.full_like(weights["norm.weight"], scale)}
        self.weights = {name: w.to(self.device).requires_grad_() for name, w in weights.items()}

    @abstractmethod
    def backward(self, batch: Batch) -> Outcome:
        """Adds the gradients of the batch's mean loss to `weights`."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What makes another training of it another: goes into the check on resuming."""

    @abstractmethod
    def write(self, directory: Path, dtype: torch.dtype) -> None:
        """The head as a checkpoint."""

    def _index(self, mask: np.ndarray) -> Tensor:
        """Flat places of a mask of the host, on the device."""
        return torch.from_numpy(np.flatnonzero(mask)).to(self.device, non_blocking=True)

    def _chunks(self, rows: int, slots: int) -> list[slice]:
        chunk = max(1, _ROWS_AT_ONCE[self.device.type] // slots)
        return [slice(begin, begin + chunk) for begin in range(0, rows, chunk)]


class DraftObjective(Objective):
    """The paper's loss of blocks behind ``num_anchors`` drawn anchors a sequence."""

    title = "the draft"

    def __init__(
        self, target: CausalLM, config: DSparkConfig, num_anchors: int, seed: int, loss: LossWeights | None = None
    ) -> None:
        config.check_target(target.config)
        self.config, self.num_anchors, self.layer_ids = config, num_anchors, config.target_layer_ids
        super().__init__(target, init_weights(config, seed), loss or LossWeights())

    def backward(self, batch: Batch) -> Outcome:
        config, block, decay = self.config, self.config.block_size, self.loss.decay
        anchors_np, real_np = sample_anchors(batch.lengths, batch.starts, self.num_anchors, batch.rng)
        weight = weight_of_slots(batch.lengths, anchors_np, real_np, block, decay)
        anchors, real = (torch.from_numpy(x).to(self.device, non_blocking=True) for x in (anchors_np, real_np))
        lengths = torch.from_numpy(batch.lengths).to(self.device, non_blocking=True)
        before, labels, valid = block_labels(batch.tokens, lengths, anchors, real, block)
        # The target's state at the token before a slot is what its own prediction of the slot comes from.
        d = batch.last.shape[-1]
        place = (anchors.unsqueeze(-1) + torch.arange(block, device=self.device)).clamp(max=batch.last.shape[1] - 1)
        target_hidden = batch.last.gather(1, place.flatten(1).unsqueeze(-1).expand(-1, -1, d)).view(*place.shape, d)
        ids = batch.tokens.gather(1, anchors)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = draft_hidden(config, self.weights, self.embedding, batch.chosen, ids, anchors)
        keep = self._index(real_np)
        parts = [x.flatten(0, 1)[keep] for x in (target_hidden, before, labels, valid)]
        kept = hidden.flatten(0, 1)[keep]
        leaf = kept.detach().requires_grad_()
        sums: LossSums | None = None
        for piece in self._chunks(leaf.shape[0], block):
            blocks = Blocks(*(x[piece] for x in (leaf, *parts)))
            terms = block_losses(config, self.weights, self.head, blocks, decay)
            (terms.total(self.loss) / weight).backward()
            sums = terms.detached() if sums is None else sums + terms.detached()
        assert sums is not None and leaf.grad is not None
        kept.backward(leaf.grad)
        return Outcome(sums, weight)

    def about(self) -> dict[str, Any]:
        return {"head": "dspark", "config": self.config.to_hf(), "num_anchors": self.num_anchors}

    def write(self, directory: Path, dtype: torch.dtype) -> None:
        write_draft(directory, self.config, self.weights, dtype)


class MtpObjective(Objective):
    """The same loss for the one token of an MTP head, at every token of a response: `mtp_training.mtp_loss` in pieces.

    ``layer_ids`` are nothing that it needs: those of the states that it shares with a draft's training.
    """

    title = "the MTP head"

    def __init__(
        self, target: CausalLM, seed: int, loss: LossWeights | None = None, layer_ids: tuple[int, ...] = ()
    ) -> None:
        self.config: ModelConfig = mtp_checkpoint.mtp_config(target.config)
        self.layer_ids = layer_ids
        super().__init__(target, mtp_checkpoint.init_weights(self.config, seed), loss or LossWeights())

    def backward(self, batch: Batch) -> Outcome:
        tokens = batch.tokens
        # Slot i says token i + 2; drafted are the response's tokens behind its first.
        place = np.arange(tokens.shape[1] - 2) + 2
        wanted = (place > batch.starts[:, None]) & (place < batch.lengths[:, None])
        following = F.embedding(tokens[:, 1:-1], self.embedding).to(batch.last.dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = mtp_hidden(self.config, self.weights, batch.last[:, :-2], following)
        keep, weight = self._index(wanted), float(max(wanted.sum(), 1))
        kept, own = (x.flatten(0, 1)[keep] for x in (hidden, batch.last[:, 1:-1]))
        labels = tokens[:, 2:].flatten()[keep]
        leaf = kept.detach().requires_grad_()
        totals: list[Tensor] = []
        for piece in self._chunks(leaf.shape[0], 1):
            logits = F.linear(leaf[piece].float(), self.head)
            with torch.no_grad():
                p = F.linear(own[piece].float(), self.head).softmax(-1)
            ce, l1 = (x.sum() for x in vocabulary_terms(logits, p, labels[piece]))
            ((self.loss.ce * ce + self.loss.l1 * l1) / weight).backward()
            totals.append(torch.stack((ce.detach(), l1.detach())))
        assert leaf.grad is not None
        kept.backward(leaf.grad)
        ce, l1 = torch.stack(totals).sum(0).unbind(0)
        count = ce.new_full((), float(wanted.sum()))
        zero, accept = torch.zeros_like(ce), count - 0.5 * l1
        rates = {"slots": count, "accept": accept, "error": zero, "bias": zero}
        of_slot = {name: value.unsqueeze(0) for name, value in rates.items()}
        return Outcome(LossSums(ce, l1, zero, **of_slot, tau=count + accept, blocks=count), weight)

    def about(self) -> dict[str, Any]:
        return {"head": "mtp"}

    def write(self, directory: Path, dtype: torch.dtype) -> None:
        mtp_checkpoint.write_mtp(directory, self.config, self.weights, dtype)


def shared_weights(target: CausalLM) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, d] and output head [V, d], f32 and free of inference mode.

    Raises:
        TrainingError: the head is held in a form that can't be read back.
    """
    embedding, head = target.embed_tokens.weight, target.lm_head.weight
    if head is None:
        if not target.config.tie_word_embeddings:
            raise TrainingError(
                "the target's output head is packed for this CPU: load it with dtype float32 to train on it"
            )
        head = embedding
    plain = embedding.detach().float().clone()
    return plain, plain if head is embedding else head.detach().float().clone()
