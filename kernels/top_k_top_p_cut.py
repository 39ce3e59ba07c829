"""Where the filters cut a row: the device side shared by `mask_top_k_top_p` and `sample_top_k_top_p`.

Whatever min-p, top-k and top-p say together, what they keep is a prefix of the row's tokens in the order (logit
descending, id ascending). So a row's filters come to one cut, i32 [3]: (status, key, id). Kept are the tokens with a
key above the cut's, and those at it with an id of at most the cut's. A key is a float32 as an i32 of the same order.

| status | meaning |
|---|---|
| 0 | no filter: all is kept |
| 1 | the candidates didn't settle it: left to the search of top_k_top_p_search.py |
| 2 | the cut is known |
| 3 | it is known, and the token has been drawn from the candidates already |

The logits are read once: for the maximum of each tile. The k-th largest maximum is no more than the k-th largest logit,
so that the few tiles above it hold all that matters; their tokens above it, the candidates, fit into registers.
"""

from kernels.noise import log_exponential_triton, philox_triton
from kernels.triton_support import tl, triton


@triton.jit
def key_of(x):
    """The order-preserving i32 of an f32; -0 as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The f32 of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, top):
    """exp(x - top), also where both are infinite."""
    return tl.where(x == top, 1.0, tl.exp(x - top))


@triton.jit
def load_scaled(row_ptr, token, inside, divisor, SCALE: tl.constexpr):
    """Logits of a row, divided by the temperature if SCALE; NaN and what is not inside come as -inf."""
    x = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
    if SCALE:
        x = tl.div_rn(x, divisor)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_filters(state, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr):
    """Top-k, top-p, min-p and divisor of a state row, and whether any filter is on. Greedy is top-k 1."""
    k, p, min_p = tl.load(top_k_ptr + state), tl.load(top_p_ptr + state), tl.load(min_p_ptr + state)
    divisor = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + state)
        k = tl.where(temperature == 0.0, 1, k)
        p = tl.where(temperature == 0.0, 1.0, p)
        min_p = tl.where(temperature == 0.0, 0.0, min_p)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return k, p, min_p, divisor, (k < vocab_size) | (p < 1.0) | (min_p > 0.0)


@triton.jit
def floor_of(best, min_p):
    """The lowest key that min-p keeps: never that of -inf, which is masked as it is, nor more than the best key."""
    threshold = value_of(best) + tl.log(tl.maximum(min_p, 1e-37))
    return tl.minimum(tl.where(min_p > 0.0, tl.maximum(key_of(threshold), -2139095040), -2139095040), best)


@triton.jit
def largest_key(keys, weights, target, BITS: tl.constexpr = 32):
    """The largest key that at least `target` of the weights lie at or above, its upper BITS; -2^31 if there is none."""
    found = tl.full([], -2147483648, tl.int32)
    bit = tl.full([], 2147483648, tl.uint32)
    for _ in range(BITS):
        # Flipping the bit makes the key larger; the sign bit too.
        trial = found ^ bit.to(tl.int32, bitcast=True)
        found = tl.where(tl.sum(tl.where(keys >= trial, weights, 0.0), axis=0) >= target, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def ties_needed(above, mass, target):
    """How many ties top-p keeps, each of this mass: they come in order of id while less than `target` lies before."""
    return tl.maximum(tl.ceil(tl.where(mass > 0.0, (target - above) / tl.maximum(mass, 1e-37), 3e38)), 1.0)


@triton.jit
def last_tie(ids, ties, needed):
    """The id of the last tie to keep; some id past all others if all are."""
    last = tl.full([], 2147483647, tl.int32)
    ties = ties.to(tl.float32)
    if tl.sum(ties, axis=0) > needed:
        last = ~largest_key(~ids, ties, needed)
    return last


@triton.jit
def collect(
    row_ptr, vocab_size, tile_max, lo, hi, divisor, tile_list_ptr, candidate_ptr,
    SCALE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write keys and ids with lo <= key < hi to candidate_ptr [2, CAP]; return how many there are.

    They come in order of the id, so that sums over them always round alike. It gives up once there are more than CAP.
    """
    tile = tl.arange(0, tile_max.shape[0])
    listed = (tile_max >= lo).to(tl.int32)
    num_listed = tl.sum(listed, axis=0)
    # The barriers order one thread's stores and another's loads; Triton sees to that for shared memory only.
    tl.debug_barrier()
    tl.store(tile_list_ptr + tl.cumsum(listed, axis=0) - 1, tile, mask=listed != 0)
    tl.debug_barrier()
    lane = tl.arange(0, TILE)[None, :]
    count = 0
    first = 0
    while (first < num_listed) & (count <= CAP):
        i = first + tl.arange(0, TILES)
        token = tl.load(tile_list_ptr + i, mask=i < num_listed, other=0)[:, None] * TILE + lane
        inside = (i < num_listed)[:, None] & (token < vocab_size)
        key = key_of(load_scaled(row_ptr, token, inside, divisor, SCALE))
        take = inside & (key >= lo) & (key < hi)
        in_tile = tl.sum(take.to(tl.int32), axis=1)
        before = count + tl.cumsum(in_tile, axis=0) - in_tile
        at = before[:, None] + tl.cumsum(take.to(tl.int32), axis=1) - 1
        tl.store(candidate_ptr + at, key, mask=take & (at < CAP))
        tl.store(candidate_ptr + CAP + at, token, mask=take & (at < CAP))
        count += tl.sum(in_tile, axis=0)
        first += TILES
    tl.debug_barrier()
    return count


