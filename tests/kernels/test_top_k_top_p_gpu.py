"""The kernels of top-k and top-p compile where there is no GPU, and on one they do what the definition says."""

import itertools

import numpy as np
import pytest
import torch

from kernels.top_k_top_p import mask_top_k_top_p, sample_top_k_top_p
from tests.kernels.test_compile import F32, I32, I64
from tests.kernels.test_compile import test_compiles_for_hopper as compile_for_hopper
from tests.kernels.test_top_k_top_p import KINDS, check_row, draws, make_row, tensors

pytestmark = pytest.mark.slow

ROW_ARGS = (F32, "i32", "i32", I32, I32, F32, F32)
TILING = {"TILES": 16, "TILE": 256}
CANDIDATES = {"TILES": 8, "TILE": 256, "CAP": 1024, "BLOCK": 1024}
SEARCH = CANDIDATES | {"ROWS": 8, "LANES": 1024}
DRAW = {"MIN_UNIFORM": 2.0**-32, "LANES": 256}
NO_DRAW = {"temperature_ptr": None, "seeds_ptr": None, "positions_ptr": None, "sampled_ptr": None, "SCALE": False}
NO_TEMPERATURE = {"temperature_ptr": None, "SCALE": False}
# (file, kernel, types of the run-time arguments, constexprs): for the mask, then for the draw
KERNELS = [
    ("cut", "tile_kernel", (*ROW_ARGS, I32, F32, "i32"), TILING | NO_TEMPERATURE),
    ("cut", "tile_kernel", (*ROW_ARGS, F32, I32, F32, "i32"), TILING | {"SCALE": True}),
    ("cut", "cut_kernel", (*ROW_ARGS, I32, F32, I32, "i32", I32, I32, "i32"), CANDIDATES | DRAW | NO_DRAW),
    (
        "cut",
        "cut_kernel",
        (*ROW_ARGS, F32, I32, F32, I32, "i32", I32, I32, I64, I64, "i32", I64),
        CANDIDATES | DRAW | {"SCALE": True},
    ),
    pytest.param(
        *("search", "search_kernel", (*ROW_ARGS, F32, I32, I32, "i32", I32, I32), SEARCH | {"SCALE": True}),
        marks=pytest.mark.slow,
    ),
    ("apply", "mask_kernel", (F32, "i32", "i32", I32, "i32", I32), TILING),
    *[
        (
            "apply",
            "sample_rest_kernel",
            (F32, "i32", "i32", I32, F32, I64, I64, "i32", I32, F32, I32),
            DRAW | {"SCALE": scale, "SPLITS": 16},
        )
        for scale in (False, True)
    ],
    ("apply", "reduce_rest_kernel", (I32, I32, F32, I32, I64), {"SPLITS": 16}),
]


@pytest.mark.parametrize(("file", "name", "types", "constexprs"), KERNELS, ids=lambda value: str(value)[:24])
def test_compiles(
    file: str,
    name: str,
    types: tuple[str, ...],
    constexprs: dict,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_for_hopper(f"top_k_top_p_{file}", name, types, constexprs, tmp_path_factory, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 1000, 100_003, 151_936])
def test_on_a_gpu(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.stack([make_row(kind, vocab, generator) for kind in KINDS])
    every = list(itertools.product((1, 50, 1500, 10**6), (0.0, 0.3, 0.95, 1.0), (0.0, 0.05)))
    for i, filters in enumerate(every[::5]):
        for form in ("triton", "torch") if i == 3 else ("triton",):
            out = logits.cuda()
            on_gpu = [x.cuda() for x in tensors([filters])]
            mask_top_k_top_p(out, torch.zeros(len(KINDS), dtype=torch.int32, device="cuda"), *on_gpu, form=form)
            for row, after in enumerate(out.cpu()):
                with np.errstate(over="ignore", invalid="ignore"):
                    check_row(logits[row], after, filters)
    kinds = torch.arange(256) % len(KINDS)
    rows = [int(i) for i in (torch.arange(256) * 7 + 1) % (len(every) + 1) - 1]
    temperature = [(0.0, 0.7, 1.0, 1e-3, 1e30)[i % 5] for i in range(len(every))]
    with torch.device("cuda"):
        fused, drawn = draws(logits.cuda()[kinds.cuda()], every, temperature, rows, "triton")
    assert torch.equal(fused, drawn)


@pytest.mark.gpu
def test_a_captured_draw_follows_its_inputs() -> None:
    """One graph serves every batch: nothing that the filters or the logits say is decided on the host."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.stack([make_row(kind, 50_000, generator) for kind in kinds]) for kinds in (KINDS[:8], KINDS[8:])]
    filters = [x.cuda() for x in tensors([(50, 0.95, 0.0)] * 8)]
    rows, seeds, positions = (torch.arange(8, device="cuda", dtype=d) for d in (torch.int32, torch.int64, torch.int64))
    logits, temperature = batches[0].cuda(), torch.ones(8, device="cuda")

    def draw() -> torch.Tensor:
        return sample_top_k_top_p(logits, rows, *filters, temperature, seeds, positions, purpose=0, form="triton")

    draw()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw()
    for batch, top_k, top_p in zip(batches * 2, (50, 50_000, 2000, 50_000), (0.9, 0.9, 1.0, 1.0), strict=True):
        logits.copy_(batch)
        filters[0].fill_(top_k)
        filters[1].fill_(top_p)
        positions.add_(1)
        graph.replay()
        assert torch.equal(captured, draw())
