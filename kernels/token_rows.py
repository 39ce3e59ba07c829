"""A few tokens as decodes: what each token of a ragged batch attends to, as a row of its own."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def token_rows(
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [r] i32
    seq_lens: torch.Tensor,
    # [r, B] i32
    block_table: torch.Tensor,
    num_tokens: int,
    *,
    form: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's block table, its request's, i32 [t, B], and how many tokens it sees, itself too, i32 [t].

    The last of a request's tokens sees all its seq_lens tokens, the one before it one fewer. Tokens behind the last
    request see none.

    Raises:
        ValueError: a wrong dtype, rank, length or form, or no request.
    """
    num_reqs = seq_lens.shape[0]
    check_tensors(torch.int32, 1, 1, seq_lens=seq_lens)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 2, num_reqs, block_table=block_table)
    form = resolve_form(form, seq_lens)
    if form == "torch":
        req, _, inside = segment_of(query_start_loc, num_reqs, num_tokens)
        following = torch.arange(1, num_tokens + 1, dtype=torch.int32, device=req.device)
        behind = query_start_loc[1 : num_reqs + 1][req] - following
        return block_table[req], torch.where(inside, seq_lens[req] - behind, 0)
    rows = block_table.new_empty(num_tokens, block_table.shape[1])
    seen = seq_lens.new_empty(num_tokens)
    if form == "loop":
        for token in range(num_tokens):
            own = 0
            while own < num_reqs and int(query_start_loc[own + 1]) <= token:
                own += 1
            rows[token] = block_table[min(own, num_reqs - 1)]
            seen[token] = 0
            if own < num_reqs:
                seen[token] = int(seq_lens[own]) - (int(query_start_loc[own + 1]) - 1 - token)
        return rows, seen
    launch(
        _token_rows_kernel,
        (num_tokens,),
        query_start_loc,
        seq_lens,
        block_table,
        block_table.stride(0),
        rows,
        seen,
        num_reqs,
        block_table.shape[1],
        form=form,
        BLOCK_R=64,
        BLOCK=1024,
    )
    return rows, seen


@triton.jit(do_not_specialize=["num_reqs"])
def _token_rows_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    block_table_stride,
    rows_ptr,
    seen_ptr,
    num_reqs,
    num_blocks,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    req = 0
    for start in range(0, num_reqs, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        end = tl.load(query_start_loc_ptr + 1 + i, mask=i < num_reqs, other=2147483647)
        req += tl.sum((end <= token).to(tl.int32), axis=0)
    row = tl.minimum(req, num_reqs - 1)
    end = tl.load(query_start_loc_ptr + 1 + row)
    seen = tl.where(req < num_reqs, tl.load(seq_lens_ptr + row) - (end - 1 - token), 0)
    tl.store(seen_ptr + token, seen)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = block < num_blocks
        ids = tl.load(block_table_ptr + row.to(tl.int64) * block_table_stride + block, mask=mask, other=0)
        tl.store(rows_ptr + token.to(tl.int64) * num_blocks + block, ids, mask=mask)