@triton.jit
def load_candidates(candidate_ptr, count, CAP: tl.constexpr):
    """Keys (-2^31 past the last) and ids that `collect` wrote."""
    slot = tl.arange(0, CAP)
    keys = tl.load(candidate_ptr + slot, mask=slot < count, other=-2147483648)
    return keys, tl.load(candidate_ptr + CAP + slot, mask=slot < count, other=0)


@triton.jit
def tile_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr,
    tile_max_ptr, tile_mass_ptr, num_tiles, SCALE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key of each tile, and where top-p comes without top-k the mass relative to it."""
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(expanded_idx_mapping_ptr + row)
    if state < 0:
        return
    k, p, min_p, divisor, filtered = load_filters(state, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr)
    if filtered:
        tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
        token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = load_scaled(logits_ptr + row * logits_stride, token, token < vocab_size, 1.0, False)
        best = tl.max(x, axis=1)
        if SCALE:
            # Division is monotonic, so that the maximum's quotient is the quotients' maximum.
            best = tl.div_rn(best, divisor)
        tl.store(tile_max_ptr + row * num_tiles + tile, key_of(best), mask=tile < num_tiles)
        if (p < 1.0) & (k >= vocab_size):
            if SCALE:
                x = tl.div_rn(x, divisor)
            mass = tl.sum(mass_of(x, best[:, None]), axis=1)
            tl.store(tile_mass_ptr + row * num_tiles + tile, mass, mask=tile < num_tiles)


@triton.jit(do_not_specialize=["purpose"])
def cut_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr,
    tile_max_ptr, tile_mass_ptr, tile_list_ptr, num_tiles, candidate_ptr, cut_ptr,
    seeds_ptr, positions_ptr, purpose, sampled_ptr,
    SCALE: tl.constexpr, MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's cut from its candidates, and its token where sampled_ptr is not None."""
    row = tl.program_id(0).to(tl.int64)
    cut_ptr += row * 3
    tl.store(cut_ptr, 0)
    state = tl.load(expanded_idx_mapping_ptr + row)
    if state < 0:
        return
    k, p, min_p, divisor, filtered = load_filters(state, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr)
    if not filtered:
        return
    tile = tl.arange(0, BLOCK)
    tile_max = tl.load(tile_max_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-2147483648)
    best = tl.max(tile_max, axis=0)
    if best == -2139095041:  # -inf: nothing is left, not even NaN
        tl.store(cut_ptr, 2)
        tl.store(cut_ptr + 1, -2139095040)
        tl.store(cut_ptr + 2, 0)
        return
    top = value_of(best)
    floor = floor_of(best, min_p)
    bound = floor
    if (vocab_size > CAP) & ((k < vocab_size) | (p < 1.0)):
        # Without top-k any bound will do that leaves enough for most rows' top-p and not too much for the candidates.
        rank = tl.where(k < vocab_size, k, num_tiles * 3 // 8)
        bound = tl.maximum(largest_key(tile_max, tl.full([BLOCK], 1.0, tl.float32), rank, 20), floor)
    # Whether the candidates hold all that top-p is about.
    complete = (k < vocab_size) | (bound == floor)
    row_ptr = logits_ptr + row * logits_stride
    candidate_ptr += row * (2 * CAP)
    count = collect(
        row_ptr, vocab_size, tile_max, bound, 2147483647, divisor, tile_list_ptr + row * num_tiles, candidate_ptr,
        SCALE, TILES, TILE, CAP,
    )  # fmt: skip
    keys, ids = load_candidates(candidate_ptr, count, CAP)
    valid = tl.arange(0, CAP) < count
    cut_key, cut_id, status = floor, vocab_size - 1, 2
    if (count > CAP) & ((k < vocab_size) | (p < 1.0)):
        status = 1
    if (count <= CAP) & (k < vocab_size):
        cut_key = tl.maximum(cut_key, largest_key(keys, valid.to(tl.float32), k))
    if (count <= CAP) & (p < 1.0):
        mass = tl.where(valid & (keys >= cut_key), mass_of(value_of(keys), top), 0.0)
        found = tl.sum(mass, axis=0)
        total = found
        if not complete:
            inside = tile < num_tiles
            tile_mass = tl.load(tile_mass_ptr + row * num_tiles + tile, mask=inside, other=0.0)
            total = tl.sum(tl.where(inside, tile_mass * mass_of(value_of(tile_max), top), 0.0), axis=0)
        target = p * total
        if (not complete) & ((min_p > 0.0) | (found < target)):
            status = 1
        else:
            cut_key = tl.minimum(largest_key(keys, mass, target), best)
            above = tl.sum(tl.where(keys > cut_key, mass, 0.0), axis=0)
            needed = ties_needed(above, mass_of(value_of(cut_key), top), target)
            cut_id = last_tie(ids, valid & (keys == cut_key), needed)
    if sampled_ptr is not None:  # noqa: SIM102, Triton must leave the inner one out where there is nothing to draw
        if (status == 2) & (count <= CAP):
            status = 3
            kept = valid & ((keys > cut_key) | ((keys == cut_key) & (ids <= cut_id)))
            zero = (ids * 0).to(tl.uint32)
            position = tl.load(positions_ptr + row)
            w0, w1, w2, w3 = philox_triton(
                tl.load(seeds_ptr + state),
                (ids // (4 * LANES) * LANES + ids % LANES).to(tl.uint32),
                zero + position.to(tl.uint32),
                zero + purpose.to(tl.uint32),
                zero + (position >> 32).to(tl.uint32),
            )
            word = ids // LANES % 4
            words = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
            scale = (tl.load(temperature_ptr + state) != 0.0).to(tl.float32)
            score = tl.where(kept, value_of(keys) - scale * log_exponential_triton(words, MIN_UNIFORM), float("-inf"))
            winners = kept & (score == tl.max(score, axis=0))
            tl.store(sampled_ptr + row, tl.min(tl.where(winners, ids, 2147483647), axis=0).to(tl.int64))
    tl.store(cut_ptr, status)
    tl.store(cut_ptr + 1, cut_key)
    tl.store(cut_ptr + 2, cut_id)
