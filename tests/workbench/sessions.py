"""Sessions on a tiny dummy model, for the tests of what drives an engine."""

from __future__ import annotations

from typing import Any

from engine import SamplingParams
from workbench import Session

TINY: dict[str, Any] = {
    "model": "tiny-llama",
    "load_format": "dummy",
    "block_size": 4,
    "num_gpu_blocks_override": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "max_model_len": 96,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def prompt(start: int, length: int, **more: Any) -> dict[str, Any]:
    """A prompt of `length` token ids."""
    return {"prompt_token_ids": [(start * 11 + i * 7) % 300 for i in range(length)], **more}


def tiny_session(prompts: Any = None, **keywords: Any) -> Session:
    """Three requests: A in two chunks, B short, C beginning as A does and coming in step 4."""
    default = [prompt(1, 17), prompt(2, 3, max_tokens=3), prompt(1, 11, arrive_at_step=4)]
    given = {**TINY, "sampling_params": GREEDY, **keywords}
    return Session(default if prompts is None else prompts, **given)


def outputs(session: Session, runner: str) -> dict[str, tuple[int, ...]]:
    """Each request's output token ids at the cursor."""
    return {view.request_id: view.output_token_ids for view in session.record.runners[runner].snapshot.requests}
