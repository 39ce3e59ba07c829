"""Kernel 19: logprobs of a token and of the k best, found first and only then normalised.

No log-softmax of the vocabulary is made: one pass over a row gives its log-sum-exp and the token's rank.
"""

import math

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.triton_support import launch, tl, triton

# Tokens of a tile whose maximum is taken to find the best tokens.
_TILE = 128
# Rows that the torch form normalises at a time: its scratch memory is this times V, whatever the number of rows.
_ROWS = 32


def topk_logprobs(
    # [l, V] f32
    logits: torch.Tensor,
    # [l] i64
    token_ids: torch.Tensor,
    k: int,
    *,
    form: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log_softmax(logits) of each row's token and of its k best tokens.

    A rank counts the logits that are at least the token's, so that two tied tokens both have the higher number. A row
    with a logit of +inf or NaN, or with nothing but -inf, has no law, and what comes of it is not defined.

    Args:
        k: 0 .. V; more than V is V. Which of the tokens that tie with the k-th come is not defined.

    Returns:
        ids: i64 [l, k + 1], column 0 the token, then the k best, best first.
        logprobs: f32 [l, k + 1], of these ids.
        ranks: i64 [l], from 1, of the token in column 0.

    Raises:
        ValueError: a wrong dtype, rank, length, form or a negative k.
    """
    num_logits, vocab_size = logits.shape
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int64, 1, num_logits, token_ids=token_ids)
    if k < 0:
        raise ValueError(f"k must be 0 or more, got {k}: for all tokens give the vocabulary's size, {vocab_size}")
    form = resolve_form(form, logits)
    token_ids, k = token_ids[:num_logits], min(k, vocab_size)
    if form == "loop":
        return _loop(logits, token_ids, k)
    column = token_ids.unsqueeze(1)
    own = logits.gather(1, column)
    ids, values = column, own
    if k:
        best, best_ids = _topk(logits, k)
        ids, values = torch.cat([column, best_ids], dim=1), torch.cat([own, best], dim=1)
    normaliser = torch.empty(num_logits, 1, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    if form == "torch":
        for first in range(0, num_logits, _ROWS):
            part = slice(first, first + _ROWS)
            normaliser[part] = logits[part].logsumexp(dim=-1, keepdim=True)
            # Torch adds up bools several times as fast in i32 as in the i64 that it would take.
            ranks[part] = (logits[part] >= own[part]).sum(dim=-1, dtype=torch.int32)
    else:
        launch(
            _normaliser_kernel,
            (num_logits,),
            logits,
            logits.stride(0),
            vocab_size,
            token_ids,
            normaliser,
            ranks,
            form=form,
            num_warps=8,
            BLOCK=4096,
        )
    return ids, values - normaliser, ranks


def _topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.topk`, in a fraction of its time: the k best tokens lie in the k tiles with the largest maxima."""
    num_tiles = logits.shape[1] // _TILE
    if 8 * k > num_tiles:  # the tiles would be too much of the row, in memory too
        return logits.topk(k, dim=-1)
    tiles = logits[:, : num_tiles * _TILE].unflatten(1, (num_tiles, _TILE))
    tile_ids = tiles.amax(dim=-1).topk(k, dim=-1).indices
    candidates = tiles.gather(1, tile_ids.unsqueeze(-1).expand(-1, -1, _TILE)).flatten(1)
    rest = logits[:, num_tiles * _TILE :]
    best, at = torch.cat([candidates, rest], dim=1).topk(k, dim=-1)
    in_tile = tile_ids.gather(1, (at // _TILE).clamp_(max=k - 1)) * _TILE + at % _TILE
    return best, torch.where(at < k * _TILE, in_tile, at + (num_tiles - k) * _TILE)


def _loop(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, logprobs, ranks = [], [], []
    for row, token in zip(logits.tolist(), token_ids.tolist(), strict=True):
        ids_and_logits = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))
        chosen = [token, *(t for t, _ in ids_and_logits[:k])]
        best = max(row)
        normaliser = best + math.log(sum(math.exp(x - best) for x in row))
        ids.append(chosen)
        logprobs.append([row[t] - normaliser for t in chosen])
        ranks.append(sum(x >= row[token] for x in row))
    shape, device = (len(ids), k + 1), logits.device
    return (
        torch.tensor(ids, dtype=torch.int64, device=device).view(shape),
        torch.tensor(logprobs, dtype=torch.float32, device=device).view(shape),
        torch.tensor(ranks, dtype=torch.int64, device=device),
    )


@triton.jit
def _normaliser_kernel(
    logits_ptr, logits_stride, vocab_size, token_ids_ptr, normaliser_ptr, ranks_ptr, BLOCK: tl.constexpr
):
    """The log-sum-exp of a row and the rank of its token, in one pass: each lane keeps its own maximum and sum."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    own = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.full([BLOCK], 0.0, tl.float32)
    rank = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        rank += ((x >= own) & (token < vocab_size)).to(tl.int32)
        larger = tl.maximum(best, x)
        # -inf - -inf is NaN: a lane that has seen nothing yet has no mass.
        mass = tl.where(best == larger, mass, mass * tl.exp(best - larger))
        mass += tl.where(x == float("-inf"), 0.0, tl.exp(x - larger))
        best = larger
    top = tl.max(best, axis=0)
    total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(best - top)), axis=0)
    tl.store(normaliser_ptr + row, top + tl.log(total))
    tl.store(ranks_ptr + row, tl.sum(rank, axis=0).to(tl.int64))
