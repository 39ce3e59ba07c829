"""How large a batch is never makes another kernel to compile: a compilation while requests wait takes a second."""

import pkgutil
from importlib import import_module

import pytest

import kernels
from kernels.triton_support import TRITON_IMPORT_ERROR

pytestmark = pytest.mark.skipif(TRITON_IMPORT_ERROR is not None, reason="needs Triton")
SIZES_OF_A_BATCH = {"num_reqs", "num_tokens_padded", "num_logits", "budget"}


def test_sizes_of_a_batch_are_not_specialized() -> None:
    from triton.runtime.jit import JITFunction

    seen, wrong = set(), []
    for module in pkgutil.iter_modules(kernels.__path__):
        for name, kernel in vars(import_module(f"kernels.{module.name}")).items():
            if isinstance(kernel, JITFunction) and name.endswith("kernel"):
                sizes = [param for param in kernel.params if param.name in SIZES_OF_A_BATCH]
                seen.update(param.name for param in sizes)
                wrong += [f"{name}: {param.name}" for param in sizes if not param.do_not_specialize]
    assert seen == SIZES_OF_A_BATCH
    assert not wrong


def test_where_prompts_begin_is_not_specialized() -> None:
    kernel = import_module("kernels.prefill_attention")._prefill_attention_kernel
    shifted = {"block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr"}
    assert {param.name for param in kernel.params if param.do_not_specialize_on_alignment} == shifted
