"""Min-p, top-k and top-p: as a mask, or as a draw that needs none.

The torch form sorts each row. The Triton form reads the logits once and sorts nothing: see top_k_top_p_cut.py. A row
without a filter costs the mask nothing.
"""

from typing import Any

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.gumbel import gumbel_sample
from kernels.noise import LANES, MIN_UNIFORM, Purpose
from kernels.top_k_top_p_apply import mask_kernel, reduce_rest_kernel, sample_rest_kernel
from kernels.top_k_top_p_cut import cut_kernel, tile_kernel
from kernels.top_k_top_p_forms import mask_loop, mask_torch
from kernels.top_k_top_p_search import search_kernel
from kernels.triton_support import launch

# Tokens of a tile whose maximum is taken; tiles that a program reads at a time.
_TILE, _TILES = 256, 16
# Room for the candidates of a row; tiles read at a time to collect them: with more, registers spill.
_CAP, _CAP_TILES = 1024, 8
# Tokens that the search weighs at a time: rows, which one thread adds up, times lanes.
_SEARCH_ROWS, _SEARCH_LANES = 8, 1024
# Programs that share a row whose token the candidates didn't give.
_SPLITS = 16


def mask_top_k_top_p(
    # [l, V] f32, changed in place
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [R] i32, from 1; V or more is off
    top_k: torch.Tensor,
    # [R] f32, 1 is off
    top_p: torch.Tensor,
    # [R] f32, 0 is off
    min_p: torch.Tensor,
    *,
    form: str = "auto",
) -> None:
    """Set to -inf, in place, what a row's filters drop: min-p first, top-k of what is left, top-p of what is left then.

    min-p drops the logits below max + log(min_p). top-k keeps what ties with the k-th. top-p keeps the fewest tokens,
    from the largest logit on and ties in order of their ids, whose probabilities among those left come to top_p or
    more: never none. NaN counts as -inf. Rows without a filter, and padding, stay as they are.

    Sums are in float32: a token with a logit within 1e-5 of min-p's threshold, or with less than 1e-6 between top_p and
    the probability before it, may fall on either side. Which side depends on the row alone, not on the batch.

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    _check(logits, expanded_idx_mapping, top_k, top_p, min_p)
    form = _resolve_form(form, logits)
    if form == "torch":
        mask_torch(logits, expanded_idx_mapping, top_k, top_p, min_p)
    elif form == "loop":
        mask_loop(logits, expanded_idx_mapping, top_k, top_p, min_p)
    elif logits.numel():
        filters = (expanded_idx_mapping, top_k, top_p, min_p, None)
        tile_max, cut = _find_cuts(logits, filters, (None, None, 0, None), False, form)
        launch(
            mask_kernel,
            (logits.shape[0], -(-tile_max.shape[1] // _TILES)),
            logits,
            logits.stride(0),
            logits.shape[1],
            tile_max,
            tile_max.shape[1],
            cut,
            form=form,
            TILES=_TILES,
            TILE=_TILE,
        )


def sample_top_k_top_p(
    # [l, V] f32
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [R] i32, from 1; V or more is off
    top_k: torch.Tensor,
    # [R] f32, 1 is off
    top_p: torch.Tensor,
    # [R] f32, 0 is off
    min_p: torch.Tensor,
    # [R] f32
    temperature: torch.Tensor,
    # [R] i64
    seeds: torch.Tensor,
    # [l] i64
    positions: torch.Tensor,
    *,
    purpose: int,
    apply_temperature: bool = False,
    form: str = "auto",
) -> torch.Tensor:
    """Draw what `gumbel_sample` draws from logits that `mask_top_k_top_p` has masked, without touching the logits.

    Args:
        purpose: a `Purpose`: the stream to draw from.
        apply_temperature: logits have not been divided by the temperature yet: filter and draw from logits /
            temperature. At temperature 0, the greedy choice, no filter matters.

    Returns:
        Token ids, i64 [l]; 0 for padding.

    Raises:
        ValueError: a wrong dtype, rank, length, purpose or form.
    """
    _check(logits, expanded_idx_mapping, top_k, top_p, min_p)
    check_tensors(torch.int64, 1, logits.shape[0], positions=positions)
    check_tensors(torch.float32, 1, temperature=temperature)
    check_tensors(torch.int64, 1, seeds=seeds)
    purpose = Purpose(purpose).value
    form = _resolve_form(form, logits)
    filters = (expanded_idx_mapping, top_k, top_p, min_p)
    draw = (temperature, seeds, positions)
    if form in ("torch", "loop"):
        return _sample_masked(logits, filters, draw, purpose, apply_temperature, form)
    num_logits, vocab_size = logits.shape
    sampled = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    if not logits.numel():
        return sampled
    _, cut = _find_cuts(logits, (*filters, temperature), (seeds, positions, purpose, sampled), apply_temperature, form)
    best = torch.empty(num_logits, _SPLITS, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_logits, _SPLITS, dtype=torch.int32, device=logits.device)
    launch(
        sample_rest_kernel,
        (num_logits, _SPLITS),
        logits,
        logits.stride(0),
        vocab_size,
        expanded_idx_mapping,
        *draw,
        purpose,
        cut,
        best,
        best_token,
        form=form,
        SCALE=apply_temperature,
        MIN_UNIFORM=MIN_UNIFORM,
        LANES=LANES,
        SPLITS=_SPLITS,
    )
    launch(
        reduce_rest_kernel,
        (num_logits,),
        expanded_idx_mapping,
        cut,
        best,
        best_token,
        sampled,
        form=form,
        num_warps=1,
        SPLITS=_SPLITS,
    )
    return sampled


def _check(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, logits.shape[0], expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int32, 1, top_k=top_k)
    check_tensors(torch.float32, 1, top_p=top_p, min_p=min_p)


def _resolve_form(form: str, logits: torch.Tensor) -> str:
    form = resolve_form(form, logits)
    # Triton 3.6 can't compile the search for a size that it takes for the constant 1.
    return "torch" if form == "triton" and logits.shape[1] == 1 else form


def _sample_masked(
    logits: torch.Tensor,
    filters: tuple[torch.Tensor, ...],
    draw: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    purpose: int,
    apply_temperature: bool,
    form: str,
) -> torch.Tensor:
    """The torch and the loop form are what the definition says: a mask, then a draw."""
    rows = filters[0][: logits.shape[0]]
    t = draw[0][rows.clamp(min=0).long()].unsqueeze(1)
    masked = logits / torch.where(t == 0, 1, t) if apply_temperature else logits.clone()
    mask_top_k_top_p(masked, *filters, form=form)
    return gumbel_sample(masked, rows.clamp(min=0), *draw, purpose=purpose, form=form).masked_fill_(rows < 0, 0)


def _find_cuts(
    logits: torch.Tensor,
    filters: tuple[torch.Tensor | None, ...],
    draw: tuple[torch.Tensor | None, torch.Tensor | None, int, torch.Tensor | None],
    scale: bool,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest key of each tile, i32 [l, num_tiles], and the cuts, i32 [l, 3].

    Args:
        filters: idx_mapping, top_k, top_p, min_p, temperature or None.
        draw: seeds, positions, purpose and where to put tokens that the candidates give; or None, None, 0, None.
        scale: logits have not been divided by the temperature yet.
    """
    num_logits, vocab_size = logits.shape
    num_tiles = -(-vocab_size // _TILE)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tile_max, tile_list, cut = scratch(num_logits, num_tiles), scratch(num_logits, num_tiles), scratch(num_logits, 3)
    tile_mass, candidates = scratch(num_logits, num_tiles, dtype=torch.float32), scratch(num_logits, 2, _CAP)
    row_args = (logits, logits.stride(0), vocab_size, *filters)
    tiling: dict[str, Any] = {"form": form, "SCALE": scale, "TILES": _TILES, "TILE": _TILE}
    launch(tile_kernel, (num_logits, -(-num_tiles // _TILES)), *row_args, tile_max, tile_mass, num_tiles, **tiling)
    tiling |= {"num_warps": 8, "TILES": _CAP_TILES, "CAP": _CAP, "BLOCK": 1 << (num_tiles - 1).bit_length()}
    launch(
        cut_kernel,
        (num_logits,),
        *row_args,
        tile_max,
        tile_mass,
        tile_list,
        num_tiles,
        candidates,
        cut,
        *draw,
        MIN_UNIFORM=MIN_UNIFORM,
        LANES=LANES,
        **tiling,
    )
    launch(
        search_kernel,
        (num_logits,),
        *row_args,
        tile_max,
        tile_list,
        num_tiles,
        candidates,
        cut,
        ROWS=_SEARCH_ROWS,
        LANES=_SEARCH_LANES,
        **tiling,
    )
    return tile_max, cut
