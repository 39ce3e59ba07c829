"""The sequential part of a block of drafts (DSpark, arXiv 2607.05147): most likely tokens, one behind the other.

The logits of draft n are the output head's, known for the whole block, plus W2 latent, where the latent comes from the
token before. r requests, N drafts, V vocabulary, d hidden size, k Markov rank.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.dispatch import check_tensors, resolve_form
from kernels.markov_drafts_triton import last_token_kernel, latent_kernel, score_kernel
from kernels.triton_support import can_launch_early, launch


class MarkovHead(NamedTuple):
    """How the token before becomes a latent, e = W1[token] and h the backbone's hidden state:

    | kind | latent | state |
    |---|---|---|
    | vanilla | e | |
    | gated | sigmoid(gate(h, e)) * e | |
    | rnn | tanh(o), where g, c, o = joint(h, s, e) | s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), from 0 |

    `gate` and `joint` are linear; what they make of h does not wait for a token, so its weights stand apart. All have
    one dtype.
    """

    kind: str
    # [V, k]
    w1: torch.Tensor
    # [V, k]
    w2: torch.Tensor
    # gated [k, d], rnn [3 k, d]; and the bias [k] or [3 k]
    hidden_weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    # gated [k, k], of e; rnn [3 k, 2 k], of s and then e
    token_weight: torch.Tensor | None = None


class ConfidenceHead(NamedTuple):
    """A confidence before its sigmoid: hidden_weight . h + token_weight . e + bias."""

    # [d]
    hidden_weight: torch.Tensor
    # [1]
    bias: torch.Tensor
    # [k], None for a head that does not see the token before
    token_weight: torch.Tensor | None = None


def markov_drafts(
    # [r, N, V] f32, of the output head
    base_logits: torch.Tensor,
    # [r, Q, d], Q >= N, of the backbone
    hidden: torch.Tensor,
    # [r] i32 or i64: the tokens before the blocks, with any stride
    anchors: torch.Tensor,
    head: MarkovHead,
    confidence: ConfidenceHead | None = None,
    *,
    form: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the most likely drafts i64 [r, N] and their confidences before the sigmoid f32 [r, N].

    A draft is the lowest id of the largest logit. NaN counts as -inf, and a row of nothing else gives id 0. Confidences
    are None without that head. Sums are float32. In Triton a vanilla head takes N + 1 launches, the others 2 N + 2.

    Raises:
        ValueError: a wrong dtype, shape or form.
    """
    _check(base_logits, hidden, anchors, head, confidence)
    form = resolve_form(form, base_logits)
    num_reqs, num_drafts, _ = base_logits.shape
    gates = None
    if head.hidden_weight is not None:
        gates = F.linear(hidden[:, :num_drafts], head.hidden_weight, head.bias)
    tokens = torch.empty(num_reqs, num_drafts, dtype=torch.int64, device=hidden.device)
    logits = torch.empty(num_reqs, num_drafts, dtype=torch.float32, device=hidden.device) if confidence else None
    run = {"loop": _loop, "torch": _torch}.get(form, _launch)
    run(base_logits, hidden, anchors, head, gates, confidence, tokens, logits, form)
    return tokens, logits


