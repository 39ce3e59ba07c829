"""The comparison itself: both runners of this engine and the peer, workload by workload, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.models import weight_bytes
from engine.sampling_params import SamplingParams

from .machine import commit, device_name, versions
from .measure import Result, Side, Timing, agreement, interleave
from .workload import Workload, workloads

if TYPE_CHECKING:
    from engine import LLM


@dataclass(frozen=True)
class Row:
    """One side of one workload, judged beside the peer."""

    side: str
    timing: Timing
    ratio: float
    """Tokens per second over the peer's."""
    same_tokens: tuple[int, int]
    """Tokens before the first difference from the peer's, and all."""


@dataclass(frozen=True)
class Report:
    about: dict[str, str]
    weight_bytes: int
    peer: str
    repeats: int
    rows: dict[Workload, tuple[Row, ...]]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; times in seconds, rates in tokens/s and GB/s."""
        return {
            "about": self.about,
            "weight_bytes": self.weight_bytes,
            "peer": self.peer,
            "repeats": self.repeats,
            "workloads": [
                {"name": workload.name, "what": str(workload), "sides": [self._row(row) for row in rows]}
                for workload, rows in self.rows.items()
            ],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        timing = row.timing
        return {
            "side": row.side,
            "tokens_per_second": {"median": timing.tokens_per_second, "min": timing.spread[0], "max": timing.spread[1]},
            "ms_per_step": timing.ms_per_step,
            "steps": timing.steps,
            "weight_bandwidth": timing.bandwidth(self.weight_bytes),
            "ratio": row.ratio,
            "same_tokens": {"before_first_difference": row.same_tokens[0], "all": row.same_tokens[1]},
            "seconds": list(timing.seconds),
            "warm_up": timing.warm_up,
        }


class Engine:
    """One runner of this engine as a side of the comparison."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __call__(self, workload: Workload) -> Result:
        before = self._llm.core.step_count
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(ask.prompt_token_ids)} for ask in workload.asks],
            [
                SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False)
                for ask in workload.asks
            ],
            use_tqdm=False,
        )
        tokens = tuple(output.outputs[0].token_ids for output in outputs)
        # The overlapped loop ends with a step that only fetches: no forward pass, so none of the weights are read.
        only_fetching = 1 if self._llm.config.async_scheduling else 0
        return Result(tokens, self._llm.core.step_count - before - only_fetching)


def compare(engines: Mapping[str, LLM], *, peer: str, repeats: int) -> Report:
    """Measures every engine and the peer on each workload, in turn. All engines share one set of weights."""
    from .transformers_peer import TransformersPeer

    first = next(iter(engines.values()))
    loaded, config = first.loaded, first.config
    if loaded.source is None or loaded.tokenizer is None:
        raise ValueError(
            f"bench needs a real checkpoint with its tokenizer; {loaded.name!r} has random weights or no tokenizer"
        )
    sides: dict[str, Side] = {name: Engine(llm) for name, llm in engines.items()}
    sides[peer] = TransformersPeer(loaded.source, config.torch_dtype)
    rows = {}
    for workload in workloads(loaded.tokenizer.encode):
        timings = interleave(workload, sides, repeats)
        theirs = timings[peer]
        rows[workload] = tuple(
            Row(name, t, t.tokens_per_second / theirs.tokens_per_second, agreement(t.token_ids, theirs.token_ids))
            for name, t in timings.items()
        )
    about = {
        "device": device_name(config.torch_device),
        "model": loaded.name,
        "dtype": str(config.torch_dtype).removeprefix("torch."),
        "commit": commit(),
        **versions("torch", peer),
    }
    return Report(about, weight_bytes(loaded.config, config.torch_dtype), peer, repeats, rows)
