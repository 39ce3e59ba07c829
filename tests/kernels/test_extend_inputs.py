"""Kernel 31: its forms agree, and no place writes outside its request's blocks."""

import pytest
import torch

from kernels.extend_inputs import Blocks, ExtendedInputs, extend_inputs
from tests.kernels.sampling_batches import Dice
from tests.kernels.test_compile import I32, I64, interpret_first, test_compiles_for_hopper
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

__all__ = ["interpret_first"]  # the fixture
compiles_for_hopper = test_compiles_for_hopper
del test_compiles_for_hopper
Arguments = tuple[tuple[torch.Tensor, ...], Blocks, int]


def batch(seed: int, num_reqs: int, longest: int = 6, max_reqs: int = 7, device: str = "cpu") -> Arguments:
    """Prompts, and decodes with rejected drafts, some near the end of their blocks or of the longest length."""
    dice = Dice(seed)
    counts = [dice.number(1, longest) for _ in range(num_reqs)]
    inside = [dice.number(0, 1) == 1 for _ in counts]
    rejected = [0 if prompt else dice.number(0, n - 1) for n, prompt in zip(counts, inside, strict=True)]
    sampled = [0 if prompt else n - k for n, k, prompt in zip(counts, rejected, inside, strict=True)]
    first = [dice.number(0, 40) for _ in counts]
    starts, size = torch.tensor([0, *counts]).cumsum(0).int(), sum(counts)
    positions = [start + j for start, n in zip(first, counts, strict=True) for j in range(n)]
    rows = torch.randperm(max_reqs, generator=dice.generator)[:num_reqs].int()
    held, block_size = torch.zeros(max_reqs, dtype=torch.int32), 2 ** dice.number(0, 4)
    num_blocks = -(-(41 + longest) // block_size) + 1
    for row, start, n in zip(rows.tolist(), first, counts, strict=True):
        held[row] = min(-(-(start + n) // block_size) + dice.number(0, 1), num_blocks)
    if seed % 4 == 0 and num_reqs:
        rows[-1] = -1
    ids = dice.numbers(0, 99, size + 1).int()
    tensors = (
        rows, starts, ids, torch.tensor([*positions, 0]), dice.numbers(0, 99, max_reqs, 1),
        torch.tensor(sampled).int(), torch.tensor(rejected).int(),
    )  # fmt: skip
    table = dice.numbers(1, 500, num_reqs + 1, num_blocks).int()
    blocks = Blocks(table.to(device), held.to(device), block_size, dice.number(38, 60))
    return tuple(x.to(device) for x in tensors), blocks, size


def run(arguments: Arguments, form: str) -> ExtendedInputs:
    tensors, blocks, size = arguments
    return extend_inputs(*tensors, blocks, size, form=form)


def assert_same(got: ExtendedInputs, expected: ExtendedInputs) -> None:
    for name, value in expected._asdict().items():
        assert getattr(got, name).tolist() == value.tolist(), name
        assert getattr(got, name).dtype == value.dtype


@pytest.mark.parametrize("form", ["torch", "interpret"])
def test_forms_agree(form: str) -> None:
    unwritten = 0
    for seed in range(24):
        arguments = batch(seed, num_reqs=seed % 6)
        expected = run(arguments, "loop")
        assert_same(run(arguments, form), expected)
        unwritten += int((expected.slot_mapping < 0).sum())
    assert unwritten > 20
    arguments = batch(1, num_reqs=3, longest=300)
    assert_same(run(arguments, form), run(arguments, "loop"))


@pytest.mark.parametrize("form", ["loop", "torch", "interpret"])
def test_a_prompts_part_and_a_decode(form: str) -> None:
    i32 = {"dtype": torch.int32}
    blocks = Blocks(torch.tensor([[3, 4, 9], [5, 6, 9]], **i32), torch.tensor([2, 0, 2], **i32), 4, 100)
    got = extend_inputs(
        torch.tensor([2, 0], **i32), torch.tensor([0, 3, 7], **i32), torch.tensor([11, 12, 13, 21, 22, 23, -1], **i32),
        torch.tensor([0, 1, 2, 5, 6, 7, 8]), torch.tensor([[70], [71], [72]]), torch.tensor([0, 2], **i32),
        torch.tensor([0, 2], **i32), blocks, 7, form=form,
    )  # fmt: skip
    assert got.token_ids.tolist() == [11, 12, 13, 0, 21, 22, 70, 0, 0]
    assert got.positions.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert got.slot_mapping.tolist() == [12, 13, 14, -1, 25, 26, 27, -1, -1]
    assert got.last_indices.tolist() == [2, 6] and got.last_positions.tolist() == [2, 7]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_torch_form_never_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = batch(5, num_reqs=4, device=device)
    with monkeypatch.context() as patch, NoHostWait(device):
        forbid_waits(patch)
        run(arguments, "torch")


def test_compiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    types = (I32, I32, I32, I64, I64, I32, I32, "i32", I32, I32, "i32", "i32", I32, I64, I64, I64, I64)
    constexprs = {"BLOCK_SIZE": 16, "PAD": -1, "BLOCK": 128}
    compiles_for_hopper(
        "extend_inputs", "_extend_inputs_kernel", types, constexprs, tmp_path_factory, monkeypatch
    )  # fmt: skip


@pytest.mark.gpu
def test_compiled_kernel() -> None:
    for seed in range(8):
        got = run(batch(seed, num_reqs=seed % 6, longest=200, device="cuda"), "triton")
        assert_same(got, run(batch(seed, num_reqs=seed % 6, longest=200), "torch"))
