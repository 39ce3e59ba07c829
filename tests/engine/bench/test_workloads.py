"""The standard workloads: their exact sizes, and that no run's prompts are another's."""

from __future__ import annotations

import pytest

from engine.bench.workloads import STANDARD, choose


def test_they_are_those_the_peers_were_measured_on() -> None:
    sizes = {name: (spec.requests, spec.lengths[0], spec.steps) for name, spec in STANDARD.items() if name != "C"}
    assert sizes == {
        "A": (256, (128, 256), 256), "AT": (256, (128, 256), 256), "B1": (1, (128, 512), 512),
        "B8": (8, (128, 512), 512),
    }  # fmt: skip
    mixed = STANDARD["C"]
    assert (sum(n_in for n_in, _ in mixed.lengths), mixed.output_tokens) == (144_831, 144_160)
    assert all(100 <= length <= 1024 for pair in mixed.lengths for length in pair)
    assert STANDARD["AT"].sampling == {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
    assert all(STANDARD[name].sampling == {"temperature": 0.0} for name in ("A", "B1", "B8", "C"))


def test_the_bytes_of_a_step_are_those_of_the_peers_page() -> None:
    """A step of A reads 7.5 GB of KV at 114,688 bytes a token: 255.5 tokens of context on average, 256 requests."""
    spec = STANDARD["A"]
    assert spec.context_tokens / spec.steps == 256 * (128 + 255 / 2)
    assert spec.context_tokens * 114_688 / spec.steps == pytest.approx(7.5e9, rel=0.01)
    counted = sum(n_in + made for n_in, n_out in STANDARD["C"].lengths for made in range(n_out))
    assert STANDARD["C"].context_tokens == counted


def test_a_run_repeats_itself_and_shares_no_prompt_with_another() -> None:
    spec = STANDARD["B8"]
    assert spec.draw(3, 1000) == spec.draw(3, 1000)
    draws = [spec.draw(0, 50_000), spec.draw(1, 50_000), STANDARD["B1"].draw(0, 50_000)]
    starts = [ask.prompt_token_ids[:16] for workload in draws for ask in workload.asks]
    starts.append(spec.first_ask(50_000).prompt_token_ids[:16])
    assert len(set(starts)) == len(starts) == 18
    assert all(0 <= token < 7 for ask in spec.draw(0, 7).asks for token in ask.prompt_token_ids)
    assert [(len(a.prompt_token_ids), a.max_tokens) for a in STANDARD["C"].draw(0, 9).asks] == list(
        STANDARD["C"].lengths
    )


def test_smaller_sizes_keep_the_shape() -> None:
    small = STANDARD["C"].resized(5, 64, None)
    assert (small.requests, small.input_len, small.output_len) == (5, (6, 64), (100, 1024))
    assert small.steps == max(n_out for _, n_out in small.lengths) and len(small.lengths) == 5
    assert small.blocks(16) == sum(-(-(a + b) // 16) for a, b in small.lengths)
    assert str(STANDARD["AT"].resized(1, 4, 2)) == "AT: 1 request, 4 in, 2 out, temperature 1.0, top_p 0.95, top_k 50"
    with pytest.raises(ValueError, match="output_len=0: at least 1"):
        small.resized(1, 1, 0)


def test_choosing_by_name() -> None:
    assert [spec.name for spec in choose("b8, A,b8")] == ["B8", "A"]
    with pytest.raises(ValueError, match="'D': possible are A, AT, B1, B8, C"):
        choose("A,D")
    with pytest.raises(ValueError, match="no workload named"):
        choose(" ,")
