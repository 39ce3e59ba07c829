"""V2's kernels, each in three forms: Triton, vectorised torch, and a plain loop that reads like a specification.

Every function takes the keyword `form`: "auto" (Triton on CUDA, else torch), "triton", "torch", "interpret" (the Triton
kernel under Triton's interpreter) or "loop". All forms write the same integers. Except for "interpret" and "loop" none
makes the host wait for the device.

Symbols of the shape comments:

| R | max requests | r | requests in this step |
|---|---|---|---|
| T | max batched tokens | t | tokens in this step |
| L | max model length | l | logits rows in this step |
| N | draft tokens | V | vocabulary |
| B | max blocks of a request | G | KV-cache groups |
"""

from kernels.bad_words import BadWordsTables, apply_bad_words
from kernels.bincount import bincount
from kernels.block_attention import block_attention
from kernels.combine_tokens import combine_sampled_and_draft_tokens, expand_idx_mapping
from kernels.dispatch import FORMS, resolve_form
from kernels.embedding import embedding
from kernels.finish_step import OutputPlaces, SampledStep, StateRows, finish_step
from kernels.flatten_sampled import flatten_sampled
from kernels.gather_block_tables import gather_block_tables
from kernels.grammar_bitmask import apply_grammar_bitmask
from kernels.gumbel import gumbel_sample
from kernels.head_rotation import HeadRotation
from kernels.linear import max_rows, small_linear
from kernels.logit_bias import LogitBiasTables, MaxLengths, apply_logit_bias
from kernels.ngram import propose_ngram
from kernels.noise import Purpose, gumbel_noise
from kernels.paged_attention import MAX_COUNTERS, decode_attention
from kernels.penalties import PenaltyTables, apply_penalties
from kernels.post_update import get_num_sampled_and_rejected, post_update
from kernels.prefill_attention import prefill_attention
from kernels.prepare_inputs import prepare_pos_seq_lens, prepare_prefill_inputs
from kernels.prepare_step import DraftedRows, LogitsRows, RequestRows, StepIndex, StepInputs, prepare_step
from kernels.prompt_logprobs import prompt_logprobs_token_ids
from kernels.rejection import DraftedBatch, Race, RejectionOutput, draft_noise_positions, rejection_sample
from kernels.rms_norm import add_rms_norm
from kernels.shift_inputs import ShiftedInputs, shift_inputs
from kernels.silu_mul import silu_mul
from kernels.slot_mappings import PAD_SLOT_ID, compute_slot_mappings
from kernels.staged_write import apply_write
from kernels.store_kv import store_kv
from kernels.temperature import apply_temperature
from kernels.top_k_top_p import mask_top_k_top_p, sample_top_k_top_p
from kernels.topk_logprobs import topk_logprobs
from kernels.verify_attention import verify_attention

__all__ = [
    "FORMS",
    "MAX_COUNTERS",
    "PAD_SLOT_ID",
    "BadWordsTables",
    "DraftedBatch",
    "DraftedRows",
    "HeadRotation",
    "LogitBiasTables",
    "LogitsRows",
    "MaxLengths",
    "OutputPlaces",
    "PenaltyTables",
    "Purpose",
    "Race",
    "RejectionOutput",
    "RequestRows",
    "SampledStep",
    "ShiftedInputs",
    "StateRows",
    "StepIndex",
    "StepInputs",
    "add_rms_norm",
    "apply_bad_words",
    "apply_grammar_bitmask",
    "apply_logit_bias",
    "apply_penalties",
    "apply_temperature",
    "apply_write",
    "bincount",
    "block_attention",
    "combine_sampled_and_draft_tokens",
    "compute_slot_mappings",
    "decode_attention",
    "draft_noise_positions",
    "embedding",
    "expand_idx_mapping",
    "finish_step",
    "flatten_sampled",
    "gather_block_tables",
    "get_num_sampled_and_rejected",
    "gumbel_noise",
    "gumbel_sample",
    "mask_top_k_top_p",
    "max_rows",
    "post_update",
    "prefill_attention",
    "prepare_pos_seq_lens",
    "prepare_prefill_inputs",
    "prepare_step",
    "prompt_logprobs_token_ids",
    "propose_ngram",
    "rejection_sample",
    "resolve_form",
    "sample_top_k_top_p",
    "shift_inputs",
    "silu_mul",
    "small_linear",
    "store_kv",
    "topk_logprobs",
    "verify_attention",
]
