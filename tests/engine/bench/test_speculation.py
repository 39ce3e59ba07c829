"""`runnerscope bench --speculation`: what is asked, how it is counted, and one run on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import runnerscope
from engine import LLM, SamplingParams
from engine.bench import closed_loop
from engine.bench.closed_loop import LoopRun, accepted_length, count_rounds, run_closed_loop, tpot
from engine.bench.prompt_sets import PromptSet, in_turn, read_sets
from engine.bench.speculation_plan import DEFAULTS, default_requests
from engine.cli.bench_speculation import _methods
from engine.cli.terminal import UserError
from engine.dspark.data import DataError
from engine.hooks import Event, InputsPrepared
from engine.models import LoadedModel
from tests.engine.tiny_text import letters, text_model

pytestmark = pytest.mark.slow  # whole benchmarks, in miniature

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return text_model(folder, letters())


@pytest.fixture(params=["v1", "v2"])
def llm(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[LLM]:
    llm = LLM(
        loaded=loaded, use_v2_model_runner=request.param == "v2", max_num_seqs=8, num_gpu_blocks_override=64,
        max_model_len=128,
    )  # fmt: skip
    yield llm
    llm.close()


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [5 + i, 9, 11]} for i in range(count)]


def lengths(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=3 + i % 4, ignore_eos=True) for i in range(count)]


# -- the loop


def test_as_many_are_under_way_as_asked_and_answers_keep_their_order(llm: LLM) -> None:
    pairs = zip(prompts(7), lengths(7), strict=True)
    alone = [llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids for prompt, one in pairs]
    sizes: list[int] = []

    def note(event: Event) -> None:
        assert isinstance(event, InputsPrepared)
        sizes.append(event.num_reqs)

    with llm.hooks.subscribe((InputsPrepared,), note):
        run = run_closed_loop(llm, prompts(7), lengths(7), 3)
    assert [output.outputs[0].token_ids for output in run.outputs] == alone
    assert max(sizes) == 3 and sizes[0] == 3 and sizes[-1] < 3
    assert run.seconds > 0 and run.tokens_per_second == sum(map(len, alone)) / run.seconds
    assert run.steps >= len(sizes) and len(run.tpot) == 7 and all(0 <= t < run.seconds for t in run.tpot)
    assert bool(run.waits_inside) == (llm.core.hooks.runner == "v1")
    llm.core.check_integrity()
    assert not llm.core.scheduler.has_requests() and not llm.core.in_flight


def test_a_failure_leaves_the_engine_empty(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], llm.step

    def third_fails() -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("stop here")
        return step()

    monkeypatch.setattr(llm, "step", third_fails)
    with pytest.raises(RuntimeError, match="stop here"):
        run_closed_loop(llm, prompts(4), lengths(4), 2)
    monkeypatch.undo()
    assert not llm.core.has_unfinished()
    assert len(run_closed_loop(llm, prompts(4), lengths(4), 2).outputs) == 4


# -- the counts


def output(tokens: int, accepted: tuple[int, ...] = (), first: float = 1.0, last: float = 1.0) -> Any:
    metrics = SimpleNamespace(
        num_drafts=len(accepted), num_accepted_tokens=sum(accepted), accepted_per_round=accepted,
        first_token_time=first, last_token_time=last,
    )  # fmt: skip
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(range(tokens)))], metrics=metrics)


def test_every_pass_counts_with_drafts_or_without() -> None:
    # 10 tokens: one from the prefill, 3 + 1 + 2 of three rounds, 3 of passes that had no drafts.
    found = count_rounds(["a", "b", "a"], [output(10, (2, 0, 1)), output(5), output(1)])
    assert found == {"a": (3, 6), "b": (0, 4)}
    assert accepted_length([found["a"]]) == 1.5 == 9 / 6
    assert accepted_length(list(found.values())) == 1.3 and accepted_length([(0, 0)]) is None
    # The last round's tokens behind a stop were accepted and dropped: no pass is taken back for them.
    assert count_rounds(["a"], [output(3, (4,))]) == {"a": (4, 1)}


def test_tpot_leaves_the_first_token_out_and_takes_the_middle_run() -> None:
    def run(*outputs: Any) -> LoopRun:
        return LoopRun(1.0, 1, outputs, closed_loop.Counter())

    quick, slow = output(5, first=1.0, last=1.4), output(3, first=0.0, last=0.8)
    assert run(quick, slow, output(1)).tpot == pytest.approx([0.1, 0.4])
    runs = [run(quick, slow, slow), run(slow), run(quick)]
    assert tpot(runs) == pytest.approx((0.3, 0.4)), "means 0.3, 0.4, 0.1; medians 0.4, 0.4, 0.1"
    assert tpot([run(output(1))]) is None


def test_there_are_several_waves_at_each_concurrency() -> None:
    assert [default_requests(n) for n in (1, 8, 64, 256)] == [40, 40, 192, 768]
    assert all(default_requests(n) >= 3 * n for n in range(1, 300))


# -- the prompts


def test_sets_take_turns_and_begin_again() -> None:
    sets = [PromptSet("a", ({"n": 0}, {"n": 1})), PromptSet("b", ({"n": 2},))]
    assert [(name, p["n"]) for name, p in in_turn(sets, 5)] == [("a", 0), ("b", 2), ("a", 1), ("b", 2), ("a", 0)]


def test_first_turns_go_through_the_chat_template(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"turns": ["ab", "cd"]}\n{"turns": ["' + "x" * 200 + '"]}\n')
    (mine,) = read_sets(llm, [path], 16)
    assert (mine.name, mine.left_out, [p["prompt"] for p in mine.prompts]) == ("mine", 1, ["[user]ab[assistant]"])
    with pytest.raises(ValueError, match="none of 2 leaves room for 127 tokens"):
        read_sets(llm, [path], 127)
    other = tmp_path / "sub" / "mine.jsonl"
    other.parent.mkdir()
    other.write_text('{"turns": ["q"]}\n')
    assert [s.name for s in read_sets(llm, [path, other], 16)] == [str(path), str(other)]
    with pytest.raises(DataError, match="cannot be read"):
        read_sets(llm, [tmp_path / "none.jsonl"], 16)
    path.write_text('{"turn": "ab"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_sets(llm, [path], 16)


def test_without_files_there_are_own_prompts(loaded: LoadedModel) -> None:
    llm = LLM(loaded=loaded, max_num_seqs=1, num_gpu_blocks_override=2, max_model_len=256)
    try:
        sets = read_sets(llm, [], 16)
    finally:
        llm.close()
    assert [(s.name, len(s.prompts), s.left_out) for s in sets] == [("math", 8, 0), ("code", 8, 0), ("chat", 8, 0)]


# -- the methods


def test_configs_are_named() -> None:
    assert _methods(()) == DEFAULTS and not any(method.given for method in DEFAULTS)
    lookup = '{"method": "dspark", "draft": "lookup", "num_speculative_tokens": 2, "verification": "fixed"}'
    found = _methods(["none", "mtp", NGRAM, f"k2={NGRAM}", NGRAM, lookup])
    assert [method.label for method in found] == ["mtp", "ngram", "k2", "ngram-2", "lookup"]
    assert all(method.given for method in found)
    assert found[-1].config == json.loads(lookup), "handed on untouched"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["eagle"], "'eagle' is not JSON"),
        (["k=eagle"], "nor one of ngram, mtp, dspark, lookup"),
        (["[1]"], 'a JSON object with a "method"'),
        (['{"num_speculative_tokens": 2}'], 'a JSON object with a "method"'),
        ([f"a={NGRAM}", f"a={NGRAM}"], "the label 'a' is taken"),
        ([f"none={NGRAM}"], "the label 'none' is taken"),
    ],
)
def test_what_is_no_config_is_refused(texts: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        _methods(texts)
    assert says in str(refused.value)


# -- the command


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> tuple[int, str, str]:
    model = ["--model", str(folder), "--load-format", "dummy", "--tokenizer", str(folder), "--dtype", "float32"]
    try:
        code = runnerscope.main(["bench", "--speculation", *model, "--threads", "1", *argv])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_a_draft_that_is_the_target_is_always_accepted(
    capsys: pytest.CaptureFixture[str], folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"turns": ["ab", "cd"]}\n{"turns": ["efg"]}\n')
    same = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})
    sizes = ["--concurrency", "1", "3", "--requests", "4", "--max-tokens", "13", "--prompts", str(path)]
    configs = ["--speculative-config", f"same={same}", "--speculative-config", "lookup"]
    code, out, err = bench(capsys, folder, *sizes, *configs, "--json", "--commit", "abc123")
    assert code == 0, err
    report = json.loads(out)
    assert report["about"]["commit"] == "abc123" and {"device", "date", "torch"} <= set(report["about"])
    assert report["methods"] == {"none": None, "same": json.loads(same), "lookup": DEFAULTS[-1].config}
    made = [(start["runner"], start["method"], start["capture"]) for start in report["starts"]]
    assert made == [("v2", "none", 0), ("v2", "same", 0), ("v2", "lookup", 0), ("v1", "none", 0), ("v1", "same", 0)]
    assert all(start["engine"] > 0 for start in report["starts"])
    (left_out,) = report["left_out"]
    assert left_out.startswith("on V1 lookup is left out: Speculative method 'dspark' is fused")
    assert [c["concurrency"] for c in report["concurrencies"]] == [1, 3]
    for result in report["concurrencies"]:
        sides = {(s["runner"], s["method"]): s for s in result["sides"]}
        assert list(sides) == [("v2", "none"), ("v2", "same"), ("v2", "lookup"), ("v1", "none"), ("v1", "same")]
        for (runner, label), side in sides.items():
            assert side["accepted_length"] == {"none": 1.0, "same": 3.0}.get(label, side["accepted_length"])
            assert side["output_tokens"] == 3 * 4 * 13 and side["tpot_ms"]["mean"] > 0
            assert side["same_tokens"] == (
                None if label == "none" else {"before_first_difference": 4 * 13, "all": 4 * 13}
            )
            assert (side["waits_inside_steps"] == {}) == (runner == "v2")
            rate = side["tokens_per_second"]
            assert rate["min"] <= rate["median"] <= rate["max"] and len(side["seconds"]) == 3
            assert side["ratio"] == pytest.approx(rate["median"] / sides[runner, "none"]["tokens_per_second"]["median"])
            assert side["preemptions"] == side["cached_tokens"] == 0
        over = sides["v2", "same"]["tpot_ms"]["mean"] / sides["v1", "same"]["tpot_ms"]["mean"]
        assert result["tpot_v2_over_v1"]["same"] == pytest.approx(over)
        assert set(result["tpot_v2_over_v1"]) == {"none", "same"}
    by_set = {(row["runner"], row["method"]): row["sets"] for row in report["accepted_length"]}
    assert by_set["v1", "same"] == by_set["v2", "same"] == {"mine": 3.0}


@pytest.mark.slow
def test_the_table_of_the_defaults(capsys: pytest.CaptureFixture[str], folder: Path, loaded: LoadedModel) -> None:
    sizes = ["--concurrency", "2", "--requests", "3", "--max-tokens", "6", "--runner", "v2"]
    code, out, err = bench(capsys, folder, *sizes, "--temperature", "0.7")
    assert code == 0, err
    assert re.search(r"host waits inside V2's steps: 0 in \d+ steps", out) and "engines made in  V2 none " in out
    for words in ("concurrency 2: 3 requests", "accepted length", "TPOT ms: mean", "× none", "waits in a step"):
        assert words in out
    assert "math 8, code 8, chat 8 (built in)" in out and "temperature 0.7" in out
    assert "on V2 mtp is left out" in out and "V1" not in out and "V2 ngram" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "on a CPU give --concurrency, --requests and --max-tokens"),
        (["--concurrency", "0"], "--concurrency 0: at least 1"),
        (["--max-tokens", "0"], "--max-tokens 0: at least 1"),
        (["--concurrency", "8", "--requests", "4"], "--requests 4: fewer than --concurrency 8"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--prompts", "no-such.jsonl"], "no-such.jsonl: cannot be read"),
        (["--max-tokens", "100000"], "leaves room for 100000 tokens"),
        (["--speculative-config", "mtp"], "speculative method 'mtp'"),
        (["--speculative-config", '{"method": "ngrm"}'], "did you mean 'ngram'"),
        (["--speculative-config", "eagle"], "'eagle' is not JSON"),
        (["--workload", "A"], "--workload does not go with --speculation"),
        (["--sampling"], "--sampling does not go with --speculation"),
        (["--repeats", "2"], "--repeats 2"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, loaded: LoadedModel, argv: list[str], says: str
) -> None:
    small = ["--concurrency", "1", "--requests", "2", "--max-tokens", "4"] if argv else []
    code, out, err = bench(capsys, folder, *small, *argv)
    assert code == 2 and out == ""
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-tokens", "4"], "--max-tokens belongs to --speculation"),
        (["--speculative-config", NGRAM, "--speculative-config", NGRAM], "several --speculative-config"),
        (["--speculative-config", "{bad"], "not JSON"),
    ],
)
def test_its_options_need_it(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert runnerscope.main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err
