"""What happens to the heads of q and k between their projection and attention: an optional RMS norm, and RoPE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors
from kernels.triton_support import tl, triton


@dataclass(frozen=True)
class HeadRotation:
    """The arguments of norm and RoPE. Symbols: t tokens, P positions of the table, D head_dim.

    RoPE turns the pair (x[i], x[i + D / 2]) by the angle whose cosine and sine are cos_sin[position, i] and
    cos_sin[position, D / 2 + i].
    """

    # [>= t] i64
    positions: torch.Tensor
    # [P, D]
    cos_sin: torch.Tensor
    # [D] each, or None where the model does not normalise its heads
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0

    def check(self, num_tokens: int, head_dim: int) -> None:
        """Raise ValueError for a wrong dtype or shape."""
        check_tensors(torch.int64, 1, num_tokens, positions=self.positions)
        check_tensors(None, 2, cos_sin=self.cos_sin)
        if self.cos_sin.shape[1] != head_dim or not self.cos_sin.is_contiguous():
            raise ValueError(f"cos_sin must be contiguous [P, {head_dim}], got {tuple(self.cos_sin.shape)}")
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm come together: give both or neither")


def rotate_heads(
    # [t, Hq + Hk, D]
    heads: torch.Tensor,
    num_heads: int,
    rotation: HeadRotation,
) -> torch.Tensor:
    """Norm and RoPE of the query heads and the key heads behind them, in float32; [t, Hq + Hk, D] f32."""
    t, _, head_dim = heads.shape
    x = heads.float()
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q, k = x.split((num_heads, x.shape[1] - num_heads), dim=1)
        norms = ((q, rotation.q_norm), (k, rotation.k_norm))
        x = torch.cat([F.rms_norm(part, (head_dim,), weight.float(), rotation.eps) for part, weight in norms], dim=1)
    cos, sin = rotation.cos_sin[rotation.positions[:t]].float().unsqueeze(1).chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@triton.jit
def rotation_factors(
    # [D]
    d,
    inside,
    # each None where there is nothing of the kind; the second points to cos_sin[position]
    norm_ptr,
    cos_sin_ptr,
    HEAD_DIM: tl.constexpr,
):
    """What an element and its partner are multiplied by, norm weight and angle together; [D] f32 each."""
    half: tl.constexpr = HEAD_DIM // 2
    is_low = d < half
    own = tl.full([d.shape[0]], 1.0, tl.float32)
    cross = own
    if norm_ptr is not None:
        own = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        cross = tl.load(norm_ptr + tl.where(is_low, d + half, d - half), mask=inside, other=0.0).to(tl.float32)
    if cos_sin_ptr is not None:
        angle_ptr = cos_sin_ptr + tl.where(is_low, d, d - half)
        own *= tl.load(angle_ptr, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angle_ptr + half, mask=inside, other=0.0).to(tl.float32)
        cross *= tl.where(is_low, -sin, sin)
    return own, cross


@triton.jit
def rotate_block(
    # pointers to the heads' first elements, [H, 1]
    head_ptr,
    inside,
    # [D]
    d,
    d_inside,
    # from rotation_factors
    own,
    cross,
    norm_ptr,
    cos_sin_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
):
    """Load heads and apply norm and RoPE; [H, D] f32. Each element's partner is loaded too, rather than shuffled in."""
    mask = inside & d_inside[None, :]
    x = tl.load(head_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * own[None, :]
    if cos_sin_ptr is not None:
        half: tl.constexpr = HEAD_DIM // 2
        partner = tl.where(d < half, d + half, d - half)
        y += tl.load(head_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32) * cross[None, :]
    if norm_ptr is not None:
        y *= 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    return y
