"""Kernels 23 to 26 of rejection.py, as Triton compiles them: which drafts are accepted."""

from kernels.noise import philox_triton
from kernels.triton_support import begin_behind, tl, triton


@triton.jit
def _log_sum_exp(max_ptr, sum_ptr, at, mask):
    """Of each row of blocks [DRAFTS, BLOCKS]; NaN for a row that is masked."""
    block_max = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    mass = tl.load(sum_ptr + at, mask=mask, other=0.0)
    top = tl.max(block_max, axis=1)
    # -inf - -inf is NaN, but a block of nothing but -inf has no mass.
    return top + tl.log(tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(block_max - top[:, None])), axis=1))


@triton.jit
def block_stats_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, token_ids_ptr, max_drafts,
    logits_ptr, logits_stride, vocab_size, draft_logits_ptr, draft_stride, draft_index_stride,
    target_max_ptr, target_sum_ptr, draft_max_ptr, draft_sum_ptr, argmax_ptr, num_blocks,
    PDL: tl.constexpr, ALL_GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """23: maximum, argmax and sum of exponentials of a block of the vocabulary, for a draft's two rows of logits."""
    begin_behind(PDL)
    req = tl.program_id(0) // max_drafts
    k = tl.program_id(0) % max_drafts
    begin = tl.load(cu_num_logits_ptr + req)
    if begin + k + 1 >= tl.load(cu_num_logits_ptr + req + 1):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.program_id(0).to(tl.int64) * num_blocks + tl.program_id(1)
    row_ptr = logits_ptr + (begin + k).to(tl.int64) * logits_stride
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    top = tl.max(x, axis=0)
    tl.store(target_max_ptr + out, top)
    tl.store(argmax_ptr + out, tl.min(tl.where(x == top, token, 2147483647), axis=0))
    if not ALL_GREEDY:
        tl.store(target_sum_ptr + out, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), axis=0))
    if draft_logits_ptr is not None:
        state = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
        draft_ptr = draft_logits_ptr + state * draft_stride + k * draft_index_stride
        x = tl.load(draft_ptr + token, mask=token < vocab_size, other=float("-inf"))
        top = tl.max(x, axis=0)
        tl.store(draft_max_ptr + out, top)
        tl.store(draft_sum_ptr + out, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), axis=0))


