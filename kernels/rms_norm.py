"""The residual stream: add a branch's output to it and normalise it for the next branch, in one pass."""

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton


def add_rms_norm(
    # [t, H], or None to normalise the residual as it is
    branch: torch.Tensor | None,
    # [t, H], changed in place
    residual: torch.Tensor,
    # [H]
    weight: torch.Tensor,
    eps: float,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Add `branch` to `residual` in place and return residual / sqrt(mean(residual^2) + eps) * weight, [t, H].

    The sum is rounded to the dtype before it is normalised; everything else is float32.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    check_tensors(residual.dtype, 2, residual=residual)
    check_tensors(residual.dtype, 1, weight=weight)
    if branch is not None:
        check_tensors(residual.dtype, 2, branch=branch)
        if branch.shape != residual.shape:
            raise ValueError(
                f"branch must have the residual's shape {tuple(residual.shape)}, got {tuple(branch.shape)}"
            )
    form = resolve_form(form, residual)
    if form == "torch":
        if branch is not None:
            residual.add_(branch)
        return F.rms_norm(residual, weight.shape, weight, eps)
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if form == "loop":
        for row in range(residual.shape[0]):
            if branch is not None:
                residual[row] = residual[row].float() + branch[row].float()
            x = residual[row].float()
            out[row] = x / float(x.square().mean() + eps) ** 0.5 * weight.float()
        return out
    num_rows, size = residual.shape
    block = 1 << (size - 1).bit_length()
    launch(
        _add_rms_norm_kernel,
        (num_rows,),
        branch,
        branch.stride(0) if branch is not None else 0,
        residual,
        residual.stride(0),
        weight,
        out,
        size,
        eps,
        form=form,
        pdl=can_launch_early(form, residual),
        num_warps=max(1, min(8, block // 256)),
        BLOCK=block,
    )
    return out


@triton.jit
def _add_rms_norm_kernel(
    branch_ptr,
    branch_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    out_ptr,
    size,
    eps,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin_behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < size
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    residual_ptr += row * residual_stride
    x = tl.load(residual_ptr + i, mask=mask, other=0.0)
    exact = x.to(tl.float32)
    if branch_ptr is not None:
        exact += tl.load(branch_ptr + row * branch_stride + i, mask=mask, other=0.0).to(tl.float32)
        rounded = exact.to(x.dtype)
        tl.store(residual_ptr + i, rounded, mask=mask)
        exact = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(exact * exact, axis=0) / size + eps)
    tl.store(out_ptr + row * size + i, (exact * scale * weight).to(x.dtype), mask=mask)
