"""The paged form: golden rounds, batches, chunked prompts, shared blocks, rejected tokens, no host wait."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.dspark.contiguous import draft_block, draft_hidden
from engine.dspark.drafter import DraftSampling, DSparkDrafter
from engine.dspark.target import prefill_with_hidden
from engine.models import load_model
from kernels.paged_attention_triton import decode_attention_kernel
from kernels.triton_support import triton
from tests.engine.dspark.golden import HEADS, ROOT, TOLERANCE, Golden, golden
from tests.engine.dspark.paged import BLOCK_SIZE, PagedLoop, Request
from tests.kernels.test_no_host_wait import NoHostWait, forbid_waits


def loop_of(given: Golden, form: str = "torch") -> PagedLoop:
    return PagedLoop(given.target, given.config, given.weights, form)


def request_of(given: Golden, first_block: int = 1) -> Request:
    # Not in order, and none of them shared.
    return Request(given.values["prompt"].tolist(), list(range(first_block + 17, first_block, -1)))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("form", ["torch", "loop", "interpret"])
def test_golden_rounds(head: str, form: str) -> None:
    given = golden(head)
    loop, request = loop_of(given, form), request_of(given)
    rounds = given.rounds()[: 8 if form == "torch" else 3]
    for i, (position, values) in enumerate(rounds):
        drafts = loop.step([request])
        assert request.computed == position and request.tokens[position] == int(values["anchor"])
        if i:
            torch.testing.assert_close(loop.last_logits, rounds[i - 1][1]["target_logits"], **TOLERANCE)
        assert torch.equal(drafts.tokens[0], values["draft_tokens"])
        base = F.linear(loop.last_hidden[0], given.weights["lm_head.weight"])
        torch.testing.assert_close(base, values["base_logits"], **TOLERANCE)
        assert drafts.confidence_logits is not None
        torch.testing.assert_close(drafts.confidence_logits[0], values["confidence_logits"], **TOLERANCE)
    if form == "torch":
        loop.step([request])
        assert request.tokens == given.sequence


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk", [3, 7, 1000])
def test_a_batch_drafts_like_each_request_alone(head: str, chunk: int) -> None:
    """Chunked prompts beside decodes; what every block is drafted from is the plain form's."""
    given = golden(head)
    loop = loop_of(given)
    prompts = (given.values["prompt"].tolist(), [5, 9, 200, 31, 7], given.sequence[3:24])
    requests = [Request(list(p), list(range(1 + 24 * i, 25 + 24 * i))) for i, p in enumerate(prompts)]
    for _ in range(10):
        drafts = loop.step(requests, chunk)
        for i, request in enumerate(requests):
            if not request.drafts:
                continue
            tokens = request.tokens[: request.computed + 1]
            _, chosen = prefill_with_hidden(given.target, [tokens], given.config.target_layer_ids)
            anchor, position = torch.tensor([[tokens[-1]]]), torch.tensor([[request.computed]])
            hidden = draft_hidden(
                given.config,
                given.weights,
                given.weights["embed_tokens.weight"],
                chosen[0].unsqueeze(0),
                anchor,
                position,
            )[0]
            torch.testing.assert_close(loop.last_hidden[i], hidden[0], **TOLERANCE)
            base = F.linear(hidden, given.weights["lm_head.weight"])
            expected, _, confidences = draft_block(given.config, given.weights, hidden, base, anchor[0])
            assert torch.equal(drafts.tokens[i], expected[0])
            assert drafts.confidence_logits is not None and confidences is not None
            torch.testing.assert_close(drafts.confidence_logits[i], confidences[0], **TOLERANCE)
    assert all(len(request.tokens) > len(prompt) for request, prompt in zip(requests, prompts, strict=True))


def test_a_prefix_hit_reads_the_shared_context_and_never_writes_it() -> None:
    """T11: two full blocks are shared; the second request computes only what lies behind them."""
    given = golden("gated")
    loop = loop_of(given)
    prompt = given.values["prompt"].tolist()
    first = Request(list(prompt), list(range(1, 20)))
    loop.step([first])
    shared = first.blocks[:2]
    other = [*prompt[: 2 * BLOCK_SIZE], 77, 12, 90]
    second = Request(list(other), [*shared, *range(40, 60)], computed=2 * BLOCK_SIZE)
    before = loop.draft_cache[:, :, shared].clone(), loop.target_cache[:, :, shared].clone()
    drafts = loop.step([second])
    assert torch.equal(loop.draft_cache[:, :, shared], before[0])
    assert torch.equal(loop.target_cache[:, :, shared], before[1])
    fresh = loop_of(given)
    alone = Request(list(other), list(range(1, 24)))
    expected = fresh.step([alone])
    assert alone.tokens == second.tokens and torch.equal(drafts.tokens, expected.tokens)
    torch.testing.assert_close(loop.last_hidden, fresh.last_hidden, **TOLERANCE)


