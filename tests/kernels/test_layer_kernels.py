"""The fused norm, gate and small linear layer against their loop forms."""

from __future__ import annotations

import pytest
import torch

import kernels

FAST_FORMS = ("torch", "interpret")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_branch", [True, False])
@pytest.mark.parametrize("form", FAST_FORMS)
def test_add_rms_norm(form: str, with_branch: bool) -> None:
    residual, weight = random(3, 40), random(40, seed=2) + 1
    branch = random(3, 40, seed=1) if with_branch else None
    expected_residual, got_residual = residual.clone(), residual.clone()
    expected = kernels.add_rms_norm(branch, expected_residual, weight, 1e-5, form="loop")
    got = kernels.add_rms_norm(branch, got_residual, weight, 1e-5, form=form)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got_residual, expected_residual)
    assert torch.equal(got_residual, residual) is not with_branch


@pytest.mark.parametrize("form", FAST_FORMS)
def test_silu_mul(form: str) -> None:
    gate_up = random(2, 2 * 1100) * 5
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    got = kernels.silu_mul(gate_up, form=form)
    torch.testing.assert_close(got, kernels.silu_mul(gate_up, form="loop"))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("num_rows", [1, 2, 16, 35])
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": True}, {"norm": True, "bias": True}, {"residual": True, "bias": True}, {"norm": True, "gated": True}],
    ids=str,
)
def test_small_linear(form: str, num_rows: int, options: dict[str, bool]) -> None:
    """Columns and depth are no multiples of a tile; the depth takes two reads for one of the cases."""
    columns, depth = 11, 1100 if options == {} else 40
    x = random(num_rows, depth) / depth**0.5
    weight = random(columns * (2 if options.get("gated") else 1), depth, seed=1)
    residual = random(num_rows, columns, seed=2) if options.get("residual") else None

    def run(form: str) -> torch.Tensor:
        target = residual.clone() if residual is not None else None
        out = kernels.small_linear(
            x,
            weight,
            norm_weight=random(depth, seed=3) + 1 if options.get("norm") else None,
            eps=1e-5,
            bias=random(columns, seed=4) if options.get("bias") else None,
            residual=target,
            gated=options.get("gated", False),
            form=form,
        )
        assert target is None or out is target
        return out

    torch.testing.assert_close(run(form), run("loop"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", ["loop", "torch", "interpret"])
@pytest.mark.parametrize("num_rows", [1, 5, 21])
def test_small_linear_writes_its_result_twice(num_rows: int, form: str) -> None:
    x, weight, places = random(num_rows, 40), random(11, 40, seed=1), torch.full((num_rows, 30), -7.0)
    residual = random(num_rows, 11, seed=2)
    out = kernels.small_linear(x, weight, residual=residual, copy=places[:, 3:14], form=form)
    assert out is residual and torch.equal(places[:, 3:14], out)
    assert (places[:, :3] == -7).all() and (places[:, 14:] == -7).all()
    with pytest.raises(ValueError, match=rf"copy must be \[{num_rows}, 11\]"):
        kernels.small_linear(x, weight, copy=places, form=form)


@pytest.mark.parametrize("form", ["loop", "torch", "interpret"])
def test_embedding(form: str) -> None:
    """With a row longer than one read."""
    weight, ids = random(7, 4100), torch.tensor([3, 0, 6, 3])
    out = kernels.embedding(ids, weight, form=form)
    assert torch.equal(out, weight[[3, 0, 6, 3]]) and out.data_ptr() != weight.data_ptr()
    assert torch.equal(kernels.embedding(ids.int(), weight, form=form), out)
    assert kernels.embedding(ids[:0], weight, form=form).shape == (0, 4100)
    with pytest.raises(ValueError, match="input_ids must be i32 or i64 and weight contiguous, got torch.int16"):
        kernels.embedding(ids.short(), weight, form=form)


def test_rows_up_to_which_a_model_is_faster_with_it() -> None:
    assert [kernels.max_rows(random(1, 4096), size) for size in (576, 1024, 2048, 4096)] == [96, 24, 1, 0]


def test_strided_rows_are_read_by_their_stride() -> None:
    gate_up = random(4, 64)[:, :32]
    torch.testing.assert_close(kernels.silu_mul(gate_up, form="interpret"), kernels.silu_mul(gate_up.contiguous()))
    x, weight = random(4, 64)[:2, 32:], random(8, 32, seed=1)
    torch.testing.assert_close(kernels.small_linear(x, weight, form="interpret"), x @ weight.T)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[N, 32\]"):
        kernels.small_linear(random(2, 32), random(8, 16))
    with pytest.raises(ValueError, match="a gated projection has no bias"):
        kernels.small_linear(random(2, 32), random(8, 32), bias=random(4), gated=True)
    with pytest.raises(ValueError, match="even number of columns"):
        kernels.silu_mul(random(2, 7))
    with pytest.raises(ValueError, match="branch must have the residual's shape"):
        kernels.add_rms_norm(random(2, 8), random(3, 8), random(8), 1e-5)
