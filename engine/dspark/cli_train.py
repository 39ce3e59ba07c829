"""`runnerscope dspark train`: the target's answers, then a head trained on them; each taken up where it was stopped."""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.numbers import count, not_negative
from ..cli.options import add_engine_options, engine_keywords
from ..cli.terminal import UserError
from .cli_data import add_prompt_files, check_prompt_files, stored_data, training_data, unused_token

if TYPE_CHECKING:
    from ..models import LoadedModel
    from .data import Sequences
    from .objectives import Objective

SEQUENCES = "sequences.safetensors"
DTYPES = ("bfloat16", "float16", "float32", "int8")
_MEMORY_SHARE = 0.6
"""Of a GPU's free memory, for hidden states."""
_SHAPE: tuple[tuple[str, str, str], ...] = (
    ("draft-block", "block_size", "drafts of a block, the anchor's place included (default: 7)"),
    ("draft-layers", "num_hidden_layers", "layers of the draft (default: 1)"),
    ("intermediate-size", "intermediate_size", "width of the draft's MLP (default: the target's)"),
    ("target-layer-ids", "target_layer_ids", "layers of the target to listen to (default: 5, evenly)"),
    ("markov-rank", "markov_rank", "width of the Markov head (default: 32)"),
    ("mask-token-id", "mask_token_id", "the filler token (default: a special token without a use, or the last)"),
)
_TRAINING: tuple[tuple[str, type, str], ...] = (
    ("steps", int, "default: 2000"),
    ("minutes", float, "train for so long instead of a number of steps; over all calls together"),
    ("batch-size", int, "sequences of a step (default: 32)"),
    ("num-anchors", int, "blocks of a sequence, for a draft (default: 32)"),
    ("learning-rate", float, "default: 6e-4"),
)
_LOSS = (("ce-weight", "ce", 0.1), ("l1-weight", "l1", 0.9))


def add_train_parser(actions: Any) -> None:
    """Adds the action to the subparsers of `runnerscope dspark`."""
    train = actions.add_parser(
        "train",
        usage="%(prog)s [options] --out DIR",
        help="train a draft, or an MTP head, on the target's own answers; goes on where it was stopped",
        description="Has the target answer prompts, then trains a head on the answers. A Ctrl-C stops behind a whole "
        "step, with all of it on disk: the same command goes on from there.",
    )
    train.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the head and its training's state"
    )
    train.add_argument(
        "--head", choices=("dspark", "mtp"), default="dspark",
        help="a DSpark draft (default), or one more layer that drafts one token",
    )  # fmt: skip
    train.add_argument(
        "--data", type=Path, metavar="DIR",
        help="directory of the answers and hidden states; give the same one to train several heads on the same answers "
        "(default: in --out)",
    )  # fmt: skip
    add_prompt_files(train)
    train.add_argument(
        "--num-sequences", type=count, metavar="N", default=4000, help="answers to train on (default: %(default)s)"
    )
    train.add_argument("--max-tokens", type=count, metavar="N", default=256, help="of an answer (default: %(default)s)")
    train.add_argument(
        "--temperatures",
        type=not_negative,
        nargs="+",
        default=[0.0],
        metavar="X",
        help="of the answers, in turn (default: 0)",
    )
    for flag, name, text in _SHAPE:
        many: dict[str, Any] = {"nargs": "+"} if name == "target_layer_ids" else {}
        train.add_argument(f"--{flag}", dest=name, type=int, metavar="N", help=text, **many)
    train.add_argument("--markov-head-type", choices=("vanilla", "gated", "rnn"), help="default: vanilla")
    for name, kind, text in _TRAINING:
        metavar = "N" if kind is int else "X"
        train.add_argument(f"--{name}", type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS)
    for flag, name, default in _LOSS:
        train.add_argument(f"--{flag}", dest=f"loss.{name}", type=not_negative, metavar="X", default=default,
                           help="of the loss (default: %(default)s)")  # fmt: skip
    train.add_argument(
        "--cache-gib", type=not_negative, metavar="X", default=8.0,
        help="most that hidden states may take on disk; nothing goes there where a GPU can hold them (default: "
        "%(default)s)",
    )  # fmt: skip
    train.add_argument("--save-every", type=count, metavar="N", default=500, help="steps (default: %(default)s)")
    train.add_argument("--save-dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    train.set_defaults(handler=run_train)
    add_engine_options(train)


def run_train(arguments: argparse.Namespace) -> int:
    """Makes the data where there is none yet, then trains."""
    import torch

    from .card import command_line, write_card
    from .data import Sequences
    from .hidden_states import HiddenStates
    from .loss import LossWeights
    from .training import STATE_DIRECTORY, Trainer, TrainingSettings, train

    _stop_like_ctrl_c()
    seed = getattr(arguments, "engine.seed", 0)
    out: Path = arguments.out
    data: Path = arguments.data or out / STATE_DIRECTORY
    shape = _given_shape(arguments)
    loss = LossWeights(**{name: getattr(arguments, f"loss.{name}") for _, name, _ in _LOSS})
    given = {n for n, _, _ in _TRAINING if n.replace("-", "_") in vars(arguments)}
    if {"steps", "minutes"} <= given:
        raise UserError("--steps and --minutes both say when the training ends; give one of them")
    for flag, path in (("--out", out), ("--data", arguments.data)):
        if path is not None and path.exists() and not path.is_dir():
            raise UserError(f"{flag} {path}: is a file; give a directory")
    settings = TrainingSettings(
        seed=seed, loss=loss, **{n.replace("-", "_"): getattr(arguments, n.replace("-", "_")) for n in given}
    )
    loaded, objective, sequences = _prepare(arguments, data, shape, settings)
    (out / STATE_DIRECTORY).mkdir(parents=True, exist_ok=True)
    hidden = HiddenStates(
        loaded.model, objective.layer_ids, sequences, data / "hidden", int(arguments.cache_gib * 2**30), loaded.name,
        memory_bytes=_memory_for_states(loaded),
    )  # fmt: skip
    print(f"{len(sequences)} answers; hidden states: {hidden.place}")
    trainer = Trainer(objective, sequences, hidden, settings)
    if trainer.resume(out):
        print(f"taking up {out} behind step {trainer.step_number}")
    begin = trainer.step_number, trainer.seconds
    report = train(trainer, out, dtype=getattr(torch, arguments.save_dtype), save_every=arguments.save_every)
    if report is not None:
        made = Sequences.load(data / SEQUENCES)[1]
        tokens = int(sequences.lengths.sum())
        write_card(out, objective, settings, made, tokens, report, trainer, arguments.save_dtype, command_line())
        rates = " ".join(f"{rate:.3f}" for rate in report.accept_rate)
        steps, seconds = trainer.step_number - begin[0], trainer.seconds - begin[1]
        print(f"{steps} steps, {seconds:.0f} s: loss {report.loss:.4f}, tau {report.tau:.3f}")
        print(f"chance of acceptance by slot: {rates}")
    size = (out / "model.safetensors").stat().st_size
    calibrate = f"runnerscope dspark calibrate {out}, " if arguments.head == "dspark" else ""
    option = "" if arguments.head == "dspark" else "--mtp "
    print(f"{out}: {size / 2**20:.2f} MiB. Next: {calibrate}runnerscope dspark eval {option}{out}")
    return 0


def _given_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked of a draft's shape. Raises UserError for an MTP head, whose shape follows from the target."""
    shape = {name: getattr(arguments, name) for _, name, _ in _SHAPE}
    shape["markov_head_type"] = arguments.markov_head_type
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in shape.items() if v is not None}
    if given and arguments.head == "mtp":
        flags = {name: flag for flag, name, _ in _SHAPE} | {"markov_head_type": "markov-head-type"}
        said = ", ".join(f"--{flags[name]}" for name in given)
        raise UserError(f"--head mtp takes no {said}: an MTP head is one layer of the target's own kind")
    return given


