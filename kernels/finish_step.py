"""Kernels 9 and 10 in one launch, with what the host wants of the step put where it is fetched from."""

from typing import NamedTuple

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.post_update import append_tokens, get_num_sampled_and_rejected, post_update
from kernels.rejection import Race
from kernels.rejection_draw import best_of_tiles
from kernels.triton_support import begin_behind, can_launch_early, launch, tl, triton


class SampledStep(NamedTuple):
    """A step whose tokens were just drawn."""

    # [r] i32, distinct rows but for the padding's
    idx_mapping: torch.Tensor
    # [>= r + 1] i32
    query_start_loc: torch.Tensor
    # [>= r] i32
    seq_lens: torch.Tensor
    # [r + 1] i32
    cu_num_logits: torch.Tensor
    # [r, w] i64
    sampled: torch.Tensor
    # [r] i32, written in place; None: one each
    num_sampled: torch.Tensor | None
    # The last of each request's tokens, still to be found
    race: Race | None = None


class StateRows(NamedTuple):
    """What the step changes of the state table, by row, and the lengths that it goes by."""

    # [R] i32
    num_computed_tokens: torch.Tensor
    # [R, 1] i64
    last_sampled_tokens: torch.Tensor
    # [R] i32
    total_len: torch.Tensor
    # [R, L] i32
    all_token_ids: torch.Tensor
    # [R] i32, read alone
    prefill_len: torch.Tensor


class OutputPlaces(NamedTuple):
    """Two places for a step's output, written in turns."""

    # [2] i32: which is next, 0 or 1; and 0
    turn: torch.Tensor
    # [2, r, w] i64, rows of w adjacent
    sampled: torch.Tensor
    # [2, r] i32
    num_sampled: torch.Tensor
    # [2, r, N] f32 and the table [R, N] f32 whose rows go there, both contiguous; or None
    confidences: torch.Tensor | None = None
    confidence_rows: torch.Tensor | None = None


