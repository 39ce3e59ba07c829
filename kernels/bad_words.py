"""Kernel 15: forbid the token that would complete a bad word."""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton

NEG_INF = float("-inf")


class BadWordsTables(NamedTuple):
    """One row a request: its words one after the other. A word has a token at least."""

    # [R] i32, 0 is off
    num_words: torch.Tensor
    # [R, W + 1] i32: word w is tokens offsets[w] .. offsets[w + 1] - 1; past the last word the last value goes on
    offsets: torch.Tensor
    # [R, C] i32
    word_token_ids: torch.Tensor


def apply_bad_words(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [l] i32, 0 .. k within each request
    expanded_local_pos: torch.Tensor,
    # [l] i32 or i64, input token of each logits row: at local position j >= 1 draft j
    token_ids: torch.Tensor,
    # [l] i64, of the tokens to be sampled: position p comes behind p tokens, drafts among them
    positions: torch.Tensor,
    # [R, L] i32: prompt, then output; drafts are not in it
    all_token_ids: torch.Tensor,
    # [R] i32
    prompt_len: torch.Tensor,
    words: BadWordsTables,
    *,
    max_words: int,
    form: str = "auto",
) -> None:
    """Set the last token of a word to -inf where the tokens before it are the last ones that the request generated.

    As in vLLM a word can only match within the output: the prompt's tokens don't count.

    Args:
        max_words: the largest num_words of the batch, which the host knows.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_logits = logits.shape[0]
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int32, 1, num_logits, expanded_local_pos=expanded_local_pos)
    check_tensors(None, 1, num_logits, token_ids=token_ids)
    check_tensors(torch.int64, 1, num_logits, positions=positions)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    check_tensors(torch.int32, 1, prompt_len=prompt_len, num_words=words.num_words)
    check_tensors(torch.int32, 2, offsets=words.offsets, word_token_ids=words.word_token_ids)
    form = resolve_form(form, logits)
    args = (expanded_idx_mapping, expanded_local_pos, token_ids, positions)
    if form == "torch":
        _torch(
            logits, expanded_idx_mapping[:num_logits], expanded_local_pos[:num_logits], token_ids[:num_logits],
            positions[:num_logits], all_token_ids, prompt_len, words,
        )  # fmt: skip
    elif form == "loop":
        _loop(logits, *args, all_token_ids, prompt_len, words)
    else:
        launch(
            _bad_words_kernel,
            (num_logits, max_words),
            logits,
            logits.stride(0),
            *args,
            all_token_ids,
            all_token_ids.stride(0),
            prompt_len,
            *words,
            words.offsets.stride(0),
            words.word_token_ids.stride(0),
            form=form,
            num_warps=1,
            BLOCK=32,
        )


def _loop(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    words: BadWordsTables,
) -> None:
    for i in range(logits.shape[0]):
        row, num_drafts = int(expanded_idx_mapping[i]), int(expanded_local_pos[i])
        if row < 0:
            continue
        committed = all_token_ids[row, int(prompt_len[row]) : int(positions[i]) - num_drafts].tolist()
        output = committed + token_ids[i - num_drafts + 1 : i + 1].tolist()
        for w in range(int(words.num_words[row])):
            *prefix, last = words.word_token_ids[row, int(words.offsets[row, w]) : int(words.offsets[row, w + 1])]
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == [int(token) for token in prefix]:
                logits[i, last] = NEG_INF


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    words: BadWordsTables,
) -> None:
    rows = expanded_idx_mapping.clamp(min=0).long()
    num_words = torch.where(expanded_idx_mapping >= 0, words.num_words[rows], 0).unsqueeze(1)
    offsets, ids = words.offsets[rows].long(), words.word_token_ids[rows].long()
    position = positions.unsqueeze(1)

    num_logits = logits.shape[0]
    # Each token of each word stands against the token at its distance from the word's end.
    slot = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    word = torch.searchsorted(offsets[:, 1:].contiguous(), slot.contiguous(), right=True)
    inside = word < num_words
    word = torch.where(inside, word, 0)
    end = offsets.gather(1, word + 1) - 1
    before = position - (end - slot)
    first_draft = position - expanded_local_pos.unsqueeze(1)
    draft_row = torch.arange(num_logits, device=ids.device).unsqueeze(1) + 1 + before - position
    draft = token_ids.long()[draft_row.clamp(0, num_logits - 1)]
    committed = all_token_ids[rows.unsqueeze(1), before.clamp(0, all_token_ids.shape[1] - 1)].long()
    differs = torch.where(before >= first_draft, draft, committed) != ids
    differs |= before < prompt_len[rows].unsqueeze(1)
    differs &= inside & (slot < end)

    num_different = torch.zeros_like(offsets[:, 1:]).scatter_add_(1, word, differs.long())
    matches = (torch.arange(num_different.shape[1], device=ids.device) < num_words) & (num_different == 0)
    last = torch.where(matches, ids.gather(1, (offsets[:, 1:] - 1).clamp(min=0)), 0)
    # Words that don't match point at token 0: amin keeps its logit unless another word forbids it.
    logits.scatter_reduce_(1, last, torch.where(matches, NEG_INF, logits.gather(1, last)), reduce="amin")


@triton.jit
def _bad_words_kernel(
    logits_ptr, logits_stride, expanded_idx_mapping_ptr, expanded_local_pos_ptr, token_ids_ptr, positions_ptr,
    all_token_ids_ptr, all_token_ids_stride, prompt_len_ptr,
    num_words_ptr, offsets_ptr, word_token_ids_ptr, offsets_stride, word_token_ids_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    state = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    if state < 0:
        return
    if word >= tl.load(num_words_ptr + state):
        return
    begin = tl.load(offsets_ptr + state * offsets_stride + word)
    num_before = tl.load(offsets_ptr + state * offsets_stride + word + 1) - begin - 1
    position = tl.load(positions_ptr + row)
    if num_before > tl.maximum(position - tl.load(prompt_len_ptr + state), 0):
        return
    first_draft = position - tl.load(expanded_local_pos_ptr + row)
    word_ptr = word_token_ids_ptr + state * word_token_ids_stride + begin
    num_different = 0
    for done in range(0, num_before, BLOCK):
        i = done + tl.arange(0, BLOCK)
        mask = i < num_before
        before = position - num_before + i
        is_draft = before >= first_draft
        committed = tl.load(all_token_ids_ptr + state * all_token_ids_stride + before, mask=mask & ~is_draft, other=0)
        draft = tl.load(token_ids_ptr + row + 1 + before - position, mask=mask & is_draft, other=0)
        token = tl.where(is_draft, draft.to(tl.int32), committed)
        num_different += tl.sum((mask & (token != tl.load(word_ptr + i, mask=mask, other=0))).to(tl.int32), axis=0)
    if num_different == 0:
        tl.store(logits_ptr + row * logits_stride + tl.load(word_ptr + num_before), float("-inf"))
