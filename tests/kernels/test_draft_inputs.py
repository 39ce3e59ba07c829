"""Kernel 32 against its loop form, and the loop form against what it must never do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.draft_inputs import DraftInputs, DraftRows, VerifiedStep, prepare_draft_inputs
from kernels.slot_mappings import PAD_SLOT_ID
from kernels.triton_support import triton

NEVER_WRITTEN = -7
MASK = 999
FORMS = ("loop", "torch", "interpret")


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def buffers(num_cells: int, num_reqs: int, num_tokens: int) -> DraftInputs:
    def full(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), NEVER_WRITTEN, dtype=dtype)

    return DraftInputs(
        full(num_cells, torch.int32),
        full(num_cells, torch.int64),
        full(num_cells, torch.int64),
        full(num_reqs, torch.int32),
        full(num_tokens, torch.int64),
    )


def random_step(seed: int, num_reqs: int, num_drafts: int) -> tuple[VerifiedStep, DraftRows, dict[str, int]]:
    """Prefill chunks, decodes with drafts, requests without tokens, and rows with too few blocks for a whole block."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    max_reqs, block_size, max_len = num_reqs + 2, 2 ** number(0, 4), 64
    table = torch.randint(1, 500, (max_reqs, -(-max_len // block_size)), generator=g).int()
    counts, positions, slots, sampled, rejected = [], [], [], [], []
    num_blocks = torch.zeros(max_reqs, dtype=torch.int32)
    rows = torch.randperm(max_reqs, generator=g)[:num_reqs].int()
    for row in rows.tolist():
        kind, computed = number(0, 3), number(0, 40)
        count = [0, number(1, 20), number(1, 20), number(1, num_drafts + 1)][kind]
        counts.append(count)
        sampled.append(0 if kind == 1 else number(1, count) if kind == 3 else 1)
        rejected.append(count - sampled[-1] if kind == 3 else 0)
        positions += range(computed, computed + count)
        used = -(-(computed + count) // block_size)
        num_blocks[row] = number(used, table.shape[1])
        slots += [
            int(table[row, p // block_size]) * block_size + p % block_size for p in range(computed, computed + count)
        ]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    padded = int(starts[-1]) + number(0, 9)
    stale = [10**6] * (padded - len(positions))
    step = VerifiedStep(
        rows,
        starts,
        torch.tensor(positions + stale, dtype=torch.int64),
        torch.tensor(slots + stale, dtype=torch.int64),
        torch.tensor(sampled, dtype=torch.int32),
        torch.tensor(rejected, dtype=torch.int32),
        table[rows.long()],
    )
    tokens = torch.randint(0, 900, (max_reqs, 1), generator=g)
    sizes = {
        "num_query": number(1, 9),
        "block_size": block_size,
        "max_model_len": max_len,
        "mask_token_id": MASK,
        "num_reqs_padded": num_reqs + number(0, 2),
        "num_tokens_padded": padded,
    }
    return step, DraftRows(tokens, num_blocks), sizes


@given(seed=st.integers(0, 2**31), num_reqs=st.integers(0, 5), num_drafts=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_forms_agree(seed: int, num_reqs: int, num_drafts: int) -> None:
    step, rows, sizes = random_step(seed, num_reqs, num_drafts)
    size = (
        sizes["num_reqs_padded"] * sizes["num_query"] + 3,
        sizes["num_reqs_padded"] + 1,
        sizes["num_tokens_padded"] + 2,
    )
    expected = buffers(*size)
    prepare_draft_inputs(expected, step, rows, **sizes, form="loop")
    for tensor in expected:
        assert tensor[-1] == NEVER_WRITTEN
    for form in ("torch", "interpret"):
        out = buffers(*size)
        prepare_draft_inputs(out, step, rows, **sizes, form=form)
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(out, name), value), f"{form}: {name}"


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_by_hand(form: str) -> None:
    """A decode that kept 1 of 2 drafts, a prompt's chunk, a finished prompt at the end of its blocks, and padding."""
    step = VerifiedStep(
        i32(2, 0, 1),
        i32(0, 3, 5, 6),
        torch.tensor([9, 10, 11, 0, 1, 6, 77, 77]),
        torch.tensor([41, 42, 43, 20, 21, 14, 88, 88]),
        i32(2, 0, 1),
        i32(1, 0, 0),
        i32(8, 9, 10, 5, 0, 0, 3, 0, 0).view(3, 3),
    )
    rows = DraftRows(torch.tensor([[5], [6], [7]]), i32(1, 2, 3))
    out = buffers(16, 4, 8)
    sizes = {"block_size": 4, "max_model_len": 12, "mask_token_id": MASK, "num_reqs_padded": 4, "num_tokens_padded": 8}
    prepare_draft_inputs(out, step, rows, num_query=4, **sizes, form=form)
    pad = PAD_SLOT_ID
    assert out.context_slot_mapping.tolist() == [41, 42, pad, 20, 21, 14, pad, pad]
    assert out.input_ids.view(4, 4).tolist() == [[7, *[MASK] * 3], [MASK] * 4, [6, *[MASK] * 3], [MASK] * 4]
    # Positions past the model's length stay inside the RoPE table.
    assert out.positions.view(4, 4).tolist() == [[11, 11, 11, 11], [0] * 4, [7, 8, 9, 10], [0] * 4]
    # Request 2 holds two blocks of four: position 8 is not its own, whatever its table says there.
    assert out.slot_mapping.view(4, 4).tolist() == [[43, pad, pad, pad], [pad] * 4, [3, pad, pad, pad], [pad] * 4]
    assert out.seq_lens.tolist() == [12, 0, 8, 0]


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_a_captured_batch_has_no_block(form: str) -> None:
    """Rows of a captured batch whose request isn't there have a sample and no tokens."""
    step = VerifiedStep(
        i32(0, 1, 1),
        i32(0, 1, 1, 1),
        torch.tensor([5, 0, 0]),
        torch.tensor([5, 1, 1]),
        i32(1, 1, 1),
        i32(0, 0, 0),
        torch.ones(3, 4, dtype=torch.int32),
    )
    rows = DraftRows(torch.tensor([[3], [0]]), i32(4, 0))
    out = buffers(6, 3, 3)
    sizes = {"block_size": 4, "max_model_len": 16, "mask_token_id": MASK, "num_reqs_padded": 3, "num_tokens_padded": 3}
    prepare_draft_inputs(out, step, rows, num_query=2, **sizes, form=form)
    assert out.seq_lens.tolist() == [8, 0, 0]
    assert out.slot_mapping.tolist() == [6, 7, *[PAD_SLOT_ID] * 4]
    assert out.context_slot_mapping.tolist() == [5, PAD_SLOT_ID, PAD_SLOT_ID]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_without_tokens(form: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    table = torch.ones(1, 4, dtype=torch.int32)
    step = VerifiedStep(i32(0), i32(0, 0), nothing, nothing, i32(1), i32(0), table)
    out = buffers(2, 1, 1)
    sizes = {"block_size": 4, "max_model_len": 16, "mask_token_id": MASK, "num_reqs_padded": 1, "num_tokens_padded": 0}
    prepare_draft_inputs(out, step, DraftRows(torch.tensor([[3]]), i32(4)), num_query=2, **sizes, form=form)
    assert out.input_ids.tolist() == [MASK] * 2 and out.slot_mapping.tolist() == [PAD_SLOT_ID] * 2
    assert (out.seq_lens.tolist(), out.context_slot_mapping.tolist()) == ([0], [NEVER_WRITTEN])


@given(seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_every_slot_is_the_requests_own_and_behind_its_valid_tokens(seed: int) -> None:
    step, rows, sizes = random_step(seed, 4, 5)
    out = buffers(64, 8, sizes["num_tokens_padded"])
    prepare_draft_inputs(out, step, rows, **sizes, form="torch")
    query, size = sizes["num_query"], sizes["block_size"]
    for i, row in enumerate(step.idx_mapping.tolist()):
        begin, end = int(step.query_start_loc[i]), int(step.query_start_loc[i + 1])
        owned = {int(block) for block in step.block_table[i, : int(rows.num_blocks[row])]}
        for cell in range(i * query, (i + 1) * query):
            slot, position = int(out.slot_mapping[cell]), int(out.positions[cell])
            if slot != PAD_SLOT_ID:
                assert slot // size in owned and slot % size == position % size
                valid = step.positions[begin : end - int(step.num_rejected[i])]
                assert position > int(valid.max())
                assert position < int(out.seq_lens[i])


def test_bad_arguments_are_named() -> None:
    step, rows, sizes = random_step(1, 2, 2)
    out = buffers(64, 8, 200)
    with pytest.raises(ValueError, match="input_ids needs at least"):
        prepare_draft_inputs(out._replace(input_ids=i32(1)), step, rows, **sizes)
    with pytest.raises(ValueError, match="num_blocks must have dtype"):
        prepare_draft_inputs(out, step, rows._replace(num_blocks=torch.zeros(4)), **sizes)
    with pytest.raises(ValueError, match="below the step's 2 requests"):
        prepare_draft_inputs(out, step, rows, **sizes | {"num_reqs_padded": 1})


def test_compiles_for_hopper(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("this process was started with TRITON_INTERPRET=1: nothing can be compiled in it")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.draft_inputs import _prepare_draft_inputs_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does anyway, with a warning
    long = {"draft_positions_ptr", "draft_slot_mapping_ptr", "context_slot_mapping_ptr", "positions_ptr"}
    long |= {"slot_mapping_ptr", "last_sampled_ptr"}
    constexprs = {"PDL": True, "NUM_QUERY": 7, "BLOCK_SIZE": 16, "PAD": -1, "BLOCK_Q": 8, "BLOCK": 256}
    signature = {
        name: "constexpr" if name in constexprs else "*i64" if name in long else "*i32" if "ptr" in name else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert "prepare_draft_inputs" in compiled.asm["ptx"]
