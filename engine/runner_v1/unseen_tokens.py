"""Overlapped loop of runner V1: the last step's tokens stay on the device, and the host has placeholders for them."""

from __future__ import annotations

import numpy as np
import torch

from ..device import Device
from .input_batch import InputBatch
from .outputs import AsyncGPUModelRunnerOutput, OutputRows
from .states import RequestStates
from .step_values import DeviceValues

PLACEHOLDER = -1


class UnseenTokens:
    """The tokens of the last step that sampled, and the rows that they were sampled in."""

    def __init__(self, device: Device, states: RequestStates) -> None:
        self._device = device
        self._states = states
        self._values = DeviceValues()
        self._output: AsyncGPUModelRunnerOutput | None = None
        self._rows: dict[str, int] = {}

    def keep(self, rows: OutputRows, values: DeviceValues) -> AsyncGPUModelRunnerOutput:
        """Takes a step's tokens, for each of which the batch gets a placeholder; its output starts on its way."""
        output = AsyncGPUModelRunnerOutput(self._device, rows, values.tensors)
        self._values, self._output = values, output
        self._rows = {req_id: row for row, req_id in enumerate(rows.req_ids) if row not in rows.discarded}
        for req_id, row in self._rows.items():
            self._states.append_token(row, req_id, PLACEHOLDER)
        return output

    def scatter(self, req_ids: tuple[str, ...], ends: np.ndarray, input_ids: torch.Tensor) -> bool:
        """Puts the tokens where `input_ids` on the device have placeholders: at the end of each request's part, [r].
        False if there is none."""
        source, target, requests = [], [], self._states.requests
        for row, req_id in enumerate(req_ids):
            previous = self._rows.get(req_id)
            outputs = requests[req_id].output_token_ids
            if previous is not None and outputs and outputs[-1] == PLACEHOLDER:
                source.append(previous)
                target.append(int(ends[row]) - 1)
        if not source:
            return False
        values, n = self._values, len(source)
        # Nothing moved and all are decodes: the tokens lie as the input wants them.
        unchanged = source == target == list(range(n))
        indices = (
            None if unchanged else (self._device.to_device(np.array(source)), self._device.to_device(np.array(target)))
        )

        def scatter() -> None:
            assert values.output is not None
            sampled = values.output.sampled[:, 0].to(torch.int32)
            if indices is None:
                input_ids[:n].copy_(sampled[:n])
            else:
                input_ids.scatter_(0, indices[1], sampled[indices[0]])

        self._device.compute.submit("scatter sampled", scatter)
        return True

    def wait_and_write(self, batch: InputBatch) -> None:
        """Writes the tokens over their placeholders, for penalties, bad words and processors. The forward of this step
        is launched already, so the device doesn't stand still."""
        if self._output is None:
            return
        sampled = self._output.wait_for_sampled()  # F
        for req_id, previous in self._rows.items():
            row = batch.req_id_to_index.get(req_id)
            outputs = self._states.requests[req_id].output_token_ids if row is not None else []
            if row is not None and outputs and outputs[-1] == PLACEHOLDER:
                outputs[-1] = int(sampled[previous, 0])
                batch.token_ids_cpu[row, batch.num_tokens[row] - 1] = outputs[-1]
