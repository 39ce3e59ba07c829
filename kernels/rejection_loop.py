"""Speculative sampling's rule in plain numbers, and the loop form of kernels 23 to 28: the specification.

A request has a target law p_j and a draft law q_j at each of its drafts j = 0 .. k - 1; behind them a target law alone.
Standard: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Block: Sun et al. 2024,
"Block Verification Accelerates Speculative Decoding".
"""

import math
from collections.abc import Sequence

import torch

from kernels.noise import Purpose, log_exponential, word_of
from kernels.philox import uniform_of_word

Law = Sequence[float]
FLOOR = 1e-30
"""What stands for no residual mass at all. Where rounding leaves none, the target's own law decides, so that a token
which the target forbids never comes out; where there is some, it changes nothing."""


def law_of(logits: Law, greedy: bool) -> list[float]:
    """The softmax; greedy, all mass on the largest logit, the lowest id on ties."""
    best = max(logits)
    if greedy:
        return one_hot(logits.index(best), len(logits))
    masses = [math.exp(x - best) for x in logits]
    return [x / sum(masses) for x in masses]


def one_hot(token: int, size: int) -> list[float]:
    """The law of a draft that was not drawn: a lookup's, or a greedy drafter's."""
    return [float(t == token) for t in range(size)]


def _ratio(p: float, q: float) -> float:
    return p / q if q else math.inf * p if p else 0.0


def prefix_masses(targets: Sequence[Law], drafts: Sequence[Law], tokens: Sequence[int], method: str) -> list[float]:
    """The mass of the accepted prefix before each draft, and behind the last: 1 unless the block is judged as one."""
    masses = [1.0]
    for p, q, token in zip(targets, drafts, tokens, strict=False):
        masses.append(min(masses[-1] * _ratio(p[token], q[token]), 1.0) if method == "block" else 1.0)
    return masses


def residual(target: Law, draft: Law, mass: float) -> list[float]:
    """What the target wants beyond what the draft has given, times a constant; all of it once nothing is left."""
    return [x * max(1.0 - (q / (mass * x) if x else 1.0), FLOOR) for x, q in zip(target, draft, strict=True)]


def acceptance_probabilities(
    targets: Sequence[Law], drafts: Sequence[Law], tokens: Sequence[int], method: str
) -> list[float]:
    """For each draft the probability h that its uniform is below it.

    "standard": a draft is accepted if all before it were and u < h. "block": the accepted drafts end at the last one
    with u < h.
    """
    if method == "standard":
        return [min(_ratio(p[t], q[t]), 1.0) for p, q, t in zip(targets, drafts, tokens, strict=False)]
    masses = prefix_masses(targets, drafts, tokens, method)[1:]
    result = []
    for j, mass in enumerate(masses):
        if j + 1 == len(masses):
            result.append(mass)
            continue
        left = sum(max(mass * p - q, 0.0) for p, q in zip(targets[j + 1], drafts[j + 1], strict=True))
        result.append(left / (left + 1.0 - mass) if left else 0.0)
    return result


def num_accepted(probabilities: Sequence[float], uniforms: Sequence[float], method: str) -> int:
    """How many drafts are accepted; "synthetic" judges as "standard" does."""
    passed = [u < h for u, h in zip(uniforms, probabilities, strict=True)]
    if method == "block":
        return max((j + 1 for j, ok in enumerate(passed) if ok), default=0)
    return passed.index(False) if False in passed else len(passed)


def loop_form(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int],
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    method: str,
    acceptance_rates: torch.Tensor | None,
    out: tuple[torch.Tensor, ...],
) -> None:
    """One request after the other; `out` as `RejectionOutput`."""
    idx_mapping, cu_num_logits, token_ids, positions, _ = batch
    sampled, num_sampled, *seen = out
    vocab = target_logits.shape[1]
    sampled.fill_(-1)
    for tensor in seen:
        tensor.zero_()
    for i in range(idx_mapping.shape[0]):
        begin, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
        state = max(int(idx_mapping[i]), 0)
        greedy, seed = float(temperature[state]) == 0.0, int(seeds[state])
        tokens = token_ids[begin + 1 : end].tolist()
        tokens = tokens[: next((j for j, token in enumerate(tokens) if token < 0), len(tokens))]
        at = positions[begin:end].tolist()
        targets = [law_of(target_logits[begin + j].tolist(), greedy) for j in range(len(tokens))]
        if draft_logits is None or greedy:
            drafts = [one_hot(token, vocab) for token in tokens]
        else:
            drafts = [law_of(draft_logits[state, j].tolist(), False) for j in range(len(tokens))]
        # The round is part of the name of a draw: position in the sequence, then place in the round.
        uniforms = [
            uniform_of_word(word_of(seed, at[j] + (j << 32), Purpose.ACCEPT, token=0)) for j in range(len(tokens))
        ]
        if acceptance_rates is not None:
            accepted = num_accepted(acceptance_rates[: len(tokens)].tolist(), uniforms, method)
        else:
            accepted = num_accepted(acceptance_probabilities(targets, drafts, tokens, method), uniforms, method)
        for j, token in enumerate(tokens):
            for tensor, value in zip(seen, (targets[j][token], drafts[j][token], uniforms[j]), strict=True):
                tensor[begin + j] = value
        law, purpose = law_of(target_logits[begin + accepted].tolist(), greedy), Purpose.SAMPLE
        if accepted < len(tokens):
            purpose = Purpose.RESAMPLE
            if not greedy:
                mass = prefix_masses(targets, drafts, tokens, method)[accepted]
                law = residual(law, drafts[accepted], mass)
        sampled[i, :accepted] = torch.tensor(tokens[:accepted], dtype=torch.int64)
        sampled[i, accepted] = _race(law, seed, at[accepted], purpose)
        num_sampled[i] = accepted + 1


def _race(law: Law, seed: int, position: int, purpose: int) -> int:
    """Gumbel-max over the tokens that have mass."""
    scores = {
        token: math.log(mass) - log_exponential(word_of(seed, position, purpose, token))
        for token, mass in enumerate(law)
        if mass > 0.0
    }
    return max(scores, key=lambda token: (scores[token], -token), default=0)
