"""Batches of V2's input preparation, and one pass of all its kernels over a batch."""

from pathlib import Path

import torch
from safetensors.torch import load_file

import kernels

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-input-prep"
NEVER_WRITTEN = -7
VOCAB = 1000

Batch = dict[str, torch.Tensor]


def golden_batch(path: Path) -> tuple[Batch, Batch]:
    """Return the inputs and the expected outputs of a golden file, keyed by their names without `in.` and `out.`."""
    tensors = load_file(path)
    given = {key.removeprefix("in."): value for key, value in tensors.items() if key.startswith("in.")}
    expected = {key.removeprefix("out."): value for key, value in tensors.items() if key.startswith("out.")}
    return given, expected


def random_batch(seed: int, *, num_reqs: int, max_reqs: int = 6, max_len: int = 64, num_drafts: int = 3) -> Batch:
    """Return the inputs of a mixed batch: prefill chunks, last chunks, decodes with 0 .. num_drafts drafts."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        """Return one number, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=g))

    block_size = 2 ** number(0, 5)
    max_blocks = -(-max_len // block_size)
    rows = torch.randperm(max_reqs, generator=g)[:num_reqs]
    batch: Batch = {
        "block_size": torch.tensor(block_size),
        "idx_mapping": rows.int(),
        "all_token_ids": torch.randint(0, VOCAB, (max_reqs, max_len), generator=g).int(),
        "last_sampled_tokens": torch.randint(0, VOCAB, (max_reqs, 1), generator=g),
        "draft_tokens": torch.randint(0, VOCAB, (max_reqs, max(num_drafts, 1)), generator=g),
        "sampled_tokens": torch.randint(0, VOCAB, (num_reqs, num_drafts + 1), generator=g),
        "block_ids": torch.randint(0, 10_000, (max_reqs, max_blocks), generator=g).int(),
    }
    state = {
        name: torch.zeros(max_reqs, dtype=torch.int32)
        for name in ("prefill_len", "num_computed_tokens", "total_len", "num_blocks")
    }
    scheduled, logits, sampled = [], [], []
    for row in rows.tolist():
        prompt = number(1, max_len // 2)
        prefilling = number(0, 1) == 1
        computed = number(0, prompt - 1) if prefilling else number(prompt, max_len - num_drafts - 2)
        drafts = 0 if prefilling else number(0, num_drafts)
        scheduled.append(number(1, prompt - computed) if prefilling else drafts + 1)
        logits.append(drafts + 1)
        sampled.append(number(1, drafts + 1))
        state["prefill_len"][row] = prompt
        state["num_computed_tokens"][row] = computed
        state["total_len"][row] = prompt if prefilling else computed + 1
        state["num_blocks"][row] = number(-(-(computed + scheduled[-1]) // block_size), max_blocks)
    starts = torch.tensor([0, *scheduled], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return (
        batch
        | state
        | {
            "query_start_loc": torch.cat([starts, starts[-1:].expand(max_reqs - num_reqs)]),
            "cu_num_logits": torch.tensor([0, *logits], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            "num_sampled_in": torch.tensor(sampled, dtype=torch.int32),
            "num_reqs_padded": torch.tensor(number(num_reqs, max_reqs)),
            "num_tokens_padded": starts[-1].long() + number(0, 9),
        }
    )


def host_sizes(batch: Batch) -> dict[str, int]:
    """Return what the host of an engine knows about a step without asking the device."""
    sizes = {name: int(batch[name]) for name in ("block_size", "num_reqs_padded", "num_tokens_padded")}
    return sizes | {"num_logits": int(batch["cu_num_logits"][-1])}


def on(device: str, batch: Batch) -> Batch:
    """Return a copy of the batch's tensors on another device; scalars stay on the host."""
    return {name: value.to(device, copy=True) if value.dim() > 0 else value for name, value in batch.items()}


def run_step(batch: Batch, form: str, *, num_tokens: int = 192, sizes: dict[str, int] | None = None) -> Batch:
    """Run kernels 2 to 7, 9 and 10 on a copy of the batch; return all that they wrote, keyed as the golden outputs.

    Given `host_sizes` of the batch beforehand, it reads no tensor.
    """
    sizes = sizes or host_sizes(batch)
    b = {name: value.clone() for name, value in batch.items() if value.dim() > 0}
    device, max_reqs, num_logits = b["idx_mapping"].device, b["all_token_ids"].shape[0], sizes["num_logits"]

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, NEVER_WRITTEN, dtype=dtype, device=device)

    idx, starts, computed = b["idx_mapping"], b["query_start_loc"], b["num_computed_tokens"]
    out: Batch = {
        "next_prefill_tokens": buffer(max_reqs),
        "seq_lens": buffer(max_reqs),
        "positions": buffer(num_tokens, dtype=torch.int64),
    }
    input_ids = buffer(num_tokens)
    kernels.prepare_prefill_inputs(
        input_ids, out["next_prefill_tokens"], idx, starts, b["all_token_ids"], b["prefill_len"], computed, form=form
    )
    out["after_prefill_input_ids"] = input_ids.clone()
    kernels.prepare_pos_seq_lens(idx, starts, computed, out["positions"], out["seq_lens"], form=form)
    out["logits_indices"] = kernels.combine_sampled_and_draft_tokens(
        input_ids,
        idx,
        b["last_sampled_tokens"],
        starts,
        out["seq_lens"],
        b["prefill_len"],
        b["draft_tokens"],
        b["cu_num_logits"],
        num_logits,
        form=form,
    )
    out["input_ids"] = input_ids
    out["expanded_idx_mapping"], out["expanded_local_pos"] = kernels.expand_idx_mapping(
        idx, num_logits, b["cu_num_logits"], form=form
    )

    gathered = buffer(*b["block_ids"].shape)
    kernels.gather_block_tables(idx, b["block_ids"], b["num_blocks"], gathered, sizes["num_reqs_padded"], form=form)
    out["gathered_block_table"] = gathered
    slots = buffer(num_tokens, dtype=torch.int64)
    kernels.compute_slot_mappings(
        idx, starts, out["positions"], b["block_ids"], sizes["block_size"], slots, sizes["num_tokens_padded"], form=form
    )
    out["slot_mapping"] = slots

    out["num_sampled"] = b["num_sampled_in"]
    out["num_rejected"] = kernels.get_num_sampled_and_rejected(
        out["num_sampled"], out["seq_lens"], b["cu_num_logits"], idx, b["prefill_len"], form=form
    )
    counts = torch.zeros(max_reqs, VOCAB, dtype=torch.int32, device=device)
    kernels.post_update(
        idx,
        computed,
        b["last_sampled_tokens"],
        b["total_len"],
        b["all_token_ids"],
        b["sampled_tokens"],
        out["num_sampled"],
        out["num_rejected"],
        starts,
        counts,
        form=form,
    )
    out["post_output_bin_counts"] = counts
    for name in ("all_token_ids", "last_sampled_tokens", "num_computed_tokens", "total_len"):
        out[f"post_{name}"] = b[name]
    return out
