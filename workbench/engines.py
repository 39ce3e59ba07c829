"""The engines of a session: one a runner, on one copy of the weights, each with its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from engine import LLM, ConfigError

from .prompts import SessionRequest
from .runner_log import RunnerLog

Runner = Literal["v1", "v2"]
RUNNERS: tuple[Literal["v1"], Literal["v2"]] = ("v1", "v2")
WITH_MODEL = ("model", "tokenizer", "load_format")
WEIGHTS = ("model", "tokenizer", "loaded", "dtype", "device", "load_format", "seed", "skip_tokenizer_init")
"""The keywords that decide what is loaded; while they stay, a new start keeps the weights."""


def runner_names(runners: str | Iterable[str]) -> tuple[Runner, ...]:
    """Those that were asked for, V1 first; ValueError for anything else."""
    asked = RUNNERS if runners == "both" else (runners,) if isinstance(runners, str) else tuple(runners)
    if not asked or any(name not in RUNNERS for name in asked):
        raise ValueError(f"runners={runners!r}: possible are 'v1', 'v2', 'both' and ('v1', 'v2')")
    return tuple(name for name in RUNNERS if name in asked)


def start_logs(
    names: Sequence[Runner],
    keywords: Mapping[str, Any],
    before: Sequence[RunnerLog] = (),
    keywords_before: Mapping[str, Any] | None = None,
) -> list[RunnerLog]:
    """Engines for these runners. They share one copy of the weights: that of the engines `before`, if they were made
    with keywords that load the same. ConfigError, and none of them, for keywords that no engine takes."""
    for key, instead in (
        ("use_v2_model_runner", "runners='v1' or 'v2'"),
        ("keep_finished", "nothing: it is always on"),
    ):
        if key in keywords:
            raise ConfigError(f"{key} is the session's to choose; give {instead}")
    loaded = keywords.get("loaded")
    if before and all(keywords.get(key) == (keywords_before or {}).get(key) for key in WEIGHTS):
        loaded = before[0].llm.loaded
    logs: list[RunnerLog] = []
    try:
        for name in names:
            own = {**keywords, "loaded": loaded, "use_v2_model_runner": name == "v2", "keep_finished": True}
            if loaded is not None:
                own = {key: value for key, value in own.items() if key not in WITH_MODEL}
            llm = LLM(**own)
            loaded = llm.loaded
            logs.append(RunnerLog(name, llm))
    except BaseException:
        for log in logs:
            log.close()
        raise
    return logs


def expect(logs: Sequence[RunnerLog], requests: Sequence[SessionRequest]) -> None:
    """Every request to every runner, or an error and none."""
    for request in requests:
        for log in logs:
            log.check(request)
    for request in requests:
        for log in logs:
            log.expect(request)