def test_writes_stay_in_the_requests_own_blocks() -> None:
    """Too few look-ahead blocks: the block is cut, and nothing else is touched (nor is slot 0)."""
    given = golden("vanilla")
    loop = loop_of(given)
    loop.draft_cache.fill_(0.5)
    prompt = given.values["prompt"].tolist()[:15]
    request = Request(prompt, [3, 4, 5, 6])
    drafts = loop.step([request])
    assert loop.last_inputs is not None and loop.last_inputs.seq_lens.tolist() == [16]
    untouched = torch.ones(loop.draft_cache.shape[2], dtype=torch.bool)
    untouched[[3, 4, 5, 6]] = False
    assert (loop.draft_cache[:, :, untouched] == 0.5).all()
    assert torch.isfinite(loop.last_hidden).all() and drafts.tokens.shape == (1, 5)


def test_what_was_rejected_leaves_no_trace() -> None:
    """Behind a rejection the next block is that of a request that never had the rejected tokens."""
    given = golden("rnn")
    loop, request = loop_of(given), request_of(given)
    loop.step([request])
    request.drafts = [1, 2, 3, 4, 5]
    loop.step([request])
    fresh = loop_of(given)
    again = Request(list(request.tokens[:-1]), list(range(1, 20)))
    fresh.step([again])
    assert again.tokens == request.tokens
    torch.testing.assert_close(loop.last_hidden, fresh.last_hidden, **TOLERANCE)


@pytest.mark.parametrize("k", [1, 3])
def test_fewer_drafts_are_the_first_of_the_block(k: int) -> None:
    """T13."""
    given = golden("rnn")
    short, whole = loop_of(given), loop_of(given)
    some = short.step([request_of(given)], k=k)
    all_of_them = whole.step([request_of(given)])
    assert some.tokens.shape == (1, k)
    assert torch.equal(some.tokens, all_of_them.tokens[:, :k])
    assert some.confidence_logits is not None and all_of_them.confidence_logits is not None
    torch.testing.assert_close(some.confidence_logits, all_of_them.confidence_logits[:, :k])


def test_drawn_drafts_follow_their_logits() -> None:
    """1 500 blocks of one context: the first draft's frequencies are softmax(logits / temperature)."""
    given = golden("vanilla")
    loop = loop_of(given)
    loop.step([request_of(given)])
    num, inputs = 1500, loop.last_inputs
    assert inputs is not None
    anchors = torch.full((num,), int(given.rounds()[0][1]["anchor"]))
    sampling = DraftSampling(
        torch.arange(num, dtype=torch.int32), torch.full((num,), 3.0), torch.arange(num, dtype=torch.int64)
    )
    drafts = loop.drafter.propose(
        loop.last_hidden.expand(num, -1, -1), anchors, inputs.positions.expand(num, -1), 2, sampling
    )
    assert drafts.logits is not None and drafts.logits.shape == (num, 2, 256)
    expected = given.rounds()[0][1]["draft_logits"][0] / 3.0
    torch.testing.assert_close(drafts.logits[0, 0], expected, **TOLERANCE)
    q = expected.softmax(-1)
    seen = torch.bincount(drafts.tokens[:, 0], minlength=256).float()
    likely = q * num >= 5
    chi_square = ((seen - q * num)[likely].square() / (q * num)[likely]).sum()
    assert chi_square < int(likely.sum()) + 4 * (2 * int(likely.sum())) ** 0.5
    # The second draft was drawn behind the first: its logits have that token's bias.
    assert (drafts.logits[:, 1] - drafts.logits[0, 1]).abs().amax(-1).gt(1e-3).any()


def test_a_greedy_row_in_a_drawn_batch_is_greedy() -> None:
    given = golden("gated")
    loop, request = loop_of(given), request_of(given)
    sampling = DraftSampling(torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.tensor([5], dtype=torch.int64))
    drafts = loop.step([request], sampling=sampling)
    assert torch.equal(drafts.tokens[0], given.rounds()[0][1]["draft_tokens"])


