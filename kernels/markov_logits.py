"""One draft's logits for a drafter that draws: with the Markov bias, over the temperature, and kept for verification.

r requests, N drafts, V vocabulary, k Markov rank, R rows of the state table.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import can_launch_early, launch, tl, triton


class KeptLogits(NamedTuple):
    """What drafts are drawn from, by row of the state table."""

    # [r] i32, no row twice
    idx_mapping: torch.Tensor
    # [R] f32
    temperature: torch.Tensor
    # [R, N, V] f32
    logits: torch.Tensor


def markov_logits(
    # [r, N, V] f32, of the output head
    base_logits: torch.Tensor,
    # [r, k]
    latents: torch.Tensor,
    # [V, k]
    w2: torch.Tensor,
    index: int,
    kept: KeptLogits,
    *,
    form: str = "auto",
) -> torch.Tensor:
    """Return (base_logits[:, index] + latents W2^T) / temperature, f32 [r, V], and keep it as kept.logits[row, index].

    A temperature of 0 divides nothing: such a draft will be the most likely one. Sums are float32.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    num_reqs, num_drafts, vocab_size = base_logits.shape
    check_tensors(torch.float32, 3, base_logits=base_logits)
    check_tensors(w2.dtype, 2, num_reqs, latents=latents)
    check_tensors(torch.int32, 1, num_reqs, idx_mapping=kept.idx_mapping)
    check_tensors(torch.float32, 1, temperature=kept.temperature)
    check_tensors(torch.float32, 3, kept_logits=kept.logits)
    if w2.shape != (vocab_size, latents.shape[1]) or not (w2.is_contiguous() and latents.is_contiguous()):
        raise ValueError(f"w2 must be contiguous [{vocab_size}, {latents.shape[1]}], got {tuple(w2.shape)}")
    if not base_logits.is_contiguous() or not kept.logits.is_contiguous():
        raise ValueError("base_logits and kept.logits must be contiguous")
    if not 0 <= index < num_drafts or kept.logits.shape[1:] != (num_drafts, vocab_size):
        raise ValueError(
            f"index {index} and kept.logits {tuple(kept.logits.shape)} don't fit {num_drafts} drafts of {vocab_size} "
            "logits: index them alike"
        )
    form = resolve_form(form, base_logits)
    if form == "torch":
        rows = kept.idx_mapping[:num_reqs].long()
        t = kept.temperature[rows]
        out = F.linear(latents, w2).float().add_(base_logits[:, index])
        out.div_(torch.where(t != 0, t, 1.0).unsqueeze(1))
        kept.logits[:, index].index_copy_(0, rows, out)
        return out
    out = torch.empty(num_reqs, vocab_size, dtype=torch.float32, device=base_logits.device)
    if form == "loop":
        for i in range(num_reqs):
            row = int(kept.idx_mapping[i])
            out[i] = base_logits[i, index] + w2.float() @ latents[i].float()
            if float(kept.temperature[row]) != 0:
                out[i] /= kept.temperature[row]
            kept.logits[row, index] = out[i]
        return out
    rank, few = latents.shape[1], num_reqs <= 16
    block_r, block_k = (1, 64) if num_reqs == 1 else (16, 16 if w2.dtype == torch.float32 else 32)
    launch(
        _markov_logits_kernel,
        (-(-vocab_size // 256), -(-num_reqs // block_r)),
        base_logits,
        latents,
        w2,
        *kept,
        out,
        num_reqs,
        num_drafts,
        vocab_size,
        index,
        form=form,
        num_warps=4 if num_reqs == 1 else 8,
        pdl=few and can_launch_early(form, out),
        RANK=rank,
        BLOCK_R=block_r,
        BLOCK_V=256,
        BLOCK_K=max(16, min(block_k, 1 << (rank - 1).bit_length())),
        UPCAST=form == "interpret",
    )
    return out


@triton.jit(do_not_specialize=["index", "num_reqs", "num_drafts"])
def _markov_logits_kernel(
    base_ptr,
    latents_ptr,
    w2_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    kept_ptr,
    out_ptr,
    num_reqs,
    num_drafts,
    vocab_size,
    index,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    MULTIPLIED: tl.constexpr = tl.float32 if UPCAST else w2_ptr.dtype.element_ty
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    w2_ptr += v.to(tl.int64)[:, None] * RANK + k[None, :]
    # Before the wait: weights alone.
    first_w2 = tl.load(w2_ptr, mask=(v < vocab_size)[:, None] & (k < RANK)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = (row < num_reqs)[:, None] & (v < vocab_size)[None, :]
    base = tl.load(base_ptr + (row * num_drafts + index)[:, None] * vocab_size + v[None, :], mask=inside, other=0.0)
    state = tl.load(idx_mapping_ptr + row, mask=row < num_reqs, other=0).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)[:, None]
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_K):
        used = k + start < RANK
        if start == 0:
            w2 = first_w2
        else:
            w2 = tl.load(w2_ptr + start, mask=(v < vocab_size)[:, None] & used[None, :], other=0.0)
        latent_ptr = latents_ptr + row[:, None] * RANK + start + k[None, :]
        latent = tl.load(latent_ptr, mask=(row < num_reqs)[:, None] & used[None, :], other=0.0)
        if BLOCK_R == 1:
            acc += tl.sum(w2.to(tl.float32) * latent.to(tl.float32), axis=1)[None, :]
        else:
            acc = tl.dot(latent.to(MULTIPLIED), tl.trans(w2.to(MULTIPLIED)), acc, input_precision="ieee")
    logits = tl.div_rn(base + acc, tl.broadcast_to(temperature, [BLOCK_R, BLOCK_V]))
    tl.store(out_ptr + row[:, None] * vocab_size + v[None, :], logits, mask=inside)
    kept_ptr += (state * num_drafts + index)[:, None] * vocab_size + v[None, :]
    tl.store(kept_ptr, logits, mask=inside)
