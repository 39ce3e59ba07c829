"""The torch form of Philox has the bits of Triton's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.philox import NUM_ROUNDS, philox, philox_words, rand, randint, uniform
from kernels.triton_support import launch, tl, triton

SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345, -(2**35), 2**63 - 1, -(2**63)]
# Random123's published known answers for philox4x32-7: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@triton.jit
def _triton_draws(
    seed_ptr, offset_ptr, ints_ptr, floats_ptr, words_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    mask = i < n
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr + i, mask=mask, other=0)
    tl.store(ints_ptr + i, tl.randint(seed, offset, ROUNDS).to(tl.int32, bitcast=True), mask=mask)
    tl.store(floats_ptr + i, tl.rand(seed, offset, ROUNDS), mask=mask)
    c = offset.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c, c + 1, c * 3, c ^ 5, ROUNDS)
    tl.store(words_ptr + i, w0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(words_ptr + n + i, w1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(words_ptr + 2 * n + i, w2.to(tl.int32, bitcast=True), mask=mask)
    tl.store(words_ptr + 3 * n + i, w3.to(tl.int32, bitcast=True), mask=mask)


def check_against_triton(seed: int, offset: torch.Tensor, form: str, device: str = "cpu") -> None:
    n = len(offset)
    seed_tensor, offset = torch.tensor([seed], device=device), offset.to(device)
    ints, words = (torch.zeros(rows, n, dtype=torch.int32, device=device) for rows in (1, 4))
    floats = torch.zeros(1, n, device=device)
    launch(_triton_draws, (1,), seed_tensor, offset, ints, floats, words, n, form=form, ROUNDS=NUM_ROUNDS, BLOCK=128)
    c = offset.long()
    assert torch.equal(randint(seed_tensor, offset), ints[0])
    assert torch.equal(rand(seed_tensor, offset), floats[0])
    assert torch.equal(torch.stack(philox(seed_tensor, c, c + 1, c * 3, c ^ 5)), words)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_of_triton(seed: int, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    edges = torch.tensor([0, 1, 255, 2**31 - 1, -1, info.max, info.min], dtype=dtype)
    spread = torch.randint(info.min, info.max, (121,), dtype=dtype, generator=torch.Generator().manual_seed(3))
    check_against_triton(seed, torch.cat([edges, spread]), "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_of_triton_on_a_gpu(seed: int) -> None:
    check_against_triton(seed, torch.arange(-64, 64) * (2**33 + 1), "triton", "cuda")


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    seed = key[1] << 32 | key[0]
    assert philox_words(seed, *counter) == words
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    got = philox(signed, *map(torch.tensor, counter))
    assert tuple(int(word) & 0xFFFFFFFF for word in got) == words


@given(seed=st.integers(-(2**63), 2**63 - 1), counter=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4))
def test_one_integer_at_a_time(seed: int, counter: tuple[int, int, int, int]) -> None:
    got = philox(torch.tensor([seed]), *(torch.tensor([part]) for part in counter))
    assert tuple(int(word) & 0xFFFFFFFF for word in got) == philox_words(seed, *counter)


def test_parts_broadcast() -> None:
    seed, position, token = torch.tensor([[3], [-4]]), torch.tensor([[9], [2**33]]), torch.arange(50)
    purpose = torch.full_like(position, 2)
    got = torch.stack(philox(seed, token, position, purpose, position >> 32))
    assert got.shape == (4, 2, 50)
    for row in range(2):
        full = [part.expand(50) for part in (seed[row], token, position[row], purpose[row], position[row] >> 32)]
        assert torch.equal(torch.stack(philox(*full)), got[:, row])


def test_uniform_stays_below_one() -> None:
    words = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    u = uniform(words)
    assert u.tolist()[:2] == [0.0, 0.0] and 0.0 < float(u[2]) < 1e-9
    assert float(u.max()) == 1 - 2.0**-24