def _prepare(
    arguments: argparse.Namespace, data: Path, shape: dict[str, Any], settings: Any
) -> tuple[LoadedModel, Objective, Sequences]:
    """The target, what is trained, and the answers; the engine is started only where answers are missing, and gone."""
    import torch

    from engine import LLM

    from ..config import EngineConfig
    from ..models import load_model

    check_prompt_files(arguments)
    keywords = engine_keywords(arguments)
    path = data / SEQUENCES
    if path.is_file():
        config = EngineConfig.from_kwargs(**keywords)
        loaded = load_model(
            config.model, tokenizer=config.tokenizer, dtype=config.torch_dtype, device=config.torch_device,
            load_format=config.load_format, seed=config.seed, skip_tokenizer_init=config.skip_tokenizer_init,
        )  # fmt: skip
        sequences = stored_data(loaded.name, arguments, path, settings.seed)
        return loaded, _objective(loaded, arguments, shape, settings, data), sequences
    llm = LLM(**keywords)
    try:
        objective = _objective(llm.loaded, arguments, shape, settings, data)
        data.mkdir(parents=True, exist_ok=True)
        sequences = training_data(llm, arguments, path, settings.seed)
        loaded = llm.loaded
    finally:
        llm.close()
    del llm
    gc.collect()
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()
    return loaded, objective, sequences


def _objective(
    loaded: LoadedModel, arguments: argparse.Namespace, shape: dict[str, Any], settings: Any, data: Path
) -> Objective:
    from .design import draft_config_for
    from .hidden_states import stored_layers
    from .objectives import DraftObjective, MtpObjective

    if arguments.head == "mtp":
        return MtpObjective(loaded.model, settings.seed, settings.loss, stored_layers(data / "hidden"))
    config = draft_config_for(loaded.config, {"mask_token_id": unused_token(loaded)} | shape)
    return DraftObjective(loaded.model, config, settings.num_anchors, settings.seed, settings.loss)


def _memory_for_states(loaded: LoadedModel) -> int:
    import torch

    if loaded.model.device.type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(loaded.model.device)[0] * _MEMORY_SHARE)


def _stop_like_ctrl_c() -> None:
    """A scheduler's SIGTERM ends a training as a Ctrl-C does: with everything on disk."""
    with contextlib.suppress(ValueError):  # not the main thread: signals don't come here
        signal.signal(signal.SIGTERM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
