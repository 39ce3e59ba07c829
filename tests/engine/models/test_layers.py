"""The layers and the packed weights against torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.models import packing
from engine.models.layers import Linear, RMSNorm
from engine.models.loader import load_model
from engine.models.packing import can_pack, pack_weights

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this torch has no oneDNN linear")


@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (5, 3, 64)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(shape: tuple[int, ...], scale: float) -> None:
    norm = RMSNorm(64, 1e-5, torch.float32, CPU)
    norm.weight.copy_(torch.randn(64))
    x = torch.randn(shape) * scale
    kept = x.clone()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (64,), norm.weight, 1e-5), atol=1e-6, rtol=1e-5)
    assert torch.equal(x, kept)


def test_rms_norm_of_zeros_and_in_bfloat16() -> None:
    norm = RMSNorm(64, 1e-5, torch.bfloat16, CPU)
    norm.weight.copy_(torch.randn(64))
    assert not norm(torch.zeros(2, 64, dtype=torch.bfloat16)).any()
    x = torch.randn(3, 64).bfloat16()
    expected = F.rms_norm(x.float(), (64,), norm.weight.float(), 1e-5)
    torch.testing.assert_close(norm(x).float(), expected, atol=2e-2, rtol=2e-2)


def linear(dtype: torch.dtype, bias: bool) -> Linear:
    layer = Linear(48, 80, bias, dtype, CPU)
    layer.weight.copy_(torch.randn(80, 48))
    if layer.bias is not None:
        layer.bias.copy_(torch.randn(80))
    return layer


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 33, 65, 130])
@pytest.mark.parametrize("keep_plain", [False, True])
def test_packed_linear_equals_the_plain_one(rows: int, bias: bool, keep_plain: bool) -> None:
    layer = linear(torch.float32, bias)
    x, residual = torch.randn(rows, 48), torch.randn(rows, 80)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.add_to(residual.clone(), x), residual + expected, atol=1e-5, rtol=1e-5)
    layer.pack(range(4, 65), keep_plain)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.add_to(residual.clone(), x), residual + expected, atol=1e-5, rtol=1e-5)
    assert (layer.weight is not None) is keep_plain


@needs_onednn
def test_a_big_model_keeps_only_the_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    both = load_model("tiny-llama", dtype=torch.float32, device=CPU, load_format="dummy").model
    monkeypatch.setattr(packing, "PLAIN_COPY_LIMIT", 1)
    packed = load_model("tiny-llama", dtype=torch.float32, device=CPU, load_format="dummy").model
    assert both.layers[0].mlp.down_proj.weight is not None
    assert packed.layers[0].mlp.down_proj.weight is None and packed.lm_head.weight is None
    hidden = torch.randn(2, both.config.hidden_size)
    torch.testing.assert_close(packed.compute_logits(hidden), both.compute_logits(hidden), atol=1e-4, rtol=1e-4)


def test_without_onednn_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = load_model("tiny-llama", dtype=torch.float32, device=CPU, load_format="dummy").model
    pack_weights(model)
    assert model.lm_head.packed is None
    assert model.compute_logits(torch.randn(5, 64)).shape == (5, model.config.vocab_size)
