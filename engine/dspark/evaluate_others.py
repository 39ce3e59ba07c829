"""What drafters other than DSpark's would have had accepted along the same greedy answers: the yardsticks of `eval`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import ModelConfig
from ..models.decoder import CausalLM
from ..spec_decode.mtp_checkpoint import check_target
from ..spec_decode.mtp_training import mtp_hidden
from ..spec_decode.ngram import NgramDecoder
from .data import Sequences
from .evaluate import Acceptance, replay
from .objectives import shared_weights
from .target import prefill_with_hidden


def evaluate_none(sequences: Sequences) -> Acceptance:
    """Without speculation: a token a round."""
    count = int((sequences.lengths - sequences.starts - 1).sum())
    return Acceptance(0, np.zeros(count, dtype=np.int64))


def evaluate_ngram(sequences: Sequences, k: int, min_ngram: int, max_ngram: int) -> Acceptance:
    """Of method "ngram": what followed where the last tokens stood first."""
    decoder = NgramDecoder(k, min_ngram, max_ngram, max_model_len=1 << 30)
    accepted: list[int] = []
    for row, start in zip(sequences, sequences.starts.tolist(), strict=True):
        tokens = np.array(row)
        accepted += replay(row, start, k, lambda place, t=tokens: decoder.propose_from_tokens([t[: place + 1]])[0])  # type: ignore[misc]
    return Acceptance(k, np.array(accepted, dtype=np.int64))


def evaluate_mtp(
    target: CausalLM, config: ModelConfig, weights: Mapping[str, Tensor], sequences: Sequences
) -> Acceptance:
    """Of an MTP head, in plain form and f32. Raises ModelConfigError if it is one for another target."""
    check_target(config, target.config)
    embedding, head = shared_weights(target)
    plain = {name: w.detach().to(target.device, torch.float32) for name, w in weights.items()}
    accepted: list[int] = []
    for tokens, start in zip(sequences, sequences.starts.tolist(), strict=True):
        drafts = _drafts(config, plain, embedding, head, target, tokens, start)
        accepted += replay(tokens, start, 1, lambda place, d=drafts, s=start: [d[place - s]])  # type: ignore[misc]
    return Acceptance(1, np.array(accepted, dtype=np.int64))


@torch.no_grad()
def _drafts(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    embedding: Tensor,
    head: Tensor,
    target: CausalLM,
    tokens: list[int],
    start: int,
) -> list[int]:
    """The draft behind each token from ``start`` to the last."""
    last, _ = prefill_with_hidden(target, [tokens], ())
    following = F.embedding(torch.tensor([tokens[1:]], device=target.device), embedding)
    hidden = mtp_hidden(config, weights, last[0][:-1].float().unsqueeze(0), following)[0]
    drafts: list[int] = F.linear(hidden[start - 1 :], head).argmax(-1).tolist()
    return drafts
