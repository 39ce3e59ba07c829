"""Rows whose cut the candidates didn't settle: a flat row under top-p, a top-k of many hundreds, a crowd of ties.

One program a row narrows an interval of keys by four in each pass over the logits, until what is left in it fits into
registers, where the search ends bit by bit. A pass weighs what lies above three pivots; a weight is 1 (KIND 0: top-k),
the probability's numerator (KIND 1: top-p), or 1 for a tie with the cut, searched by id (KIND 2).
"""

from kernels.top_k_top_p_cut import (
    collect,
    floor_of,
    key_of,
    largest_key,
    last_tie,
    load_candidates,
    load_filters,
    load_scaled,
    mass_of,
    ties_needed,
    value_of,
)
from kernels.triton_support import tl, triton


@triton.jit
def _weigh(
    row_ptr, vocab_size, pivot1, pivot2, pivot3, top, cut_key, divisor,
    KIND: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The weights of all that lies at or above each of three pivots."""
    above1 = tl.full([LANES], 0.0, tl.float32)
    above2, above3 = above1, above1
    for first in range(0, vocab_size, ROWS * LANES):
        token = first + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        x = load_scaled(row_ptr, token, token < vocab_size, divisor, SCALE)
        key = key_of(x)
        if KIND == 0:
            weight = tl.full([ROWS, LANES], 1.0, tl.float32)
        elif KIND == 1:
            weight = mass_of(x, top)
        else:
            weight = (key == cut_key).to(tl.float32)
            key = ~token
        above1 += tl.sum(tl.where(key >= pivot1, weight, 0.0), axis=0)
        above2 += tl.sum(tl.where(key >= pivot2, weight, 0.0), axis=0)
        above3 += tl.sum(tl.where(key >= pivot3, weight, 0.0), axis=0)
    return tl.sum(above1, axis=0), tl.sum(above2, axis=0), tl.sum(above3, axis=0)


@triton.jit
def _search(
    row_ptr, vocab_size, lo, hi, below, target, top, cut_key, divisor, tile_max, tile_list_ptr, candidate_ptr,
    KIND: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The largest key in lo .. hi - 1 with at least `target` of the weights at or above it (lo if none has), and the
    weights above it.

    None lies at or above hi, `below` (or less) at or above lo.
    """
    lo, hi = lo.to(tl.int64), hi.to(tl.int64)
    above = below * 0.0
    may_collect = lo * 0 + (1 if KIND < 2 else 0)
    while hi - lo > 1:
        lightest = below * 0.0 + 1.0
        if KIND == 1:
            lightest = mass_of(value_of(lo.to(tl.int32)), top)
        # So many keys lie in the interval at most, were it not for rounding: half the room is for that.
        if (may_collect != 0) & (below - above <= lightest * (CAP // 2)):
            first, last = lo.to(tl.int32), hi.to(tl.int32)
            count = collect(
                row_ptr, vocab_size, tile_max, first, last, divisor, tile_list_ptr, candidate_ptr,
                SCALE, TILES, TILE, CAP,
            )  # fmt: skip
            may_collect = lo * 0
            if count <= CAP:
                keys, ids = load_candidates(candidate_ptr, count, CAP)
                valid = tl.arange(0, CAP) < count
                weight = tl.where(valid, mass_of(value_of(keys), top) if KIND == 1 else 1.0, 0.0)
                lo = tl.maximum(lo, largest_key(keys, weight, target - above).to(tl.int64))
                above += tl.sum(tl.where(keys > lo.to(tl.int32), weight, 0.0), axis=0)
                hi = lo + 1
        else:
            step = (hi - lo + 3) // 4
            pivot1 = lo + step
            pivot2, pivot3 = tl.minimum(pivot1 + step, hi), tl.minimum(pivot1 + 2 * step, hi)
            above1, above2, above3 = _weigh(
                row_ptr, vocab_size, pivot1.to(tl.int32), pivot2.to(tl.int32), pivot3.to(tl.int32), top, cut_key,
                divisor, KIND, SCALE, ROWS, LANES,
            )  # fmt: skip
            if above3 >= target:
                lo, below = pivot3, above3
            elif above2 >= target:
                lo, hi, below, above = pivot2, pivot3, above2, above3
            elif above1 >= target:
                lo, hi, below, above = pivot1, pivot2, above1, above2
            else:
                hi, above = pivot1, above1
    return lo.to(tl.int32), above


@triton.jit
def search_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr,
    tile_max_ptr, tile_list_ptr, num_tiles, candidate_ptr, cut_ptr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the cut of a row with status 1, and set it to 2."""
    row = tl.program_id(0).to(tl.int64)
    cut_ptr += row * 3
    if tl.load(cut_ptr) != 1:
        return
    state = tl.load(expanded_idx_mapping_ptr + row)
    k, p, min_p, divisor, filtered = load_filters(state, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr)
    tile = tl.arange(0, BLOCK)
    tile_list_ptr += row * num_tiles
    candidate_ptr += row * (2 * CAP)
    row_ptr = logits_ptr + row * logits_stride
    tile_max = tl.load(tile_max_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-2147483648)
    best = tl.max(tile_max, axis=0)
    top = value_of(best)
    cut_key, cut_id = floor_of(best, min_p), vocab_size - 1
    if k < vocab_size:
        cut_key, above = _search(
            row_ptr, vocab_size, cut_key, best + 1, top * 0.0 + vocab_size, k.to(tl.float32), top, cut_key, divisor,
            tile_max, tile_list_ptr, candidate_ptr, 0, SCALE, ROWS, LANES, TILES, TILE, CAP,
        )  # fmt: skip
    if p < 1.0:
        total, total, total = _weigh(
            row_ptr, vocab_size, cut_key, cut_key, cut_key, top, cut_key, divisor, 1, SCALE, ROWS, LANES
        )
        target = p * total
        cut_key, above = _search(
            row_ptr, vocab_size, cut_key, best + 1, total, target, top, cut_key, divisor,
            tile_max, tile_list_ptr, candidate_ptr, 1, SCALE, ROWS, LANES, TILES, TILE, CAP,
        )  # fmt: skip
        cut_key = tl.minimum(cut_key, best)
        needed = ties_needed(above, mass_of(value_of(cut_key), top), target)
        count = collect(
            row_ptr, vocab_size, tile_max, cut_key, cut_key + 1, divisor, tile_list_ptr, candidate_ptr,
            SCALE, TILES, TILE, CAP,
        )  # fmt: skip
        if count <= CAP:
            keys, ids = load_candidates(candidate_ptr, count, CAP)
            cut_id = last_tie(ids, tl.arange(0, CAP) < count, needed)
        else:
            found, above = _search(
                row_ptr, vocab_size, ~cut_id, best * 0, top * 0.0 + vocab_size, needed, top, cut_key, divisor,
                tile_max, tile_list_ptr, candidate_ptr, 2, SCALE, ROWS, LANES, TILES, TILE, CAP,
            )  # fmt: skip
            cut_id = ~found
    tl.store(cut_ptr, 2)
    tl.store(cut_ptr + 1, cut_key)
    tl.store(cut_ptr + 2, cut_id)
