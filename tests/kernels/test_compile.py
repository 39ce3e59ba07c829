"""Every Triton kernel compiles for a GPU, where there is none, and even after kernels were interpreted."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kernels
from kernels.triton_support import triton

pytestmark = pytest.mark.slow

I32, I64, F32, BF16 = "*i32", "*i64", "*fp32", "*bf16"
ROTATION = (I64, F32, BF16, BF16, "fp32")
NO_ROTATION = dict.fromkeys(("positions_ptr", "cos_sin_ptr", "q_norm_ptr", "k_norm_ptr"))
NO_DRAFTS = dict.fromkeys(("token_ids_ptr", "expanded_idx_mapping_ptr", "expanded_local_pos_ptr"))
QWEN3 = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128}
TILES = {"BLOCK_D": 128, "BLOCK_SIZE": 16, "UPCAST": False}
DECODE = (BF16, "i32", BF16, "i64", I32, "i32", I32, I64)
LINEAR = {"PDL": True, "UPCAST": False, "EVEN": True, "BLOCK_N": 16, "BLOCK_K": 512, "NUM_CHUNKS": 2}
BEFORE = (I32, "i32", F32, I32, "i32")  # anchors, and the best of each tile of the draft before
SCORE = (*BEFORE, F32, BF16, BF16, BF16, BF16, "i32", "i32", BF16, BF16, BF16, F32, I64, "i32", "i32", "i32", "i32")
SCORE_TILES = {"BLOCK_T": 32, "BLOCK_D": 256, "UPCAST": False, "PDL": True}
LATENT = {"RANK": 32, "BLOCK_J": 32, "BLOCK_K": 32, "BLOCK_T": 256, "PDL": True}
GUMBEL_ARGS = (F32, "i32", "i32", I32, F32, I64, I64, "i32", "i32", F32, I64, I32, I64)
PREPARE = (*[I32] * 6, I64, I64, I32, I32, *["i32"] * 4, I32, I64, I32, I64, I32, I32, "i32", I64, I64)
FINISH = (
    *[I32] * 4, I64, "i32", F32, I64, "i32", *[I32] * 4, I64, *[I32] * 3, *["i32"] * 3, I32, I64, "i32", I32, "i32",
    F32, F32,
)  # fmt: skip
# (file, kernel, types of the run-time arguments, constexprs)
KERNELS = [
    ("staged_write", "_apply_write_kernel", (I32, "i32", I32, I32, I32, I32), {"BLOCK": 1024}),
    ("prepare_inputs", "_prepare_prefill_inputs_kernel", (*[I32] * 7, "i32"), {"BLOCK": 1024}),
    ("prepare_inputs", "_prepare_pos_seq_lens_kernel", (I32, I32, I32, I64, I32, "i32", "i32"), {"BLOCK": 1024}),
    (
        "combine_tokens",
        "_combine_sampled_and_draft_tokens_kernel",
        (I32, I32, I64, I32, I32, I32, I64, I32, I64, "i32", "i32"),
        {"BLOCK": 32},
    ),
    ("combine_tokens", "_expand_idx_mapping_kernel", (I32, I32, I32, I32), {"BLOCK": 32}),
    ("gather_block_tables", "_gather_block_tables_kernel", (*[I32] * 4, *["i32"] * 4), {"BLOCK": 1024}),
    (
        "slot_mappings",
        "_compute_slot_mappings_kernel",
        (I32, I32, I64, I32, "i32", I64, "i32", "i32"),
        {"BLOCK_SIZE": 16, "PAD": -1, "BLOCK": 1024},
    ),
    ("post_update", "_get_num_sampled_and_rejected_kernel", (*[I32] * 6, "i32"), {"BLOCK": 128}),
    (
        "post_update",
        "_post_update_kernel",
        (I32, I32, I64, I32, I32, I64, I32, I32, I32, I32, *["i32"] * 5),
        {"BLOCK": 8},
    ),
    (
        "post_update",
        "_post_update_kernel",
        (I32, I32, I64, I32, I32, I64, I32, I32, I32, *["i32"] * 5),
        {"BLOCK": 1, "output_bin_counts_ptr": None},
    ),
    *[
        (
            "prepare_step",
            "_prepare_step_kernel",
            (*PREPARE, *rows, *["i32"] * 4),
            {"WITH_PROMPTS": prompts, "BLOCK_SIZE": 16, "PAD": -1, "BLOCK_T": 1024, "BLOCK_B": 1024, "BLOCK_L": 32}
            | ({} if rows else NO_DRAFTS),
        )
        for prompts, rows in ((True, (I32, I32, I32)), (False, ()))
    ],
    (
        "finish_step",
        "_finish_step_kernel",
        FINISH,
        {"WIDTH": 8, "BLOCK": 8, "TILES": 64, "CONFIDENCES": 7, "BLOCK_C": 8},
    ),
    (
        "finish_step",
        "_finish_step_kernel",
        (*[I32] * 4, I64, "i32", "i32", *[I32] * 3, I64, *[I32] * 3, *["i32"] * 3, I32, I64, "i32", I32, "i32"),
        {"WIDTH": 1, "BLOCK": 1, "TILES": 1, "CONFIDENCES": 0, "BLOCK_C": 1, "given_ptr": None}
        | dict.fromkeys(("tile_max_ptr", "tile_argmax_ptr", "confidence_place_ptr", "confidence_rows_ptr")),
    ),
    *[
        (
            "gumbel_triton",
            "chunk_kernel",
            GUMBEL_ARGS,
            {
                "ALL_GREEDY": greedy,
                "APPLY_TEMPERATURE": scale,
                "MIN_UNIFORM": 2.0**-32,
                "LANES": 256,
                "TILES": 4,
                "CHUNKS": 8,
            },
        )
        for greedy, scale in ((False, False), (False, True), (True, False))
    ],
    (
        "logit_bias",
        "_logit_bias_kernel",
        (F32, "i32", "i32", I32, I64, I32, I32, I32, I32, F32, *[I32] * 3, *["i32"] * 4),
        {"ALLOWED": 1024, "BIASES": 1024, "STOP_IDS": 128, "BLOCK": 4096},
    ),
    (
        "penalties",
        "_penalties_kernel",
        (F32, "i32", "i32", I32, I32, I32, F32, F32, F32, I32, I32, "i32", "i32"),
        {"BLOCK": 4096},
    ),
    ("bincount", "_bincount_kernel", (*[I32] * 6, *["i32"] * 3), {"BLOCK": 1024}),
    (
        "bad_words",
        "_bad_words_kernel",
        (F32, "i32", I32, I32, I64, I64, I32, "i32", *[I32] * 4, "i32", "i32"),
        {"BLOCK": 32},
    ),
    ("temperature", "_temperature_kernel", (F32, "i32", "i32", I32, F32), {"BLOCK": 4096}),
    ("topk_logprobs", "_normaliser_kernel", (F32, "i32", "i32", I64, F32, I64), {"BLOCK": 4096}),
    (
        "prompt_logprobs",
        "_prompt_logprobs_token_ids_kernel",
        (I32, I32, I32, "i32", "i32", I32, I64),
        {"BLOCK": 1024},
    ),
    ("grammar_bitmask", "_grammar_bitmask_kernel", (F32, "i32", "i32", I32, I32, "i32"), {"BLOCK": 8192}),
    (
        "paged_attention_triton",
        "decode_attention_kernel",
        (*DECODE, *ROTATION, "fp32", BF16, F32, F32, I32, "i32"),
        {
            **QWEN3,
            **TILES,
            "PDL": True,
            "GROUP": 2,
            "GROUP_PAD": 2,
            "BLOCK_M": 16,
            "BLOCK_N": 32,
            "SPLITS": 4,
        },
    ),
    (
        "paged_attention_triton",
        "decode_attention_kernel",
        (*DECODE, "fp32", "fp32", BF16, "i32"),
        {
            **QWEN3,
            **TILES,
            "PDL": False,
            "GROUP": 3,
            "GROUP_PAD": 4,
            "BLOCK_M": 16,
            "BLOCK_N": 32,
            "SPLITS": 1,
            **NO_ROTATION,
        }
        | dict.fromkeys(("partial_ptr", "statistics_ptr", "counters_ptr")),
    ),
    *[
        (
            "verify_attention_triton",
            "verify_attention_kernel",
            (BF16, "i32", BF16, "i64", I32, "i32", I32, *starts, I64, *ROTATION, "fp32", BF16, *parts, "i32", "i32"),
            {
                **QWEN3,
                **TILES,
                "PDL": True,
                "EACH": 0 if starts else 8,
                "QUERIES": 8 // groups,
                "GROUPS": groups,
                "PER_QUERY": 2,
                "ROWS": 16 // groups,
                "BLOCK_M": 16,
                "BLOCK_N": 32,
                "BLOCK_Q": 16,
                "SPLITS": splits,
                "OWN_PART": int(splits > 2),
                **dict.fromkeys(() if parts else ("partial_ptr", "statistics_ptr", "counters_ptr")),
                **dict.fromkeys(() if starts else ("query_start_loc_ptr",)),
            },
        )
        for groups, splits, parts in ((1, 1, ()), (2, 8, (F32, F32, I32)))
        for starts in ((I32,), ())
    ],
    (
        "prefill_attention",
        "_prefill_attention_kernel",
        (BF16, "i32", BF16, "i64", I32, "i32", I32, I32, "i32", "fp32", BF16, "i32"),
        {**QWEN3, **TILES, "GROUP": 2, "BLOCK_M": 64, "BLOCK_Q": 32, "BLOCK_N": 64},
    ),
    (
        "store_kv",
        "_store_kv_kernel",
        (BF16, "i32", BF16, "i64", I64, *ROTATION),
        {**QWEN3, "NUM_HEADS": 16, "BLOCK_H": 32, "BLOCK_KV": 8, "HALF": 64},
    ),
    (
        "rms_norm",
        "_add_rms_norm_kernel",
        (BF16, "i32", BF16, "i32", BF16, BF16, "i32", "fp32"),
        {"BLOCK": 1024},
    ),
    *[
        (
            "markov_drafts_triton",
            "score_kernel",
            tuple(t for i, t in enumerate(SCORE) if i != 8),
            {"RANK": 32, "BLOCK_K": 32, **SCORE_TILES, **tile, "latents_ptr": None},
        )
        for tile in (
            {"BLOCK_R": 1, "BLOCK_V": 256, "FIRST": True},
            {"BLOCK_R": 1, "BLOCK_V": 256, "FIRST": False},
            {"BLOCK_R": 16, "BLOCK_V": 256, "FIRST": False},
        )
    ],
    (
        "markov_drafts_triton",
        "score_kernel",
        SCORE,
        {"RANK": 250, "BLOCK_K": 32, **SCORE_TILES, "BLOCK_R": 32, "BLOCK_V": 256, "FIRST": False},
    ),
    *[
        (
            "markov_drafts_triton",
            "latent_kernel",
            (*BEFORE, BF16, BF16, BF16, BF16, F32, "i32", "i32", "i32"),
            {**LATENT, "IS_RNN": is_rnn, "FIRST": first},
        )
        for is_rnn, first in ((False, True), (True, True), (True, False))
    ],
    (
        "markov_drafts_triton",
        "last_token_kernel",
        (F32, I32, "i32", I64, "i32", "i32"),
        {"BLOCK_T": 256, "PDL": True},
    ),
    (
        "store_context",
        "_store_context_kernel",
        (BF16, BF16, "i64", "i64", I64, I64, F32, BF16, "fp32"),
        {"NUM_LAYERS": 2, "NUM_KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_H": 4, "HALF": 32},
    ),
    (
        "mask_drafts",
        "_mask_drafts_kernel",
        (I64, I32, I64, I64, "i32", "i32", F32, F32, F32, "i32", I64, "i32"),
        {"NUM_DRAFTS": 7, "NONE": -1, "BLOCK": 8},
    ),
    (
        "allot_verification",
        "_allot_verification_kernel",
        (F32, "i32", I32, I32, "i32", I32, I32, "i32"),
        {"NUM_DRAFTS": 7, "BLOCK_R": 16, "BLOCK_N": 8},
    ),
    (
        "keep_drafts",
        "_keep_drafts_kernel",
        (I64, I32, I32, I64, "i32", I64, "i32"),
        {"NUM_DRAFTS": 1, "NONE": -1, "BLOCK": 1},
    ),
    (
        "token_rows",
        "_token_rows_kernel",
        (I32, I32, I32, "i32", I32, I32, "i32", "i32"),
        {"BLOCK_R": 64, "BLOCK": 1024},
    ),
    *[
        (
            "markov_logits",
            "_markov_logits_kernel",
            (F32, BF16, BF16, I32, F32, F32, F32, "i32", "i32", "i32", "i32"),
            {"RANK": rank, "BLOCK_R": block_r, "BLOCK_V": 256, "BLOCK_K": 32, "UPCAST": False, "PDL": True},
        )
        for rank, block_r in ((32, 1), (250, 16))
    ],
    ("embedding", "_embedding_kernel", (I32, BF16, BF16, "i32"), {"BLOCK": 1024}),
    ("silu_mul", "_silu_mul_kernel", (BF16, "i32", BF16, "i32"), {"BLOCK": 1024}),
    (
        "linear_triton",
        "one_row_kernel",
        (BF16, "i32", BF16, BF16, BF16, "i32", "i32", "i32", "i32", "i32", "fp32"),
        {**LINEAR, "GATED": True, "SPLIT": 4, "bias_ptr": None, "residual_ptr": None, "copy_ptr": None},
    ),
    (
        "linear_triton",
        "few_rows_kernel",
        (BF16, "i32", BF16, BF16, BF16, BF16, BF16, "i32", BF16, "i32", "i32", "i32", "i32", "fp32"),
        {**LINEAR, "GATED": False, "BLOCK_M": 8, "COLUMNS_FIRST": True},
    ),
    (
        "linear_triton",
        "few_rows_kernel",
        (BF16, "i32", BF16, BF16, "i32", "i32", "i32", "i32", "i32", "fp32"),
        {**LINEAR, "GATED": True, "BLOCK_M": 16, "COLUMNS_FIRST": False}
        | dict.fromkeys(("norm_weight_ptr", "bias_ptr", "residual_ptr", "copy_ptr")),
    ),
]


@pytest.fixture(scope="module", autouse=True)
def interpret_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("this process was started with TRITON_INTERPRET=1: nothing can be compiled in it")
    rows = torch.arange(2)
    kernels.gumbel_sample(torch.eye(2), rows.int(), torch.ones(2), rows, rows, purpose=0, form="interpret")


@pytest.mark.parametrize(("file", "name", "types", "constexprs"), KERNELS, ids=lambda value: str(value)[:24])
def test_compiles_for_hopper(
    file: str,
    name: str,
    types: tuple[str, ...],
    constexprs: dict,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does anyway, with a warning
    kernel = getattr(import_module(f"kernels.{file}"), name)
    if "PDL" in kernel.arg_names:
        constexprs = {"PDL": True, **constexprs}
    runtime = [argument for argument in kernel.arg_names if argument not in constexprs]
    signature = dict(zip(runtime, types, strict=True)) | dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(fn=kernel, signature={arg: signature[arg] for arg in kernel.arg_names}, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 0


def test_no_constant_is_outside_float32s_normal_range() -> None:
    """Triton 3.6 gives such a constant type fp64, and everything it touches; later versions don't."""
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value:
                assert 2.0**-126 <= abs(node.value) < 2.0**128, f"{path.name}, line {node.lineno}: {node.value}"