@triton.jit
def judge_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, token_ids_ptr, max_drafts,
    logits_ptr, logits_stride, vocab_size, draft_logits_ptr, draft_stride, draft_index_stride,
    positions_ptr, temperature_ptr, seeds_ptr, acceptance_rates_ptr,
    target_max_ptr, target_sum_ptr, draft_max_ptr, draft_sum_ptr, argmax_ptr, num_blocks,
    target_lse_ptr, draft_lse_ptr, prefix_ptr, target_probs_ptr, draft_probs_ptr, uniforms_ptr,
    num_drafts_ptr, sampled_ptr, sampled_stride, num_sampled_ptr,
    PDL: tl.constexpr, METHOD: tl.constexpr, DECIDE: tl.constexpr, ALL_GREEDY: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCKS: tl.constexpr, ACCEPT: tl.constexpr,
):  # fmt: skip
    """24, 26: p, q and u of a request's drafts and, where no residual mass is needed for it, how many are accepted.
    DRAFTS > max_drafts, as there is a row of logits more."""
    begin_behind(PDL)
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    k = tl.arange(0, DRAFTS)
    given = begin + k + 1 < tl.load(cu_num_logits_ptr + req + 1)
    draft = tl.load(token_ids_ptr + begin + k + 1, mask=given, other=-1).to(tl.int64)
    num_drafts = tl.min(tl.where(draft < 0, k, DRAFTS), axis=0)
    tl.store(num_drafts_ptr + req, num_drafts)
    is_draft = k < num_drafts
    state = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    greedy = tl.load(temperature_ptr + state) == 0.0
    block = tl.arange(0, BLOCKS)
    at = (req * max_drafts + k)[:, None] * num_blocks + block[None, :]
    inside = is_draft[:, None] & (block < num_blocks)[None, :]
    block_max = tl.load(target_max_ptr + at, mask=inside, other=float("-inf"))
    block_argmax = tl.load(argmax_ptr + at, mask=inside, other=2147483647)
    best = block_max == tl.max(block_max, axis=1)[:, None]
    is_argmax = draft == tl.min(tl.where(best, block_argmax, 2147483647), axis=1)
    p = is_argmax.to(tl.float32)
    q = p * 0.0 + 1.0
    out = req * max_drafts + k
    if not ALL_GREEDY:
        target_lse = _log_sum_exp(target_max_ptr, target_sum_ptr, at, inside)
        tl.store(target_lse_ptr + out, target_lse, mask=is_draft)
        logit = tl.load(logits_ptr + (begin + k) * logits_stride + draft, mask=is_draft, other=float("-inf"))
        p = tl.where(greedy, p, tl.exp(logit - target_lse))
    if draft_logits_ptr is not None:
        draft_lse = _log_sum_exp(draft_max_ptr, draft_sum_ptr, at, inside)
        tl.store(draft_lse_ptr + out, draft_lse, mask=is_draft)
        draft_ptr = draft_logits_ptr + state * draft_stride + k * draft_index_stride
        logit = tl.load(draft_ptr + draft, mask=is_draft, other=float("-inf"))
        q = tl.where(greedy, q, tl.exp(logit - draft_lse))
    p = tl.where(is_draft, p, 0.0)
    q = tl.where(is_draft, q, 0.0)
    position = tl.load(positions_ptr + begin + k, mask=is_draft, other=0)
    zero = (k * 0).to(tl.uint32)
    place = ((position >> 32) + k).to(tl.uint32)
    word, _, _, _ = philox_triton(tl.load(seeds_ptr + state), zero, position.to(tl.uint32), zero + ACCEPT, place)
    u = tl.uint_to_uniform_float(word)
    is_row = k < tl.load(cu_num_logits_ptr + req + 1) - begin
    tl.store(target_probs_ptr + begin + k, p, mask=is_row)
    tl.store(draft_probs_ptr + begin + k, q, mask=is_row)
    tl.store(uniforms_ptr + begin + k, tl.where(is_draft, u, 0.0), mask=is_row)
    before = p * 0.0 + 1.0
    after = before
    if METHOD == 2:
        ratio = p / tl.maximum(q, 1.2e-38)
        mass = tl.max(before, axis=0)
        for j in range(DRAFTS):
            before = tl.where(k == j, mass, before)
            mass = tl.minimum(mass * tl.sum(tl.where(k == j, ratio, 0.0), axis=0), 1.0)
            after = tl.where(k == j, mass, after)
    tl.store(prefix_ptr + out, before, mask=is_draft)
    if DECIDE:
        if METHOD == 2:
            # A draft that was not drawn: what is left behind draft k is all but the next draft.
            is_next = k[None, :] == k[:, None] + 1
            left = after * (1.0 - tl.sum(tl.where(is_next, p[None, :], 0.0), axis=1))
            accepted = _accepted_of_block(k, num_drafts, u, after, left)
        else:
            if METHOD == 1:
                passed = u < tl.load(acceptance_rates_ptr + k, mask=is_draft, other=0.0)
            else:
                passed = u * q < p
            accepted = tl.min(tl.where(is_draft & passed, DRAFTS, k), axis=0)
            accepted = tl.minimum(accepted, num_drafts)
        tokens = tl.where(k < accepted, draft, -1)
        tl.store(sampled_ptr + req * sampled_stride + k, tokens, mask=k <= max_drafts)
        tl.store(num_sampled_ptr + req, accepted + 1)


