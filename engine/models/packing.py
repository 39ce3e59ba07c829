"""Weights in the layout of oneDNN, which reads them faster than a plain matrix at some numbers of rows.

Measured with one thread on a CPU with AVX-512 and AMX, all layers of SmolLM2-135M, milliseconds, plain / packed:
float32 36 / 39 at 1 row, 83 / 50 at 8 rows, 106 / 85 at 32, equal at 128; bfloat16 33 / 24 at 1 row, 176 / 133 at 512.
"""

from __future__ import annotations

import torch

from .decoder import CausalLM

_FLOAT32_ROWS = range(4, 65)
PLAIN_COPY_LIMIT = 1 << 30
"""Bytes of float32 weights up to which both layouts are kept. Beyond, only the packed one: 8% slower at one row."""


def pack_weights(model: CausalLM) -> None:
    """Pack every projection where this processor and this torch can; otherwise leave the model as it is.

    Call it last: a weight whose plain copy is dropped can't be filled any more.
    """
    if not can_pack(model.dtype, model.device):
        return
    linears = [model.lm_head]
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    size = sum(linear.weight.nbytes for linear in linears if linear.weight is not None)
    keep_plain = model.dtype == torch.float32 and size <= PLAIN_COPY_LIMIT
    for linear in linears:
        linear.pack(_FLOAT32_ROWS, keep_plain)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's linear exists here and computes in this type natively."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32
