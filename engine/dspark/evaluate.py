"""How many drafts a target accepts: rounds replayed along its own answers, and outcomes to calibrate on.

Greedy verification gives the target's greedy answer whatever is drafted. So an answer that is known lets every round be
replayed exactly, with all blocks of a sequence drafted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import CausalLM
from .config import DSparkConfig
from .contiguous import draft_block, draft_hidden, most_likely
from .data import Sequences
from .lookup import lookup_loop
from .objectives import shared_weights
from .target import prefill_with_hidden

_BLOCKS_AT_ONCE = 64
_TOKENS_AT_ONCE = {"cuda": 65_536, "cpu": 4096}


@dataclass(frozen=True)
class Acceptance:
    """Rounds of one method: how many of their k drafts were accepted, i64 [rounds]."""

    k: int
    accepted: np.ndarray

    @property
    def accepted_length(self) -> float:
        """Committed tokens a round, the bonus or corrected one counted: 1 + the sum of `prefix_rates`."""
        return 1.0 + float(self.accepted.mean()) if len(self.accepted) else 1.0

    @property
    def prefix_rates(self) -> list[float]:
        """Of each position, the part of the rounds whose drafts up to it were all accepted."""
        return [float((self.accepted > j).mean()) if len(self.accepted) else 0.0 for j in range(self.k)]

    @property
    def conditional_rates(self) -> list[float | None]:
        """Of each position, the part of the rounds that came to it which accepted it; None where none came."""
        reached = [int((self.accepted >= j).sum()) for j in range(self.k + 1)]
        return [reached[j + 1] / reached[j] if reached[j] else None for j in range(self.k)]


class DraftModel:
    """A draft in plain form beside its target, for measuring. Tensors in float32 on the target's device."""

    def __init__(self, target: CausalLM, config: DSparkConfig, weights: Mapping[str, Tensor]) -> None:
        config.check_target(target.config)
        self.target, self.config = target, config
        embedding, self.target_head = shared_weights(target)
        self.weights = {name: w.detach().to(target.device, torch.float32) for name, w in weights.items()}
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.head = self.weights.get("lm_head.weight", self.target_head)

    @torch.no_grad()
    def draft(
        self, chosen: Tensor, anchors: Tensor, positions: Tensor, choose: Callable[[Tensor], Tensor] = most_likely
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks of one sequence: tokens [a, γ], logits [a, γ, V] and confidences before the sigmoid [a, γ].

        Args:
            chosen: [s, n * d], the target's at the injected layers; anchors, positions: i64 [a].
            choose: as of `draft_block`.
        """
        hidden = draft_hidden(
            self.config, self.weights, self.embedding, chosen.float().unsqueeze(0), anchors.unsqueeze(0),
            positions.unsqueeze(0),
        )[0]  # fmt: skip
        base = F.linear(hidden, self.head)
        tokens, logits, confidences = draft_block(self.config, self.weights, hidden, base, anchors, choose)
        return tokens, logits, torch.zeros_like(tokens, dtype=torch.float32) if confidences is None else confidences

    def greedy_blocks(self, tokens: Sequence[int], start: int, chosen: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The block behind each position from ``start`` to the last but one: drafts i64 [m, γ], confidences f32."""
        positions = torch.arange(start, max(start, len(tokens) - 1), device=chosen.device)
        anchors = torch.tensor(tokens[start : len(tokens) - 1], device=chosen.device)
        parts = [
            self.draft(chosen, anchors[i : i + _BLOCKS_AT_ONCE], positions[i : i + _BLOCKS_AT_ONCE])
            for i in range(0, len(positions), _BLOCKS_AT_ONCE)
        ]
        if not parts:
            empty = np.zeros((0, self.config.block_size))
            return empty.astype(np.int64), empty.astype(np.float32)
        drafts, _, confidences = (torch.cat(x).cpu() for x in zip(*parts, strict=True))
        return drafts.numpy(), confidences.numpy()


def matches(tokens: Sequence[int], position: int, drafts: Sequence[int]) -> int:
    """How many drafts a greedy target accepts behind ``position``, whose answer ``tokens`` is."""
    count = 0
    for draft, token in zip(drafts, tokens[position + 1 :], strict=False):
        if draft != token:
            break
        count += 1
    return count


def replay(tokens: Sequence[int], start: int, k: int, drafts_behind: Callable[[int], Sequence[int]]) -> list[int]:
    """Accepted drafts of each round of a greedy answer; rounds whose block runs past its end are left out."""
    accepted, position = [], start
    while position + k < len(tokens):
        accepted.append(matches(tokens, position, drafts_behind(position)[:k]))
        position += accepted[-1] + 1
    return accepted


def evaluate_draft(model: DraftModel, sequences: Sequences, k: int) -> Acceptance:
    """Of a draft, along greedy answers."""
    model.config.check_num_speculative_tokens(k)
    accepted: list[int] = []
    for tokens, start, chosen in _with_hidden(model, sequences):
        drafts, _ = model.greedy_blocks(tokens, start, chosen)
        accepted += replay(tokens, start, k, lambda position, d=drafts, s=start: d[position - s].tolist())  # type: ignore[misc]
    return Acceptance(k, np.array(accepted, dtype=np.int64))


def evaluate_lookup(sequences: Sequences, k: int, min_ngram: int, max_ngram: int) -> Acceptance:
    """Of the draft without weights, along greedy answers; lengths as of `lookup_loop`."""

    def drafts(known: list[int]) -> list[int]:
        return lookup_loop(known, k, min_ngram=min_ngram, max_ngram=max_ngram)

    accepted: list[int] = []
    for tokens, start in zip(sequences, sequences.starts.tolist(), strict=True):
        accepted += replay(tokens, start, k, lambda position, t=tokens: drafts(t[: position + 1]))  # type: ignore[misc]
    return Acceptance(k, np.array(accepted, dtype=np.int64))


def greedy_outcomes(model: DraftModel, sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Confidences [n, γ] of the block behind every token of greedy answers, and whether its drafts were accepted.

    Outcomes are of prefixes, as `calibration.fit` wants them; blocks that run past an answer's end are left out.
    """
    block = model.config.block_size
    logits, outcomes = [], []
    for tokens, start, chosen in _with_hidden(model, sequences):
        drafts, confidences = model.greedy_blocks(tokens, start, chosen)
        whole = max(0, len(tokens) - start - block)
        counts = np.array([matches(tokens, start + i, drafts[i].tolist()) for i in range(whole)], dtype=np.int64)
        logits.append(confidences[:whole])
        outcomes.append(np.arange(block) < counts[:, None])
    return np.concatenate(logits), np.concatenate(outcomes)


@torch.no_grad()
def sampled_outcomes(model: DraftModel, sequences: Sequences, rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """As `greedy_outcomes`, at temperature 1: drafts are drawn, and accepted by the rejection rule.

    Each round draws one anchor a sequence, since what was drafted has to go through the target.
    """
    generator = torch.Generator(model.target.device).manual_seed(seed)
    rng = np.random.default_rng(seed)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

    logits, outcomes = [], []
    for _ in range(rounds):
        for tokens, start, chosen in _with_hidden(model, sequences):
            position = int(rng.integers(start, len(tokens)))
            anchor = torch.tensor([tokens[position]], device=chosen.device)
            place = torch.tensor([position], device=chosen.device)
            drafts, draft_logits, confidences = model.draft(chosen, anchor, place, draw)
            verified = [*tokens[: position + 1], *drafts[0, :-1].tolist()]
            last, _ = prefill_with_hidden(model.target, [verified], model.config.target_layer_ids)
            p = F.linear(last[0][position:].float(), model.target_head).softmax(-1)
            q = draft_logits[0].softmax(-1)
            index = drafts[0].unsqueeze(1)
            ratio = (p.gather(1, index) / q.gather(1, index)).squeeze(1)
            uniform = torch.rand(ratio.shape, generator=generator, device=ratio.device)
            outcomes.append((uniform < ratio).cumprod(0).bool().cpu().numpy())
            logits.append(confidences[0].cpu().numpy())
    return np.stack(logits), np.stack(outcomes)


def _with_hidden(model: DraftModel, sequences: Sequences) -> Iterator[tuple[list[int], int, Tensor]]:
    """Tokens, start and injected hidden states of each sequence; as many at once as fit."""
    limit = _TOKENS_AT_ONCE[model.target.device.type]
    begin = 0
    while begin < len(sequences):
        end = begin + 1
        while end < len(sequences) and int(sequences.lengths[begin : end + 1].sum()) <= limit:
            end += 1
        batch = [sequences[i] for i in range(begin, end)]
        _, chosen = prefill_with_hidden(model.target, batch, model.config.target_layer_ids)
        for tokens, start, states in zip(batch, sequences.starts[begin:end].tolist(), chosen, strict=True):
            yield tokens, start, states.clone()
        begin = end
