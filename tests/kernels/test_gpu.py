"""On a GPU the compiled kernels, and the torch forms, give what the loop form says."""

from pathlib import Path

import pytest
import torch

import kernels
from kernels.noise import log_exponential_torch
from tests.kernels.batches import GOLDEN, golden_batch, on, random_batch, run_step
from tests.kernels.draws import EDGE_WORDS, TILE, exact_scores, noise
from tests.kernels.test_staged_write import stage

pytestmark = pytest.mark.gpu
GPU_FORMS = ("triton", "torch", "auto")


@pytest.mark.parametrize("form", GPU_FORMS)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_golden_batches(path: Path, form: str) -> None:
    given, _ = golden_batch(path)
    expected, out = run_step(given, "loop"), run_step(on("cuda", given), form)
    for name, value in expected.items():
        assert torch.equal(out[name].cpu(), value), name


@pytest.mark.parametrize("form", GPU_FORMS)
def test_random_batches(form: str) -> None:
    for seed in range(30):
        batch = random_batch(seed, num_reqs=seed % 25, max_reqs=24, max_len=200, num_drafts=seed % 8)
        expected, out = run_step(batch, "loop", num_tokens=3000), run_step(on("cuda", batch), form, num_tokens=3000)
        for name, value in expected.items():
            assert torch.equal(out[name].cpu(), value), (seed, name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", GPU_FORMS)
def test_staged_writes(form: str, dtype: torch.dtype) -> None:
    writes = [(2, 5, list(range(1, 3000))), (0, 0, [7]), (2, 0, [9, 8]), (1, 4, [])]
    expected, target = torch.zeros(3, 4000, dtype=dtype), torch.zeros(3, 4000, dtype=dtype, device="cuda")
    staged = stage(writes, dtype)
    kernels.apply_write(expected, *staged, form="loop")
    kernels.apply_write(target, *(x.cuda() for x in staged), form=form)
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("form", GPU_FORMS)
@pytest.mark.parametrize("vocab", [7, TILE, 3 * TILE + 5, 151_936])
def test_gumbel(form: str, vocab: int) -> None:
    rows = 16
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    idx = torch.tensor([3, 1, 0, 2] * 4, dtype=torch.int32)
    temperature, seeds = torch.tensor([0.0, 0.5, 1.0, 3.0]), torch.tensor([1, -(2**50), 3, 2**33])
    positions = torch.arange(rows) * 2**30
    on_gpu = [x.cuda() for x in (logits, idx, temperature, seeds, positions)]
    for apply_temperature in (False, True):
        ids = kernels.gumbel_sample(
            *on_gpu, purpose=kernels.Purpose.SAMPLE, apply_temperature=apply_temperature, form=form
        ).cpu()
        assert ids.dtype == torch.int64
        for row in range(rows):
            t = float(temperature[idx[row]])
            scores = exact_scores(
                logits[row],
                t if apply_temperature else float(t != 0),
                int(seeds[idx[row]]),
                int(positions[row]),
                kernels.Purpose.SAMPLE,
            )
            assert scores.max() - scores[ids[row]] <= 1e-4
    greedy = kernels.gumbel_sample(*on_gpu, purpose=0, all_greedy=True, form=form)
    assert torch.equal(greedy.cpu(), logits.argmax(-1))


def test_noise_at_every_edge() -> None:
    words = torch.cat([EDGE_WORDS, (2 ** torch.arange(31)).int(), (torch.arange(900) * 4_770_001 - 2**31).int()])
    expected, got = log_exponential_torch(words), noise(words.cuda(), "triton").cpu()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_greedy_ties_and_empty_rows() -> None:
    logits = torch.zeros(3, 4 * TILE, device="cuda")
    logits[1, [700, 5, TILE + 1]] = 2.0
    logits[2] = float("-inf")
    rows = torch.arange(3, device="cuda")
    for all_greedy in (False, True):
        ids = kernels.gumbel_sample(
            logits,
            rows.int(),
            torch.zeros(3, device="cuda"),
            rows,
            rows,
            purpose=0,
            all_greedy=all_greedy,
            form="triton",
        )
        assert ids.tolist() == [0, 5, 0]
