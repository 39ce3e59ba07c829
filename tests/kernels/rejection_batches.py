"""Random batches of drafts and their two rows of logits."""

from dataclasses import dataclass, field, replace

import torch

from kernels import DraftedBatch
from tests.kernels.sampling_batches import NEG_INF, Dice


@dataclass
class Drafted:
    """`drafts[i]` are request i's, cut at the first that is none."""

    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    batch: DraftedBatch
    temperature: torch.Tensor
    seeds: torch.Tensor
    drafts: list[list[int]]
    acceptance_rates: torch.Tensor = field(default_factory=lambda: torch.tensor([0.9, 0.6, 0.5]))

    def on(self, device: str) -> "Drafted":
        names = ("target_logits", "draft_logits", "temperature", "seeds", "acceptance_rates")
        batch = DraftedBatch(*(x.to(device) for x in self.batch[:4]), self.batch.max_drafts)
        return replace(self, batch=batch, **{name: getattr(self, name).to(device) for name in names})


def drafted_batch(
    seed: int, *, vocab: int, num_reqs: int = 4, max_reqs: int = 6, max_drafts: int = 3, closeness: float = 1.0
) -> Drafted:
    """Requests with 0 .. max_drafts drafts, some of them -1, each likely under laws that are near each other."""
    dice = Dice(seed)
    rows = torch.randperm(max_reqs, generator=dice.generator)[:num_reqs]
    draft_logits = dice.normal(max_reqs, max_drafts + 1, vocab) * 2
    cu, tokens, positions, target, drafts = [0], [], [], [], []
    for row in rows.tolist():
        own = draft_logits[row, : dice.number(0, max_drafts)].softmax(-1)
        own = own.multinomial(1, generator=dice.generator)[:, 0].tolist() if len(own) else []
        if own and dice.number(0, 3) == 0:
            own[dice.number(0, len(own) - 1)] = -1
        cu.append(cu[-1] + len(own) + 1)
        tokens += [dice.number(0, vocab - 1), *own]
        start = dice.number(1, 2**33)
        positions += range(start, start + len(own) + 1)
        target.append(draft_logits[row, : len(own) + 1] + dice.normal(len(own) + 1, vocab) / closeness)
        drafts.append(own[: own.index(-1)] if -1 in own else own)
    target_logits = torch.cat(target)
    target_logits[dice.numbers(0, 5, *target_logits.shape) == 0] = NEG_INF
    target_logits[:, 0] = target_logits[:, 0].clamp(min=-3)
    temperature = torch.where(dice.numbers(0, 3, max_reqs) == 0, 0.0, 1.0)
    return Drafted(
        target_logits=target_logits,
        draft_logits=draft_logits[:, :max_drafts].contiguous(),
        batch=DraftedBatch(
            rows.int(), torch.tensor(cu).int(), torch.tensor(tokens).int(), torch.tensor(positions), max_drafts
        ),
        temperature=temperature,
        seeds=dice.numbers(-(2**62), 2**62, max_reqs),
        drafts=drafts,
    )
