"""The Triton form of kernels 23 to 28 (see rejection.py): statistics of the rows, judgement, draw; 4 launches, 6 where
residual masses are needed; one fewer without the insertion."""

import math
from typing import Any

import torch

from kernels.noise import LANES, MIN_UNIFORM, Purpose
from kernels.rejection_draw import draw_kernel, insert_kernel
from kernels.rejection_judge import block_stats_kernel, judge_block_kernel, judge_kernel, residual_mass_kernel
from kernels.rejection_loop import FLOOR
from kernels.triton_support import can_launch_early, launch

BLOCK = 4096
METHOD_CODES = {"standard": 0, "synthetic": 1, "block": 2}


def triton_form(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int],
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    method: str,
    acceptance_rates: torch.Tensor | None,
    all_greedy: bool,
    out: tuple[torch.Tensor, ...],
    form: str,
    insert: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rejection_sample`, into `out`. Returns the maximum and the argmax of each tile of V, [r, tiles] f32 and i64,
    for the token that is to be inserted."""
    idx_mapping, cu_num_logits, token_ids, positions, max_drafts = batch
    num_reqs, vocab_size, device = idx_mapping.shape[0], target_logits.shape[1], target_logits.device
    sampled, num_sampled, *seen = out
    if all_greedy or not max_drafts:
        draft_logits = None
    num_blocks, num_tiles = -(-vocab_size // BLOCK), -(-vocab_size // (4 * LANES))
    drafts = num_reqs * max_drafts
    # Of the target's row and of the drafter's: maximum and sum of exp(x - maximum) in each block.
    block_stats = torch.empty(4, drafts, num_blocks, dtype=torch.float32, device=device)
    block_argmax = torch.empty(drafts, num_blocks, dtype=torch.int32, device=device)
    # Of each draft: log-sum-exp of the target's row and of the drafter's, mass of the prefix before it.
    row_stats = torch.empty(3, drafts, dtype=torch.float32, device=device)
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=device)
    tile_max = torch.empty(num_reqs, num_tiles, dtype=torch.float32, device=device)
    tile_argmax = torch.empty(num_reqs, num_tiles, dtype=torch.int64, device=device)
    by_residual_mass = method == "block" and draft_logits is not None
    block_mass = torch.empty(drafts, num_blocks, device=device) if by_residual_mass else None
    pdl = can_launch_early(form, target_logits)
    requests = (idx_mapping, cu_num_logits, token_ids, max_drafts)
    logits = (target_logits, target_logits.stride(0), vocab_size)
    draft = (draft_logits, *((0, 0) if draft_logits is None else draft_logits.stride()[:2]))
    padded = {"DRAFTS": _power_of_2(max_drafts + 1), "BLOCKS": _power_of_2(num_blocks)}

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constexprs: Any) -> None:
        launch(kernel, grid, *requests, *args, form=form, num_warps=num_warps, pdl=pdl, **constexprs)

    run(
        block_stats_kernel, (drafts, num_blocks), *logits, *draft, *block_stats, block_argmax, num_blocks,
        ALL_GREEDY=all_greedy, BLOCK=BLOCK,
    )  # fmt: skip
    run(
        judge_kernel, (num_reqs,), *logits, *draft, positions, temperature, seeds, acceptance_rates, *block_stats,
        block_argmax, num_blocks, *row_stats, *seen, num_drafts, sampled, sampled.stride(0), num_sampled,
        METHOD=METHOD_CODES[method], DECIDE=not by_residual_mass, ALL_GREEDY=all_greedy, **padded,
        ACCEPT=Purpose.ACCEPT.value, num_warps=1,
    )  # fmt: skip
    if block_mass is not None:
        run(
            residual_mass_kernel, (drafts, num_blocks), *logits, *draft, temperature, *row_stats, num_drafts,
            block_mass, num_blocks, BLOCK=BLOCK,
        )  # fmt: skip
        run(
            judge_block_kernel, (num_reqs,), temperature, row_stats[2], block_mass, num_blocks, *seen, num_drafts,
            sampled, sampled.stride(0), num_sampled, **padded, num_warps=1,
        )  # fmt: skip
    run(
        draw_kernel, (num_reqs, num_tiles), *logits, *draft, positions, temperature, seeds, *row_stats, num_drafts,
        num_sampled, tile_max, tile_argmax, ALL_GREEDY=all_greedy, FLOOR=FLOOR, LOG_FLOOR=math.log(FLOOR),
        MIN_UNIFORM=MIN_UNIFORM, LANES=LANES, SAMPLE=Purpose.SAMPLE.value, RESAMPLE=Purpose.RESAMPLE.value,
    )  # fmt: skip
    if insert:
        launch(
            insert_kernel, (num_reqs,), tile_max, tile_argmax, num_tiles, sampled, sampled.stride(0), num_sampled,
            form=form, num_warps=1, pdl=pdl, TILES=_power_of_2(num_tiles),
        )  # fmt: skip
    return tile_max, tile_argmax


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
