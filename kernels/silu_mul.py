"""The gate of the MLP: silu(gate) * up."""

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def silu_mul(
    # [t, 2 I], the gate's columns first
    gate_up: torch.Tensor,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return gate / (1 + exp(-gate)) * up, [t, I], computed in float32 and rounded once.

    Raises:
        ValueError: a wrong rank, an odd number of columns, or a wrong form.
    """
    check_tensors(None, 2, gate_up=gate_up)
    num_rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up must have an even number of columns, the gate's and then up's: got {columns}")
    size = columns // 2
    form = resolve_form(form, gate_up)
    if form == "torch":
        gate, up = gate_up.float().split(size, dim=1)
        return F.silu(gate).mul_(up).to(gate_up.dtype)
    out = gate_up.new_empty(num_rows, size)
    if form == "loop":
        for row in range(num_rows):
            gate, up = gate_up[row].float().split(size)
            out[row] = gate / (1 + torch.exp(-gate)) * up
        return out
    launch(
        _silu_mul_kernel,
        (num_rows, -(-size // 1024)),
        gate_up,
        gate_up.stride(0),
        out,
        size,
        form=form,
        BLOCK=1024,
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, gate_up_stride, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    gate_ptr = gate_up_ptr + row * gate_up_stride + i
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    exact = gate.to(tl.float32)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + i, (exact / (1.0 + tl.exp(-exact)) * up).to(gate.dtype), mask=mask)
