"""The context of a parallel drafter: its layers' keys, normed and rotated, and values stored in one launch."""

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton


def store_context(
    # [t, 2 (K, V) * layers * Hk * D], as a product for all layers makes them
    kv: torch.Tensor,
    # [layers, 2, num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [>= t] i64
    slot_mapping: torch.Tensor,
    # [>= t] i64
    positions: torch.Tensor,
    # [P, D]: cosines, then sines (see HeadRotation)
    cos_sin: torch.Tensor,
    # [layers, D]
    k_norm: torch.Tensor,
    eps: float,
    *,
    form: str = "auto",
) -> None:
    """RMS norm and RoPE of each token's keys, in float32, then the store in its slot of every layer; -1 stores nothing.

    Slot s is `kv_cache[:, :, s // block_size, s % block_size]`. kv and kv_cache have one dtype.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    num_layers, _, _, _, num_kv_heads, head_dim = kv_cache.shape
    check_tensors(kv_cache.dtype, 2, kv=kv)
    check_tensors(None, 2, num_layers, k_norm=k_norm, cos_sin=cos_sin)
    check_tensors(torch.int64, 1, kv.shape[0], slot_mapping=slot_mapping, positions=positions)
    if kv.shape[1] != 2 * num_layers * num_kv_heads * head_dim or not kv.is_contiguous():
        raise ValueError(
            f"kv rows must be contiguous, 2 * {num_layers} layers * {num_kv_heads} heads * {head_dim} long: "
            f"got {kv.shape[1]}"
        )
    if not kv_cache.is_contiguous() or not cos_sin.is_contiguous() or cos_sin.shape[1] != head_dim or head_dim % 2:
        raise ValueError(f"kv_cache and cos_sin must be contiguous, of one even head size: got {head_dim}")
    form = resolve_form(form, kv)
    if form == "torch":
        _torch(kv, kv_cache, slot_mapping, positions, cos_sin, k_norm, eps)
    elif form == "loop":
        _loop(kv, kv_cache, slot_mapping, positions, cos_sin, k_norm, eps)
    else:
        launch(
            _store_context_kernel,
            (kv.shape[0], num_layers),
            kv,
            kv_cache,
            kv_cache.stride(0),
            kv_cache.stride(1),
            slot_mapping,
            positions,
            cos_sin,
            k_norm,
            eps,
            form=form,
            pdl=can_launch_early(form, kv),
            num_warps=1 if num_kv_heads * head_dim <= 512 else 4,
            NUM_LAYERS=num_layers,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_H=1 << (num_kv_heads - 1).bit_length(),
            HALF=1 << (head_dim // 2 - 1).bit_length(),
        )


def _loop(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_norm: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    num_layers, _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    keys, values = kv.view(-1, 2, num_layers, num_kv_heads, head_dim).unbind(1)
    for token in range(kv.shape[0]):
        block, offset = divmod(int(slot_mapping[token]), block_size)
        if int(slot_mapping[token]) < 0:
            continue
        cos, sin = cos_sin[int(positions[token])].float().chunk(2)
        for layer in range(num_layers):
            for head in range(num_kv_heads):
                x = keys[token, layer, head].float()
                x = x / float(x.square().mean() + eps) ** 0.5 * k_norm[layer].float()
                low, high = x.chunk(2)
                key = torch.cat((low * cos - high * sin, high * cos + low * sin))
                kv_cache[layer, 0, block, offset, head] = key.to(kv_cache.dtype)
                kv_cache[layer, 1, block, offset, head] = values[token, layer, head]


def _torch(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_norm: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    t, (num_layers, _, _, _, num_kv_heads, head_dim) = kv.shape[0], kv_cache.shape
    slots = slot_mapping[:t]
    is_pad = slots < 0
    kv = kv.view(t, 2, num_layers, num_kv_heads, head_dim)
    keys = F.rms_norm(kv[:, 0].float(), (head_dim,), None, eps) * k_norm.float().unsqueeze(1)
    # The positions of padding are left over from some other step.
    angles = cos_sin[positions[:t].masked_fill(is_pad, 0)].float().view(t, 1, 1, head_dim)
    cos, sin = angles.chunk(2, -1)
    low, high = keys.chunk(2, -1)
    keys = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(kv.dtype)
    stored = torch.stack((keys, kv[:, 1])).permute(2, 0, 1, 3, 4)
    cache = kv_cache.view(num_layers, 2, -1, num_kv_heads, head_dim)
    # Padding rewrites slot 0 with what is there, after the others: with one index twice, index_copy_ may pick either.
    first = torch.where((slots == 0).view(-1, 1, 1), stored, 0).sum(2, keepdim=True)
    kept = torch.where((slots == 0).any(), first.to(kv.dtype), cache[:, :, :1])
    cache.index_copy_(2, slots.clamp_min(0), torch.where(is_pad.view(-1, 1, 1), kept, stored))


@triton.jit
def _store_context_kernel(
    kv_ptr,
    kv_cache_ptr,
    layer_stride,
    value_offset,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_norm_ptr,
    eps,
    PDL: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
):
    begin_behind(PDL)
    half: tl.constexpr = HEAD_DIM // 2
    SIZE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (head < NUM_KV_HEADS) & (d < half)
    place = head * HEAD_DIM + d
    key_ptr = kv_ptr + (token * 2 * NUM_LAYERS + layer) * SIZE + place
    value_ptr = key_ptr + NUM_LAYERS * SIZE
    low = tl.load(key_ptr, mask=inside, other=0.0)
    high = tl.load(key_ptr + half, mask=inside, other=0.0)
    low_value = tl.load(value_ptr, mask=inside, other=0.0)
    high_value = tl.load(value_ptr + half, mask=inside, other=0.0)
    x, y = low.to(tl.float32), high.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x + y * y, axis=1) / HEAD_DIM + eps)[:, None]
    norm_ptr = k_norm_ptr + layer * HEAD_DIM + d
    x *= scale * tl.load(norm_ptr, mask=d < half, other=0.0).to(tl.float32)
    y *= scale * tl.load(norm_ptr + half, mask=d < half, other=0.0).to(tl.float32)
    table_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM + d
    cos = tl.load(table_ptr, mask=d < half, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + half, mask=d < half, other=0.0).to(tl.float32)
    cache_ptr = kv_cache_ptr + layer * layer_stride + slot * SIZE + place
    tl.store(cache_ptr, (x * cos - y * sin).to(low.dtype), mask=inside)
    tl.store(cache_ptr + half, (y * cos + x * sin).to(low.dtype), mask=inside)
    tl.store(cache_ptr + value_offset, low_value, mask=inside)
    tl.store(cache_ptr + value_offset + half, high_value, mask=inside)
