"""What comes before the forward in one launch: as its parts, kernel by kernel."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import PAD_SLOT_ID, LogitsRows, RequestRows, StepIndex, StepInputs, prepare_step
from tests.kernels.batches import on, random_batch, run_step

pytestmark = pytest.mark.slow  # interpreted kernels

FORMS = ("torch", "interpret")


def prepared(batch: dict[str, torch.Tensor], form: str, **keywords: Any) -> tuple[StepInputs, LogitsRows]:
    b = {name: value.clone() for name, value in batch.items()}
    i32, i64 = ({"dtype": kind, "device": b["idx_mapping"].device} for kind in (torch.int32, torch.int64))
    inputs = StepInputs(
        torch.zeros(192, **i32), torch.full((192,), 5, **i64), torch.full((8,), 3, **i32), torch.full((192,), 9, **i64),
        torch.full_like(b["block_ids"], 8), torch.full((6,), 4, **i32),
    )  # fmt: skip
    rows = RequestRows(
        b["num_computed_tokens"], b["prefill_len"], b["all_token_ids"], b["last_sampled_tokens"], b["draft_tokens"],
        b["block_ids"], b["num_blocks"],
    )  # fmt: skip
    index = StepIndex(b["idx_mapping"], b["query_start_loc"], b["cu_num_logits"])
    sizes = {"num_tokens_padded": int(b["num_tokens_padded"]), "num_logits": int(b["cu_num_logits"][-1])}
    defaults = sizes | {"block_size": int(b["block_size"]), "with_prompts": True, "with_drafts": True}
    return inputs, prepare_step(index, rows, inputs, form=form, **(defaults | keywords))


def flat(values: Any) -> list[torch.Tensor]:
    return [x for value in values for x in (flat(value) if isinstance(value, tuple) else [value]) if x is not None]


@given(
    seed=st.integers(0, 2**31), num_reqs=st.integers(1, 6), num_drafts=st.integers(0, 4), nobodys=st.integers(0, 40),
    with_drafts=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_form_writes_the_same(seed: int, num_reqs: int, num_drafts: int, nobodys: int, with_drafts: bool) -> None:
    batch = random_batch(seed, num_reqs=num_reqs, num_drafts=num_drafts)
    keywords = {"num_logits": int(batch["cu_num_logits"][-1]) + nobodys, "with_drafts": with_drafts}
    expected = prepared(batch, "loop", **keywords)
    for form in FORMS:
        got = prepared(batch, form, **keywords)
        for name, values, wanted in zip(("inputs", "rows"), got, expected, strict=True):
            for place, (one, other) in enumerate(zip(flat(values), flat(wanted), strict=True)):
                assert torch.equal(one, other), f"{form}: {name} {place}"


@pytest.mark.parametrize("form", ["loop", *FORMS])
def test_as_the_kernels_that_are_its_parts(form: str) -> None:
    batch = random_batch(11, num_reqs=6)
    t, r = int(batch["query_start_loc"][6]), 6
    expected = run_step(batch, "loop")
    inputs, logits = prepared(batch, form)
    indices = expected["logits_indices"]
    assert torch.equal(inputs.input_ids[:t], expected["input_ids"][:t])
    assert torch.equal(inputs.positions[:t], expected["positions"][:t])
    assert torch.equal(inputs.seq_lens[:r], expected["seq_lens"]) and not inputs.seq_lens[r:].any()
    assert torch.equal(inputs.slot_mapping[:t], expected["slot_mapping"][:t])
    assert (inputs.slot_mapping[t : int(batch["num_tokens_padded"])] == PAD_SLOT_ID).all()
    assert torch.equal(logits.indices, indices) and torch.equal(logits.positions, expected["positions"][indices] + 1)
    assert logits.drafted is not None
    assert torch.equal(logits.drafted.idx_mapping, expected["expanded_idx_mapping"])
    assert torch.equal(logits.drafted.local_pos, expected["expanded_local_pos"])
    decodes = logits.positions > batch["prefill_len"][logits.drafted.idx_mapping.long()]
    assert torch.equal(logits.drafted.token_ids[decodes], expected["input_ids"][indices][decodes]) and decodes.any()


@pytest.mark.parametrize("form", ["loop", *FORMS])
def test_a_draft_that_is_none_is_told_but_is_no_input(form: str) -> None:
    """Decodes padded to a captured step: one of two drafts, the second none, and a request that isn't there."""
    i32, one = torch.int32, torch.ones(6, dtype=torch.int32)
    batch = {
        "idx_mapping": torch.tensor([2, 5], dtype=i32), "query_start_loc": torch.tensor([0, 3, 3], dtype=i32),
        "cu_num_logits": torch.tensor([0, 3, 4], dtype=i32), "num_computed_tokens": one * torch.tensor(6),
        "prefill_len": one, "all_token_ids": torch.zeros(6, 12, dtype=i32),
        "last_sampled_tokens": torch.full((6, 1), 70), "draft_tokens": torch.tensor([[80, -1]] * 6),
        "block_ids": torch.arange(18, dtype=i32).view(6, 3), "num_blocks": one * 3, "block_size": torch.tensor(4),
        "num_tokens_padded": torch.tensor(6),
    }  # fmt: skip
    batch["num_computed_tokens"][5] = 0
    inputs, logits = prepared(batch, form, num_logits=6, with_prompts=False)
    assert inputs.input_ids[:6].tolist() == [70, 80, 0, 0, 0, 0]
    assert inputs.positions[:4].tolist() == [6, 7, 8, 5] and inputs.seq_lens.tolist() == [9, *[0] * 7]
    assert inputs.slot_mapping[:6].tolist() == [7 * 4 + 2, 7 * 4 + 3, 8 * 4, *[PAD_SLOT_ID] * 3]
    assert (inputs.next_prefill_tokens == 4).all()
    assert logits.positions.tolist() == [7, 8, 9, 0, 0, 0] and logits.drafted is not None
    assert logits.drafted.token_ids.tolist() == [70, 80, -1, 0, 0, 0]
    assert logits.drafted.idx_mapping.tolist() == [2, 2, 2, 5, -1, -1]


@pytest.mark.gpu
@pytest.mark.parametrize("with_drafts", [False, True])
def test_compiled(with_drafts: bool) -> None:
    for seed in range(8):
        batch = random_batch(seed, num_reqs=6)
        keywords = {"num_logits": int(batch["cu_num_logits"][-1]) + 3, "with_drafts": with_drafts}
        expected = prepared(batch, "loop", **keywords)
        got = prepared(on("cuda", batch), "triton", **keywords)
        for one, other in zip(flat(got), flat(expected), strict=True):
            assert torch.equal(one.cpu(), other)
