"""Triton where it is installed, and a way to interpret a compiled kernel on the CPU.

Every kernel file imports `triton` and `tl` from here, so that the package can be imported without Triton. Kernels are
ordinary `@triton.jit` functions; `launch` compiles them or interprets them, whichever the form asks for, in one process
and whatever TRITON_INTERPRET was when the process started.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch

triton: Any
tl: Any
TRITON_IMPORT_ERROR: ImportError | None = None
try:
    import triton as _triton
    import triton.language as _language

    triton, tl = _triton, _language
except ImportError as error:
    TRITON_IMPORT_ERROR = error

    def _undecorated(fn: Callable | None = None, **_: Any) -> Callable:
        return fn if fn is not None else _undecorated

    triton, tl = SimpleNamespace(jit=_undecorated), SimpleNamespace(constexpr=lambda value: value)

# The interpreter swaps functions of triton.language while it runs, so nothing may compile or interpret beside it.
_LANGUAGE_LOCK = RLock()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    form: str,
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
    pdl: bool | None = None,
    **constexprs: Any,
) -> None:
    """Run a `@triton.jit` kernel over `grid`: compiled for form "triton", on the CPU for form "interpret".

    A thread may have `maxnreg` registers. A kernel with the constexpr PDL is told `pdl`, and where it is true launched
    before the kernel in front of it has ended (see `can_launch_early`).
    """
    if 0 in grid:
        return
    if pdl is not None:
        constexprs["PDL"] = pdl
    with _LANGUAGE_LOCK:
        if form == "interpret":
            with _interpreter():
                _interpreted(kernel.fn)[grid](*args, **constexprs)
        else:
            options = {"maxnreg": maxnreg} if maxnreg else {}
            options |= {"launch_pdl": True} if pdl else {}
            kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **options, **constexprs)


def can_launch_early(form: str, tensor: torch.Tensor) -> bool:
    """Whether programmatic dependent launch is possible: compiled, on Hopper or newer.

    A kernel launched so calls `gdc_wait()` before it reads what earlier kernels wrote or writes what they read. One
    with something to read before that calls `gdc_launch_dependents()` at once, so a chain of them may be waiting. What
    it reads early must have been complete when a kernel began that was launched the ordinary way, or that starts with
    `begin_behind`: weights, and whatever a step's embedding came after.
    """
    return form == "triton" and _capability(tensor.device) >= 9


@triton.jit
def begin_behind(PDL: tl.constexpr):
    """How a kernel starts that may be launched early and reads nothing early: all before it is complete, and the next
    one may be on its way."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def interpreted_as(stand_in: Callable) -> Callable[[Callable], Callable]:
    """Say, below `jit`, what the interpreter calls for a device function that it cannot run, as inline PTX."""

    def mark(fn: Callable) -> Callable:
        if TRITON_IMPORT_ERROR is None and triton.knobs.runtime.interpret:  # `jit` makes no JITFunction then
            return stand_in
        fn.stand_in = stand_in  # type: ignore[attr-defined]
        return fn

    return mark


@cache
def _interpreted(fn: Callable) -> Any:
    # NOTE: keyed by the plain function. A JITFunction hashes its source and globals, which are patched just then.
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(fn)


@contextmanager
def _interpreter() -> Iterator[None]:
    """Let compiled device functions (`tl.max`, `tl.philox`, our helpers) be called by an interpreted kernel.

    Triton decides at decoration time which of the two a device function is. A JITFunction is never called in compiled
    mode (its `__call__` only raises), so giving that call a meaning here changes nothing for compiled kernels. The
    language is patched once for the whole launch and restored after it: Triton's own nested calls patch it again each
    time, and leave it patched.
    """
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    def call(device_function: Any, *args: Any, **kwargs: Any) -> Any:
        fn = getattr(device_function.fn, "stand_in", device_function.fn)
        return _interpreted(fn).rewrite()(*args, **kwargs)

    already_patched = SimpleNamespace(restore=lambda: None)
    language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        language.set_attr(interpreter, "_patch_lang", lambda fn: already_patched)
        language.set_attr(JITFunction, "__call__", call)
        # Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses.
        language.set_attr(tl.core.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        yield
    finally:
        language.restore()
