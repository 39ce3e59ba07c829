"""One more head as the drafter: its paged form says what the plain form says; it learns; its files are checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.models import ModelConfigError
from engine.models.checkpoint import CheckpointError
from engine.spec_decode import DraftSampler, FinishedStep
from engine.spec_decode.mtp import MtpDecoder, MtpHead
from engine.spec_decode.mtp_checkpoint import Weights, init_weights, mtp_config, read_mtp, write_mtp
from engine.spec_decode.mtp_training import mtp_hidden, mtp_loss
from tests.engine.spec_decode.rounds import MAX_LEN, NUM_BLOCKS, Request, Rounds, as_on_a_gpu, greedy_tokens, model
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits

PROMPTS = [[5, 9, 11, 3, 8, 8, 1], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
FAMILIES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")


def head_weights(name: str, seed: int = 3) -> Weights:
    """As to train from, but with every part large enough to matter."""
    weights = init_weights(mtp_config(model(name).config), seed)
    generator = torch.Generator().manual_seed(seed)
    return {key: w + 0.3 * torch.randn(w.shape, generator=generator) for key, w in weights.items()}


def decoder(name: str, weights: Weights, method: str = "greedy") -> MtpDecoder:
    target = model(name)
    head = MtpHead(mtp_config(target.config), weights, target.model)
    return MtpDecoder(head, DraftSampler(method, 8, 1, target.config.vocab_size, torch.device("cpu"), "torch"), MAX_LEN)


def hidden_states(name: str, tokens: list[int]) -> torch.Tensor:
    """The target's, [1, s, d], of the whole sequence at once."""
    seen: list[torch.Tensor] = []
    target = model(name)
    forward = target.model.forward

    class Keeping:
        compute_logits = staticmethod(target.model.compute_logits)

        def __call__(self, *args: object) -> torch.Tensor:
            seen.append(forward(*args))  # type: ignore[arg-type]
            return seen[-1]

    greedy_tokens(dataclasses.replace(target, model=Keeping()), tokens, 1)  # type: ignore[arg-type]
    return seen[-1].unsqueeze(0).clone()


def plain_draft(name: str, weights: Weights, request: Request) -> int:
    target, tokens = model(name), request.tokens
    hidden = hidden_states(name, tokens)[:, :-1]
    following = F.embedding(torch.tensor([tokens[1:]]), target.model.embed_tokens.weight)
    states = mtp_hidden(mtp_config(target.config), weights, hidden, following)
    return int(target.model.compute_logits(states[:, -1]).argmax())


