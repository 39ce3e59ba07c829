"""Kernels 23 to 28, compiled: they compile where there is no GPU; on one they give what the torch form gives."""

from importlib import import_module

import pytest
import torch

from kernels.rejection_loop import FLOOR
from tests.kernels.rejection_batches import drafted_batch
from tests.kernels.test_compile import F32, I32, I64, interpret_first, test_compiles_for_hopper
from tests.kernels.test_rejection import METHODS, assert_same, run

pytestmark = pytest.mark.slow

__all__ = ["interpret_first"]  # the fixture
compiles_for_hopper = test_compiles_for_hopper
del test_compiles_for_hopper

NOT_DRAWN = {"draft_logits_ptr": None}
REQUESTS, LOGITS, DRAFT, STRIDES = (I32, I32, I32, "i32"), (F32, "i32", "i32"), (F32,), ("i32", "i32")
STATS = (F32, F32, F32, F32, I32, "i32")
SAMPLED = (I32, I64, "i32", I32)
PADDED = {"DRAFTS": 8, "BLOCKS": 64}
DRAW = {
    "FLOOR": FLOOR, "LOG_FLOOR": -69.0, "MIN_UNIFORM": 2.0**-32, "LANES": 256, "SAMPLE": 0, "RESAMPLE": 3,
}  # fmt: skip
KERNELS = [
    *[
        (
            "rejection_judge",
            "block_stats_kernel",
            (*REQUESTS, *LOGITS, *(DRAFT if drawn else ()), *STRIDES, *STATS),
            {"ALL_GREEDY": greedy, "BLOCK": 4096, **({} if drawn else NOT_DRAWN)},
        )
        for greedy, drawn in ((True, False), (False, False), (False, True))
    ],
    *[
        (
            "rejection_judge",
            "judge_kernel",
            (
                *REQUESTS, *LOGITS, *(DRAFT if drawn else ()), *STRIDES, I64, F32, I64,
                *((F32,) if method == 1 else ()), *STATS, *[F32] * 6, *SAMPLED,
            ),
            {
                "METHOD": method, "DECIDE": method != 2 or not drawn, "ALL_GREEDY": greedy, "ACCEPT": 2, **PADDED,
                **({} if drawn else NOT_DRAWN), **({} if method == 1 else {"acceptance_rates_ptr": None}),
            },
        )
        for method in (0, 1, 2)
        for greedy, drawn in ((True, False), (False, False), (False, True))
    ],
    (
        "rejection_judge",
        "residual_mass_kernel",
        (*REQUESTS, *LOGITS, *DRAFT, *STRIDES, *[F32] * 4, I32, F32, "i32"),
        {"BLOCK": 4096},
    ),
    (
        "rejection_judge",
        "judge_block_kernel",
        (*REQUESTS, *[F32] * 3, "i32", *[F32] * 3, *SAMPLED),
        PADDED,
    ),
    *[
        (
            "rejection_draw",
            "draw_kernel",
            (*REQUESTS, *LOGITS, *(DRAFT if drawn else ()), *STRIDES, I64, F32, I64, *[F32] * 3, I32, I32, F32, I64),
            {"ALL_GREEDY": greedy, **DRAW, **({} if drawn else NOT_DRAWN)},
        )
        for greedy, drawn in ((True, False), (False, False), (False, True))
    ],
    ("flatten_sampled", "_flatten_sampled_kernel", (I64, "i32", I32, I64), {"BLOCK": 8}),
    ("rejection_draw", "insert_kernel", (F32, I64, "i32", I64, "i32", I32), {"TILES": 256}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "name", "types", "constexprs"), KERNELS, ids=lambda value: str(value)[:24])
def test_compiles(
    file: str,
    name: str,
    types: tuple[str, ...],
    constexprs: dict,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiles_for_hopper(file, name, types, constexprs, tmp_path_factory, monkeypatch)


def test_one_draft_and_a_small_vocabulary_compile(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes a constant of an integer argument that is 1."""
    for (name, number), ones in {
        ("block_stats_kernel", 2): ("max_drafts", "num_blocks"),
        ("judge_kernel", 8): ("max_drafts", "num_blocks"),
        ("residual_mass_kernel", 0): ("max_drafts", "num_blocks"),
        ("judge_block_kernel", 0): ("max_drafts", "num_blocks"),
        ("draw_kernel", 2): ("max_drafts",),
        ("insert_kernel", 0): ("num_tiles", "sampled_stride"),
    }.items():
        file, _, types, constexprs = [kernel for kernel in KERNELS if kernel[1] == name][number]
        kernel = getattr(import_module(f"kernels.{file}"), name)
        runtime = [argument for argument in kernel.arg_names if argument not in constexprs and argument != "PDL"]
        kept = tuple(kind for argument, kind in zip(runtime, types, strict=True) if argument not in ones)
        one = dict.fromkeys(ones, 1) | ({"DRAFTS": 1, "BLOCKS": 1} if "DRAFTS" in constexprs else {})
        compiles_for_hopper(file, name, kept, constexprs | one, tmp_path_factory, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 33, 4097, 49_152, 151_936])
@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_kernels(method: str, sampled_drafts: bool, vocab: int) -> None:
    for seed in range(4):
        drafted = drafted_batch(seed, vocab=vocab, num_reqs=6, closeness=(1, 3)[seed % 2])
        expected = run(drafted, "torch", method=method, sampled_drafts=sampled_drafts)
        got = run(drafted.on("cuda"), "triton", method=method, sampled_drafts=sampled_drafts)
        assert_same(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["torch", "triton"])
def test_no_synchronisation_on_a_gpu(form: str, method: str, sampled_drafts: bool) -> None:
    drafted = drafted_batch(1, vocab=3000).on("cuda")
    run(drafted, form, method=method, sampled_drafts=sampled_drafts)  # compiles, fills the allocator's cache
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run(drafted, form, method=method, sampled_drafts=sampled_drafts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
