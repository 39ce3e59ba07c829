"""What speculation is worth: the same prompts with each way of drafting and without, at several concurrencies."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import LLM, EngineConfig, SamplingParams
from engine.config import ConfigError
from engine.models import LoadedModel, ModelNotFoundError
from engine.worker import unsupported_features

from .closed_loop import LoopRun, count_rounds, run_closed_loop
from .machine import commit, device_name, driver_version, versions
from .measure import agreement
from .prompt_sets import PromptSet, in_turn, read_sets
from .speculation_plan import NONE, Method, SpeculationPlan
from .startup import build
from .suite import GPU_BATCHED_TOKENS, MAX_MODEL_LEN

_LOOKAHEAD = 64
"""Slots of a request beyond its answer: two steps in flight, each of which may keep all its drafts."""


@dataclass(frozen=True)
class Side:
    """One method on one runner at one concurrency. `runs`: the timed ones; `rounds`: by set of prompts, accepted drafts
    and passes in all of them; `same_tokens`: before the first difference from the answers without speculation, and
    all of those (None if they are sampled, or there is nothing to compare with)."""

    runner: str
    method: Method
    runs: tuple[LoopRun, ...]
    warm_up: float
    rounds: Mapping[str, tuple[int, int]]
    same_tokens: tuple[int, int] | None


@dataclass(frozen=True)
class ConcurrencyResult:
    concurrency: int
    requests: int
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class SpeculationReport:
    """`starts`: of each engine (by runner and label) the seconds until it was made, and of them those that capture
    took; `left_out`: sentences about what was asked for and isn't measured."""

    about: dict[str, str]
    methods: tuple[Method, ...]
    starts: dict[tuple[str, str], tuple[float, float]]
    left_out: tuple[str, ...]
    repeats: int
    results: tuple[ConcurrencyResult, ...]


Key = tuple[str, Method]
"""Runner and method."""


def run_speculation(
    plan: SpeculationPlan, on_result: Callable[[SpeculationReport], None] | None = None
) -> SpeculationReport:
    """Measures everything in `plan`: one engine for each runner and method, on one copy of the weights. At each
    concurrency every engine answers one wave to warm up (graphs are captured when it is made), then all take turns.

    `on_result` gets the report so far when the engines stand and whenever a concurrency is done. Raises ValueError
    (ConfigError, DataError) for what cannot be.
    """
    for method in plan.methods:
        if method.given:
            _check(plan, method)
    loaded, sets = _read(plan)
    left_out = [f"{s.name}: {s.left_out} prompts are too long and left out" for s in sets if s.left_out]
    with contextlib.ExitStack() as stack:
        starts: dict[tuple[str, str], tuple[float, float]] = {}
        engines = _engines(plan, loaded, _keywords(plan, loaded, sets), starts, left_out, stack)
        measured = {method for _, method in engines}
        methods = tuple(method for method in (NONE, *plan.methods) if method in measured)
        report = SpeculationReport(_about(plan, loaded, sets), methods, starts, tuple(left_out), plan.repeats, ())
        if on_result:
            on_result(report)
        for concurrency in plan.concurrency:
            result = _measure(plan, concurrency, engines, sets)
            report = replace(report, results=(*report.results, result))
            if on_result:
                on_result(report)
    return report


def _check(plan: SpeculationPlan, method: Method) -> None:
    EngineConfig.from_kwargs(**plan.model, **{**plan.engine, "speculative_config": method.config})


def _read(plan: SpeculationPlan) -> tuple[LoadedModel, list[PromptSet]]:
    """The weights, and the prompts as an engine on them reads them; that engine is too small to do more."""
    length = {"max_model_len": plan.engine["max_model_len"]} if "max_model_len" in plan.engine else {}
    small = {"max_num_seqs": 1, "num_gpu_blocks_override": 2, "enforce_eager": True, **length}
    reader = LLM(**plan.model, **small)
    try:
        loaded = reader.loaded
        if not length and loaded.config.max_position_embeddings > MAX_MODEL_LEN:
            reader.close()
            reader = LLM(loaded=loaded, **small, max_model_len=MAX_MODEL_LEN)
        return loaded, read_sets(reader, plan.files, plan.max_tokens)
    finally:
        reader.close()


