"""Checks that notebooks print: of the machine, and of a reader's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch

from engine.cli.doctor import checks
from engine.models import DEFAULT_MODEL, resolve_model


def self_check() -> None:
    """Prints one line if all that is needed is here, else a line for each part that fails and what to do about it.

    Fetches the default model if this machine has it not yet. Raises RuntimeError if something needed is missing, so
    that "run all" stops at the first cell.
    """
    failed = []
    with contextlib.suppress(Exception):  # the model's check will say what is wrong
        resolve_model(DEFAULT_MODEL, progress=False)
    for check in checks():
        try:
            check.find()
        except Exception as error:  # noqa: BLE001 - whatever is broken is reported, and the next part is looked at
            if check.needed:
                failed.append(check.name)
            print(f"{'✗' if check.needed else '–'} {check.name}: {error}; {check.remedy}")
    if failed:
        raise RuntimeError(f"not ready: {', '.join(failed)}")
    names = " · ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "jupyterlab"))
    print(f"✓ ready: {names} · device, streams, kernels and model in order · V1 == V2")


def check(name: str, yours: Any, truth: Any, *, cases: Sequence[tuple[Any, ...]] = (), hint: str = "") -> None:
    """Prints one line on an exercise: right, not yet written, or where it differs first; never raises.

    Without `cases`, `yours` and `truth` are values. With them both are functions, and each case holds the arguments of
    a call; every call gets copies of its tensors. An answer is not yet written while it is `...` or None, or raises
    NotImplementedError. Tensors may differ by rounding (1e-5), anything else is compared with `==`.
    """

    def results() -> Iterator[tuple[Any, Any, str]]:
        if not cases:
            yield yours, truth, ""
        for number, case in enumerate(cases, start=1):
            yield _call(yours, case), _call(truth, case), f"case {number} of {len(cases)}: " if len(cases) > 1 else ""

    try:
        largest = max(_compare(*result) for result in results())
    except NotImplementedError:
        print(f"– {name}: not written yet." + (f" Hint: {hint}" if hint else ""))
    except _Differs as error:
        print(f"✗ {name}: {error}." + (f" Hint: {hint}" if hint else ""))
    except Exception as error:  # noqa: BLE001 - whatever a reader's code raises is shown to them
        print(f"✗ {name}: it raised {type(error).__name__}: {error}")
    else:
        several = f": right in {len(cases)} cases" if len(cases) > 1 else ""
        print(f"✓ {name}{several}" + (f", within {largest:.0e}" if largest else ""))


class _Differs(Exception):
    """An answer is wrong; says where."""


def _call(function: Callable[..., Any], case: tuple[Any, ...]) -> Any:
    return function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in case))


def _compare(yours: Any, truth: Any, where: str = "") -> float:
    """The largest difference of two tensors, 0 for equal values. Raises _Differs or NotImplementedError."""
    if yours is None or yours is ...:
        raise NotImplementedError
    if not isinstance(truth, torch.Tensor):
        if not isinstance(yours, torch.Tensor) and yours == truth:
            return 0.0
        raise _Differs(f"{where}yours is {yours!r}, right is {truth!r}")
    if not isinstance(yours, torch.Tensor) or yours.shape != truth.shape:
        got = f"a tensor {list(yours.shape)}" if isinstance(yours, torch.Tensor) else repr(yours)
        raise _Differs(f"{where}expected a tensor {list(truth.shape)}, got {got}")
    a, b = yours.double(), truth.double()
    wrong = ~torch.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    if wrong.any():
        place = tuple(int(i) for i in wrong.nonzero()[0])
        at = ", ".join(map(str, place))
        raise _Differs(f"{where}at [{at}] yours is {float(a[place]):.5g}, right is {float(b[place]):.5g}")
    same = a == b  # two infinities have no difference
    return 0.0 if same.all() else float((a - b)[~same].abs().max())
