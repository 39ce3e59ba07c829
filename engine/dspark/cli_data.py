"""The sequences that `runnerscope dspark` works on, from its options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.numbers import count
from ..cli.terminal import UserError

if TYPE_CHECKING:
    from ..llm import LLM
    from ..models import LoadedModel
    from .data import Sequences

_PROMPTS, _ANSWERS = "prompts.jsonl", "answers.jsonl"
"""What an interrupted call leaves beside the sequences."""


def add_prompt_options(parser: Any) -> None:
    """Options of the prompts that something is measured on, for `answers`."""
    add_prompt_files(parser)
    parser.add_argument(
        "--num-sequences", type=count, metavar="N", default=100, help="of each file (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", default=256, help="of an answer (default: %(default)s)"
    )


def add_prompt_files(parser: Any) -> None:
    """The option of the files, for `check_prompt_files`."""
    parser.add_argument(
        "--prompts", type=Path, nargs="+", metavar="FILE", help='files of {"turns": [...]} lines; default: self-made'
    )


def check_prompt_files(arguments: argparse.Namespace) -> None:
    """Reads them once, before anything is loaded. Raises DataError, naming the file and the line."""
    from .data import read_prompts

    for path in arguments.prompts or ():
        read_prompts(path)


def training_data(llm: LLM, arguments: argparse.Namespace, path: Path, seed: int) -> Sequences:
    """New sequences, in ``path``; what an interrupted call had is taken up."""
    from .data import answer, first_turn, fits, read_prompts, self_prompts

    if arguments.prompts:
        turns = [turns for file in arguments.prompts for turns in read_prompts(file)][: arguments.num_sequences]
        prompts = [prompt for prompt in (first_turn(llm, turn[0]) for turn in turns) if fits(llm, prompt)]
        _say_missing(len(turns) - len(prompts), len(turns))
    else:
        prompts = self_prompts(llm, arguments.num_sequences, seed, keep=path.with_name(_PROMPTS))
    kept = path.with_name(_ANSWERS)
    sequences = answer(llm, prompts, arguments.max_tokens, arguments.temperatures, seed, keep=kept)
    sequences.save(path, _about(llm.loaded.name, arguments, seed))
    kept.unlink()
    print(f"{len(sequences)} sequences, {int(sequences.lengths.sum())} tokens in {path}")
    return sequences


def stored_data(name: str, arguments: argparse.Namespace, path: Path, seed: int) -> Sequences:
    """The sequences of an earlier call for the model ``name``. Raises UserError if they were made in another way."""
    from .data import Sequences

    sequences, made = Sequences.load(path)
    about = _about(name, arguments, seed)
    if made != about:
        different = "; ".join(f"{k} was {made.get(k)}, is {about[k]}" for k in about if made.get(k) != about[k])
        raise UserError(f"{path} holds other sequences: {different}. Give another --out or --data, or the same options")
    return sequences


def _about(name: str, arguments: argparse.Namespace, seed: int) -> dict[str, str]:
    return {
        "model": name,
        "prompts": ", ".join(path.name for path in arguments.prompts or []) or "self-generated",
        "num_sequences": str(arguments.num_sequences),
        "max_tokens": str(arguments.max_tokens),
        "temperatures": " ".join(map(str, arguments.temperatures)),
        "seed": str(seed),
    }


def answers(llm: LLM, arguments: argparse.Namespace, temperature: float) -> dict[str, Sequences]:
    """The target's answers to each file of prompts, or to prompts of its own."""
    from .data import answer, answer_turns, read_prompts, self_prompts

    if not arguments.prompts:
        # Another seed than training's: these prompts were not trained on.
        prompts = self_prompts(llm, arguments.num_sequences, seed=1_000_003)
        return {"self-made": answer(llm, prompts, arguments.max_tokens, [temperature], seed=0)}
    found = {}
    for path in arguments.prompts:
        conversations = read_prompts(path)[: arguments.num_sequences]
        found[path.stem] = answer_turns(llm, conversations, arguments.max_tokens, temperature)
        asked = sum(map(len, conversations))
        _say_missing(asked - len(found[path.stem]), asked)
    return found


def _say_missing(missing: int, asked: int) -> None:
    if missing:
        print(f"{missing} of {asked} turns left out: no room for them, raise --max-model-len", file=sys.stderr)


def unused_token(loaded: LoadedModel) -> int | None:
    """The last special token that means nothing to a chat; None without one."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return None
    used = set(tokenizer.special_tokens.values())
    added = tokenizer.backend.get_added_tokens_decoder().items()
    template = tokenizer.chat_template or ""
    free = [i for i, token in added if token.special and token.content not in used and token.content not in template]
    return max((i for i in free if i < loaded.config.vocab_size and i not in tokenizer.eos_token_ids), default=None)
