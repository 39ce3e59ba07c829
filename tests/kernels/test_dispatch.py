"""How a form is picked, what is refused, and that interpreting leaves Triton as it was."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import kernels
from kernels.dispatch import FORMS, resolve_form
from kernels.triton_support import launch, tl, triton

CPU = torch.zeros(1)


@triton.jit
def _square_max(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr, tl.max(x * x, axis=0))


@triton.jit
def _fails(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 3, "BLOCK is not three")


def square_max(values: list[float]) -> float:
    out = torch.zeros(1)
    launch(_square_max, (1,), torch.tensor(values), out, len(values), form="interpret", BLOCK=16)
    return float(out)


def run_python(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ".", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_what_auto_means() -> None:
    assert resolve_form("auto", CPU) == "torch"
    assert [resolve_form(form, CPU) for form in ("torch", "loop", "interpret")] == ["torch", "loop", "interpret"]


def test_an_unknown_form_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown kernel form 'cuda': choose one of auto, triton, torch, interpret, l"):
        resolve_form("cuda", CPU)


def test_triton_on_a_cpu_says_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match="'triton' needs CUDA tensors, got tensors on cpu: use 'interpret'"):
        resolve_form("triton", CPU)


def test_every_function_takes_every_form_on_a_cpu_but_triton() -> None:
    idx, cu = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for form in FORMS:
        if form == "triton":
            with pytest.raises(ValueError, match="CUDA"):
                kernels.expand_idx_mapping(idx, 1, cu, form=form)
        else:
            assert kernels.expand_idx_mapping(idx, 1, cu, form=form)[0].tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idx_mapping": torch.zeros(2, dtype=torch.int64)}, "idx_mapping must have dtype torch.int32, got torch.int6"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"query_start_loc needs at least 3 row\(s\)"),
        ({"block_table": torch.zeros(6, dtype=torch.int32)}, r"block_table must have 2 dimension\(s\), got shape \(6,"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32).t()}, r"block_table must have adjacent elements"),
        ({"num_tokens_padded": 9}, r"positions needs at least 9 row\(s\) for this batch, got 8"),
    ],
)
@pytest.mark.parametrize("form", ["torch", "loop", "interpret"])
def test_bad_tensors_are_named(change: dict, message: str, form: str) -> None:
    arguments = {
        "idx_mapping": torch.zeros(2, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "positions": torch.zeros(8, dtype=torch.int64),
        "block_table": torch.zeros(3, 4, dtype=torch.int32),
        "block_size": 4,
        "slot_mapping": torch.zeros(8, dtype=torch.int64),
        "num_tokens_padded": 8,
    }
    with pytest.raises(ValueError, match=message):
        kernels.compute_slot_mappings(**(arguments | change), form=form)


def test_padding_below_the_batch_is_refused() -> None:
    idx, table = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_reqs_padded must be at least 2, the size of the batch, got 1"):
        kernels.gather_block_tables(idx, table, torch.zeros(3, dtype=torch.int32), table.clone(), 1)
    with pytest.raises(ValueError, match="input_block_table must have the 4 columns of block_table, got 3"):
        kernels.gather_block_tables(idx, table, torch.zeros(3, dtype=torch.int32), table[:, :3].contiguous(), 2)


def test_interpreting_needs_no_variable_and_leaves_triton_as_it_was() -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("this process was started with TRITON_INTERPRET=1: nothing is compiled in it")
    before = {name: getattr(tl, name) for name in ("load", "store", "arange", "max", "range")}
    core_before = {name: getattr(tl.core, name) for name in ("load", "reduce", "broadcast_to")}
    call_before = triton.runtime.jit.JITFunction.__call__
    assert square_max([1.0, -3.0, 2.0]) == 9.0
    with pytest.raises(Exception, match="BLOCK is not three"):
        launch(_fails, (1,), CPU, form="interpret", BLOCK=4)
    assert before == {name: getattr(tl, name) for name in before}
    assert core_before == {name: getattr(tl.core, name) for name in core_before}
    assert triton.runtime.jit.JITFunction.__call__ is call_before
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tl.max(CPU)


def test_threads_may_interpret_at_once() -> None:
    results: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        results[thread] = [square_max([float(thread), 0.5 * i]) for i in range(8)]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {t: [max(t * t, 0.25 * i * i) for i in range(8)] for t in range(3)}


def test_an_empty_grid_launches_nothing() -> None:
    out = torch.full((1,), 5.0)
    launch(_square_max, (0,), torch.ones(1), out, 1, form="interpret", BLOCK=16)
    assert out == 5.0


@pytest.mark.slow
def test_without_triton() -> None:
    out = run_python("""
        import sys
        sys.modules["triton"] = None
        import torch, kernels
        idx, cu = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
        for form in ("auto", "torch", "loop"):
            print(form, kernels.expand_idx_mapping(idx, 3, cu, form=form)[0].tolist())
        for form in ("triton", "interpret"):
            try:
                kernels.expand_idx_mapping(idx, 3, cu, form=form)
            except ModuleNotFoundError as error:
                print(error)
        """)
    lines = out.splitlines()
    assert lines[:3] == ["auto [4, 4, 2]", "torch [4, 4, 2]", "loop [4, 4, 2]"]
    assert len(lines) == 5
    for form, line in zip(("triton", "interpret"), lines[3:], strict=True):
        assert line.startswith(f"kernel form '{form}' needs Triton, which cannot be imported here (")
        assert line.endswith("install triton, or use the form 'torch' or 'loop'")


@pytest.mark.slow
def test_a_process_started_with_triton_interpret() -> None:
    out = run_python(
        """
        import torch, kernels
        idx, cu = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
        print(kernels.expand_idx_mapping(idx, 3, cu, form="interpret")[0].tolist())
        ids = kernels.gumbel_sample(torch.eye(2), torch.zeros(2, dtype=torch.int32), torch.zeros(1),
                                    torch.zeros(1, dtype=torch.int64), torch.arange(2), purpose=0, form="interpret")
        print(ids.tolist())
        """,
        TRITON_INTERPRET="1",
    )
    assert out.splitlines() == ["[4, 4, 2]", "[0, 1]"]
