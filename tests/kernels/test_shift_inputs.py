"""Kernel 30: its forms agree, and give each token the one behind it."""

import pytest
import torch

from kernels import shift_inputs
from kernels.shift_inputs import ShiftedInputs
from tests.kernels.sampling_batches import Dice
from tests.kernels.test_compile import I32, I64, interpret_first, test_compiles_for_hopper
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

__all__ = ["interpret_first"]  # the fixture
compiles_for_hopper = test_compiles_for_hopper
del test_compiles_for_hopper
ALL_FORMS = ("loop", "torch", "interpret")


def batch(seed: int, num_reqs: int, longest: int = 6, max_reqs: int = 7) -> tuple[tuple[torch.Tensor, ...], int]:
    """Arguments and the padded size: prompts, decodes with rejected drafts, requests without tokens, padding."""
    dice = Dice(seed)
    counts = [dice.number(0 if seed % 3 == 0 else 1, longest) for _ in range(num_reqs)]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    rows = torch.randperm(max_reqs, generator=dice.generator)[:num_reqs].int()
    if seed % 4 == 0 and num_reqs:
        rows[-1] = -1
    size = int(starts[-1]) + dice.number(0, 5)
    inside_prompt = [dice.number(0, 1) == 1 for _ in counts]
    rejected = [
        0 if inside or not n else dice.number(0, n - 1) for n, inside in zip(counts, inside_prompt, strict=True)
    ]
    sampled = [0 if inside else n - k for n, k, inside in zip(counts, rejected, inside_prompt, strict=True)]
    return (
        rows, starts, dice.numbers(0, 99, size + 2).int(), dice.numbers(0, 999, size + 2),
        dice.numbers(0, 99, size + 2), dice.numbers(0, 99, max_reqs, 1), dice.numbers(0, 99, max_reqs).int(),
        torch.tensor(sampled).int(), torch.tensor(rejected).int(),
    ), size  # fmt: skip


def assert_same(got: ShiftedInputs, expected: ShiftedInputs) -> None:
    for name, value in expected._asdict().items():
        assert getattr(got, name).tolist() == value.tolist(), name
        assert getattr(got, name).dtype == value.dtype


@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_forms_agree(form: str) -> None:
    for seed in range(24):
        arguments, size = batch(seed, num_reqs=seed % 6)
        assert_same(shift_inputs(*arguments, size, form=form), shift_inputs(*arguments, size, form="loop"))
    arguments, size = batch(1, num_reqs=3, longest=300)
    assert_same(shift_inputs(*arguments, size, form=form), shift_inputs(*arguments, size, form="loop"))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_prompts_part_a_decode_and_padding(form: str) -> None:
    i32 = {"dtype": torch.int32}
    got = shift_inputs(
        torch.tensor([2, 0], **i32), torch.tensor([0, 3, 7], **i32),
        torch.tensor([5, 6, 7, 10, 11, 12, -1, 0, 0], **i32),
        torch.arange(100, 109), torch.arange(20, 29), torch.tensor([[70], [71], [72]]),
        torch.tensor([80, 81, 82], **i32), torch.tensor([0, 2], **i32), torch.tensor([0, 2], **i32), 8, form=form,
    )  # fmt: skip
    assert got.token_ids.tolist() == [6, 7, 82, 11, 70, 0, 0, 0]
    assert got.slot_mapping.tolist() == [100, 101, 102, 103, 104, -1, -1, -1]
    assert got.last_indices.tolist() == [2, 4] and got.draft_positions.tolist() == [24, 26]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_torch_form_never_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, size = batch(5, num_reqs=4)
    arguments = tuple(x.to(device) for x in arguments)
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        shift_inputs(*arguments, size, form="torch")


def test_compiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    types = (I32, I32, I32, I64, I64, I64, I32, I32, I32, I32, I64, I64, I64)
    sizes = ("i32", "i32")
    for kinds, constexprs in (((*types, "i32", *sizes), {}), ((*types, *sizes), {"last_sampled_tokens_stride": 1})):
        compiles_for_hopper(
            "shift_inputs", "_shift_inputs_kernel", kinds, {"PAD": -1, "BLOCK": 128, **constexprs}, tmp_path_factory,
            monkeypatch,
        )  # fmt: skip


@pytest.mark.gpu
def test_compiled_kernel() -> None:
    for seed in range(8):
        arguments, size = batch(seed, num_reqs=seed % 6, longest=200)
        got = shift_inputs(*(x.cuda() for x in arguments), size, form="triton")
        assert_same(got, shift_inputs(*arguments, size, form="torch"))