def _check(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    head: MarkovHead,
    confidence: ConfidenceHead | None,
) -> None:
    num_reqs, num_drafts, vocab_size = base_logits.shape
    check_tensors(torch.float32, 3, base_logits=base_logits)
    check_tensors(head.w1.dtype, 3, num_reqs, hidden=hidden)
    if not base_logits.is_contiguous() or not hidden.is_contiguous():
        raise ValueError("base_logits and hidden must be contiguous: draft n of request i is row i * N + n")
    if hidden.shape[1] < num_drafts:
        raise ValueError(f"hidden has {hidden.shape[1]} positions a request, base_logits {num_drafts}: give one each")
    if anchors.shape != (num_reqs,) or anchors.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"anchors must be [{num_reqs}] i32 or i64, got {tuple(anchors.shape)} {anchors.dtype}")
    rank, size = head.w1.shape[1], hidden.shape[2]
    gates = {"vanilla": 0, "gated": 1, "rnn": 3}.get(head.kind)
    if gates is None:
        raise ValueError(f"head.kind {head.kind!r} is unknown: choose vanilla, gated or rnn")
    shapes: dict[str, tuple[int, ...]] = {"w1": (vocab_size, rank), "w2": (vocab_size, rank)}
    if gates:
        width = rank * (2 if head.kind == "rnn" else 1)
        shapes |= {
            "hidden_weight": (gates * rank, size),
            "bias": (gates * rank,),
            "token_weight": (gates * rank, width),
        }
    for name, shape in shapes.items():
        weight = getattr(head, name)
        if weight is None or weight.shape != shape or not weight.is_contiguous():
            found = None if weight is None else tuple(weight.shape)
            raise ValueError(f"head.{name} of a {head.kind} head must be contiguous {list(shape)}, got {found}")
    if confidence is not None:
        check_tensors(hidden.dtype, 1, size, hidden_weight=confidence.hidden_weight)
        check_tensors(hidden.dtype, 1, 1, bias=confidence.bias)
        if confidence.token_weight is not None:
            check_tensors(hidden.dtype, 1, rank, token_weight=confidence.token_weight)


def _loop(
    base_logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, head: MarkovHead,
    gates: torch.Tensor | None, confidence: ConfidenceHead | None, tokens: torch.Tensor, logits: torch.Tensor | None,
    form: str,
) -> None:  # fmt: skip
    w2 = head.w2.float()
    for i in range(tokens.shape[0]):
        token, state = int(anchors[i]), torch.zeros(head.w1.shape[1], device=hidden.device)
        for n in range(tokens.shape[1]):
            e = latent = head.w1[token].float()
            if gates is not None and head.token_weight is not None:
                seen = e if head.kind == "gated" else torch.cat((state, e))
                gate = gates[i, n].float() + head.token_weight.float() @ seen
                if head.kind == "gated":
                    latent = torch.sigmoid(gate) * e
                else:
                    g, c, o = gate.chunk(3)
                    latent = torch.tanh(o)
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            if confidence is not None and logits is not None:
                z = confidence.hidden_weight.float() @ hidden[i, n].float() + confidence.bias[0].float()
                if confidence.token_weight is not None:
                    z = z + confidence.token_weight.float() @ e
                logits[i, n] = z
            token, best = 0, float("-inf")
            for v, score in enumerate((base_logits[i, n] + w2 @ latent.to(w2.dtype)).tolist()):
                if score > best:
                    token, best = v, score
            tokens[i, n] = token


def _torch(
    base_logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, head: MarkovHead,
    gates: torch.Tensor | None, confidence: ConfidenceHead | None, tokens: torch.Tensor, logits: torch.Tensor | None,
    form: str,
) -> None:  # fmt: skip
    previous, state = anchors, None
    for n in range(tokens.shape[1]):
        e = F.embedding(previous, head.w1)
        latent, state = next_latent(head, None if gates is None else gates[:, n], e, state)
        if confidence is not None and logits is not None:
            logits[:, n] = confidence_logits(confidence, hidden[:, n], e)
        scores = F.linear(latent, head.w2).float().add_(base_logits[:, n])
        previous = scores.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).argmax(-1)
        tokens[:, n] = previous


