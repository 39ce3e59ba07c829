"""Kernels 27 and 28 of rejection.py, as Triton compiles them: the token behind the accepted drafts."""

from kernels.noise import LN2, log2_exponential_triton, philox_triton
from kernels.triton_support import begin_behind, tl, triton


@triton.jit
def draw_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, token_ids_ptr, max_drafts,
    logits_ptr, logits_stride, vocab_size, draft_logits_ptr, draft_stride, draft_index_stride,
    positions_ptr, temperature_ptr, seeds_ptr, target_lse_ptr, draft_lse_ptr, prefix_ptr, num_drafts_ptr,
    num_sampled_ptr, tile_max_ptr, tile_argmax_ptr,
    PDL: tl.constexpr, ALL_GREEDY: tl.constexpr, FLOOR: tl.constexpr, LOG_FLOOR: tl.constexpr,
    MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr, SAMPLE: tl.constexpr, RESAMPLE: tl.constexpr,
):  # fmt: skip
    """27: the best of a tile by Gumbel-max, of the residual behind a rejected draft, else of the target."""
    begin_behind(PDL)
    req = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    accepted = tl.load(num_sampled_ptr + req) - 1
    row = tl.load(cu_num_logits_ptr + req).to(tl.int64) + accepted
    state = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    w0, w1, w2, w3 = zero, zero, zero, zero
    scale = 0.0
    if not ALL_GREEDY:
        is_rejected = accepted < tl.load(num_drafts_ptr + req)
        purpose = tl.where(is_rejected, RESAMPLE, SAMPLE)
        is_random = tl.load(temperature_ptr + state) != 0.0
        subtract = is_rejected & is_random
        scale = -LN2 * is_random.to(tl.float32)
        position = tl.load(positions_ptr + row)
        w0, w1, w2, w3 = philox_triton(
            tl.load(seeds_ptr + state),
            (tile * LANES + lane).to(tl.uint32),
            zero + position.to(tl.uint32),
            zero + purpose.to(tl.uint32),
            zero + (position >> 32).to(tl.uint32),
        )
        # Where nothing is subtracted, what is read of the draft is not used.
        rejected = tl.where(subtract, tl.load(token_ids_ptr + row + subtract.to(tl.int32)).to(tl.int64), -1)
        subtracted_size = tl.where(subtract, vocab_size, 0)
        at = req * max_drafts + tl.minimum(accepted, max_drafts - 1)
    token = tile * (4 * LANES) + lane
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_token = token
    for word in tl.static_range(0, 4):
        x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        # A NaN must not win a reduction, nor let a lane past the vocabulary win.
        x = tl.where(x == x, x, float("-inf"))
        if not ALL_GREEDY:
            if draft_logits_ptr is not None:
                draft_ptr = draft_logits_ptr + state * draft_stride + accepted * draft_index_stride
                y = tl.load(draft_ptr + token, mask=token < subtracted_size, other=float("-inf"))
                log_pm = x - tl.load(target_lse_ptr + at) + tl.log(tl.load(prefix_ptr + at))
                log_q = y - tl.load(draft_lse_ptr + at)
                ratio = tl.where(x == float("-inf"), 1.0, tl.exp(log_q - log_pm))
                x += tl.where(subtract, tl.log(tl.maximum(1.0 - ratio, FLOOR)), 0.0)
            else:
                x += tl.where(token == rejected, LOG_FLOOR, 0.0)
            words = w0 if word == 0 else (w1 if word == 1 else (w2 if word == 2 else w3))
            # As kernel 18 does it, to the last bit.
            x = tl.fma(log2_exponential_triton(words, MIN_UNIFORM), scale, x)
        best_token = tl.where(x > best, token, best_token)
        best = tl.maximum(best, x)
        token += LANES
    tile_max = tl.max(best, axis=0)
    out = req * tl.num_programs(1) + tile
    tl.store(tile_max_ptr + out, tile_max)
    tl.store(tile_argmax_ptr + out, tl.min(tl.where(best == tile_max, best_token, 2147483647), axis=0).to(tl.int64))


@triton.jit
def insert_kernel(
    tile_max_ptr, tile_argmax_ptr, num_tiles, sampled_ptr, sampled_stride, num_sampled_ptr, PDL: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """28: the token of the best tile behind the accepted drafts."""
    begin_behind(PDL)
    req = tl.program_id(0).to(tl.int64)
    winner = best_of_tiles(req, tile_max_ptr, tile_argmax_ptr, num_tiles, TILES)
    tl.store(sampled_ptr + req * sampled_stride + tl.load(num_sampled_ptr + req) - 1, winner)


@triton.jit
def best_of_tiles(req, tile_max_ptr, tile_argmax_ptr, num_tiles, TILES: tl.constexpr):
    """The token i64 of a request's best tile, the lowest of several."""
    tile = tl.arange(0, TILES)
    best = tl.load(tile_max_ptr + req * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(tile_argmax_ptr + req * num_tiles + tile, mask=tile < num_tiles, other=9223372036854775807)
    return tl.min(tl.where(best == tl.max(best, axis=0), token, 9223372036854775807), axis=0)
