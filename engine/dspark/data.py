"""What a draft is trained on: the target's own answers, to prompts that it made up itself or that a file has."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..sampling_params import SamplingParams
from .journal import Journal, generate_into
from .openers import closer, opener

if TYPE_CHECKING:
    from ..llm import LLM

_MARK = "\ue000"
"""Stands for a user's words in a rendered template; of the private use area, so no template has it."""
_TURN_TEMPERATURE = 0.8
"""At 1 every fourth made-up turn of a small model is gibberish, and the answer to it then too."""


class DataError(ValueError):
    """Prompts or sequences that cannot be used; says which and why."""


@dataclass(frozen=True)
class Sequences:
    """Token sequences, each a prompt and its response.

    Attributes:
        tokens: i32 [Σ lengths].
        lengths: i64 [n].
        starts: i64 [n], where each response begins; at least 1, and a response has at least one token.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != len(self.tokens) or len(self.lengths) != len(self.starts):
            raise DataError("sequences: lengths, starts and tokens don't belong together")
        if len(self.lengths) and not ((self.starts >= 1) & (self.starts < self.lengths)).all():
            raise DataError("sequences: each needs a prompt and a response of at least one token")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin, end = self.begins[index : index + 2].tolist()
        return list(self.tokens[begin:end].tolist())

    @cached_property
    def begins(self) -> np.ndarray:
        """i64 [n + 1]: where each sequence begins in ``tokens``, and where the last ends."""
        return np.concatenate((np.zeros(1, dtype=np.int64), self.lengths.cumsum()))

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """i64 [b, s]: where in ``tokens`` the tokens of sequences [b] are; len(tokens) behind a shorter one's end."""
        lengths = self.lengths[indices]
        place = np.arange(int(lengths.max(initial=0)))
        return np.where(place < lengths[:, None], self.begins[indices][:, None] + place, len(self.tokens))

    def __iter__(self) -> Iterator[list[int]]:
        return (self[i] for i in range(len(self)))

    @property
    def fingerprint(self) -> str:
        """Of all tokens, so that what was computed from them can be told from what wasn't."""
        return hashlib.sha256(self.tokens.tobytes() + self.lengths.tobytes() + self.starts.tobytes()).hexdigest()

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Sequences:
        """From prompts and their responses; pairs without a response are left out."""
        pairs = [(prompt, response) for prompt, response in pairs if prompt and response]
        flat = list(itertools.chain.from_iterable(part for pair in pairs for part in pair))
        return cls(
            np.array(flat, dtype=np.int32),
            np.array([len(prompt) + len(response) for prompt, response in pairs], dtype=np.int64),
            np.array([len(prompt) for prompt, _ in pairs], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Sequences]) -> Sequences:
        """All of ``parts``, one behind the other."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "lengths", "starts")))

    def save(self, path: Path, about: Mapping[str, str]) -> None:
        """One safetensors file; ``about`` says how they were made."""
        parts = {name: torch.from_numpy(getattr(self, name)) for name in ("tokens", "lengths", "starts")}
        save_file(parts, path.with_name(f"{path.name}.part"), metadata=dict(about))
        os.replace(path.with_name(f"{path.name}.part"), path)

    @classmethod
    def load(cls, path: Path) -> tuple[Sequences, dict[str, str]]:
        """What `save` wrote, and its ``about``. Raises DataError if it is damaged."""
        try:
            with safe_open(path, framework="np") as opened:
                parts = [opened.get_tensor(name) for name in ("tokens", "lengths", "starts")]
                return cls(*parts), dict(opened.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: damaged or no sequences ({error}). Delete it to make them anew") from None


def read_prompts(path: Path) -> list[list[str]]:
    """The turns of each line of a JSON-lines file, ``{"turns": ["...", ...]}``. Raises DataError, naming the line."""
    prompts = []
    try:
        # Not splitlines(): JSON may have U+2028 and its like within a text, and they end no line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read, it is not UTF-8 ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f'{path}, line {number}: not of the form {{"turns": ["...", ...]}}') from None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise DataError(f"{path}, line {number}: turns must be texts that are not empty")
        prompts.append(turns)
    if not prompts:
        raise DataError(f"{path}: holds no prompts")
    return prompts


def self_prompts(
    llm: LLM, count: int, seed: int, max_tokens: int = 96, progress: bool = True, keep: Path | None = None
) -> list[dict[str, Any]]:
    """Prompts that the target makes up: its chat template up to the user's words, sampled on at temperature 0.8.

    Most turns begin with given words (openers.py). A target without a chat template gets its first token, or a random
    one, as the whole prompt: its answers are then any text of its own. Fewer than ``count`` where a made-up turn is
    empty or too long. What was made up is kept in the file ``keep`` and taken up from there.
    """
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        rng = np.random.default_rng(seed)
        bos, vocab = llm.loaded.config.bos_token_id, min(tokenizer.vocab_size, llm.loaded.config.vocab_size)
        firsts = [bos] if bos is not None else []
        return [{"prompt_token_ids": [*firsts, int(rng.integers(vocab))]} for _ in range(count)]
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=True)
    before, mark, behind = text.partition(_MARK)
    if not mark:
        raise DataError("the chat template drops what the user says: give prompts in a file (--prompts)")
    # Mostly an end-of-sequence token, which ends the turn anyway.
    stop = behind.strip().partition("\n")[0]

    def begun(words: str) -> dict[str, Any]:
        return {"prompt_token_ids": tokenizer.encode(before + words, add_special_tokens=False)}

    openers = [words if fits(llm, begun(words)) else "" for words in map(opener, range(count))]
    beginnings = [begun(words) for words in openers]
    params = [
        SamplingParams(
            temperature=_TURN_TEMPERATURE, seed=seed + i, max_tokens=max_tokens, stop=(stop,) if stop else ()
        )
        for i in range(count)
    ]
    about = {"model": llm.loaded.name, "count": str(count), "seed": str(seed), "max_tokens": str(max_tokens)}
    texts = generate_into(
        Journal(keep, about), llm, beginnings, params, lambda output: output.outputs[0].text, "Prompts", progress
    )
    turns = [
        (o + t).strip() + closer(i) if t.strip() else "" for i, (o, t) in enumerate(zip(openers, texts, strict=True))
    ]
    prompts = [p for p in (first_turn(llm, turn) for turn in turns if turn) if fits(llm, p)]
    if not prompts:
        raise DataError(
            f"none of {count} prompts that the target made up can be used: all empty, or too long for max_model_len="
            f"{llm.config.max_model_len}. Give prompts in a file (--prompts), or raise max_model_len"
        )
    return prompts


def first_turn(llm: LLM, text: str) -> dict[str, Any]:
    """A prompt that asks ``text``, in the target's chat template where it has one."""
    return _prompt(llm, [{"role": "user", "content": text}])