def next_latent(
    head: MarkovHead, gate: torch.Tensor | None, e: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latent [r, k] and the rnn's next state, of W1's rows e [r, k] and what the head makes of h, [r, k] or [r, 3 k].

    `state` None is its first.
    """
    if gate is None or head.token_weight is None:
        return e, None
    if head.kind == "gated":
        return torch.sigmoid(F.linear(e, head.token_weight).add_(gate)).mul_(e), None
    if state is None:
        state = torch.zeros_like(e)
    joint = F.linear(torch.cat((state, e), -1), head.token_weight).add_(gate)
    g, c, o = joint.chunk(3, -1)
    g = torch.sigmoid(g)
    return torch.tanh(o), g * state + (1 - g) * torch.tanh(c)


def confidence_logits(confidence: ConfidenceHead, hidden: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """Confidences before the sigmoid f32 [r], of hidden [r, d] and W1's rows e [r, k]."""
    z = torch.mv(hidden, confidence.hidden_weight).float()
    if confidence.token_weight is not None:
        z = z + torch.mv(e, confidence.token_weight).float()
    return z + confidence.bias.float()


def _launch(
    base_logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, head: MarkovHead,
    gates: torch.Tensor | None, confidence: ConfidenceHead | None, tokens: torch.Tensor, logits: torch.Tensor | None,
    form: str,
) -> None:  # fmt: skip
    (num_reqs, num_drafts, vocab_size), rank = base_logits.shape, head.w1.shape[1]
    block_r, block_v, block_k, block_t, num_warps = _tile(num_reqs, rank, head.w1.dtype)
    num_tiles = -(-vocab_size // block_v)
    device, pdl = hidden.device, can_launch_early(form, hidden)
    # Of the draft before and of this one, in turn.
    maxima = torch.empty(2, num_reqs, num_tiles, dtype=torch.float32, device=device)
    argmaxima = torch.empty(2, num_reqs, num_tiles, dtype=torch.int32, device=device)
    latents = states = None
    if gates is not None:
        latents = torch.empty(num_reqs, rank, dtype=head.w1.dtype, device=device)
        states = torch.empty(2, num_reqs, rank, dtype=torch.float32, device=device)
    row_blocks = -(-num_reqs // block_r)
    before = (anchors, anchors.stride(0), maxima, argmaxima, num_tiles)
    for n in range(num_drafts):
        if gates is not None:
            launch(
                latent_kernel, (num_reqs,), *before, head.w1, gates, head.token_weight, latents, states,
                num_reqs, num_drafts, n,
                RANK=rank, BLOCK_J=max(16, 1 << (rank - 1).bit_length()), BLOCK_K=32, BLOCK_T=256,
                IS_RNN=head.kind == "rnn", FIRST=n == 0,
                form=form, pdl=pdl,
            )  # fmt: skip
        launch(
            score_kernel, (num_tiles + 1, row_blocks), *before, base_logits, head.w1, head.w2, latents,
            hidden, hidden.shape[1], hidden.shape[2],
            confidence.hidden_weight if confidence else None, confidence.token_weight if confidence else None,
            confidence.bias if confidence else None, logits, tokens, num_reqs, num_drafts, vocab_size, n,
            num_warps=num_warps, RANK=rank, BLOCK_R=block_r, BLOCK_V=block_v,
            BLOCK_K=max(16, min(block_k, 1 << (rank - 1).bit_length())), BLOCK_T=block_t, BLOCK_D=256,
            UPCAST=form == "interpret", FIRST=n == 0, form=form, pdl=pdl,
        )  # fmt: skip
    launch(
        last_token_kernel, (num_reqs,), maxima, argmaxima, num_tiles, tokens, num_reqs, num_drafts, BLOCK_T=256,
        num_warps=1, form=form, pdl=pdl,
    )  # fmt: skip


def _tile(num_reqs: int, rank: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Of a program of score_kernel: requests, tokens, depth and tiles of one read; and its warps. None spills.

    Each program looks for the token before itself, which saves a launch a draft; the more requests there are, the wider
    its tile, so that there are fewer programs to do so.
    """
    if num_reqs == 1:
        return 1, 256, 64, 256, 4
    if dtype == torch.float32:  # no matrix instruction takes it as it is
        return 16, 256, 16, 32, 8
    if num_reqs <= 16:
        return 16, 256, 32, 32, 8
    return 32, 512 if rank <= 64 else 256, 32, 32, 8
