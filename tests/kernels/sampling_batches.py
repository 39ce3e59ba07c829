"""Random batches of the sampler's kernels: logits rows with drafts, state tables with a row a request, padding."""

from dataclasses import dataclass

import torch

from kernels import BadWordsTables, LogitBiasTables, MaxLengths, PenaltyTables

NEG_INF = float("-inf")
MAX_WORDS, MAX_WORD_TOKENS = 5, 16


@dataclass
class SamplingBatch:
    """`drafts[i]` are the drafts before logits row i, those of its request; a padding row ends the batch."""

    logits: torch.Tensor
    idx_mapping: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    all_token_ids: torch.Tensor
    prompt_len: torch.Tensor
    prefill_len: torch.Tensor
    drafts: list[list[int]]

    def output_before(self, i: int) -> list[int]:
        """What the request of logits row i has generated before it, drafts included."""
        row, drafts = int(self.expanded_idx_mapping[i]), self.drafts[i]
        committed = self.all_token_ids[row, int(self.prompt_len[row]) : int(self.positions[i]) - len(drafts)]
        return committed.tolist() + drafts


class Dice:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int) -> int:
        """One number, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def numbers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def sampling_batch(
    seed: int, *, vocab: int, num_reqs: int, max_reqs: int = 6, max_drafts: int = 3, max_len: int = 40
) -> SamplingBatch:
    """Requests at random lengths with 0 .. max_drafts drafts; few token ids, so that they repeat."""
    dice = Dice(seed)
    rows = torch.randperm(max_reqs, generator=dice.generator)[:num_reqs].tolist()
    prompt_len, prefill_len = torch.zeros(max_reqs, dtype=torch.int32), torch.zeros(max_reqs, dtype=torch.int32)
    expanded, local, tokens, positions, drafts = [], [], [], [], []
    all_token_ids = dice.numbers(0, min(vocab, 6) - 1, max_reqs, max_len).int()
    for row in rows:
        prompt_len[row] = dice.number(1, max_len // 2)
        prefill_len[row] = dice.number(int(prompt_len[row]), max_len - 1)
        total = dice.number(int(prefill_len[row]), max_len - 1)
        own = dice.numbers(0, min(vocab, 6) - 1, dice.number(0, max_drafts)).tolist()
        for j in range(len(own) + 1):
            expanded.append(row)
            local.append(j)
            tokens.append(own[j - 1] if j else int(all_token_ids[row, total - 1]))
            positions.append(total + j)
            drafts.append(own[:j])
    expanded, local, tokens, positions = [*expanded, -1], [*local, 0], [*tokens, 0], [*positions, 0]
    logits = dice.normal(len(expanded), vocab) * 3
    logits[dice.numbers(0, 9, *logits.shape) == 0] = NEG_INF
    return SamplingBatch(
        logits=logits,
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        expanded_idx_mapping=torch.tensor(expanded, dtype=torch.int32),
        expanded_local_pos=torch.tensor(local, dtype=torch.int32),
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.tensor(positions),
        all_token_ids=all_token_ids,
        prompt_len=prompt_len,
        prefill_len=prefill_len,
        drafts=drafts,
    )


def bias_tables(seed: int, *, vocab: int, max_reqs: int = 6, width: int = 7) -> LogitBiasTables:
    dice = Dice(seed)
    few = min(vocab, width)

    def ids() -> torch.Tensor:
        order = [torch.randperm(vocab, generator=dice.generator)[:few] for _ in range(max_reqs)]
        return torch.nn.functional.pad(torch.stack(order), (0, width - few), value=vocab + 3).int()

    stop_ids = ids()
    stop_ids[:, 0] = vocab  # an id that is none
    return LogitBiasTables(
        num_allowed=(dice.numbers(0, few, max_reqs) * dice.numbers(0, 1, max_reqs)).int(),
        allowed_ids=ids(),
        num_biases=dice.numbers(0, few, max_reqs).int(),
        bias_ids=ids(),
        biases=dice.normal(max_reqs, width) * 10,
        num_stop_ids=dice.numbers(0, width, max_reqs).int(),
        stop_ids=stop_ids,
        min_len=dice.numbers(0, 45, max_reqs).int(),
    )


def longest(tables: LogitBiasTables) -> MaxLengths:
    return MaxLengths(*(int(x.max()) for x in (tables.num_allowed, tables.num_biases, tables.num_stop_ids)))


def penalty_tables(seed: int, *, vocab: int, max_reqs: int = 6) -> PenaltyTables:
    dice = Dice(seed)
    off = dice.numbers(0, 1, 3, max_reqs).bool()
    return PenaltyTables(
        repetition=torch.where(off[0], 1.0, 0.3 + 2 * torch.rand(max_reqs, generator=dice.generator)),
        frequency=torch.where(off[1], 0.0, dice.normal(max_reqs).clamp(-2, 2)),
        presence=torch.where(off[2], 0.0, dice.normal(max_reqs).clamp(-2, 2)),
        prompt_bin_mask=dice.numbers(-(2**31), 2**31 - 1, max_reqs, -(-vocab // 32)).int(),
        output_bin_counts=(dice.numbers(0, 4, max_reqs, vocab) * dice.numbers(0, 1, max_reqs, vocab)).int(),
    )


def bad_words_tables(seed: int, *, vocab: int, max_reqs: int = 6) -> BadWordsTables:
    dice = Dice(seed)
    num_words = dice.numbers(0, MAX_WORDS, max_reqs).int()
    offsets = torch.zeros(max_reqs, MAX_WORDS + 1, dtype=torch.int32)
    for row in range(max_reqs):
        for w in range(MAX_WORDS):
            length = dice.number(1, 3) if w < int(num_words[row]) else 0
            offsets[row, w + 1] = offsets[row, w] + length
    ids = dice.numbers(0, min(vocab, 6) - 1, max_reqs, MAX_WORD_TOKENS).int()
    return BadWordsTables(num_words, offsets, ids)
