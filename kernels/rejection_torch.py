"""The torch form of kernels 23 to 28 (see rejection.py): vectorised, without a host wait."""

import math

import torch

from kernels.noise import Purpose, gumbel_noise
from kernels.philox import philox, uniform
from kernels.rejection_loop import FLOOR

_TILE = 128


def draft_noise_positions(
    # [...] i64
    positions: torch.Tensor,
    # broadcasts with it
    index: int | torch.Tensor,
) -> torch.Tensor:
    """The `positions` that name the noise of a round's draft number `index` (from 0), which will stand at `positions`:
    for a drafter's `gumbel_sample(..., purpose=Purpose.DRAFT)`, and for the uniform that judges the draft."""
    return positions + (index << 32)


def count_accepted(
    # [r, N] bool, true for a prefix of each row
    is_draft: torch.Tensor,
    # [r, N] f32: p and q of each draft and its uniform
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
    method: str,
    # [r, N] f32 for "block", see `residual_mass`
    residual_masses: torch.Tensor | None = None,
    # [N] f32 for "synthetic"
    acceptance_rates: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many drafts of each row are accepted, i64 [r]."""
    if method == "block":
        assert residual_masses is not None
        number = torch.arange(1, is_draft.shape[1] + 1, device=is_draft.device)
        mass = prefix_masses(target_probs, draft_probs)[:, 1:]
        left = torch.cat([residual_masses[:, 1:], torch.zeros_like(mass[:, :1])], dim=1)
        # 0 / 0 where nothing is left to want: a later draft is accepted then.
        threshold = torch.where(left > 0, left / (left + 1 - mass), 0.0)
        is_last = number == is_draft.sum(dim=1, keepdim=True)
        passed = is_draft & (uniforms < torch.where(is_last, mass, threshold))
        return torch.where(passed, number, 0).amax(dim=1) if is_draft.shape[1] else is_draft.sum(dim=1)
    if acceptance_rates is not None:
        passed = uniforms < acceptance_rates[: is_draft.shape[1]]
    else:
        passed = uniforms * draft_probs < target_probs
    return (is_draft & passed).cumprod(dim=1).sum(dim=1)


def prefix_masses(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """The mass of the accepted prefix before each draft and behind the last, f32 [r, N + 1], of p and q f32 [r, N]."""
    masses = [torch.ones_like(target_probs[:, :1])]
    ratios = target_probs / draft_probs.clamp(min=1.2e-38)
    for ratio in ratios.split(1, dim=1):
        masses.append((masses[-1] * ratio).clamp_(max=1.0))
    return torch.cat(masses, dim=1)


def subtract_draft(logits: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """The logits of the residual (p m - q)+ from those of p, any shape; `log_ratio` is log(q / (p m))."""
    # Where p is 0 the ratio is 0 / 0 or infinite.
    ratio = torch.where(logits == -math.inf, 1.0, log_ratio.exp())
    return logits + (1.0 - ratio).clamp_(min=FLOOR).log_()


def torch_form(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int],
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    method: str,
    acceptance_rates: torch.Tensor | None,
    all_greedy: bool,
) -> tuple[torch.Tensor, ...]:
    """As `rejection_sample`."""
    idx_mapping, cu_num_logits, token_ids, positions, max_drafts = batch
    num_reqs, num_logits = idx_mapping.shape[0], target_logits.shape[0]
    states = idx_mapping.clamp(min=0).long()
    seed, greedy = seeds[states], temperature[states] == 0
    begin, last = cu_num_logits[:num_reqs].long(), cu_num_logits[1 : num_reqs + 1].long() - 1
    k = torch.arange(max_drafts, device=target_logits.device)
    row = torch.minimum(begin.unsqueeze(1) + k, last.unsqueeze(1))
    drafts = torch.where(row < last.unsqueeze(1), token_ids[(row + 1).clamp_(max=max(num_logits - 1, 0))].long(), -1)
    is_draft = (drafts >= 0).cumprod(dim=1).bool()
    own_logits = None if draft_logits is None else draft_logits[states, :max_drafts]
    laws = DraftLaws(target_logits, row, own_logits, all_greedy)
    p, q = laws.probabilities(torch.where(is_draft, drafts, 0), greedy)
    key = draft_noise_positions(positions[row], k)
    zero = torch.zeros_like(key)
    u = uniform(philox(seed.unsqueeze(1), zero, key, zero + Purpose.ACCEPT.value, key >> 32)[0])

    masses, left = torch.ones_like(p), None
    if method == "block":
        masses = prefix_masses(p, q)[:, :-1]
        left = laws.residual_masses(masses, p, greedy)
    accepted = count_accepted(is_draft, p, q, u, method, left, acceptance_rates)

    chosen = begin + accepted
    if all_greedy:
        own = laws.best[chosen]
    else:
        logits, is_rejected = target_logits[chosen], accepted < is_draft.sum(dim=1)
        if max_drafts:
            logits = laws.residual(logits, drafts, masses, accepted, is_rejected & ~greedy)
        purpose = torch.where(is_rejected, Purpose.RESAMPLE.value, Purpose.SAMPLE.value)
        noise = gumbel_noise(seed, positions[chosen], logits.shape[1], purpose=purpose)
        own = (logits + noise.mul_((~greedy).float().unsqueeze(1))).argmax(dim=-1)
    sampled = torch.where(k < accepted.unsqueeze(1), drafts, -1)
    sampled = torch.cat([sampled, torch.full_like(sampled[:, :1] if max_drafts else own.unsqueeze(1), -1)], dim=1)
    sampled.scatter_(1, accepted.unsqueeze(1), own.unsqueeze(1))

    # The rows of a request's drafts are its own, so a sum is a store; rows that stand for no draft add 0.
    seen = [
        torch.zeros_like(target_logits[:, 0]).index_add_(0, row.flatten(), torch.where(is_draft, x, 0.0).flatten())
        for x in (p, q, u)
    ]
    return sampled, (accepted + 1).to(torch.int32), *seen


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """As `x.argmax(-1)`, the lowest id on ties, in a fraction of its time on a CPU, where only maxima are quick: the
    first best tile, then the first best of it. x f32 [l, V]."""
    num_tiles = x.shape[1] // _TILE
    if num_tiles * _TILE != x.shape[1] or not num_tiles:
        return x.argmax(dim=-1)
    tiles = x.unflatten(1, (num_tiles, _TILE))
    tile = tiles.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (tiles.take_along_dim(tile.unsqueeze(-1), 1).squeeze(1).argmax(dim=-1, keepdim=True) + tile * _TILE)[:, 0]


class DraftLaws:
    """Target and drafter at r requests' N drafts. `row` i64 [r, N] of `target_logits` f32 [l, V] judges each draft;
    `draft_logits` f32 [r, N, V], None for drafts that were not drawn. `best` i64 [l] is the argmax of each row."""

    def __init__(
        self, target_logits: torch.Tensor, row: torch.Tensor, draft_logits: torch.Tensor | None, all_greedy: bool
    ) -> None:
        self.target_logits, self.row, self.all_greedy = target_logits, row, all_greedy
        self.draft_logits = None if all_greedy else draft_logits
        self.best = _argmax(target_logits)
        if not all_greedy:
            self.target_lse = target_logits.logsumexp(dim=-1)[row]
        if self.draft_logits is not None:
            self.draft_lse = self.draft_logits.logsumexp(dim=-1)

    def probabilities(self, drafts: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """p and q f32 [r, N] of `drafts` i64 [r, N]."""
        p = (self.best[self.row] == drafts).float()
        q, greedy = torch.ones_like(p), greedy.unsqueeze(1)
        if not self.all_greedy:
            p = torch.where(greedy, p, (self.target_logits[self.row, drafts] - self.target_lse).exp())
        if self.draft_logits is not None:
            log_q = self.draft_logits.gather(2, drafts.unsqueeze(-1)).squeeze(-1) - self.draft_lse
            q = torch.where(greedy, q, log_q.exp())
        return p, q

    def residual_masses(self, masses: torch.Tensor, p: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        """The sum of (mass p - q)+ over the vocabulary, f32 [r, N], of the mass before each draft."""
        left = masses * (1.0 - p)  # where the draft was not drawn
        if self.draft_logits is None:
            return left
        wanted = masses.unsqueeze(-1) * (self.target_logits[self.row] - self.target_lse.unsqueeze(-1)).exp_()
        given = (self.draft_logits - self.draft_lse.unsqueeze(-1)).exp_()
        return torch.where(greedy.unsqueeze(1), left, (wanted - given).clamp_(min=0).sum(dim=-1))

    def residual(
        self, logits: torch.Tensor, drafts: torch.Tensor, masses: torch.Tensor, at: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """`logits` f32 [r, V] of draft number `at` i64 [r] without what the draft has given, where `wanted` bool
        [r]."""
        at, wanted = at.clamp(max=drafts.shape[1] - 1).unsqueeze(1), wanted.unsqueeze(1)
        if self.draft_logits is None:
            change = torch.where(wanted, math.log(FLOOR), 0.0)
            return logits.scatter_add(1, drafts.gather(1, at).clamp_(min=0), change)
        log_q = self.draft_logits.take_along_dim(at.unsqueeze(-1), dim=1).squeeze(1) - self.draft_lse.gather(1, at)
        log_pm = logits - self.target_lse.gather(1, at) + masses.gather(1, at).log()
        return torch.where(wanted, subtract_draft(logits, log_q - log_pm), logits)
