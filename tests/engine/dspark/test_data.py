"""Prompts and answers: made up by the target, read from files, stored, and refused where they make no sense."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.dspark.data import DataError, Sequences, answer, answer_turns, read_prompts, self_prompts
from tests.engine.engine_helpers import EOS, greedy, tiny_llm
from tests.engine.tiny_text import letters, text_model


def test_sequences_are_stored_with_how_they_were_made(tmp_path: Path) -> None:
    sequences = Sequences.of([([1, 2], [3]), ([4], []), ([5], [6, 7, 8])])
    assert len(sequences) == 2 and list(sequences) == [[1, 2, 3], [5, 6, 7, 8]]
    assert sequences.starts.tolist() == [2, 1]
    sequences.save(tmp_path / "s", {"model": "tiny"})
    read, about = Sequences.load(tmp_path / "s")
    assert list(read) == list(sequences) and about == {"model": "tiny"}
    assert read.fingerprint == sequences.fingerprint
    assert Sequences.of([([1], [2, 3])]).fingerprint != Sequences.of([([1, 2], [3])]).fingerprint
    joined = Sequences.joined([sequences, read])
    assert list(joined) == list(sequences) * 2
    with pytest.raises(IndexError):
        sequences[2]
    (tmp_path / "s").write_bytes(b"no")
    with pytest.raises(DataError, match="Delete it"):
        Sequences.load(tmp_path / "s")
    with pytest.raises(DataError, match="a prompt and a response"):
        Sequences(np.arange(3), np.array([3]), np.array([3]))


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"turns": ["c"], "id": 3}\n')
    assert read_prompts(path) == [["a", "b"], ["c"]]
    for text, message in (
        ("", "holds no prompts"),
        ('{"turns": ["a"]}\n{"text": "b"}', "line 2: not of the form"),
        ("[1]", "line 1: not of the form"),
        ('{"turns": []}', "line 1: turns must be texts"),
        ('{"turns": [""]}', "not empty"),
        (json.dumps({"turns": "word"}), "must be texts"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_prompts(path)
    with pytest.raises(DataError, match="none: cannot be read .No such file or directory.$"):
        read_prompts(tmp_path / "none")
    # A line ends where JSON Lines says, and not at every character that Unicode ends one at.
    path.write_text(json.dumps({"turns": ["a\u2028b\x85c"]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(path) == [["a\u2028b\x85c"]]


def test_the_target_makes_up_its_prompts(tmp_path: Path) -> None:
    with tiny_llm(loaded=text_model(tmp_path, letters()), max_model_len=128, num_gpu_blocks_override=257) as llm:
        prompts = self_prompts(llm, 6, seed=1, max_tokens=8, progress=False)
        assert 1 <= len(prompts) <= 6
        for prompt in prompts:
            assert prompt["prompt"].startswith("[user]") and prompt["prompt"].endswith("[assistant]")
        assert len({p["prompt"] for p in prompts}) > 1
        assert self_prompts(llm, 6, seed=1, max_tokens=8, progress=False) == prompts
        assert self_prompts(llm, 6, seed=2, max_tokens=8, progress=False) != prompts
        sequences = answer(llm, prompts, 10, (0.0, 1.0), seed=5, progress=False)
        for i, prompt in enumerate(prompts):
            assert sequences[i][: int(sequences.starts[i])] == prompt["prompt_token_ids"]
            assert sequences.lengths[i] - sequences.starts[i] <= 10
        best = llm.generate(prompts[0], greedy(10, ignore_eos=False), use_tqdm=False)[0].outputs[0].token_ids
        assert sequences[0][int(sequences.starts[0]) :] == list(best)


def test_an_answer_keeps_its_end() -> None:
    prompts = [{"prompt_token_ids": [i]} for i in range(3, 103)]
    params = greedy(30, ignore_eos=False, temperature=1.0, seed=1)
    with tiny_llm() as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    ending = [o for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert ending and all(o.outputs[0].token_ids[-1] == EOS for o in ending)


def test_a_target_without_a_template_starts_from_a_random_token(tmp_path: Path) -> None:
    loaded = text_model(tmp_path, letters())
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = None
    with tiny_llm(loaded=loaded) as llm:
        prompts = self_prompts(llm, 5, seed=0)
        assert all(p["prompt_token_ids"][0] == 1 and len(p["prompt_token_ids"]) == 2 for p in prompts)
        sequences = answer_turns(llm, [["ab", "cd"]], 4, 0.0, progress=False)
        assert len(sequences) == 2


def test_later_turns_are_asked_behind_earlier_answers(tmp_path: Path) -> None:
    with tiny_llm(loaded=text_model(tmp_path, letters()), max_model_len=128, num_gpu_blocks_override=257) as llm:
        sequences = answer_turns(llm, [["ab", "cd"], ["ef"]], 4, 0.0, progress=False)
        assert len(sequences) == 3
        first = llm.generate(
            llm.chat_prompt([{"role": "user", "content": "ab"}]), greedy(4, ignore_eos=False), use_tqdm=False
        )
        text = first[0].outputs[0].text
        prompt = llm.chat_prompt(
            [
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "cd"},
            ]
        )
        assert sequences[2][: int(sequences.starts[2])] == prompt["prompt_token_ids"]