def fits(llm: LLM, prompt: Mapping[str, Any]) -> bool:
    """Whether a prompt leaves room for two tokens of an answer."""
    limit = llm.config.max_model_len
    return limit is None or len(prompt["prompt_token_ids"]) + 2 <= limit


def _prompt(llm: LLM, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is not None:
        return llm.chat_prompt(messages)
    return {"prompt_token_ids": tokenizer.encode("\n".join(m["content"] for m in messages))}


def answer(
    llm: LLM,
    prompts: Sequence[Any],
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    progress: bool = True,
    keep: Path | None = None,
) -> Sequences:
    """The target's answers, by this engine; prompt i at temperature i mod len(temperatures).

    An answer keeps its end-of-sequence token: a draft must learn to propose it. Answers are kept in the file ``keep``
    as they come, and taken up from there.
    """
    params = [
        SamplingParams(temperature=temperatures[i % len(temperatures)], seed=seed + i, max_tokens=max_tokens)
        for i in range(len(prompts))
    ]
    asked = hashlib.sha256(json.dumps([p["prompt_token_ids"] for p in prompts]).encode()).hexdigest()
    about = {
        "model": llm.loaded.name,
        "prompts": asked,
        "max_tokens": str(max_tokens),
        "temperatures": " ".join(map(str, temperatures)),
        "seed": str(seed),
    }
    answers = generate_into(
        Journal(keep, about), llm, prompts, params, lambda output: output.outputs[0].token_ids, "Answers", progress
    )
    return Sequences.of([(p["prompt_token_ids"], tokens) for p, tokens in zip(prompts, answers, strict=True)])


def answer_turns(
    llm: LLM,
    conversations: Sequence[Sequence[str]],
    max_tokens: int,
    temperature: float,
    seed: int = 0,
    progress: bool = True,
) -> Sequences:
    """As `answer`, for the turns of a file: each turn is asked behind the answers to those before it.

    A conversation ends where it becomes too long for the engine; the number of sequences tells.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    pairs = []
    going = list(range(len(conversations)))
    for turn in range(max(map(len, conversations))):
        going = [i for i in going if len(conversations[i]) > turn]
        for i in going:
            histories[i].append({"role": "user", "content": conversations[i][turn]})
        prompts = {i: _prompt(llm, histories[i]) for i in going}
        going = [i for i in going if fits(llm, prompts[i])]
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        for i, output in zip(going, llm.generate([prompts[i] for i in going], params, use_tqdm=progress), strict=True):
            histories[i].append({"role": "assistant", "content": output.outputs[0].text})
            pairs.append((output.prompt_token_ids, output.outputs[0].token_ids))
    return Sequences.of(pairs)
