"""Rows of an embedding table: how a step's forward begins."""

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton


def embedding(
    # [t] i32 or i64, each in 0 .. V - 1
    input_ids: torch.Tensor,
    # [V, d]
    weight: torch.Tensor,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return `weight[input_ids]`, [t, d] in memory of its own.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    check_tensors(None, 1, input_ids=input_ids)
    check_tensors(None, 2, weight=weight)
    if input_ids.dtype not in (torch.int32, torch.int64) or not weight.is_contiguous():
        raise ValueError(f"input_ids must be i32 or i64 and weight contiguous, got {input_ids.dtype}")
    form = resolve_form(form, weight)
    if form == "torch":
        return F.embedding(input_ids, weight)
    out = weight.new_empty(input_ids.shape[0], weight.shape[1])
    if form == "loop":
        for i in range(input_ids.shape[0]):
            out[i] = weight[int(input_ids[i])]
        return out
    block = min(4096, 1 << (weight.shape[1] - 1).bit_length())
    launch(
        _embedding_kernel,
        (input_ids.shape[0],),
        input_ids,
        weight,
        out,
        weight.shape[1],
        form=form,
        num_warps=max(1, min(4, block // 256)),
        pdl=can_launch_early(form, weight),
        BLOCK=block,
    )
    return out


@triton.jit
def _embedding_kernel(input_ids_ptr, weight_ptr, out_ptr, size, PDL: tl.constexpr, BLOCK: tl.constexpr):
    begin_behind(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(input_ids_ptr + token).to(tl.int64)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(weight_ptr + row * size + i, mask=i < size)
        tl.store(out_ptr + token * size + i, x, mask=i < size)
