"""Every way of drafting that a tiny engine has, and what it is tried on."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import LoadedModel
from engine.spec_decode.mtp_checkpoint import init_weights, mtp_config, write_mtp
from tests.engine.engine_helpers import LOOPS, prompt_of, tiny_model

SIDES = [("v1", "plain"), ("v2", "plain"), ("v2", "overlapped")]
sides = pytest.mark.parametrize(("runner", "loop"), SIDES)


def ngram(k: int, longest: int = 3) -> dict[str, Any]:
    spec = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1, "prompt_lookup_max": longest}
    return {"speculative_config": spec}


def lookup(k: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "dspark", "draft": "lookup", "num_speculative_tokens": k}}


def itself(k: int) -> dict[str, Any]:
    """The target as its own draft model: it draws what the target draws."""
    return {"speculative_config": {"method": "draft_model", "model": "tiny-llama", "num_speculative_tokens": k}}


def drawn(k: int) -> dict[str, Any]:
    """The target as its own draft model, which draws: from all tokens, so that a grammar has much to refuse."""
    return {"speculative_config": itself(k)["speculative_config"] | {"draft_sample_method": "probabilistic"}}


def random_head(target: LoadedModel) -> str:
    """The directory of an MTP head of random weights."""
    config, path = mtp_config(target.config), Path(tempfile.mkdtemp())
    write_mtp(path, config, init_weights(config, 3), torch.float32)
    return str(path)


@cache
def _tiny_head() -> str:
    return random_head(tiny_model())


def one_head(k: int) -> dict[str, Any]:
    """One head more, of random weights, with its one draft."""
    return {"speculative_config": {"method": "mtp", "model": _tiny_head()}}


def ruled(spec: dict[str, Any], method: str) -> dict[str, Any]:
    return {"speculative_config": spec["speculative_config"] | {"rejection_sample_method": method}}


OTHERS = [(*side, spec) for side in SIDES for spec in (itself, one_head)] + [("v2", loop, lookup) for loop in LOOPS]


def repeating(length: int, seed: int, period: int = 5) -> list[int]:
    """A prompt in which everything stood before."""
    return (prompt_of(period, seed) * length)[:length]


PROMPTS = [repeating(17, 1), prompt_of(9, 2), repeating(30, 3), prompt_of(4, 4), repeating(12, 5), prompt_of(21, 6)]
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "together": {},
    "one row": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "few blocks": {"num_gpu_blocks_override": 18},
    "small blocks": {"block_size": 1, "num_gpu_blocks_override": 120},
    "no prefix cache": {"enable_prefix_caching": False},
}