def finish_step(
    step: SampledStep, rows: StateRows, places: OutputPlaces, *, form: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count what was accepted, bring the state table up to date, and put the output into the place whose turn it is.

    As `get_num_sampled_and_rejected` and then `post_update` without counts for penalties. The turn then is the other's.

    Returns:
        num_sampled, num_rejected: i32 [r].

    Raises:
        ValueError: a wrong dtype, rank, length or form.
    """
    num_reqs, width = step.sampled.shape
    check_tensors(torch.int32, 1, idx_mapping=step.idx_mapping, num_computed_tokens=rows.num_computed_tokens)
    check_tensors(torch.int32, 1, total_len=rows.total_len, prefill_len=rows.prefill_len)
    check_tensors(torch.int32, 1, num_reqs, seq_lens=step.seq_lens)
    check_tensors(torch.int32, 1, num_reqs + 1, query_start_loc=step.query_start_loc, cu_num_logits=step.cu_num_logits)
    check_tensors(torch.int32, 2, all_token_ids=rows.all_token_ids, place_of_num_sampled=places.num_sampled)
    check_tensors(torch.int64, 2, last_sampled_tokens=rows.last_sampled_tokens, sampled=step.sampled)
    check_tensors(torch.int32, 1, 2, turn=places.turn)
    check_tensors(torch.int64, 3, 2, place_of_sampled=places.sampled)
    if places.sampled.shape != (2, num_reqs, width) or places.sampled.stride(1) != width:
        raise ValueError(f"a place must be of {num_reqs} adjacent rows of {width}, got {tuple(places.sampled.shape)}")
    form = resolve_form(form, step.idx_mapping)
    num_sampled, sampled = step.num_sampled, step.sampled
    if form not in ("torch", "loop"):
        given = num_sampled
        num_rejected = torch.empty_like(step.idx_mapping)
        num_sampled = torch.empty_like(num_rejected) if given is None else given
        _launch(step, given, num_sampled, num_rejected, rows, places, form)
        return num_sampled, num_rejected
    if num_sampled is None:
        num_sampled = torch.ones_like(step.idx_mapping)
    if step.race is not None:
        sampled = _inserted(sampled, num_sampled, step.race)
    num_rejected = get_num_sampled_and_rejected(
        num_sampled, step.seq_lens, step.cu_num_logits, step.idx_mapping, rows.prefill_len, form=form
    )
    post_update(step.idx_mapping, *rows[:4], sampled, num_sampled, num_rejected, step.query_start_loc, form=form)
    outputs = [(places.sampled, sampled), (places.num_sampled, num_sampled)]
    if places.confidences is not None and places.confidence_rows is not None:
        outputs.append((places.confidences, places.confidence_rows[step.idx_mapping.long()]))
    for place, values in outputs:
        if form == "loop":
            place[int(places.turn[0])] = values
        else:
            place.index_copy_(0, places.turn[:1].long(), values.unsqueeze(0))
    places.turn[0].bitwise_xor_(1)
    return num_sampled, num_rejected


def _inserted(sampled: torch.Tensor, num_sampled: torch.Tensor, race: Race) -> torch.Tensor:
    best = race.tile_max == race.tile_max.amax(1, keepdim=True)
    token = torch.where(best, race.tile_argmax, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
    return sampled.scatter(1, (num_sampled - 1).long().unsqueeze(1), token)


def _launch(
    step: SampledStep, given: torch.Tensor | None, num_sampled: torch.Tensor, num_rejected: torch.Tensor,
    rows: StateRows, places: OutputPlaces, form: str,
) -> None:  # fmt: skip
    num_reqs, width = step.sampled.shape
    num_tiles = 0 if step.race is None else step.race.tile_max.shape[1]
    num_confidences = 0 if places.confidences is None else places.confidences.shape[2]
    launch(
        _finish_step_kernel,
        (num_reqs,),
        *step[:5],
        step.sampled.stride(0),
        *(step.race or (None, None)),
        num_tiles,
        given,
        num_sampled,
        num_rejected,
        *rows,
        rows.last_sampled_tokens.stride(0),
        rows.all_token_ids.stride(0),
        rows.all_token_ids.shape[1],
        places.turn,
        places.sampled,
        places.sampled.stride(0),
        places.num_sampled,
        places.num_sampled.stride(0),
        places.confidences,
        places.confidence_rows,
        form=form,
        num_warps=1,  # whose one instruction reads the turn for all of a program, before its arrival is counted
        pdl=can_launch_early(form, step.sampled),
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        TILES=1 << max(num_tiles - 1, 0).bit_length(),
        CONFIDENCES=num_confidences,
        BLOCK_C=1 << max(num_confidences - 1, 0).bit_length(),
    )


@triton.jit(do_not_specialize=["place_stride", "count_place_stride"])
def _finish_step_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_num_logits_ptr,
    sampled_ptr,
    sampled_stride,
    tile_max_ptr,
    tile_argmax_ptr,
    num_tiles,
    given_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    total_len_ptr,
    all_token_ids_ptr,
    prefill_len_ptr,
    last_sampled_tokens_stride,
    all_token_ids_stride,
    max_model_len,
    turn_ptr,
    place_ptr,
    place_stride,
    count_place_ptr,
    count_place_stride,
    confidence_place_ptr,
    confidence_rows_ptr,
    PDL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CONFIDENCES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    begin_behind(PDL)
    req = tl.program_id(0).to(tl.int64)
    turn = tl.load(turn_ptr)
    # Nothing that follows has to wait for the count, which says who was the last to read the turn.
    arrived = tl.atomic_add(turn_ptr + 1, 1, sem="release")
    row = tl.load(idx_mapping_ptr + req).to(tl.int64)
    decided = tl.load(seq_lens_ptr + req) >= tl.load(prefill_len_ptr + row)
    given = 1 if given_ptr is None else tl.load(given_ptr + req)
    count = tl.where(decided, given, 0)
    num_logits = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    rejected = tl.where(decided, num_logits - count, 0)
    tl.store(num_sampled_ptr + req, count)
    tl.store(num_rejected_ptr + req, rejected)
    tl.store(count_place_ptr + turn * count_place_stride + req, count)
    k = tl.arange(0, BLOCK)
    token = tl.load(sampled_ptr + req * sampled_stride + k, mask=k < WIDTH, other=0)
    if tile_max_ptr is not None:
        winner = best_of_tiles(req, tile_max_ptr, tile_argmax_ptr, num_tiles, TILES)
        token = tl.where(k == given - 1, winner, token)
    tl.store(place_ptr + turn * place_stride + req * WIDTH + k, token, mask=k < WIDTH)
    if confidence_place_ptr is not None:
        n = tl.arange(0, BLOCK_C)
        chance = tl.load(confidence_rows_ptr + row * CONFIDENCES + n, mask=n < CONFIDENCES, other=0.0)
        out_ptr = confidence_place_ptr + (turn * tl.num_programs(0) + req) * CONFIDENCES
        tl.store(out_ptr + n, chance, mask=n < CONFIDENCES)
    scheduled = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
    append_tokens(
        row, k, token, count, scheduled - rejected, num_computed_tokens_ptr, last_sampled_tokens_ptr, total_len_ptr,
        all_token_ids_ptr, None, last_sampled_tokens_stride, all_token_ids_stride, 0, max_model_len,
    )  # fmt: skip
    if arrived == tl.num_programs(0) - 1:
        tl.store(turn_ptr, 1 - turn)
        tl.store(turn_ptr + 1, 0)
