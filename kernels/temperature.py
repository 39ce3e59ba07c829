"""Kernel 16: divide by the temperature.

The draws do this on the fly. It stands alone for what must see scaled logits before the draw.
"""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton


def apply_temperature(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [R] f32
    temperature: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Divide each row by its temperature. Rows with temperature 0 (greedy) and 1, and padding, stay as they are.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_logits, vocab_size = logits.shape
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.float32, 1, temperature=temperature)
    form = resolve_form(form, logits)
    if form == "torch":
        rows = expanded_idx_mapping[:num_logits]
        t = temperature[rows.clamp(min=0).long()]
        logits.div_(torch.where((rows >= 0) & (t != 0), t, 1.0).unsqueeze(1))
    elif form == "loop":
        for i in range(num_logits):
            row = int(expanded_idx_mapping[i])
            if row >= 0 and float(temperature[row]) not in (0.0, 1.0):
                logits[i] /= float(temperature[row])
    else:
        block = 4096
        launch(
            _temperature_kernel,
            (num_logits, -(-vocab_size // block)),
            logits,
            logits.stride(0),
            vocab_size,
            expanded_idx_mapping,
            temperature,
            form=form,
            BLOCK=block,
        )


@triton.jit
def _temperature_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, temperature_ptr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(expanded_idx_mapping_ptr + row)
    if state < 0:
        return
    temperature = tl.load(temperature_ptr + state)
    if (temperature == 0.0) | (temperature == 1.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out_ptr = logits_ptr + row * logits_stride + token
    logit = tl.load(out_ptr, mask=token < vocab_size, other=0.0)
    tl.store(out_ptr, tl.div_rn(logit, temperature), mask=token < vocab_size)
