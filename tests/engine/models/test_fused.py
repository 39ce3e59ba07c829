"""The step in few launches gives what the layers give one by one."""

from __future__ import annotations

import pytest
import torch

from engine.attention import allocate_kv_cache
from engine.attention.triton_backend import TritonAttention
from engine.models import fused, load_model
from engine.models.decoder import CausalLM
from engine.models.fused import fused_forward, fused_layers, fused_logits
from kernels import max_rows
from tests.engine.attention.batches import make_batch

NAMES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
TABLES = [[3, 7, 1, 9, 12, 20, 21, 22], [2, 8, 4, 6, 11, 23, 24, 25]]
STEPS = {"few rows": ([5, 1], [1, 1], [1, 1]), "many rows": ([17, 4], [1, 1], [18, 1])}


def logits_of(model: CausalLM, attention: TritonAttention | None, steps: tuple[list[int], ...]) -> torch.Tensor:
    """Logits of two requests over steps of so many tokens, through one cache."""
    device, dtype = model.device, model.dtype
    cache = allocate_kv_cache(model.config, 26, 8, dtype, device)
    ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1)).int()
    done, out = [0, 0], []
    for step in steps:
        positions, metadata = make_batch([(done[i], step[i]) for i in (0, 1)], TABLES, 8, pad=2, device=str(device))
        tokens = torch.cat([ids[i, done[i] : done[i] + step[i]] for i in (0, 1)] + [torch.zeros(2).int()]).to(device)
        if attention is None:
            logits = model.compute_logits(model(tokens, positions, metadata, cache))
        else:
            with torch.inference_mode():
                hidden = fused_forward(model, attention, tokens, positions, metadata, cache)
                assert torch.isfinite(hidden).all(), "padding rows are finite"
                logits = fused_logits(model, hidden, attention.form)
        out.append(logits[:-2].cpu())
        done = [a + b for a, b in zip(done, step, strict=True)]
    return torch.cat(out)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *[("torch", name) for name in NAMES],
        pytest.param("interpret", "tiny-qwen3", marks=pytest.mark.slow),
        *[pytest.param("triton", name, marks=pytest.mark.gpu) for name in NAMES],
    ],
)
def test_equals_the_layers(
    form: str, name: str, steps: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "interpret":
        request.getfixturevalue("few_splits")
    # Of a larger model, so that both ways through a layer are taken.
    monkeypatch.setattr(fused, "max_rows", lambda x, hidden_size: min(16, max_rows(x, hidden_size)))
    device = torch.device("cuda" if form == "triton" else "cpu")
    model = load_model(name, dtype=torch.float32, device=device, load_format="dummy", skip_tokenizer_init=True).model
    model.triton_attention = None
    config = model.config
    attention = TritonAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, device, form)
    expected, got = logits_of(model, None, STEPS[steps]), logits_of(model, attention, STEPS[steps])
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("num_rows", "early"), [(16, True), (17, False)])
def test_attention_starts_early_behind_our_own_projections(
    num_rows: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And behind no others, however wide qkv is."""
    monkeypatch.setattr(fused, "max_rows", lambda x, hidden_size: 16)
    cpu = torch.device("cpu")
    model = load_model(
        "tiny-qwen3", dtype=torch.float32, device=cpu, load_format="dummy", skip_tokenizer_init=True
    ).model
    heads, head_dim = model.config.num_attention_heads, model.config.head_dim
    seen = []

    def attend(qkv: torch.Tensor, cache: torch.Tensor, rotation: object, start_early: bool) -> torch.Tensor:
        seen.append(start_early)
        return qkv[:, : heads * head_dim].contiguous()

    cache = allocate_kv_cache(model.config, 2, 8, torch.float32, cpu)
    hidden = torch.ones(num_rows, model.config.hidden_size)
    with torch.inference_mode():
        fused_layers(model, hidden, torch.arange(num_rows), attend, cache, "torch")
    assert seen == [early] * model.config.num_hidden_layers
