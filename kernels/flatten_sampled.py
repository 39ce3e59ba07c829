"""Kernel 29: the tokens of a verification, one a row of logits, for who looks at them beside the logits."""

import torch

from kernels.dispatch import check_tensors, resolve_form, segment_of
from kernels.triton_support import launch, tl, triton


def flatten_sampled(
    # [r, N + 1] i64
    sampled: torch.Tensor,
    # [r + 1] i32, ascending from 0
    cu_num_logits: torch.Tensor,
    num_logits: int,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return the token drawn from each row of logits; 0 where a row gave none (its entry of `sampled` is negative).

    Args:
        num_logits: `cu_num_logits[r]`, which the host knows.

    Returns:
        i64 [num_logits].

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs = sampled.shape[0]
    check_tensors(torch.int64, 2, sampled=sampled)
    check_tensors(torch.int32, 1, num_reqs + 1, cu_num_logits=cu_num_logits)
    form = resolve_form(form, sampled)
    if form == "torch" and num_reqs > 0:
        req, local_pos, _ = segment_of(cu_num_logits, num_reqs, num_logits)
        return sampled[req, local_pos.long().clamp_(max=sampled.shape[1] - 1)].clamp_(min=0)
    flat = torch.zeros(num_logits, dtype=torch.int64, device=sampled.device)
    if form == "loop":
        for i in range(num_reqs):
            begin, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
            for k in range(end - begin):
                flat[begin + k] = max(int(sampled[i, k]), 0)
    elif form != "torch":
        launch(
            _flatten_sampled_kernel,
            (num_reqs,),
            sampled,
            sampled.stride(0),
            cu_num_logits,
            flat,
            form=form,
            num_warps=1,
            BLOCK=1 << (sampled.shape[1] - 1).bit_length(),
        )
    return flat


@triton.jit
def _flatten_sampled_kernel(sampled_ptr, sampled_stride, cu_num_logits_ptr, flat_ptr, BLOCK: tl.constexpr):
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_num_logits_ptr + req)
    k = tl.arange(0, BLOCK)
    mask = k < tl.load(cu_num_logits_ptr + req + 1) - begin
    token = tl.load(sampled_ptr + req * sampled_stride + k, mask=mask, other=0)
    tl.store(flat_ptr + begin + k, tl.maximum(token, 0), mask=mask)
