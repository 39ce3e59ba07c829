"""How an answer ends, and what of its text is shown: stop strings, stop ids, lengths, detokenization."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.detokenizer import Detokenizer
from engine.models import LoadedModel, Tokenizer
from tests.engine.engine_helpers import EOS, both_loops, both_runners, greedy, ids, prompt_of, tiny_llm
from tests.engine.tiny_text import letters, raw_bytes, text_model

fixed = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return text_model(tmp_path_factory.mktemp("letters"), letters())


def _free(llm: LLM, prompt: list[int], max_tokens: int = 20) -> tuple[str, tuple[int, ...]]:
    output = llm.generate(ids(*prompt), greedy(max_tokens), use_tqdm=False)[0].outputs[0]
    return output.text, output.token_ids


# -- in an engine ----------------------------------------------------------------------------------------------------


@both_runners
@both_loops
def test_a_stop_string_cuts_the_text_wherever_token_borders_lie(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt = prompt_of(6, 3)
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        text, token_ids = _free(llm, prompt)
        tokenizer = llm.get_tokenizer()
        borders = [len(tokenizer.decode(token_ids[:n])) for n in range(len(token_ids) + 1)]
        across = 0
        for begin in range(2, 14):
            stop = text[begin : begin + 3]
            at = text.index(stop)
            params = greedy(20, stop=[stop, "no such text"], ignore_eos=True)
            output = llm.generate(ids(*prompt), params, use_tqdm=False)[0].outputs[0]
            assert output.text == text[:at]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            # The tokens go on until the string is complete and no further.
            needed = next(n for n, border in enumerate(borders) if border >= at + 3)
            assert output.token_ids == token_ids[:needed]
            across += at not in borders or at + 3 not in borders
            assert not llm.core.has_unfinished() and not llm.core.in_flight
        assert across > 2


@both_runners
@both_loops
def test_a_stream_shows_no_part_of_a_stop_string(runner: str, loop: str, loaded: LoadedModel) -> None:
    prompt = prompt_of(6, 3)
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        text, _ = _free(llm, prompt)
        for stop in (text[9:12], text[5:11], text[12:13], text[10:12] + "zzz"):
            final = text[: text.index(stop)] if stop in text else text
            seen = [output.outputs[0].text for output in llm.stream(ids(*prompt), greedy(20, stop=stop))]
            assert seen[-1] == final
            assert all(final.startswith(partial) for partial in seen)
            assert all(a == b[: len(a)] for a, b in zip(seen, seen[1:], strict=False))
            # Held back is no more than what may still turn out to be the string.
            assert len(seen[-2]) >= len(final) - 2 * len(stop) - 4


@both_runners
def test_the_earliest_stop_string_wins(runner: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loaded=loaded) as llm:
        text, _ = _free(llm, prompt_of(6, 3))
        late, early = text[12:15], text[4:7]
        output = llm.generate(ids(*prompt_of(6, 3)), greedy(20, stop=[late, early]), use_tqdm=False)[0].outputs[0]
        assert output.text == text[: text.index(early)] and output.stop_reason == early


@both_runners
@both_loops
def test_min_tokens_holds_stop_strings_back(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        text, token_ids = _free(llm, prompt_of(6, 3))
        first = llm.get_tokenizer().decode(token_ids[:2])
        params = greedy(20, stop=first, min_tokens=5)
        output = llm.generate(ids(*prompt_of(6, 3)), params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) > 5 and output.text.startswith(first)
        if first not in text[len(first) :]:
            assert output.text == text and output.finish_reason == "length"


@both_runners
@both_loops
def test_one_request_stops_at_a_string_while_the_next_step_is_in_flight(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    """The token that was computed too many is dropped, and the other request never notices."""
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        text, _ = _free(llm, prompt_of(6, 3))
        other = llm.generate(ids(*prompt_of(9, 4)), greedy(20), use_tqdm=False)[0].outputs[0]
        stop = text[6:9]
        outputs = llm.generate(
            [ids(*prompt_of(6, 3)), ids(*prompt_of(9, 4))], [greedy(20, stop=stop), greedy(20)], use_tqdm=False
        )
        assert outputs[0].outputs[0].text == text[: text.index(stop)]
        assert outputs[1].outputs[0].token_ids == other.token_ids


@both_runners
@both_loops
def test_stop_ids_end_the_answer_and_are_no_part_of_its_text(runner: str, loop: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loop, loaded=loaded) as llm:
        _, token_ids = _free(llm, prompt_of(6, 3))
        stop_id = token_ids[4]
        at = token_ids.index(stop_id)
        output = llm.generate(ids(*prompt_of(6, 3)), greedy(20, stop_token_ids=[stop_id]), use_tqdm=False)[0].outputs[0]
        assert output.token_ids == token_ids[: at + 1]
        assert output.text == llm.get_tokenizer().decode(token_ids[:at])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)


@both_runners
@both_loops
def test_the_end_of_sequence_ends_it_unless_ignored(runner: str, loop: str, loaded: LoadedModel) -> None:
    # Flat enough that </s> comes soon; the seeds make both runs the same.
    params = {"temperature": 30.0, "max_tokens": 40}
    with tiny_llm(runner, loop, loaded=loaded, max_num_seqs=64, num_gpu_blocks_override=900) as llm:
        prompts = [ids(*prompt_of(5, i)) for i in range(48)]
        stopped, ignored = (
            llm.generate(prompts, [SamplingParams(**params, seed=i, ignore_eos=e) for i in range(48)], use_tqdm=False)
            for e in (False, True)
        )
    ended = [o.outputs[0] for o in stopped if o.outputs[0].finish_reason == "stop"]
    assert ended and all(output.token_ids[-1] == EOS and output.stop_reason is None for output in ended)
    assert all(EOS not in output.token_ids[:-1] and "</s>" not in output.text for output in ended)
    assert all(len(o.outputs[0].token_ids) == 40 and o.outputs[0].finish_reason == "length" for o in ignored)
    for a, b in zip(stopped, ignored, strict=True):
        assert b.outputs[0].token_ids[: len(a.outputs[0].token_ids)] == a.outputs[0].token_ids


@both_runners
@both_loops
@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"), [(5, 1, 1), (5, 7, 7), (60, None, 4), (60, 50, 4), (63, 9, 1)]
)
def test_lengths_end_it(runner: str, loop: str, prompt_len: int, max_tokens: int | None, expected: int) -> None:
    """max_tokens, or max_model_len (64) where that comes first."""
    with tiny_llm(runner, loop) as llm:
        output = llm.generate(ids(*prompt_of(prompt_len)), greedy(max_tokens), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == expected and output.finish_reason == "length"


@both_runners
def test_detokenize_false_makes_no_text(runner: str, loaded: LoadedModel) -> None:
    with tiny_llm(runner, loaded=loaded) as llm:
        text, token_ids = _free(llm, prompt_of(6, 3))
        output = llm.generate(ids(*prompt_of(6, 3)), greedy(20, detokenize=False), use_tqdm=False)[0].outputs[0]
        assert output.text == "" and output.token_ids == token_ids and text != ""


@both_runners
def test_skip_special_tokens(runner: str, loaded: LoadedModel) -> None:
    params = {"temperature": 40.0, "max_tokens": 40, "ignore_eos": True}
    with tiny_llm(runner, loaded=loaded, max_num_seqs=64, num_gpu_blocks_override=900) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [ids(*prompt_of(5, i)) for i in range(32)]
        shown, hidden = (
            llm.generate(
                prompts, [SamplingParams(**params, seed=i, skip_special_tokens=s) for i in range(32)], use_tqdm=False
            )
            for s in (False, True)
        )
        special = 0
        for a, b in zip(shown, hidden, strict=True):
            a, b = a.outputs[0], b.outputs[0]
            assert a.token_ids == b.token_ids
            assert a.text == tokenizer.decode(a.token_ids, skip_special_tokens=False)
            assert b.text == tokenizer.decode(a.token_ids, skip_special_tokens=True)
            special += a.text != b.text
        assert special > 0


# -- the detokenizer alone -------------------------------------------------------------------------------------------


def _tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(letters() if kind == "letters" else raw_bytes(), {}, None, (EOS,))


LETTERS, RAW = _tokenizer("letters"), _tokenizer("bytes")


@fixed
@given(st.lists(st.integers(0, 250), max_size=30), st.booleans())
def test_any_ids_give_the_text_of_decoding_them_at_once(token_ids: list[int], skip: bool) -> None:
    """Bytes that are no UTF-8 too. The pieces only ever add to the text."""
    detokenizer, seen = Detokenizer(RAW, SamplingParams(skip_special_tokens=skip)), [""]
    for token_id in token_ids:
        assert detokenizer.add(token_id) is None
        assert detokenizer.text.startswith(seen[-1])
        seen.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == RAW.decode(token_ids, skip_special_tokens=skip)


@fixed
@given(st.text(max_size=12))
def test_any_text_comes_back_byte_by_byte_and_never_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(RAW, SamplingParams())
    for token_id in RAW.encode(text, add_special_tokens=False):
        detokenizer.add(token_id)
        assert text.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == text


@fixed
@given(
    st.lists(st.integers(3, 383), min_size=1, max_size=25),
    st.lists(st.text("abcz ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4),
)  # fmt: skip
def test_stop_strings_against_a_search_in_the_whole_text(
    token_ids: list[int], stops: list[str], min_tokens: int
) -> None:
    # Letters close to each other, so that stops are met.
    token_ids = [3 + (t - 3) % 5 for t in token_ids]
    detokenizer = Detokenizer(LETTERS, SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=99))
    text, held_until, expected = "", 0, None
    for number, token_id in enumerate(token_ids, start=1):
        before = len(text)
        text += LETTERS.decode([token_id])
        if number <= min_tokens:
            held_until = len(text)
        hits = [(text.find(s, max(0, before - len(s) + 1)), s) for s in stops] if number > min_tokens else []
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            expected = min(hits)
        found = detokenizer.add(token_id)
        assert text.startswith(detokenizer.visible_text)
        if expected is not None:
            assert found == expected[1]
            break
        assert found is None
        assert not any(s in detokenizer.visible_text[held_until:] for s in stops)
    detokenizer.finish()
    assert detokenizer.visible_text == detokenizer.text == (text if expected is None else text[: expected[0]])
