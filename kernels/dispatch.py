"""How a form of a kernel is picked, and the checks that every form shares.

| form | what runs |
|---|---|
| triton | the compiled Triton kernel; CUDA tensors only |
| torch | vectorised torch, on any device, without a host wait |
| interpret | the same Triton kernel under Triton's interpreter: slow, any device |
| loop | a plain loop over requests that reads device scalars: the specification |
| auto | triton for CUDA tensors where Triton is installed, else torch |
"""

import torch

from kernels.triton_support import TRITON_IMPORT_ERROR

FORMS = ("auto", "triton", "torch", "interpret", "loop")


def resolve_form(form: str, tensor: torch.Tensor) -> str:
    """Return the form to run: "triton", "torch", "interpret" or "loop".

    Args:
        form: one of `FORMS`.
        tensor: any tensor argument of the call; its device decides for "auto".

    Raises:
        ValueError: `form` is unknown, or "triton" is asked for on tensors that are not on a CUDA device.
        ModuleNotFoundError: `form` needs Triton and Triton cannot be imported.
    """
    if form == "auto":
        return "triton" if tensor.is_cuda and TRITON_IMPORT_ERROR is None else "torch"
    if form in ("torch", "loop"):
        return form
    if form not in FORMS:
        raise ValueError(f"unknown kernel form {form!r}: choose one of {', '.join(FORMS)}")
    if TRITON_IMPORT_ERROR is not None:
        raise ModuleNotFoundError(
            f"kernel form {form!r} needs Triton, which cannot be imported here ({TRITON_IMPORT_ERROR}): "
            "install triton, or use the form 'torch' or 'loop'"
        )
    if form == "triton" and not tensor.is_cuda:
        raise ValueError(
            f"kernel form 'triton' needs CUDA tensors, got tensors on {tensor.device}: "
            "use 'interpret' to run the same kernel there, or 'torch' for speed"
        )
    return form


def check_tensors(dtype: torch.dtype | None, ndim: int, min_length: int = 0, **tensors: torch.Tensor) -> None:
    """Raise ValueError for the first tensor of another dtype, rank or memory layout, or with too few rows.

    Kernels take the stride between rows from the tensor and expect the elements of a row to be adjacent.
    `dtype=None` accepts any.
    """
    for name, tensor in tensors.items():
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if tensor.dim() != ndim:
            raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} must have adjacent elements in a row, got strides {tensor.stride()}")
        if tensor.shape[0] < min_length:
            raise ValueError(f"{name} needs at least {min_length} row(s) for this batch, got {tensor.shape[0]}")


def segment_of(offsets: torch.Tensor, num_segments: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say for each of the flat indices 0..count-1 which segment of a ragged batch it lies in; no host wait.

    Args:
        offsets: i32 [>= num_segments + 1], ascending from 0: segment s is `offsets[s] : offsets[s + 1]`.
        num_segments: number of segments, at least 1.
        count: how many flat indices; may exceed `offsets[num_segments]`.

    Returns:
        The segment (i64 [count], the last one for indices beyond every segment), the offset within it (i32 [count]),
        and whether the index lies in any segment (bool [count]).
    """
    index = torch.arange(count, dtype=torch.int32, device=offsets.device)
    segment = torch.searchsorted(offsets[1 : num_segments + 1], index, right=True)
    inside = segment < num_segments
    segment = segment.clamp_(max=num_segments - 1)
    return segment, index - offsets[segment], inside