def test_embedding_and_head_of_the_target_serve_a_draft_without() -> None:
    given = golden("vanilla")
    own = {name: w for name, w in given.weights.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    drafter = DSparkDrafter(given.config, own, given.target)
    assert drafter.embed_tokens is given.target.embed_tokens
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(drafter.compute_logits(hidden), given.target.compute_logits(hidden))
    changed = given.weights | {"lm_head.weight": given.weights["lm_head.weight"] * 2}
    doubled = DSparkDrafter(given.config, changed, given.target)
    torch.testing.assert_close(doubled.compute_logits(hidden), 2 * given.target.compute_logits(hidden))


def test_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    given = golden("rnn")
    loop, request = loop_of(given), request_of(given)
    loop.step([request])
    inputs, t = loop.last_inputs, 3
    assert inputs is not None
    table = torch.arange(24, dtype=torch.int32).view(1, 24)
    hidden, anchors, positions = torch.randn(t, 192), torch.tensor([3]), torch.arange(t)
    sampling = DraftSampling(torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.tensor([5]))
    with monkeypatch.context() as patch, NoHostWait("cpu"):
        forbid_waits(patch)
        loop.drafter.inject_context(hidden, positions, inputs.context_slot_mapping[:t], loop.draft_cache)
        out = loop.drafter.backbone(inputs, table, loop.draft_cache, 64)
        loop.drafter.propose(out, anchors, inputs.positions.view(1, 5), 5, sampling)
        loop.drafter.propose(out, anchors, inputs.positions.view(1, 5), 5)


def test_half_precision() -> None:
    """The same block in bfloat16: close, in the target's dtype, with logits and confidences in float32."""
    given = golden("rnn")
    half = load_model(
        ROOT / "rnn" / "target", dtype=torch.bfloat16, device=torch.device("cpu"), skip_tokenizer_init=True
    ).model
    whole, request = loop_of(given), request_of(given)
    expected = whole.step([request])
    prompt, inputs = given.values["prompt"].tolist(), whole.last_inputs
    assert inputs is not None
    _, chosen = prefill_with_hidden(given.target, [prompt], given.config.target_layer_ids)
    drafter = DSparkDrafter(given.config, given.weights, half)
    cache, table = drafter.allocate_kv_cache(120, BLOCK_SIZE), torch.tensor([request.blocks], dtype=torch.int32)
    positions = torch.arange(len(prompt))
    drafter.inject_context(chosen[0].bfloat16(), positions, inputs.context_slot_mapping, cache)
    hidden = drafter.backbone(inputs, table, cache, 40)
    drafts = drafter.propose(hidden, inputs.input_ids[:1].long(), inputs.positions.view(1, 5), 5)
    assert cache.dtype == hidden.dtype == torch.bfloat16
    error = (hidden.float() - whole.last_hidden).norm(dim=-1)
    assert (error < 0.1 * whole.last_hidden.norm(dim=-1)).all()
    assert drafts.confidence_logits is not None and expected.confidence_logits is not None
    assert drafts.confidence_logits.dtype == torch.float32
    assert (drafts.confidence_logits - expected.confidence_logits)[0, 0].abs() < 0.5


def test_the_decode_kernel_compiles_for_a_whole_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 7 with 3 query heads a KV head is a decode with 21: SmolLM2's draft."""
    if triton.knobs.runtime.interpret:
        pytest.skip("this process was started with TRITON_INTERPRET=1: nothing can be compiled in it")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does anyway, with a warning
    constexprs: dict[str, object] = {"PDL": False, "UPCAST": False, "GROUP": 21, "GROUP_PAD": 32, "NUM_KV_HEADS": 3}
    constexprs |= {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_SIZE": 16, "BLOCK_M": 32, "BLOCK_N": 64, "SPLITS": 16}
    constexprs |= dict.fromkeys(("positions_ptr", "cos_sin_ptr", "q_norm_ptr", "k_norm_ptr"))
    types = {"slot_mapping_ptr": "*i64", "value_offset": "i64", "eps": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(("qkv_ptr", "kv_cache_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("partial_ptr", "statistics_ptr"), "*fp32")
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in decode_attention_kernel.arg_names
    }
    source = ASTSource(fn=decode_attention_kernel, signature=signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2, "num_stages": 2})
    assert compiled.metadata.shared < 200_000
