"""Random requests that ask for everything, random engines with every way of drafting, and drafts that are mostly right.

A case follows from its seed alone. What a request is to stop at is taken from what it would say without it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.models import LoadedModel, Tokenizer, load_model
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from tests.engine.drafters import random_head
from tests.engine.dspark.golden import ROOT
from tests.engine.engine_helpers import EOS, TraceRequest, ids, make_llm
from tests.engine.tiny_text import letters

TARGET, DRAFT = ROOT / "vanilla" / "target", ROOT / "vanilla" / "draft"
MAX_LEN, VOCAB = 48, 256
REGEXES = ("[a-e]{3,8}", "(ab|ba)+c", "(abc[d-f]){4}", "[a-z]{10}( [a-z]{2})*")


class Lean(LogitsProcessor):
    """Prefers a token that depends on every one before."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        known = torch.arange(rows.token_ids.shape[1]) < rows.lens.unsqueeze(1)
        best = (rows.token_ids * known).sum(1, keepdim=True) % logits.shape[1]
        return logits.scatter_add(1, best, torch.full(best.shape, 5.0))


LEAN = Lean()


@cache
def target() -> LoadedModel:
    model = load_model(TARGET, dtype=torch.float32, device=torch.device("cpu"), skip_tokenizer_init=True)
    return dataclasses.replace(model, tokenizer=Tokenizer(letters(), {}, None, [EOS]))


@cache
def _mtp_head() -> str:
    return random_head(target())


@cache
def _plain_llm(runner: str) -> LLM:
    return make_llm(runner, "plain", target(), max_model_len=MAX_LEN, max_num_seqs=1, enable_prefix_caching=False)


@lru_cache(maxsize=4096)
def alone(runner: str, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    """The right answer: the request alone, without drafts, on the plain loop, nothing cached."""
    return _plain_llm(runner).generate(ids(*prompt), params, use_tqdm=False)[0]


@dataclass(frozen=True)
class Case:
    """`bumps`: how a step may go wrong. `timing`, `captured`, `watched`: of the device, its steps, its events."""

    runner: str
    trace: list[TraceRequest]
    config: dict[str, Any]
    loop: str
    timing: str
    captured: bool
    watched: bool
    bumps: tuple[str, ...]

    def has_one_answer(self, params: SamplingParams) -> bool:
        """It is the same with drafts and without; what is drawn has the same law then, and no more."""
        return params.temperature == 0 or self.config["speculative_config"] is None


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    runner, loop = rng.choice([("v1", "plain"), ("v1", "overlapped"), *[("v2", "plain"), ("v2", "overlapped")] * 2])
    spec = None if (runner, loop) == ("v1", "overlapped") else _speculative_config(rng, runner)
    openings = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (0, 4, 8, 11)]
    longest, trace = rng.choice((4, 12, 30)), []
    for i in range(rng.randint(3, 9)):
        prompt = tuple([*rng.choice(openings), *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8)))])
        params = _params(rng, runner, prompt, rng.randint(1, longest), greedy=rng.random() < (0.8 if spec else 0.5))
        abort_at = rng.choice((None, None, None, rng.randint(0, 20)))
        trace.append(TraceRequest(f"r{i}", prompt, params, rng.randint(0, 8), abort_at, rng.randint(0, 2)))
    block_size, max_num_seqs = rng.choice((1, 3, 4, 8)), rng.choice((1, 3, 6, 6))
    budget = max(max_num_seqs, rng.choice((1, 5, 12, 64)))
    tokens = max(min(MAX_LEN, len(one.prompt) + (one.params.max_tokens or 0)) for one in trace)
    config = {
        "block_size": block_size, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget,
        "num_gpu_blocks_override": 1 - (-tokens // block_size) + rng.choice((0, 0, 1, 3, 40)),
        "enable_prefix_caching": rng.random() < 0.75, "scheduling_policy": rng.choice(("fcfs", "priority")),
        "enable_chunked_prefill": budget < MAX_LEN or rng.random() < 0.5, "max_model_len": MAX_LEN,
        "skip_tokenizer_init": True, "speculative_config": spec,
    }  # fmt: skip
    captured = runner == "v2" and rng.random() < 0.4
    if captured:
        config["cudagraph_capture_sizes"] = tuple(n for n in (1, 2, 4) if n <= max_num_seqs)
    timing, watched = rng.choice(("threads", "late")), rng.random() < 0.3
    bumps = tuple(bump for bump in ("interrupt", "failure", "generate") if rng.random() < 0.25)
    return Case(runner, trace, config, loop, timing, captured, watched, bumps)


def _params(rng: random.Random, runner: str, prompt: tuple[int, ...], max_tokens: int, greedy: bool) -> SamplingParams:
    some = rng.sample(range(3, VOCAB), 12)
    features: list[dict[str, Any]] = [
        {"min_tokens": rng.randint(0, max_tokens)}, {"logprobs": rng.choice((0, 3, 40))},
        {"prompt_logprobs": rng.choice((0, 2))}, {"repetition_penalty": rng.choice((0.7, 1.3))},
        {"presence_penalty": 0.6, "frequency_penalty": rng.choice((-0.3, 0.4))},
        {"logit_bias": {some[0]: 4, some[1]: 4}},
        {"allowed_token_ids": some}, {"bad_words_token_ids": [some[:1], some[1:3]]}, {"logits_processors": [LEAN]},
        {"detokenize": False}, {"structured_outputs": {"regex": rng.choice(REGEXES)}},
    ]  # fmt: skip
    asked: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": rng.random() < 0.6}
    asked |= {"temperature": 0} if greedy else {"temperature": 0.8, "top_k": rng.choice((0, 20)), "seed": max_tokens}
    for feature in rng.sample(features, rng.choice((0, 0, 1, 1, 2))):
        asked |= feature
    if "structured_outputs" in asked:
        asked = {key: asked[key] for key in asked.keys() - {"min_tokens", "allowed_token_ids"}} | {"ignore_eos": False}
    said = alone(runner, prompt, SamplingParams(**asked)).outputs[0]
    if rng.random() < 0.3:
        asked["stop_token_ids"] = [rng.choice(said.token_ids), some[3]]
    if said.text and rng.random() < 0.4:
        begin = rng.randrange(len(said.text))
        asked["stop"] = [said.text[begin : begin + rng.randint(1, 5)], "zz"]
    return SamplingParams(**asked)


def _speculative_config(rng: random.Random, runner: str) -> dict[str, Any] | None:
    count = {"num_speculative_tokens": rng.randint(1, 5)}
    specs: list[dict[str, Any] | None] = [
        None, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **count},
        {"method": "draft_model", "model": str(TARGET), **count}, {"method": "mtp", "model": _mtp_head()},
    ]  # fmt: skip
    if runner == "v2":
        dspark = {"method": "dspark", "model": str(DRAFT), **count}
        specs += [{"method": "dspark", "draft": "lookup", **count}, dspark]
        specs += [dspark | {"verification_schedule": "threshold", "confidence_threshold": 0.5}]
        specs += [dspark | {"verification_schedule": schedule} for schedule in ("early_stop", "budgeted")]
    spec = rng.choice(specs)
    return spec if spec is None else spec | {"rejection_sample_method": rng.choice(("standard", "block"))}