@pytest.mark.parametrize("chunk", [1000, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_paged_head_says_what_the_plain_one_says(name: str, chunk: int) -> None:
    weights = head_weights(name)
    rounds = Rounds(model(name), decoder(name, weights))
    requests = [rounds.add(prompt, row) for prompt, row in zip(PROMPTS, (2, 0, 5), strict=True)]
    for _ in range(8):
        drafts = rounds.step(requests, chunk)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            assert own == [plain_draft(name, weights, request) if request.num_accepted else -1]
    for prompt, request in zip(PROMPTS, requests, strict=True):
        output = request.tokens[len(prompt) :]
        assert len(output) >= 4 and output == greedy_tokens(model(name), prompt, len(output))


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_over_a_gpus_backend(name: str, chunk: int) -> None:
    """In few launches, for few rows and for many."""
    weights = head_weights(name)
    rounds = Rounds(model(name), decoder(name, weights))
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(PROMPTS)]
    for _ in range(6):
        with as_on_a_gpu(model(name)):
            drafts = rounds.step(requests, chunk)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            if request.num_accepted:
                assert own == [plain_draft(name, weights, request)]


def test_accepted_and_rejected_drafts_leave_the_cache_right() -> None:
    """Every other draft is made the right one."""
    weights = head_weights("tiny-llama")
    mtp = decoder("tiny-llama", weights)
    rounds = Rounds(model(), mtp)
    requests = [rounds.add(prompt, row) for row, prompt in enumerate(PROMPTS)]
    for step in range(10):
        drafts = rounds.step(requests)
        for request, own in zip(requests, drafts.tolist(), strict=True):
            assert own == [plain_draft("tiny-llama", weights, request)]
            if (step + request.row) % 2:
                request.drafts = greedy_tokens(model(), request.tokens, 1)
    assert all({0, 1} <= set(request.num_accepted[1:]) for request in requests)
    assert mtp._kv_cache is not None and not mtp._kv_cache[:, :, [0, NUM_BLOCKS - 1]].any()


def test_drafting_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    mtp = decoder("tiny-llama", head_weights("tiny-llama"), "probabilistic")
    rounds = Rounds(model(), mtp)
    requests = [rounds.add(prompt, row, temperature=0.7) for row, prompt in enumerate(PROMPTS)]
    rounds.step(requests)
    propose = mtp.propose

    def watched(step: FinishedStep) -> torch.Tensor:
        with monkeypatch.context() as patch, NoHostWait("cpu"):
            forbid_waits(patch)
            return propose(step)

    mtp.propose = watched  # type: ignore[method-assign]
    assert (rounds.step(requests) >= 0).all()
    assert mtp.draft_logits is not None and mtp.draft_logits[:3].any()


def test_the_last_position_gets_no_draft() -> None:
    rounds = Rounds(model(), decoder("tiny-llama", head_weights("tiny-llama")))
    request = rounds.add(range(3, MAX_LEN), 0)
    for _ in range(4):
        drafts = rounds.step([request])
        assert (int(drafts) >= 0) == (len(request.tokens) < MAX_LEN)
        if len(request.tokens) >= MAX_LEN:
            break
    assert len(request.tokens) >= MAX_LEN


def test_training_makes_drafts_that_are_accepted() -> None:
    """The head learns what its target says: the loss falls and the chance of acceptance rises."""
    target = model()
    config, weights = mtp_config(target.config), init_weights(mtp_config(target.config), 0)
    sequences = []
    for start in range(3, 11):
        sequences.append([start, *greedy_tokens(target, [start], 30)])
    hidden = torch.cat([hidden_states("tiny-llama", tokens) for tokens in sequences])
    tokens = torch.tensor(sequences)
    counts = torch.ones(tokens.shape, dtype=torch.bool)
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.0)
    head, embedding = target.model.lm_head.weight, target.model.embed_tokens.weight
    assert head is not None
    rates = []
    for _ in range(60):
        loss = mtp_loss(config, weights, embedding, head, hidden, tokens, counts)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        rates.append(float(loss.accept_rate))
        assert 0 <= rates[-1] <= 1 and float(loss.l1) == pytest.approx(2 * (1 - rates[-1]), abs=1e-5)
    assert rates[-1] > rates[0] + 0.3
    trained = {name: weight.detach() for name, weight in weights.items()}
    rounds = Rounds(target, decoder("tiny-llama", trained))
    requests = [rounds.add([start], row) for row, start in enumerate(range(3, 9))]
    for _ in range(12):
        rounds.step(requests)
    accepted = [number for request in requests for number in request.num_accepted[1:]]
    assert sum(accepted) / len(accepted) > 0.5


def test_only_the_tokens_that_count_are_learned() -> None:
    target = model()
    config, weights = mtp_config(target.config), init_weights(mtp_config(target.config), 0)
    tokens = torch.tensor([[5, 9, 11, 3, 8, 2]])
    hidden, counts = hidden_states("tiny-llama", tokens[0].tolist()), torch.zeros(1, 6, dtype=torch.bool)
    counts[0, 3] = True
    head, embedding = target.model.lm_head.weight, target.model.embed_tokens.weight
    assert head is not None
    loss = mtp_loss(config, weights, embedding, head, hidden, tokens, counts, ce_weight=1.0, l1_weight=0.0)
    following = F.embedding(tokens[:, 1:3], embedding)
    logits = F.linear(mtp_hidden(config, weights, hidden[:, :2], following)[0, 1], head)
    assert float(loss.total) == pytest.approx(float(-logits.log_softmax(-1)[3]), rel=1e-5)
    tokens[0, 4:] = 1
    again = mtp_loss(config, weights, embedding, head, hidden, tokens, counts, ce_weight=1.0, l1_weight=0.0)
    assert float(again.total) == float(loss.total)


def test_files(tmp_path: Path) -> None:
    config, weights = mtp_config(model("tiny-qwen3").config), head_weights("tiny-qwen3")
    write_mtp(tmp_path, config, weights, torch.float32)
    read_config, read = read_mtp(tmp_path)
    assert read_config == config
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)

    spoilt = {**weights, "extra.weight": torch.zeros(1), "enorm.weight": torch.zeros(2)}
    del spoilt["hnorm.weight"]
    with pytest.raises(CheckpointError) as error:
        write_mtp(tmp_path, config, spoilt, torch.float32)
    for problem in ("hnorm.weight is missing", "extra.weight is not part of", "enorm.weight has shape [2], the config"):
        assert problem in str(error.value)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelConfigError, match="is no MTP head's"):
        read_mtp(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "depth": 2}))
    with pytest.raises(ModelConfigError, match="depth"):
        read_mtp(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="missing, damaged or cut off"):
        read_mtp(tmp_path)


def test_a_head_of_another_model_is_refused() -> None:
    config = dataclasses.replace(mtp_config(model().config), vocab_size=100)
    with pytest.raises(ModelConfigError, match="vocab_size is 100, the target's 384. Use the head that was trained"):
        MtpHead(config, {}, model().model)
