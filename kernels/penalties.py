"""Kernel 13: repetition, frequency and presence penalties.

A draft is judged as if the drafts before it had been accepted: the counts of its row are those of the state table plus
the drafts before it in the batch.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


class PenaltyTables(NamedTuple):
    """One row a request. Repetition 1, frequency 0 and presence 0 are off."""

    # [R] f32
    repetition: torch.Tensor
    # [R] f32
    frequency: torch.Tensor
    # [R] f32
    presence: torch.Tensor
    # [R, ceil(V / 32)] i32, bit t % 32 of word t // 32: token t is in the prompt
    prompt_bin_mask: torch.Tensor
    # [R, V] i32, how often each token was generated
    output_bin_counts: torch.Tensor


def apply_penalties(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [l] i32, 0 .. k within each request
    expanded_local_pos: torch.Tensor,
    # [l] i32 or i64, input token of each logits row: at local position j >= 1 draft j
    token_ids: torch.Tensor,
    tables: PenaltyTables,
    *,
    max_drafts: int,
    form: str = "auto",
) -> None:
    """Divide positive logits of the tokens seen in prompt or output by the repetition penalty and multiply negative
    ones by it; then subtract frequency * count and presence * (count > 0) of the tokens in the output.

    The formulas are vLLM's (repetition: Keskar et al. 2019, "CTRL"; the others: OpenAI's API).

    Args:
        max_drafts: the most drafts that a request of the batch has, which the host knows.

    Raises:
        ValueError: a wrong dtype, rank, length or form, or a vocabulary that does not fit the tables.
    """
    num_logits, vocab_size = logits.shape
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int32, 1, num_logits, expanded_local_pos=expanded_local_pos)
    check_tensors(None, 1, num_logits, token_ids=token_ids)
    for name, table in tables._asdict().items():
        is_bins = name in ("prompt_bin_mask", "output_bin_counts")
        check_tensors(torch.int32 if is_bins else torch.float32, 2 if is_bins else 1, **{name: table})
    if tables.output_bin_counts.shape[1] != vocab_size or tables.prompt_bin_mask.shape[1] * 32 < vocab_size:
        raise ValueError(
            f"logits have {vocab_size} tokens, output_bin_counts {tables.output_bin_counts.shape[1]} and "
            f"prompt_bin_mask room for {tables.prompt_bin_mask.shape[1] * 32}: make the tables for this vocabulary"
        )
    form = resolve_form(form, logits)
    if form == "torch":
        _torch(
            logits, expanded_idx_mapping[:num_logits], expanded_local_pos[:num_logits], token_ids[:num_logits], tables,
            max_drafts,
        )  # fmt: skip
    elif form == "loop":
        _loop(logits, expanded_idx_mapping, expanded_local_pos, token_ids, tables)
    else:
        block = 4096
        launch(
            _penalties_kernel,
            (num_logits, -(-vocab_size // block)),
            logits,
            logits.stride(0),
            vocab_size,
            expanded_idx_mapping,
            expanded_local_pos,
            token_ids,
            *tables,
            tables.prompt_bin_mask.stride(0),
            tables.output_bin_counts.stride(0),
            form=form,
            BLOCK=block,
        )


def _loop(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    token_ids: torch.Tensor,
    tables: PenaltyTables,
) -> None:
    for i in range(logits.shape[0]):
        row = int(expanded_idx_mapping[i])
        if row < 0:
            continue
        repetition, frequency, presence = (float(x[row]) for x in tables[:3])
        drafts = token_ids[i - int(expanded_local_pos[i]) + 1 : i + 1].tolist()
        for token in range(logits.shape[1]):
            in_prompt = int(tables.prompt_bin_mask[row, token // 32]) >> token % 32 & 1
            count = int(tables.output_bin_counts[row, token]) + drafts.count(token)
            logit = float(logits[i, token])
            if in_prompt or count:
                logit = logit / repetition if logit > 0 else logit * repetition
            if count:
                logit -= frequency * count + presence
            logits[i, token] = logit


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    token_ids: torch.Tensor,
    tables: PenaltyTables,
    max_drafts: int,
) -> None:
    is_row, rows = (expanded_idx_mapping >= 0).unsqueeze(1), expanded_idx_mapping.clamp(min=0).long()
    counts = tables.output_bin_counts[rows]
    line = torch.arange(logits.shape[0], device=logits.device)
    for back in range(max_drafts):
        is_before = expanded_local_pos > back
        draft = torch.where(is_before, token_ids[(line - back).clamp_(min=0)], 0)
        counts.scatter_add_(1, draft.long().unsqueeze(1), is_before.to(torch.int32).unsqueeze(1))
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    in_prompt = (tables.prompt_bin_mask[rows].unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits.shape[1]]
    repetition, frequency, presence = (torch.where(is_row, x[rows].unsqueeze(1), off) for x, off in _with_off(tables))
    seen = (in_prompt + counts) > 0
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(seen, penalised, logits)
    penalised = torch.where(counts > 0, penalised - (counts * frequency + presence), penalised)
    logits.copy_(torch.where(is_row, penalised, logits))


def _with_off(tables: PenaltyTables) -> list[tuple[torch.Tensor, float]]:
    return [(tables.repetition, 1.0), (tables.frequency, 0.0), (tables.presence, 0.0)]


@triton.jit
def _penalties_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, expanded_local_pos_ptr, token_ids_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, prompt_bin_mask_ptr, output_bin_counts_ptr,
    prompt_bin_mask_stride, output_bin_counts_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    if state < 0:
        return
    repetition = tl.load(repetition_ptr + state)
    frequency = tl.load(frequency_ptr + state)
    presence = tl.load(presence_ptr + state)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    out_ptr = logits_ptr + row * logits_stride + token
    logit = tl.load(out_ptr, mask=inside, other=0.0)
    count = tl.load(output_bin_counts_ptr + state * output_bin_counts_stride + token, mask=inside, other=0)
    local_pos = tl.load(expanded_local_pos_ptr + row)
    for back in range(local_pos):
        draft = tl.load(token_ids_ptr + row - back)
        count += (token == draft).to(tl.int32)
    word = tl.load(prompt_bin_mask_ptr + state * prompt_bin_mask_stride + token // 32, mask=inside, other=0)
    seen = (((word >> (token % 32)) & 1) != 0) | (count > 0)
    penalised = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(seen, penalised, logit)
    logit = tl.where(count > 0, logit - (count.to(tl.float32) * frequency + presence), logit)
    tl.store(out_ptr, logit, mask=inside)