def install_right_drafts(llm: LLM, case: Case, seed: int) -> None:
    """From now on the drafter mostly proposes what the request will say, as a model of random weights never would."""
    answers = [one.prompt + alone(case.runner, one.prompt, one.params).outputs[0].token_ids for one in case.trace]
    decoder = llm.core.runner.decoder
    propose, propose_from_tokens = decoder.propose, decoder.propose_from_tokens

    def right(tokens: tuple[int, ...], count: int) -> list[int]:
        known = next((one for one in answers if len(one) > len(tokens) and one[: len(tokens)] == tokens), tokens)
        rng = random.Random(f"{seed} {tokens}")
        count = min(count, MAX_LEN - len(tokens))
        return [t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in known[len(tokens) :][:count]]

    def on_device(step: Any) -> torch.Tensor:
        drafts = propose(step).clone()
        for i, row in enumerate(step.idx_mapping.tolist()):
            if step.num_sampled[i] > 0 and row < case.config["max_num_seqs"]:
                tokens = step.rows.all_token_ids[row, : step.rows.total_len[row]].tolist()
                if own := right(tuple(tokens), drafts.shape[1]):
                    drafts[i] = torch.tensor(own + [-1] * (drafts.shape[1] - len(own)))
            if decoder.confidences is not None:
                decoder.confidences[row] = torch.rand(drafts.shape[1]) * (drafts[i] >= 0)
        return drafts

    def on_host(tokens: Sequence[Any]) -> list[list[int]]:
        return [
            right(tuple(own.tolist()), decoder.num_drafts) or drafts
            for own, drafts in zip(tokens, propose_from_tokens(tokens), strict=True)
        ]

    if llm.core.use_v2:
        decoder.propose, decoder.keeps_drafts = on_device, False
    elif decoder.on_host:
        decoder.propose_from_tokens = on_host
