"""Kernel 18: sample by Gumbel-max with counter-based noise.

A choice is a pure function of (logits, seed, position, purpose): never of its row or its batch. Its noise: noise.py.
"""

import math

import torch

from kernels.dispatch import check_tensors, resolve_form
from kernels.gumbel_triton import chunk_kernel
from kernels.noise import LANES, MIN_UNIFORM, Purpose, gumbel_noise, log_exponential, word_of
from kernels.triton_support import can_launch_early, launch

# Of chunk_kernel: 16 logits a thread and step. Further steps share what a program does once, while there are programs
# enough: four of 64 registers a thread fit on each of an H200's 132 SMs, so that 512 run all at once.
_TILES, _WARPS, _REGISTERS, _PROGRAMS = 4, 8, 64, 512


def gumbel_sample(
    # [l, V] f32
    logits: torch.Tensor,
    # [l] i32, -1 for padding
    expanded_idx_mapping: torch.Tensor,
    # [R] f32
    temperature: torch.Tensor,
    # [R] i64
    seeds: torch.Tensor,
    # [l] i64
    positions: torch.Tensor,
    *,
    purpose: int,
    all_greedy: bool = False,
    apply_temperature: bool = False,
    # i32 [>= l], all zero, and again zero when the kernel has ended
    counters: torch.Tensor | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Draw one token id for each row of logits, with probability softmax(logits / temperature).

    Temperature 0 is greedy: the largest logit, the lowest id on ties. A logit of -inf is never chosen while the row has
    another; a row of nothing but -inf gives id 0. A row with NaN, and padding, gives some id below V.

    Args:
        purpose: a `Purpose`: the stream to draw from.
        all_greedy: the host knows that every temperature is 0: draw no noise.
        apply_temperature: logits have not been divided by the temperature yet.

    Returns:
        Token ids, i64 [l].

    Raises:
        ValueError: a wrong dtype, rank, length, purpose or form.
    """
    num_logits = logits.shape[0]
    check_tensors(torch.float32, 2, logits=logits)
    check_tensors(torch.int32, 1, num_logits, expanded_idx_mapping=expanded_idx_mapping)
    check_tensors(torch.int64, 1, num_logits, positions=positions)
    check_tensors(torch.float32, 1, temperature=temperature)
    check_tensors(torch.int64, 1, seeds=seeds)
    purpose = Purpose(purpose).value
    form = resolve_form(form, logits)
    if form == "torch":
        if all_greedy:
            return logits.argmax(dim=-1)
        return _torch(logits, expanded_idx_mapping, temperature, seeds, positions, purpose, apply_temperature)
    sampled = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    if form == "loop":
        for i in range(num_logits):
            row = max(int(expanded_idx_mapping[i]), 0)
            t = 0.0 if all_greedy else float(temperature[row])
            sampled[i] = _choose(
                logits[i].tolist(), t, int(seeds[row]), int(positions[i]), purpose, t if apply_temperature else 1.0
            )
        return sampled
    steps_of_row = -(-logits.shape[1] // (4 * LANES * _TILES))
    steps = max(-(-num_logits * steps_of_row // _PROGRAMS), 1)
    num_chunks = -(-steps_of_row // steps)
    if counters is None:
        counters = torch.zeros(num_logits, dtype=torch.int32, device=logits.device)
    check_tensors(torch.int32, 1, num_logits, counters=counters)
    chunk_max = torch.empty(num_logits, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_argmax = torch.empty(num_logits, num_chunks, dtype=torch.int64, device=logits.device)
    launch(
        chunk_kernel,
        (num_logits, num_chunks),
        logits,
        logits.stride(0),
        logits.shape[1],
        expanded_idx_mapping,
        temperature,
        seeds,
        positions,
        purpose,
        steps,
        chunk_max,
        chunk_argmax,
        counters,
        sampled,
        form=form,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        pdl=can_launch_early(form, logits),
        ALL_GREEDY=all_greedy,
        APPLY_TEMPERATURE=apply_temperature,
        MIN_UNIFORM=MIN_UNIFORM,
        LANES=LANES,
        TILES=_TILES,
        CHUNKS=1 << (num_chunks - 1).bit_length(),
    )
    return sampled


def _choose(logits: list[float], temperature: float, seed: int, position: int, purpose: int, scale: float) -> int:
    """Choose a token for one row: the specification."""
    best, best_score = 0, -math.inf
    for token, logit in enumerate(logits):
        score = logit
        if temperature != 0.0:
            # logit / T + noise and logit + T * noise have the same argmax, and the latter is greedy at T = 0.
            score = logit - scale * log_exponential(word_of(seed, position, purpose, token))
        if score > best_score:
            best, best_score = token, score
    return best


def _torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
    apply_temperature: bool,
) -> torch.Tensor:
    rows = expanded_idx_mapping[: logits.shape[0]].clamp(min=0).long()
    noise = gumbel_noise(seeds[rows], positions, logits.shape[1], purpose=purpose)
    t = temperature[rows].unsqueeze(1)
    # Multiply, then add: a fused step could round a row's last columns unlike the same row in another batch.
    return (logits + noise.mul_(t if apply_temperature else (t != 0).float())).argmax(dim=-1)
