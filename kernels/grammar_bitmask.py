"""Kernel 22: forbid what a grammar does not allow, from bitmaps that the host has built."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton

NEG_INF = float("-inf")


def apply_grammar_bitmask(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [n] i32, the logits row of each bitmap, distinct
    logits_rows: torch.Tensor,
    # [n, >= ceil(V / 32)] i32: bit t % 32 of word t // 32 allows token t
    bitmask: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Set the logits of tokens whose bit is 0 to -inf. Rows without a bitmap stay as they are.

    Raises:
        ValueError: a wrong dtype, rank, length or form, or a bitmap too short for the vocabulary.
    """
    num_rows, vocab_size = logits_rows.shape[0], logits.shape[1]
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, logits_rows=logits_rows)
    check_tensors(torch.int32, 2, num_rows, bitmask=bitmask)
    if bitmask.shape[1] * 32 < vocab_size:
        raise ValueError(
            f"bitmask has room for {bitmask.shape[1] * 32} tokens, the vocabulary has {vocab_size}: "
            f"give each row {-(-vocab_size // 32)} words"
        )
    form = resolve_form(form, logits)
    if form == "torch":
        _torch(logits, logits_rows, bitmask[:num_rows])
    elif form == "loop":
        for i in range(num_rows):
            row = int(logits_rows[i])
            for token in range(vocab_size):
                if not int(bitmask[i, token // 32]) >> token % 32 & 1:
                    logits[row, token] = NEG_INF
    else:
        block = 8192
        launch(
            _grammar_bitmask_kernel,
            (num_rows, -(-vocab_size // block)),
            logits,
            logits.stride(0),
            vocab_size,
            logits_rows,
            bitmask,
            bitmask.stride(0),
            form=form,
            BLOCK=block,
        )


def _torch(logits: torch.Tensor, logits_rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    rows = logits_rows.long()
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (bitmask.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, rows, logits[rows].masked_fill_(forbidden, NEG_INF))


@triton.jit
def _grammar_bitmask_kernel(
    logits_ptr, logits_stride, vocab_size, logits_rows_ptr, bitmask_ptr, bitmask_stride, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(logits_rows_ptr + i).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(bitmask_ptr + i * bitmask_stride + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden)