def _keywords(plan: SpeculationPlan, loaded: LoadedModel, sets: Sequence[PromptSet]) -> dict[str, Any]:
    """LLM's: as many rows as the highest concurrency, and a KV cache that holds its longest requests at once."""
    most = max(plan.concurrency)
    defaults: dict[str, Any] = {
        "max_num_seqs": most,
        "max_model_len": min(MAX_MODEL_LEN, loaded.config.max_position_embeddings),
        "block_size": EngineConfig.block_size,
        # A repeat must not find its own prompt.
        "enable_prefix_caching": False,
    }
    if loaded.model.device.type == "cuda":
        defaults["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
    keywords = defaults | dict(plan.engine)
    longest = sorted(
        (
            len(prompt["prompt_token_ids"]) + plan.max_tokens + _LOOKAHEAD
            for _, prompt in in_turn(sets, max(map(plan.num_requests, plan.concurrency)))
        ),
        reverse=True,
    )[:most]
    blocks = sum(-(-length // keywords["block_size"]) for length in longest)
    return {"num_gpu_blocks_override": blocks + blocks // 10 + most} | keywords


def _engines(
    plan: SpeculationPlan,
    loaded: LoadedModel,
    keywords: dict[str, Any],
    starts: dict[tuple[str, str], tuple[float, float]],
    left_out: list[str],
    stack: contextlib.ExitStack,
) -> dict[Key, LLM]:
    """One for each runner and method that can be; `left_out` gets a sentence about each other."""
    engines: dict[Key, LLM] = {}
    missing: dict[str, list[str]] = {}
    for runner in plan.runners:
        for method in (NONE, *plan.methods):
            own = _own_keywords(keywords, runner, method)
            try:
                config = EngineConfig.from_kwargs(**plan.model, **own)
                problems = [] if method is NONE else unsupported_features(config, runner == "v2")
                if not problems:
                    llm, starts[runner, method.label] = build(loaded, own)
                    stack.callback(llm.close)
                    engines[runner, method] = llm
            except (ConfigError, ModelNotFoundError) as error:
                if method.given or method is NONE:
                    raise
                problems = [str(error)]
            if problems:
                missing.setdefault(f"{method.label} is left out: {' '.join(problems)}", []).append(runner.upper())
    left_out += [f"on {' and '.join(names)} {sentence}" for sentence, names in missing.items()]
    return engines


def _own_keywords(keywords: dict[str, Any], runner: str, method: Method) -> dict[str, Any]:
    own = {**keywords, "use_v2_model_runner": runner == "v2"}
    if method.config is not None:
        own["speculative_config"] = dict(method.config)
        if runner == "v1":  # its drafts need the tokens on the host
            own = {"async_scheduling": False} | own
    return own


def _measure(
    plan: SpeculationPlan, concurrency: int, engines: Mapping[Key, LLM], sets: Sequence[PromptSet]
) -> ConcurrencyResult:
    asks = in_turn(sets, plan.num_requests(concurrency))
    prompts = [prompt for _, prompt in asks]
    # No seeds: a seeded request would cost V1 a generator of its own.
    params = [SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens, detokenize=False)] * len(asks)
    warm_ups = {
        key: run_closed_loop(llm, prompts[:concurrency], params[:concurrency], concurrency).seconds
        for key, llm in engines.items()
    }
    runs: dict[Key, list[LoopRun]] = {key: [] for key in engines}
    for _ in range(plan.repeats):
        for key, llm in engines.items():
            runs[key].append(run_closed_loop(llm, prompts, params, concurrency))
    sides = []
    for (runner, method), own in runs.items():
        same = None
        if plan.temperature == 0.0 and method.config is not None:
            same = agreement(_tokens(own[0]), _tokens(runs[runner, NONE][0]))
        names = [name for name, _ in asks]
        rounds = count_rounds(names * len(own), [output for run in own for output in run.outputs])
        sides.append(Side(runner, method, tuple(own), warm_ups[runner, method], rounds, same))
    return ConcurrencyResult(concurrency, len(asks), tuple(sides))


def _tokens(run: LoopRun) -> tuple[tuple[int, ...], ...]:
    return tuple(output.outputs[0].token_ids for output in run.outputs)


def _about(plan: SpeculationPlan, loaded: LoadedModel, sets: Sequence[PromptSet]) -> dict[str, str]:
    device, weight = loaded.model.device, loaded.model.embed_tokens.weight
    about = {"device": device_name(device)} | ({"driver": driver_version()} if device.type == "cuda" else {})
    how = "greedy" if plan.temperature == 0.0 else f"temperature {plan.temperature:g}"
    return about | {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": plan.commit or commit(),
        "model": f"{loaded.name}, {loaded.load_format} weights, {str(weight.dtype).removeprefix('torch.')}",
        "prompts": ", ".join(f"{s.name} {len(s.prompts)}" for s in sets) + ("" if plan.files else " (built in)"),
        "answers": f"{how}, until they end or have {plan.max_tokens} tokens",
        **versions("torch", "triton"),
    }
