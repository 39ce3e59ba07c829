"""The standard workloads on both runners: ceilings, starts, timed and observed runs and the peer, in one report."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.attention import kv_bytes_per_token
from engine.config import EngineConfig
from engine.hooks import Event
from engine.models import LoadedModel, weight_bytes

from .ceilings import Ceilings, measure_ceilings
from .machine import commit, device_name, driver_version, versions
from .measure import Paired, Timing
from .peer_vllm import PeerResult, run_vllm
from .profile import Profile, profile_steps
from .runs import EngineRuns, Run
from .startup import StartUp, load, start, start_again
from .step_costs import SUMMARY_EVENTS, StepCostObserver, StepCosts
from .workloads import WorkloadSpec

MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4096
GPU_BATCHED_TOKENS = 16384
"""vLLM's default for offline use on a GPU of this size."""
MORE_PAIRS = 2
"""With `observe` there are so many more turns: a difference of a percent wants more than three pairs."""


@dataclass(frozen=True)
class Plan:
    """What to measure. `model`: `startup.load`'s keywords; `engine`: keywords of LLM beside those."""

    specs: tuple[WorkloadSpec, ...]
    runners: tuple[str, ...]
    repeats: int
    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    peer: bool = False
    observe: bool = False
    warm_start: bool = False
    profile: Path | None = None
    commit: str | None = None

    @property
    def turns(self) -> int:
        """How often our own engines take turns."""
        return self.repeats + MORE_PAIRS * self.observe


@dataclass(frozen=True)
class Inside:
    """What only our own engine shows. `observed`: by level, runs beside unobserved ones. At level "summary" a log of
    SUMMARY_EVENTS is kept, which is read when the run is over; at "every event" an observer is called for each."""

    runs: tuple[Run, ...]
    costs: StepCosts
    profile: Profile | None
    saved: Path | None
    observed: dict[str, Observed]


@dataclass(frozen=True)
class Observed:
    """`runs`: (unobserved, observed), one after the other, in turns the one and the other first."""

    runs: tuple[tuple[Run, Run], ...]

    @property
    def paired(self) -> Paired:
        return Paired(tuple((alone.seconds, observed.seconds) for alone, observed in self.runs))

    @property
    def read_us_per_step(self) -> float:
        """What reading the logs took afterwards."""
        observed = [run for _, run in self.runs]
        return sum(run.read_seconds for run in observed) / sum(run.steps for run in observed) * 1e6


@dataclass(frozen=True)
class Side:
    name: str
    timing: Timing
    inside: Inside | None = None


