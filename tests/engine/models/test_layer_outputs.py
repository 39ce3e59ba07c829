"""What a step leaves of its layers is what they gave, whichever way the step runs."""

import pytest
import torch

from engine.attention import allocate_kv_cache
from engine.attention.triton_backend import TritonAttention
from engine.dspark.target import forward_with_hidden
from engine.models import load_model
from engine.models.layer_outputs import LayerOutputs
from tests.engine.attention.batches import make_batch

TABLES = [[3, 7, 1, 9, 12, 20, 21, 22], [2, 8, 4, 6, 11, 23, 24, 25]]


@pytest.mark.parametrize("lengths", [(5, 1), (17, 9)], ids=["few rows", "many rows"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer_ids", [(-1, 0), (0,), (-1,), (0, 1)])
def test_the_chosen_layers(layer_ids: tuple[int, ...], fused: bool, lengths: tuple[int, int]) -> None:
    cpu = torch.device("cpu")
    model = load_model("tiny-qwen3", dtype=torch.float32, device=cpu, load_format="dummy").model
    config = model.config
    positions, metadata = make_batch([(0, lengths[0]), (0, lengths[1])], TABLES, 8, pad=2, device="cpu")
    ids = torch.arange(len(positions), dtype=torch.int32)
    args = (ids, positions, metadata)
    last, expected = forward_with_hidden(model, *args, allocate_kv_cache(config, 26, 8, torch.float32, cpu), layer_ids)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    if fused:
        model.triton_attention = TritonAttention(*heads, cpu, "torch")
    outputs = LayerOutputs(layer_ids, config.hidden_size, 64, torch.float32, cpu)
    hidden = model(*args, kv_cache=allocate_kv_cache(config, 26, 8, torch.float32, cpu), layer_outputs=outputs)
    t = sum(lengths)
    torch.testing.assert_close(hidden[:t], last[:t], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(outputs.states[:t], expected[:t], atol=2e-3, rtol=2e-3)
    assert not outputs.states[len(ids) :].any()