@triton.jit
def _accepted_of_block(k, num_drafts, u, after, left):
    wanted = left + 1.0 - after
    # 0 / 0 where nothing is left to want: a later draft is accepted then.
    threshold = tl.where(left > 0.0, left / tl.where(left > 0.0, wanted, 1.0), 0.0)
    threshold = tl.where(k + 1 == num_drafts, after, threshold)
    return tl.max(tl.where((k < num_drafts) & (u < threshold), k + 1, 0), axis=0)


@triton.jit
def residual_mass_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, token_ids_ptr, max_drafts,
    logits_ptr, logits_stride, vocab_size, draft_logits_ptr, draft_stride, draft_index_stride,
    temperature_ptr, target_lse_ptr, draft_lse_ptr, prefix_ptr, num_drafts_ptr, block_mass_ptr, num_blocks,
    PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """25: what the target wants beyond what the draft has given, in a block of the vocabulary."""
    begin_behind(PDL)
    req = tl.program_id(0) // max_drafts
    k = tl.program_id(0) % max_drafts
    state = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    if (k == 0) | (k >= tl.load(num_drafts_ptr + req)) | (tl.load(temperature_ptr + state) == 0.0):
        return
    at = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + (tl.load(cu_num_logits_ptr + req) + k).to(tl.int64) * logits_stride
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    draft_ptr = draft_logits_ptr + state * draft_stride + k * draft_index_stride
    y = tl.load(draft_ptr + token, mask=token < vocab_size, other=float("-inf"))
    wanted = tl.load(prefix_ptr + at) * tl.exp(x - tl.load(target_lse_ptr + at))
    left = tl.maximum(wanted - tl.exp(y - tl.load(draft_lse_ptr + at)), 0.0)
    tl.store(block_mass_ptr + at * num_blocks + tl.program_id(1), tl.sum(left, axis=0))


@triton.jit
def judge_block_kernel(
    idx_mapping_ptr, cu_num_logits_ptr, token_ids_ptr, max_drafts,
    temperature_ptr, prefix_ptr, block_mass_ptr, num_blocks, target_probs_ptr, draft_probs_ptr, uniforms_ptr,
    num_drafts_ptr, sampled_ptr, sampled_stride, num_sampled_ptr, PDL: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """26, where the residual masses had to be summed up before it."""
    begin_behind(PDL)
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_drafts = tl.load(num_drafts_ptr + req)
    k = tl.arange(0, DRAFTS)
    is_draft = k < num_drafts
    has_next = k + 1 < num_drafts
    state = tl.maximum(tl.load(idx_mapping_ptr + req), 0).to(tl.int64)
    greedy = tl.load(temperature_ptr + state) == 0.0
    draft = tl.load(token_ids_ptr + begin + k + 1, mask=is_draft, other=0).to(tl.int64)
    p = tl.load(target_probs_ptr + begin + k, mask=is_draft, other=0.0)
    q = tl.load(draft_probs_ptr + begin + k, mask=is_draft, other=1.0)
    u = tl.load(uniforms_ptr + begin + k, mask=is_draft, other=0.0)
    next_p = tl.load(target_probs_ptr + begin + k + 1, mask=has_next, other=0.0)
    before = tl.load(prefix_ptr + req * max_drafts + k, mask=is_draft, other=0.0)
    after = tl.minimum(before * (p / tl.maximum(q, 1.2e-38)), 1.0)
    block = tl.arange(0, BLOCKS)
    at = (req * max_drafts + k + 1)[:, None] * num_blocks + block[None, :]
    inside = (k + 1 < tl.where(greedy, 0, num_drafts))[:, None] & (block < num_blocks)[None, :]
    left = tl.sum(tl.load(block_mass_ptr + at, mask=inside, other=0.0), axis=1)
    left = tl.where(greedy, after * (1.0 - next_p), left)
    accepted = _accepted_of_block(k, num_drafts, u, after, left)
    tl.store(sampled_ptr + req * sampled_stride + k, tl.where(k < accepted, draft, -1), mask=k <= max_drafts)
    tl.store(num_sampled_ptr + req, accepted + 1)
