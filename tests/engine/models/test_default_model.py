"""The real default model against transformers' generate on the same dequantised float32 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import allocate_kv_cache
from engine.models import LoadedModel, load_model, read_checkpoint
from tests.engine.attention.batches import make_batch
from tests.engine.models.gguf_files import fill

CPU = torch.device("cpu")
TOKENS = 12
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland",
]


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype=torch.float32, device=CPU)


def greedy(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one batch: prefill together, then decode together."""
    cache = allocate_kv_cache(loaded.config, 13, 16, torch.float32, CPU)
    tables = [list(range(1 + 4 * i, 5 + 4 * i)) for i in range(len(prompts))]
    done, new = [0] * len(prompts), prompts
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(TOKENS):
        positions, metadata = make_batch([(d, len(n)) for d, n in zip(done, new, strict=True)], tables, 16)
        ids = torch.tensor([i for n in new for i in n], dtype=torch.int32)
        hidden = loaded.model.forward(ids, positions, metadata, cache)
        last = torch.from_numpy(metadata.query_start_loc_np[1:] - 1)
        chosen = loaded.model.compute_logits(hidden[last]).argmax(-1).tolist()
        done = [d + len(n) for d, n in zip(done, new, strict=True)]
        new = [[token] for token in chosen]
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
    return outputs


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(smollm2: Path, ours: LoadedModel) -> None:
    checkpoint = read_checkpoint(smollm2)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config.to_hf())).eval()
    fill(reference, checkpoint.tensors())
    reference.generation_config.eos_token_id = None
    assert ours.tokenizer is not None
    prompts = [ours.tokenizer.encode(prompt) for prompt in PROMPTS]
    found = greedy(ours, prompts)
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.inference_mode():
            out = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
        assert tokens == out[0, len(prompt) :].tolist()
    assert "Paris" in ours.tokenizer.decode(found[0])


def test_what_is_loaded(ours: LoadedModel, smollm2: Path) -> None:
    assert (ours.name, ours.source, ours.load_format) == ("SmolLM2-135M-Instruct", smollm2, "auto")
    config = ours.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
