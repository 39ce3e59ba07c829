"""What cuts (see top_k_top_p_cut.py) are for: the mask, and the draw of rows whose candidates didn't give the token."""

from kernels.noise import log_exponential_triton, philox_triton
from kernels.top_k_top_p_cut import key_of, load_scaled
from kernels.triton_support import tl, triton


@triton.jit
def mask_kernel(
    logits_ptr, logits_stride, vocab_size, tile_max_ptr, num_tiles, cut_ptr, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Set to -inf what lies below a row's cut."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cut_ptr + row * 3) == 0:
        return
    cut_key, cut_id = tl.load(cut_ptr + row * 3 + 1), tl.load(cut_ptr + row * 3 + 2)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    tile_max = tl.load(tile_max_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-2147483648)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    row_ptr = logits_ptr + row * logits_stride
    # A tile wholly below the cut need not be read.
    key = key_of(load_scaled(row_ptr, token, (token < vocab_size) & (tile_max >= cut_key)[:, None], 1.0, False))
    kept = (key > cut_key) | ((key == cut_key) & (token <= cut_id))
    tl.store(row_ptr + token, float("-inf"), mask=(token < vocab_size) & ~kept)


@triton.jit(do_not_specialize=["purpose"])
def sample_rest_kernel(
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, temperature_ptr, seeds_ptr, positions_ptr, purpose,
    cut_ptr, best_ptr, best_token_ptr,
    SCALE: tl.constexpr, MIN_UNIFORM: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The best of every SPLITS-th tile of a row whose token isn't drawn yet."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    state = tl.load(expanded_idx_mapping_ptr + row)
    status = tl.load(cut_ptr + row * 3)
    if (state < 0) | (status == 3):
        return
    # Without a cut everything is above it.
    cut_key = tl.where(status == 0, -2147483648, tl.load(cut_ptr + row * 3 + 1))
    cut_id = tl.load(cut_ptr + row * 3 + 2)
    temperature = tl.load(temperature_ptr + state)
    scale = (temperature != 0.0).to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    seed, position = tl.load(seeds_ptr + state), tl.load(positions_ptr + row)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_token = split * 4 * LANES + lane
    for tile in range(split, tl.cdiv(vocab_size, 4 * LANES), SPLITS):
        w0, w1, w2, w3 = philox_triton(
            seed,
            (tile * LANES + lane).to(tl.uint32),
            zero + position.to(tl.uint32),
            zero + purpose.to(tl.uint32),
            zero + (position >> 32).to(tl.uint32),
        )
        for word in tl.static_range(0, 4):
            token = (tile * 4 + word) * LANES + lane
            words = w0 if word == 0 else (w1 if word == 1 else (w2 if word == 2 else w3))
            x = load_scaled(logits_ptr + row * logits_stride, token, token < vocab_size, divisor, SCALE)
            key = key_of(x)
            score = x - scale * log_exponential_triton(words, MIN_UNIFORM)
            kept = (key > cut_key) | ((key == cut_key) & (token <= cut_id))
            better = kept & (score > best)
            best_token = tl.where(better, token, best_token)
            best = tl.where(better, score, best)
    row_best = tl.max(best, axis=0)
    tl.store(best_ptr + row * SPLITS + split, row_best)
    tl.store(best_token_ptr + row * SPLITS + split, tl.min(tl.where(best == row_best, best_token, 2147483647), axis=0))


@triton.jit
def reduce_rest_kernel(
    expanded_idx_mapping_ptr, cut_ptr, best_ptr, best_token_ptr, sampled_ptr, SPLITS: tl.constexpr
):  # fmt: skip
    """The best of a row's SPLITS; 0 for padding."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    if tl.load(expanded_idx_mapping_ptr + row) < 0:
        tl.store(sampled_ptr + row, tl.program_id(0).to(tl.int64) * 0)
    elif tl.load(cut_ptr + row * 3) != 3:
        best = tl.load(best_ptr + row * SPLITS + split)
        token = tl.load(best_token_ptr + row * SPLITS + split)
        winner = tl.min(tl.where(best == tl.max(best, axis=0), token, 2147483647), axis=0)
        tl.store(sampled_ptr + row, winner.to(tl.int64))
