"""transformers' greedy answers of the default model, kept as `tests/golden/smollm2/greedy.json`.

To make them anew, where prompts or the model change (four minutes)::

    python -m tests.engine.greedy_answers

What is kept is believed by nobody: test_parity.py has transformers say of each token that it is the best one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.models import DEFAULT_MODEL, Tokenizer, load_model, read_checkpoint, resolve_model
from tests.engine.prompts import CHATS, TEXTS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "smollm2" / "greedy.json"
NUM_TOKENS = 48


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    return prompts + [tokenizer.encode(tokenizer.apply_chat_template(chat), add_special_tokens=False) for chat in CHATS]


def reference_model(path: Path) -> torch.nn.Module:
    """The checkpoint read straight into transformers, in float32: the engine's loader is held to it as well."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = read_checkpoint(path)
    config = AutoConfig.for_model(**checkpoint.config.to_hf())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    state = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' generate, left-padded in batches of like lengths; that padding changes nothing is what the test of
    the kept answers checks."""
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), 10):
        batch = order[begin : begin + 10]
        width = max(len(prompts[i]) for i in batch)
        input_ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        out = model.generate(
            input_ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        for i, row in zip(batch, out[:, width:].tolist(), strict=True):
            answers[i] = row
    return answers


def main() -> None:
    path = resolve_model(DEFAULT_MODEL)
    tokenizer = load_model(path, dtype=torch.float32, device=torch.device("cpu")).tokenizer
    assert tokenizer is not None
    answers = generate(reference_model(path), prompts_of(tokenizer))
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(answer) for answer in answers) + "\n]\n")


if __name__ == "__main__":
    main()
