"""Sampled answers that are held to a grammar, with drafts: each token has the target's law over the allowed tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.models import LoadedModel
from tests.engine.drafters import drawn, ngram
from tests.engine.engine_helpers import VOCAB, ids, replaced_model, tiny_llm
from tests.engine.grammars import token_of
from tests.kernels.draws import chi_square_z

pytestmark = pytest.mark.slow

DRAWS = 40_000
LENGTH = 240
FIRST, SECOND = ([token_of(char) for char in chars] for chars in ("abcd", "cdef"))
"""What the grammar allows at even and at odd places: two tokens at both, so that a draft is refused now and then."""
DRAWN = drawn(3)
CASES = [
    (*side, spec, method)
    for *side, spec in (("v1", "plain", ngram(3)), ("v2", "overlapped", ngram(3)), ("v2", "overlapped", DRAWN))
    for method in ("standard", "block")
]


@pytest.mark.parametrize(("runner", "loop", "spec", "method"), CASES)
def test_drafts_change_no_law(runner: str, loop: str, spec: dict[str, Any], method: str, loaded: LoadedModel) -> None:
    """The target says the same everywhere, mostly what is forbidden; so does the drafter, something else. Then the
    places are independent draws, and neighbours tell whether accepted drafts and corrections come as they should."""
    generator = torch.Generator().manual_seed(11)
    target, draft = torch.randn(2, VOCAB, generator=generator) * 0.7
    for tokens, logits in ((FIRST + SECOND, target), (FIRST + SECOND, draft)):
        logits[tokens] += 4
    params = SamplingParams(
        temperature=0.8, max_tokens=LENGTH, structured_outputs={"regex": "([a-d][c-f]){200}"}, detokenize=False
    )
    config: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 128, "max_num_batched_tokens": 1024}
    config |= {"num_gpu_blocks_override": 4097, "block_size": 16}
    speculative_config = spec["speculative_config"] | {"rejection_sample_method": method}
    with tiny_llm(runner, loop, loaded=loaded, speculative_config=speculative_config, **config) as llm:
        if spec is DRAWN:
            llm.core.runner.decoder._model.compute_logits = lambda hidden: draft.repeat(hidden.shape[0], 1)
        with replaced_model(llm, compute_logits=lambda hidden: target.repeat(hidden.shape[0], 1)):
            outputs = llm.generate([ids(token_of("a"))] * -(-DRAWS // LENGTH), params, use_tqdm=False)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert DRAWS // 10 < accepted < drafted - DRAWS // 50, "drafts are accepted and refused"
    texts = torch.tensor([output.outputs[0].token_ids for output in outputs])
    assert texts.shape[1] == LENGTH and texts.numel() >= DRAWS
    probs = (target.double() / 0.8).exp()
    for own, behind, offset in ((FIRST, SECOND, 0), (SECOND, FIRST, 1)):
        pairs = list(itertools.product(own, behind))
        law = torch.tensor([float(probs[one] * probs[other]) for one, other in pairs], dtype=torch.float64)
        firsts, seconds = texts[:, offset : LENGTH - 1 : 2], texts[:, offset + 1 :: 2]
        counts = torch.tensor([int(((firsts == one) & (seconds == other)).sum()) for one, other in pairs])
        assert int(counts.sum()) == firsts.numel(), "nothing is said that the grammar forbids"
        assert abs(chi_square_z(counts, law / law.sum() * firsts.numel())) < 3.3
