"""Kernel 20: the tokens that a prompt's logprobs are of: behind each token the next one."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def prompt_logprobs_token_ids(
    # [r] i32
    idx_mapping: torch.Tensor,
    # [>= r + 1] i32
    query_start_loc: torch.Tensor,
    # [R, L] i32
    all_token_ids: torch.Tensor,
    # [R] i32, before this step
    num_computed_tokens: torch.Tensor,
    num_tokens: int,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return for each token of the step the one behind it in its request, which the logits at its place predict.

    A last known token has none behind it: whatever its request's row holds there is returned.

    Args:
        num_tokens: `query_start_loc[r]` or more, which the host knows; tokens past it get 0.

    Returns:
        Token ids, i64 [num_tokens].

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs, max_len = idx_mapping.shape[0], all_token_ids.shape[1]
    check_tensors(torch.int32, 1, idx_mapping=idx_mapping, num_computed_tokens=num_computed_tokens)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=query_start_loc)
    check_tensors(torch.int32, 2, all_token_ids=all_token_ids)
    form = resolve_form(form, idx_mapping)
    if form == "torch" and num_reqs > 0:
        req, offset, inside = segment_of(query_start_loc, num_reqs, num_tokens)
        rows = idx_mapping.long()[req]
        behind = num_computed_tokens[rows] + offset + 1
        found = all_token_ids[rows, behind.clamp_(max=max_len - 1).long()]
        return torch.where(inside, found, 0).long()
    target = torch.zeros(num_tokens, dtype=torch.int64, device=idx_mapping.device)
    if form == "loop":
        for i in range(num_reqs):
            row, begin = int(idx_mapping[i]), int(query_start_loc[i])
            for k in range(int(query_start_loc[i + 1]) - begin):
                target[begin + k] = all_token_ids[row, min(int(num_computed_tokens[row]) + k + 1, max_len - 1)]
    elif num_reqs > 0:
        launch(
            _prompt_logprobs_token_ids_kernel,
            (num_reqs,),
            idx_mapping,
            query_start_loc,
            all_token_ids,
            all_token_ids.stride(0),
            max_len,
            num_computed_tokens,
            target,
            form=form,
            BLOCK=1024,
        )
    return target


@triton.jit
def _prompt_logprobs_token_ids_kernel(
    idx_mapping_ptr, query_start_loc_ptr, all_token_ids_ptr, all_token_ids_stride, max_len, num_computed_tokens_ptr,
    target_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + req)
    length = tl.load(query_start_loc_ptr + req + 1) - begin
    behind = tl.load(num_computed_tokens_ptr + row) + 1
    for done in range(0, length, BLOCK):
        k = done + tl.arange(0, BLOCK)
        column = tl.minimum(behind + k, max_len - 1)
        token = tl.load(all_token_ids_ptr + row * all_token_ids_stride + column, mask=k < length, other=0)
        tl.store(target_ptr + begin + k, token.to(tl.int64), mask=k < length)
