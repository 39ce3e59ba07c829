"""A tiny target, its own answers, and trainings on them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from engine.dspark.data import Sequences
from engine.dspark.design import draft_config_for
from engine.dspark.hidden_states import HiddenStates, stored_layers
from engine.dspark.objectives import DraftObjective, MtpObjective
from engine.dspark.training import Trainer, TrainingSettings
from engine.models import CausalLM, LoadedModel, load_model
from tests.engine.engine_helpers import VOCAB, greedy, tiny_llm


@cache
def loaded_target() -> LoadedModel:
    """A random target with something to learn: its branches weigh little, so what comes next is mostly decided by the
    last token, and a little by those before it."""
    loaded = load_model("tiny-qwen2", dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=3)
    for layer in loaded.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            assert linear.weight is not None
            linear.weight.mul_(0.1)
            linear.packed = None
    return loaded


def target() -> CausalLM:
    return loaded_target().model


@cache
def greedy_sequences(count: int, seed: int) -> Sequences:
    """The tiny target's own greedy answers to random prompts."""
    rng = np.random.default_rng(seed)
    prompts = [[int(t) for t in rng.integers(3, VOCAB, size=3)] for _ in range(count)]
    with tiny_llm(loaded=loaded_target(), max_num_seqs=32) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(40), use_tqdm=False)
    return Sequences.of([(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs])


def draft_of(trainer: Trainer) -> DraftObjective:
    assert isinstance(trainer.objective, DraftObjective)
    return trainer.objective


SETTINGS = TrainingSettings(steps=300, batch_size=16, num_anchors=8, learning_rate=3e-3)


def trainer_on(
    path: Path,
    sequences: Sequences,
    settings: TrainingSettings = SETTINGS,
    max_bytes: int = 1 << 24,
    memory_bytes: int = 0,
) -> Trainer:
    config = draft_config_for(target().config, {"block_size": 4, "markov_rank": 16, "intermediate_size": 64})
    objective = DraftObjective(target(), config, settings.num_anchors, settings.seed, settings.loss)
    hidden = HiddenStates(
        target(), config.target_layer_ids, sequences, path / "hidden", max_bytes, "tiny", memory_bytes
    )
    return Trainer(objective, sequences, hidden, settings)


def mtp_trainer_on(
    path: Path, sequences: Sequences, settings: TrainingSettings = SETTINGS, memory_bytes: int = 0
) -> Trainer:
    objective = MtpObjective(target(), settings.seed, settings.loss, stored_layers(path / "hidden"))
    hidden = HiddenStates(target(), objective.layer_ids, sequences, path / "hidden", 1 << 24, "tiny", memory_bytes)
    return Trainer(objective, sequences, hidden, settings)
