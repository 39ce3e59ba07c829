"""The peer: transformers' own generate, filled with the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.cpu_stream import run_on_compute_worker
from engine.models import read_checkpoint

from .measure import Result
from .workload import Workload


class TransformersPeer:
    """A static batch, left padded, generating until its longest request is done: how generate serves a batch."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model, self._pad = run_on_compute_worker(lambda: self._load(path, dtype))

    @staticmethod
    def _load(path: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, int]:
        checkpoint = read_checkpoint(path)
        options = dict(checkpoint.config.to_hf())
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        left = set(missing) - ({"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set())
        if left or unexpected:
            raise ValueError(f"{path}: transformers' model lacks {sorted(left)} and does not know {sorted(unexpected)}")
        model.tie_weights()
        return model.eval(), checkpoint.config.eos_token_ids[0] if checkpoint.config.eos_token_ids else 0

    def __call__(self, workload: Workload) -> Result:
        longest_in = max(len(ask.prompt_token_ids) for ask in workload.asks)
        ids = torch.full((len(workload.asks), longest_in), self._pad)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(workload.asks):
            ids[row, longest_in - len(ask.prompt_token_ids) :] = torch.tensor(ask.prompt_token_ids)
            mask[row, longest_in - len(ask.prompt_token_ids) :] = 1
        # No end-of-sequence id: both sides make exactly the tokens that are wanted.
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=workload.longest, pad_token_id=self._pad, eos_token_id=None
        )

        def generate() -> torch.Tensor:
            with torch.inference_mode():
                return self._model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)

        # On the thread that the engines compute on: both sides then have the same pool of OpenMP threads, and only one.
        out = run_on_compute_worker(generate)
        rows = out[:, longest_in:].tolist()
        tokens = tuple(tuple(row[: ask.max_tokens]) for row, ask in zip(rows, workload.asks, strict=True))
        return Result(tokens, workload.longest)
