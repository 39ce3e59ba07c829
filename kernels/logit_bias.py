"""Kernel 12: allowed token ids, additive biases, and stop ids that are forbidden below a length."""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton

NEG_INF = float("-inf")


class MaxLengths(NamedTuple):
    """No request of a batch has more ids in a list than this."""

    allowed: int
    biases: int
    stop_ids: int


class LogitBiasTables(NamedTuple):
    """One row a request. Lists start at column 0; a count of 0 switches a list off. No id comes twice in a list of
    biases; an id outside of the vocabulary means nothing."""

    # [R] i32
    num_allowed: torch.Tensor
    # [R, A] i32
    allowed_ids: torch.Tensor
    # [R] i32
    num_biases: torch.Tensor
    # [R, B] i32
    bias_ids: torch.Tensor
    # [R, B] f32
    biases: torch.Tensor
    # [R] i32
    num_stop_ids: torch.Tensor
    # [R, S] i32
    stop_ids: torch.Tensor
    # [R] i32, the first position at which the request may stop
    min_len: torch.Tensor


def apply_logit_bias(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [l] i64, of the tokens to be sampled
    positions: torch.Tensor,
    tables: LogitBiasTables,
    *,
    max_lengths: MaxLengths,
    form: str = "auto",
) -> None:
    """Forbid all but the allowed ids, then add the biases, then forbid the stop ids where position < min_len.

    Args:
        max_lengths: the longest lists of the batch, which the host knows.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_logits = logits.shape[0]
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int64, 1, num_logits, positions=positions)
    for name, table in tables._asdict().items():
        check_tensors(torch.float32 if name == "biases" else torch.int32, 2 if table.dim() == 2 else 1, **{name: table})
    form = resolve_form(form, logits)
    if form == "torch":
        _torch(logits, expanded_idx_mapping[:num_logits], positions[:num_logits], tables, max_lengths)
    elif form == "loop":
        _loop(logits, expanded_idx_mapping, positions, tables)
    else:
        launch(
            _logit_bias_kernel,
            (num_logits,),
            logits,
            logits.stride(0),
            logits.shape[1],
            expanded_idx_mapping,
            positions,
            *tables,
            tables.allowed_ids.stride(0),
            tables.bias_ids.stride(0),
            tables.biases.stride(0),
            tables.stop_ids.stride(0),
            form=form,
            ALLOWED=_block(tables.allowed_ids),
            BIASES=_block(tables.bias_ids),
            STOP_IDS=_block(tables.stop_ids),
            BLOCK=4096,
        )


def _block(table: torch.Tensor) -> int:
    return 1 << (table.shape[1] - 1).bit_length()


def _loop(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, positions: torch.Tensor, tables: LogitBiasTables
) -> None:
    vocab_size = logits.shape[1]
    for i in range(logits.shape[0]):
        row = int(expanded_idx_mapping[i])
        if row < 0:
            continue
        if tables.num_allowed[row] > 0:
            allowed = tables.allowed_ids[row, : int(tables.num_allowed[row])].tolist()
            for token in set(range(vocab_size)) - set(allowed):
                logits[i, token] = NEG_INF
        for b in range(int(tables.num_biases[row])):
            token = int(tables.bias_ids[row, b])
            if 0 <= token < vocab_size:
                logits[i, token] += tables.biases[row, b]
        if int(positions[i]) < int(tables.min_len[row]):
            for token in tables.stop_ids[row, : int(tables.num_stop_ids[row])].tolist():
                if 0 <= token < vocab_size:
                    logits[i, token] = NEG_INF


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    tables: LogitBiasTables,
    max_lengths: MaxLengths,
) -> None:
    vocab_size = logits.shape[1]
    is_row, rows = expanded_idx_mapping >= 0, expanded_idx_mapping.clamp(min=0).long()

    def listed(ids: torch.Tensor, count: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of each logits row, 0 where there is none, and where there is one."""
        slot = torch.arange(width, device=ids.device)
        found = ids[rows, :width]
        valid = (slot < count[rows].unsqueeze(1)) & is_row.unsqueeze(1) & (found >= 0) & (found < vocab_size)
        return torch.where(valid, found, 0).long(), valid

    if max_lengths.allowed:
        ids, valid = listed(tables.allowed_ids, tables.num_allowed, max_lengths.allowed)
        # Slots without an id point at one column more than there are.
        kept = logits.new_zeros(logits.shape[0], vocab_size + 1, dtype=torch.bool)
        kept.scatter_(1, torch.where(valid, ids, vocab_size), True)
        limited = is_row & (tables.num_allowed[rows] > 0)
        logits.masked_fill_(~kept[:, :vocab_size] & limited.unsqueeze(1), NEG_INF)
    if max_lengths.biases:
        ids, valid = listed(tables.bias_ids, tables.num_biases, max_lengths.biases)
        logits.scatter_add_(1, ids, torch.where(valid, tables.biases[rows, : max_lengths.biases], 0.0))
    if max_lengths.stop_ids:
        ids, valid = listed(tables.stop_ids, tables.num_stop_ids, max_lengths.stop_ids)
        forbidden = valid & (positions < tables.min_len[rows]).unsqueeze(1)
        # Slots without an id point at token 0: amin keeps its logit unless another slot forbids it.
        logits.scatter_reduce_(1, ids, torch.where(forbidden, NEG_INF, logits.gather(1, ids)), reduce="amin")


@triton.jit
def _logit_bias_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, positions_ptr,
    num_allowed_ptr, allowed_ids_ptr, num_biases_ptr, bias_ids_ptr, biases_ptr, num_stop_ids_ptr, stop_ids_ptr,
    min_len_ptr, allowed_ids_stride, bias_ids_stride, biases_stride, stop_ids_stride,
    ALLOWED: tl.constexpr, BIASES: tl.constexpr, STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    if state < 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    num_allowed = tl.load(num_allowed_ptr + state)
    if num_allowed > 0:
        slot = tl.arange(0, ALLOWED)
        token = tl.load(allowed_ids_ptr + state * allowed_ids_stride + slot, mask=slot < num_allowed, other=-1)
        inside = (token >= 0) & (token < vocab_size)
        kept = tl.load(row_ptr + token, mask=inside, other=0.0)
        # One thread's stores and another's loads and stores meet at the same address, here and below.
        tl.debug_barrier()
        for first in range(0, vocab_size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(row_ptr + column, tl.full([BLOCK], float("-inf"), tl.float32), mask=column < vocab_size)
        tl.debug_barrier()
        tl.store(row_ptr + token, kept, mask=inside)
        tl.debug_barrier()
    num_biases = tl.load(num_biases_ptr + state)
    if num_biases > 0:
        slot = tl.arange(0, BIASES)
        token = tl.load(bias_ids_ptr + state * bias_ids_stride + slot, mask=slot < num_biases, other=-1)
        inside = (token >= 0) & (token < vocab_size)
        bias = tl.load(biases_ptr + state * biases_stride + slot, mask=inside, other=0.0)
        tl.store(row_ptr + token, tl.load(row_ptr + token, mask=inside, other=0.0) + bias, mask=inside)
        tl.debug_barrier()
    num_stop_ids = tl.load(num_stop_ids_ptr + state)
    if tl.load(positions_ptr + row) < tl.load(min_len_ptr + state):
        slot = tl.arange(0, STOP_IDS)
        token = tl.load(stop_ids_ptr + state * stop_ids_stride + slot, mask=slot < num_stop_ids, other=-1)
        inside = (token >= 0) & (token < vocab_size)
        tl.store(row_ptr + token, tl.full([STOP_IDS], float("-inf"), tl.float32), mask=inside)
