"""The whole engine on a CUDA device: waits, parity, numbers against float32, and memory that nobody may read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention import allocate_kv_cache
from engine.hooks import Event
from engine.models import CausalLM, LoadedModel, load_model
from engine.models.rope import RotaryEmbedding
from tests.engine.attention.batches import make_batch
from tests.engine.drafters import random_head
from tests.engine.engine_helpers import note_drafts

pytestmark = pytest.mark.gpu
MODEL = "qwen3-0.6b"
ENGINE = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 600,
          "skip_tokenizer_init": True, "cudagraph_capture_sizes": (1, 4, 16)}  # fmt: skip


def prompts(count: int, longest: int, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(5000) for _ in range(draw.randint(1, longest))]} for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def tokens(llm: LLM, asked: list[dict[str, list[int]]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(
        MODEL, dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", skip_tokenizer_init=True
    )


@pytest.fixture
def engine(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(loaded=loaded, **ENGINE | request.param)
    yield llm
    llm.close()


@pytest.mark.parametrize("engine", [{"use_v2_model_runner": True}], indirect=True)
@pytest.mark.parametrize("observed", [False, True])
def test_v2_never_waits_inside_a_step(engine: LLM, observed: bool) -> None:
    """Torch raises where it would synchronise, and the engine's own counter stays at zero."""
    with engine.hooks.subscribe(Event, lambda event: None) if observed else engine.hooks.subscribe((), print):
        for prompt in prompts(12, 300):
            engine.add(prompt, SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, ignore_eos=True))
        torch.cuda.set_sync_debug_mode("error")
        try:
            while engine.core.has_unfinished():
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.core.device.waits.inside_step == {} and engine.core.device.waits.outside_step["output"] > 20
    assert engine.hooks.errors == []


@pytest.mark.parametrize(("async_scheduling", "enforce_eager"), [(True, False), (False, True)])
def test_the_runners_agree(loaded: LoadedModel, async_scheduling: bool, enforce_eager: bool) -> None:
    """Chunked prompts, prefix hits, more requests than rows, and too few blocks for all of them at once."""
    asked = prompts(24, 400, seed=1)
    asked += [{"prompt_token_ids": asked[0]["prompt_token_ids"] + [7, 8]}, asked[1]]
    results = []
    for v2 in (False, True):
        keywords = ENGINE | {"async_scheduling": async_scheduling, "enforce_eager": enforce_eager}
        llm = LLM(loaded=loaded, use_v2_model_runner=v2, **keywords | {"num_gpu_blocks_override": 120})
        results.append(tokens(llm, asked, greedy(40)))
        llm.core.check_integrity()
        llm.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_v1s_drafts_are_those_piece_by_piece(loaded: LoadedModel, method: str) -> None:
    """Its drafter is captured behind each size of its forward; ten requests run at the size of sixteen."""
    spec: dict[str, Any] = {"method": method, "model": MODEL, "num_speculative_tokens": 3}
    if method == "mtp":
        spec = {"method": method, "model": random_head(loaded)}
    results = []
    for eager in (False, True):
        keywords = ENGINE | {"async_scheduling": False, "enforce_eager": eager, "speculative_config": spec}
        llm = LLM(loaded=loaded, use_v2_model_runner=False, **keywords)
        drafts = note_drafts(llm)
        results.append((tokens(llm, prompts(10, 60, seed=2), greedy(24)), drafts))
        llm.core.check_integrity()
        llm.close()
    assert results[0] == results[1] and any(results[0][1])


@pytest.mark.parametrize("engine", [{"use_v2_model_runner": v2} for v2 in (False, True)], indirect=True)
def test_nobody_reads_what_nobody_wrote(engine: LLM) -> None:
    """NaN in the null block, in every block that no request owns and in V2's padding row: the tokens stay."""
    asked = prompts(9, 200, seed=2)  # nine: a captured batch of sixteen has seven rows of padding
    before = tokens(engine, asked, greedy(30))
    engine.core.scheduler.kv_cache.reset_prefix_cache()
    engine.core.worker.kv_cache.fill_(float("nan"))
    assert tokens(engine, asked, greedy(30)) == before
    assert engine.core.worker.kv_cache[:, :, 0].isnan().all(), "nothing wrote into the null block"


def test_bfloat16_logits_stay_near_float32() -> None:
    """Against the plain layers in float32, on the same rounded weights: prompts and two decodes.

    Random weights amplify what 28 layers round; plain bfloat16 layers are off by a tenth of the logits' spread in the
    mean. The fused step may be off by no more than a tenth more than those.
    """
    half, whole = (
        load_model(MODEL, dtype=dtype, device=torch.device("cpu"), load_format="dummy", skip_tokenizer_init=True).model
        for dtype in (torch.bfloat16, torch.float32)
    )
    with torch.inference_mode():
        for rounded_weight, weight in zip(weights(half), weights(whole), strict=True):
            weight.copy_(rounded_weight)
    whole.triton_attention = None
    exact, fused = run(whole), run(half)
    half.triton_attention = None
    plain_error, error = (run(half) - exact).abs().mean(), (fused - exact).abs().mean()
    assert error < 0.15 * exact.std() and error < 1.1 * plain_error, (error, plain_error, exact.std())


def weights(module: object) -> Iterator[torch.Tensor]:
    """Every weight below `module`; the angles of RoPE are none."""
    for value in vars(module).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, torch.Tensor):
                yield part
            elif type(part).__module__.startswith("engine.models") and not isinstance(part, RotaryEmbedding):
                yield from weights(part) if hasattr(part, "__dict__") else ()


def run(model: CausalLM) -> torch.Tensor:
    """Float32 logits [6, V] of two requests: chunks of 40 and 3 tokens, then two decodes each."""
    cache = allocate_kv_cache(model.config, 26, 16, model.dtype, model.device)
    ids = torch.randint(0, 5000, (2, 64), generator=torch.Generator().manual_seed(1)).int()
    done, out = [0, 0], []
    for step in ([40, 3], [1, 1], [1, 1]):
        tables = [[3, 7, 1, 9], [2, 8, 4, 6]]
        positions, metadata = make_batch([(done[i], step[i]) for i in (0, 1)], tables, 16, device="cuda")
        flat = torch.cat([ids[i, done[i] : done[i] + step[i]] for i in (0, 1)]).cuda()
        with torch.inference_mode():
            hidden = model(flat, positions, metadata, cache)
            out.append(model.compute_logits(hidden[[step[0] - 1, sum(step) - 1]]).float())
        done = [a + b for a, b in zip(done, step, strict=True)]
    return torch.cat(out)