@dataclass(frozen=True)
class WorkloadResult:
    """`weight_bytes` and `kv_bytes`: what one step must read, the KV at the mean context of all requests."""

    spec: WorkloadSpec
    weight_bytes: int
    kv_bytes: int
    sides: tuple[Side, ...]

    @property
    def bytes_per_step(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class SuiteReport:
    about: dict[str, str]
    ceilings: Ceilings
    starts: dict[str, StartUp]
    peer_starts: dict[str, float]
    repeats: int
    workloads: tuple[WorkloadResult, ...]


def run_suite(plan: Plan, on_workload: Callable[[SuiteReport], None] | None = None) -> SuiteReport:
    """Measures everything in `plan`. The peer runs first, while the device's memory is free; our engines then share
    one copy of the weights and take turns; starts in fresh processes, whose disk caches are warm by then, come last.

    `on_workload` gets the report so far whenever a workload is done. Raises ValueError for what cannot be,
    RuntimeError if a side fails or makes other tokens than it was asked for.
    """
    EngineConfig.from_kwargs(**plan.model, **plan.engine)  # refuses what cannot be before anything is loaded
    loaded, weights = load(plan.model)
    device = loaded.model.embed_tokens.weight.device
    keywords = _keywords(plan, loaded, device)
    sizes = keywords["max_num_seqs"], keywords["max_model_len"]
    peers = [run_vllm(plan.specs, r, plan.repeats, loaded, *sizes) for r in plan.runners] if plan.peer else []
    prompt = list(plan.specs[0].first_ask(loaded.config.vocab_size).prompt_token_ids)
    chosen = {runner: {**keywords, "use_v2_model_runner": runner == "v2"} for runner in plan.runners}
    engines: dict[str, EngineRuns] = {}
    starts: dict[str, StartUp] = {}
    with contextlib.ExitStack() as stack:
        for runner in plan.runners:
            llm, starts[runner] = start(loaded, weights, None, chosen[runner], prompt)
            stack.callback(llm.close)
            engines[runner] = EngineRuns(llm)
        peer_starts = {peer.side: peer.to_first_token for peer in peers}
        about = _about(plan, loaded, keywords)
        report = SuiteReport(about, measure_ceilings(device), starts, peer_starts, plan.turns, ())
        for spec in plan.specs:
            result = _measure(plan, spec, loaded, engines, peers)
            report = replace(report, workloads=(*report.workloads, result))
            if on_workload:
                on_workload(report)
    if plan.warm_start:
        fresh = {f"{runner}, fresh process": start_again(plan.model, chosen[runner], prompt) for runner in chosen}
        report = replace(report, starts=starts | fresh)
    return report


def _keywords(plan: Plan, loaded: LoadedModel, device: torch.device) -> dict[str, Any]:
    """LLM's keywords: the peers' sizes, and a KV cache in which the largest workload fits, so that both engines do."""
    defaults: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": min(MAX_MODEL_LEN, loaded.config.max_position_embeddings),
        "block_size": 16,
    }
    if device.type == "cuda":
        defaults["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
    keywords = defaults | dict(plan.engine)
    for spec in plan.specs:
        if spec.longest > keywords["max_model_len"]:
            raise ValueError(
                f"workload {spec.name} has a request of {spec.longest} tokens and {loaded.name!r} runs with "
                f"max_model_len={keywords['max_model_len']}; lower --input-len and --output-len"
            )
    most = max(spec.blocks(keywords["block_size"]) for spec in plan.specs)
    return {"num_gpu_blocks_override": most + most // 10 + keywords["max_num_seqs"]} | keywords


def _measure(
    plan: Plan, spec: WorkloadSpec, loaded: LoadedModel, engines: dict[str, EngineRuns], peers: list[PeerResult]
) -> WorkloadResult:
    """One warm-up of each engine, then all take turns: what drifts, drifts for all alike."""
    warm_ups = {runner: engine.run(spec).seconds for runner, engine in engines.items()}
    runs: dict[str, list[Run]] = {runner: [] for runner in engines}
    pairs: dict[str, dict[str, list[tuple[Run, Run]]]] = {runner: {} for runner in engines}
    for turn in range(plan.turns):
        for runner, engine in engines.items():
            if not plan.observe:
                runs[runner].append(engine.run(spec))
                continue
            alone, observed = _take_turn(engine, spec, turn)
            runs[runner].append(alone)
            for level, run in observed.items():
                pairs[runner].setdefault(level, []).append((alone, run))
    sides = []
    for runner, engine in engines.items():
        seconds = tuple(run.seconds for run in runs[runner])
        timing = Timing(seconds, warm_ups[runner], spec.steps, spec.output_tokens, ())
        costs = engine.step_costs(spec)
        profile, saved = _profiled(plan, spec, runner, engine)
        levels = {level: Observed(tuple(done)) for level, done in pairs[runner].items()}
        sides.append(Side(runner.upper(), timing, Inside(tuple(runs[runner]), costs, profile, saved, levels)))
    sides += [Side(peer.side, peer.timings[spec.name]) for peer in peers]
    dtype = loaded.model.embed_tokens.weight.dtype
    kv_bytes = spec.context_tokens * kv_bytes_per_token(loaded.config, dtype) // spec.steps
    return WorkloadResult(spec, weight_bytes(loaded.config, dtype), kv_bytes, tuple(sides))


def _take_turn(engine: EngineRuns, spec: WorkloadSpec, turn: int) -> tuple[Run, dict[str, Run]]:
    """An unobserved run with an observed one before or behind it. In one turn a third follows, at every event: it takes
    long, and what it costs is no matter of a percent."""
    if turn % 2 == 0:
        alone = engine.run(spec)
        return alone, {"summary": engine.run(spec, SUMMARY_EVENTS)}
    summary = engine.run(spec, SUMMARY_EVENTS)
    alone = engine.run(spec)
    observed = {"summary": summary}
    if turn == 1:
        observed["every event"] = engine.run(spec, (Event,), StepCostObserver())
    return alone, observed


def _profiled(plan: Plan, spec: WorkloadSpec, runner: str, engine: EngineRuns) -> tuple[Profile | None, Path | None]:
    """On a GPU always, since only the profiler knows what ran there; elsewhere if a trace is wanted."""
    if plan.profile is None and not engine.llm.core.device.is_cuda:
        return None, None
    profile = profile_steps(engine, spec)
    if plan.profile is None:
        return profile, None
    path, several = plan.profile, len(plan.specs) * len(plan.runners) > 1
    if several:
        path = path.with_name(f"{path.stem}-{spec.name}-{runner}{path.suffix}")
    profile.save(path)
    return profile, path


def _about(plan: Plan, loaded: LoadedModel, keywords: dict[str, Any]) -> dict[str, str]:
    weight = loaded.model.embed_tokens.weight
    about = {"device": device_name(weight.device)}
    if weight.device.type == "cuda":
        about["driver"] = driver_version()
    peers = ("vllm",) if plan.peer else ()
    return about | {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": plan.commit or commit(),
        "model": f"{loaded.name}, {loaded.load_format} weights, {str(weight.dtype).removeprefix('torch.')}",
        "engine": ", ".join(f"{key}={value}" for key, value in keywords.items()),
        **versions("torch", "triton", "numpy", *peers),
    }
