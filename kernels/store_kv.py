"""Norm and RoPE of a step's queries and keys, and the store of its keys and values in the paged cache: one launch."""

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.head_rotation import HeadRotation, rotate_heads
from kernels.triton_support import launch, tl, triton


def store_kv(
    # [t, (Hq + 2 Hk) * D], q and k changed in place where there is a rotation
    qkv: torch.Tensor,
    # [2 (K, V), num_blocks, block_size, Hk, D], changed in place
    kv_cache: torch.Tensor,
    # [>= t] i64
    slot_mapping: torch.Tensor,
    rotation: HeadRotation | None = None,
    *,
    form: str = "auto",
) -> None:
    """Rotate q and k (see `HeadRotation`), then store each token's K and V in its slot; slot -1 stores nothing.

    Slot s is `kv_cache[:, s // block_size, s % block_size]`. qkv and kv_cache have one dtype.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    num_heads, head_dim = check_qkv(qkv, kv_cache)
    check_tensors(torch.int64, 1, qkv.shape[0], slot_mapping=slot_mapping)
    if rotation is not None:
        rotation.check(qkv.shape[0], head_dim)
    form = resolve_form(form, qkv)
    if form == "torch":
        _torch(qkv, kv_cache, slot_mapping, rotation, num_heads)
    elif form == "loop":
        _loop(qkv, kv_cache, slot_mapping, rotation, num_heads)
    else:
        num_kv_heads = kv_cache.shape[3]
        launch(
            _store_kv_kernel,
            (qkv.shape[0],),
            qkv,
            qkv.stride(0),
            kv_cache,
            kv_cache.stride(0),
            slot_mapping,
            rotation.positions if rotation else None,
            rotation.cos_sin if rotation else None,
            rotation.q_norm if rotation else None,
            rotation.k_norm if rotation else None,
            rotation.eps if rotation else 0.0,
            form=form,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_H=1 << (num_heads + num_kv_heads - 1).bit_length(),
            BLOCK_KV=1 << (num_kv_heads - 1).bit_length(),
            HALF=1 << (head_dim // 2 - 1).bit_length(),
        )


def check_qkv(qkv: torch.Tensor, kv_cache: torch.Tensor) -> tuple[int, int]:
    """Return (Hq, D) of a qkv [t, (Hq + 2 Hk) * D] that fits a cache [2, num_blocks, block_size, Hk, D].

    Raises:
        ValueError: it does not.
    """
    check_tensors(kv_cache.dtype, 2, qkv=qkv)
    check_tensors(None, 5, kv_cache=kv_cache)
    if not kv_cache.is_contiguous() or kv_cache.shape[0] != 2:
        raise ValueError(f"kv_cache must be contiguous [2, num_blocks, block_size, Hk, D], got {tuple(kv_cache.shape)}")
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_heads, rest = divmod(qkv.shape[1] - 2 * num_kv_heads * head_dim, head_dim)
    if rest or num_heads < 1 or num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"qkv rows must be (Hq + 2 * {num_kv_heads}) * {head_dim} long, Hq a multiple of {num_kv_heads}, D even: "
            f"got {qkv.shape[1]}"
        )
    return num_heads, head_dim


def _loop(
    qkv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, rotation: HeadRotation | None, num_heads: int
) -> None:
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    half = head_dim // 2
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    for token in range(qkv.shape[0]):
        for head in range(num_heads + num_kv_heads):
            if rotation is None:
                break
            x = heads[token, head].float()
            norm = rotation.q_norm if head < num_heads else rotation.k_norm
            if norm is not None:
                x = x / float(x.square().mean() + rotation.eps) ** 0.5 * norm.float()
            cos, sin = rotation.cos_sin[int(rotation.positions[token])].float().split(half)
            low, high = x.split(half)
            heads[token, head] = torch.cat((low * cos - high * sin, high * cos + low * sin))
        block, offset = divmod(int(slot_mapping[token]), block_size)
        if int(slot_mapping[token]) >= 0:
            kv_cache[0, block, offset] = heads[token, num_heads : num_heads + num_kv_heads]
            kv_cache[1, block, offset] = heads[token, num_heads + num_kv_heads :]


def _torch(
    qkv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, rotation: HeadRotation | None, num_heads: int
) -> None:
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], *kv_cache.shape[3:]
    heads = qkv.view(num_tokens, -1, head_dim)
    if rotation is not None:
        qk = heads[:, : num_heads + num_kv_heads]
        qk.copy_(rotate_heads(qk, num_heads, rotation))
    slots = slot_mapping[:num_tokens]
    cache = kv_cache.view(2, -1, num_kv_heads, head_dim)
    kv = heads[:, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(0, 1)
    # Padding rewrites slot 0 with what is there, after the others: with one index twice, index_copy_ may pick either.
    is_pad = (slots < 0).view(1, -1, 1, 1)
    first = torch.where((slots == 0).view(1, -1, 1, 1), kv, 0).sum(1, keepdim=True)
    kept = torch.where((slots == 0).any(), first.to(kv.dtype), cache[:, :1])
    cache.index_copy_(1, slots.clamp_min(0), torch.where(is_pad, kept, kv))


@triton.jit
def _store_kv_kernel(
    qkv_ptr,
    qkv_stride,
    kv_cache_ptr,
    value_offset,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    # A block of one: the interpreter cannot spread a boolean scalar over a block.
    has_slot = slot + tl.zeros([1, 1], tl.int64) >= 0
    half: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (head < NUM_HEADS + NUM_KV_HEADS) & (d < half)
    row_ptr = qkv_ptr + token * qkv_stride + head * HEAD_DIM + d
    low = tl.load(row_ptr, mask=inside, other=0.0)
    high = tl.load(row_ptr + half, mask=inside, other=0.0)
    if cos_sin_ptr is not None:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if q_norm_ptr is not None:
            scale = 1.0 / tl.sqrt_rn(tl.sum(x * x + y * y, axis=1) / HEAD_DIM + eps)[:, None]
            is_q = (head < NUM_HEADS) & (d < half)
            is_k = (head >= NUM_HEADS) & (d < half)
            # One of the two loads is masked off, so their sum is the head's own weight.
            x *= scale * (_load_f32(q_norm_ptr + d, is_q) + _load_f32(k_norm_ptr + d, is_k))
            y *= scale * (_load_f32(q_norm_ptr + half + d, is_q) + _load_f32(k_norm_ptr + half + d, is_k))
        table_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM + d
        cos, sin = _load_f32(table_ptr, d < half), _load_f32(table_ptr + half, d < half)
        low, high = (x * cos - y * sin).to(low.dtype), (y * cos + x * sin).to(low.dtype)
        tl.store(row_ptr, low, mask=inside)
        tl.store(row_ptr + half, high, mask=inside)
    cache_ptr = kv_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM)
    key_ptr = cache_ptr + (head - NUM_HEADS) * HEAD_DIM + d
    is_key = inside & (head >= NUM_HEADS) & has_slot
    tl.store(key_ptr, low, mask=is_key)
    tl.store(key_ptr + half, high, mask=is_key)
    head = tl.arange(0, BLOCK_KV)[:, None]
    d = tl.arange(0, 2 * HALF)[None, :]
    inside = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
    v_ptr = qkv_ptr + token * qkv_stride + (NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM + d
    v = tl.load(v_ptr, mask=inside, other=0.0)
    tl.store(cache_ptr + value_offset + head * HEAD_DIM + d, v, mask=inside & has_slot)


@triton.jit
def _load_f32(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
