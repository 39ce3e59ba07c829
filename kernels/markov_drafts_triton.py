"""The Triton kernels of markov_drafts.

A program of score_kernel has some tokens of the vocabulary, and leaves their best score for the next draft's launch,
each program of which finds the best of all: so nothing stands between two drafts. One more column of programs writes
what was found, and the confidences.
"""

from kernels.triton_support import tl, triton


@triton.jit
def _best_token(max_ptr, argmax_ptr, row, num_reqs, num_tiles, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):
    """The best tile's token of rows [BLOCK_R], i32; the lowest id of several, 0 where nothing is above -inf."""
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, num_tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)[None, :]
        mask = (row < num_reqs)[:, None] & (tile < num_tiles)
        maximum = tl.load(max_ptr + row[:, None] * num_tiles + tile, mask=mask, other=float("-inf"))
        argmax = tl.load(argmax_ptr + row[:, None] * num_tiles + tile, mask=mask, other=2147483647)
        top = tl.max(maximum, axis=1)
        lowest = tl.min(tl.where(maximum == top[:, None], argmax, 2147483647), axis=1)
        token = tl.where(top > best, lowest, token)
        best = tl.maximum(best, top)
    return token


@triton.jit
def _token_before(
    anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, row, num_reqs, index,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Token ids i64 [BLOCK_R] that draft `index` stands behind."""
    if FIRST:
        token = tl.load(anchors_ptr + row * anchors_stride, mask=row < num_reqs, other=0)
    else:
        before = ((index + 1) % 2).to(tl.int64) * num_reqs * num_tiles
        token = _best_token(max_ptr + before, argmax_ptr + before, row, num_reqs, num_tiles, BLOCK_R, BLOCK_T)
    return token.to(tl.int64)


@triton.jit(do_not_specialize=["index", "num_reqs", "num_drafts", "anchors_stride"])
def score_kernel(
    anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, base_ptr, w1_ptr, w2_ptr, latents_ptr,
    hidden_ptr, num_positions, hidden_size, hidden_weight_ptr, token_weight_ptr, bias_ptr, confidences_ptr, tokens_ptr,
    num_reqs, num_drafts, vocab_size, index,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score of each tile of V for draft `index`; the grid is (tiles + 1, blocks of requests)."""
    MULTIPLIED: tl.constexpr = tl.float32 if UPCAST else w2_ptr.dtype.element_ty
    tile = tl.program_id(0)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    w2_ptr += v.to(tl.int64)[:, None] * RANK + k[None, :]
    # Before the wait: weights alone.
    first_w2 = tl.load(w2_ptr, mask=(v < vocab_size)[:, None] & (k < RANK)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tile == num_tiles:
        before = _token_before(
            anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, row, num_reqs, index, BLOCK_R, BLOCK_T, FIRST
        )
        if not FIRST:
            tl.store(tokens_ptr + row * num_drafts + index - 1, before, mask=row < num_reqs)
        if confidences_ptr is not None:
            _confidence(
                hidden_ptr + (row * num_positions + index) * hidden_size, hidden_size, hidden_weight_ptr,
                w1_ptr + before * RANK, token_weight_ptr, bias_ptr, confidences_ptr + row * num_drafts + index,
                row < num_reqs, RANK, BLOCK_R, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        return
    base_ptr += (row * num_drafts + index)[:, None] * vocab_size + v[None, :]
    inside = (row < num_reqs)[:, None] & (v < vocab_size)[None, :]
    base = tl.load(base_ptr, mask=inside, other=float("-inf"))
    if latents_ptr is None:
        before = _token_before(
            anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, row, num_reqs, index, BLOCK_R, BLOCK_T, FIRST
        )
        latent_ptr = w1_ptr + before[:, None] * RANK + k[None, :]
    else:
        latent_ptr = latents_ptr + row[:, None] * RANK + k[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_K):
        used = k + start < RANK
        if start == 0:
            w2 = first_w2
        else:
            w2 = tl.load(w2_ptr + start, mask=(v < vocab_size)[:, None] & used[None, :], other=0.0)
        latent = tl.load(latent_ptr + start, mask=(row < num_reqs)[:, None] & used[None, :], other=0.0)
        if BLOCK_R == 1:
            acc += tl.sum(w2.to(tl.float32) * latent.to(tl.float32), axis=1)[None, :]
        else:
            acc = tl.dot(latent.to(MULTIPLIED), tl.trans(w2.to(MULTIPLIED)), acc, input_precision="ieee")
    score = base + acc
    score = tl.where(score == score, score, float("-inf"))
    best = tl.max(score, axis=1)
    argmax = tl.min(tl.where(score == best[:, None], v[None, :], 2147483647), axis=1)
    out = ((index % 2).to(tl.int64) * num_reqs + row) * num_tiles + tile
    tl.store(max_ptr + out, best, mask=row < num_reqs)
    tl.store(argmax_ptr + out, argmax, mask=row < num_reqs)


@triton.jit
def _confidence(
    hidden_ptr, hidden_size, hidden_weight_ptr, e_ptr, token_weight_ptr, bias_ptr, out_ptr, inside,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # hidden_ptr, e_ptr, out_ptr and inside: [BLOCK_R]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (d < hidden_size)[None, :]
        h = tl.load(hidden_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += h * tl.load(hidden_weight_ptr + d, mask=d < hidden_size, other=0.0).to(tl.float32)[None, :]
    z = tl.sum(acc, axis=1) + tl.load(bias_ptr).to(tl.float32)
    if token_weight_ptr is not None:
        for start in tl.static_range(0, RANK, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            e = tl.load(e_ptr[:, None] + k[None, :], mask=inside[:, None] & (k < RANK)[None, :], other=0.0)
            w = tl.load(token_weight_ptr + k, mask=k < RANK, other=0.0).to(tl.float32)
            z += tl.sum(e.to(tl.float32) * w[None, :], axis=1)
    tl.store(out_ptr, z, mask=inside)


@triton.jit(do_not_specialize=["index", "num_reqs", "num_drafts", "anchors_stride"])
def latent_kernel(
    anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, w1_ptr, gates_ptr, token_weight_ptr, latents_ptr,
    states_ptr, num_reqs, num_drafts, index,
    RANK: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, IS_RNN: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The latent of draft `index` of a gated or rnn head, a program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = _token_before(
        anchors_ptr, anchors_stride, max_ptr, argmax_ptr, num_tiles, row + tl.arange(0, 1), num_reqs, index,
        1, BLOCK_T, FIRST,
    )  # fmt: skip
    e_ptr = w1_ptr + tl.max(token, axis=0) * RANK
    j = tl.arange(0, BLOCK_J)
    inside = j < RANK
    out_ptr = latents_ptr + row * RANK + j
    gates_ptr += (row * num_drafts + index) * RANK * (3 if IS_RNN else 1) + j
    if IS_RNN:
        s_ptr = states_ptr + ((index + 1) % 2 * num_reqs + row) * RANK
        g = _gate(gates_ptr, token_weight_ptr, 0, s_ptr, e_ptr, j, RANK, BLOCK_J, BLOCK_K, IS_RNN, FIRST)
        c = _gate(gates_ptr, token_weight_ptr, 1, s_ptr, e_ptr, j, RANK, BLOCK_J, BLOCK_K, IS_RNN, FIRST)
        o = _gate(gates_ptr, token_weight_ptr, 2, s_ptr, e_ptr, j, RANK, BLOCK_J, BLOCK_K, IS_RNN, FIRST)
        keep = 1.0 / (1.0 + tl.exp(-g))
        state = (1.0 - keep) * _tanh(c)
        if not FIRST:
            state += keep * tl.load(s_ptr + j, mask=inside, other=0.0)
        tl.store(states_ptr + (index % 2 * num_reqs + row) * RANK + j, state, mask=inside)
        latent = _tanh(o)
    else:
        g = _gate(gates_ptr, token_weight_ptr, 0, states_ptr, e_ptr, j, RANK, BLOCK_J, BLOCK_K, IS_RNN, FIRST)
        latent = tl.load(e_ptr + j, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-g))
    tl.store(out_ptr, latent.to(latents_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate(
    gates_ptr, weight_ptr, part: tl.constexpr, s_ptr, e_ptr, j, RANK: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_RNN: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Part 0, 1 or 2 of what the head's linear layer gives, [BLOCK_J] f32."""
    WIDTH: tl.constexpr = RANK * (2 if IS_RNN else 1)
    OF_E: tl.constexpr = RANK if IS_RNN else 0
    y = tl.load(gates_ptr + part * RANK, mask=j < RANK, other=0.0).to(tl.float32)
    weight_ptr += (part * RANK + j)[:, None] * WIDTH
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = (j < RANK)[:, None] & (k < RANK)[None, :]
        e = tl.load(e_ptr + k, mask=k < RANK, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + OF_E + k[None, :], mask=mask, other=0.0).to(tl.float32)
        y += tl.sum(w * e[None, :], axis=1)
        if IS_RNN and not FIRST:
            s = tl.load(s_ptr + k, mask=k < RANK, other=0.0)
            w = tl.load(weight_ptr + k[None, :], mask=mask, other=0.0).to(tl.float32)
            y += tl.sum(w * s[None, :], axis=1)
    return y


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit(do_not_specialize=["num_reqs", "num_drafts"])
def last_token_kernel(
    max_ptr, argmax_ptr, num_tiles, tokens_ptr, num_reqs, num_drafts, BLOCK_T: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The last draft, a program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    last = ((num_drafts + 1) % 2).to(tl.int64) * num_reqs * num_tiles
    token = _best_token(max_ptr + last, argmax_ptr + last, row, num_reqs, num_tiles, 1, BLOCK_T)
    tl.store(tokens_ptr + row * num_drafts + num_drafts - 1, token.to(tl.int64), mask=row < num_reqs)
