"""From the configuration to what runner V2 holds of DSpark."""

from __future__ import annotations

from ..config import ConfigError, EngineConfig
from ..models import LoadedModel, ModelConfigError, resolve_model
from ..spec_decode.draw import DraftSampler
from ..spec_decode.shipped import SPEC_MODEL, shipped_head
from .calibration import Calibration, CalibrationError
from .checkpoint import read_draft
from .decoder import DSparkDecoder, LookupDecoder
from .drafter import DSparkDrafter


def build_dspark_decoder(config: EngineConfig, target: LoadedModel, num_rows: int) -> DSparkDecoder | LookupDecoder:
    """The decoder that ``speculative_config`` of method "dspark" asks for.

    Args:
        config: resolved.
        num_rows: R, rows of the runner's state, the padding's counted.

    Raises:
        ConfigError: the draft doesn't go with the target, or more drafts are asked for than it was trained for.
        CheckpointError, ModelNotFoundError: it can't be read.
    """
    spec, max_len = config.speculative_config, config.max_model_len
    assert spec is not None and spec.method == "dspark" and max_len is not None
    if spec.draft == "lookup":
        assert spec.num_speculative_tokens is not None, "checked when the config was made"
        low, high = spec.prompt_lookup
        return LookupDecoder(spec.num_speculative_tokens, max_len, min_ngram=low, max_ngram=high)
    path = shipped_head("dspark", target) if spec.model is None else resolve_model(spec.model, what=SPEC_MODEL)
    try:
        draft, weights = read_draft(path)
        draft.check_target(target.config)
        num_drafts = spec.num_speculative_tokens or draft.block_size
        draft.check_num_speculative_tokens(num_drafts)
        calibration = Calibration.load(path)
    except (ModelConfigError, CalibrationError) as error:
        raise ConfigError(f"speculative_config model={str(path)!r}: {error}") from None
    if spec.verification_schedule != "fixed" and not draft.enable_confidence_head:
        raise ConfigError(
            f"speculative_config model={str(path)!r}: this draft has no confidence head, which verification_schedule="
            f"{spec.verification_schedule!r} goes by; 'fixed' is possible"
        )
    if draft.model.max_position_embeddings < max_len:
        limit = draft.model.max_position_embeddings
        raise ConfigError(
            f"speculative_config model={str(path)!r}: the draft knows {limit} positions, fewer than max_model_len="
            f"{max_len}; ask for max_model_len={limit} or less"
        )
    if calibration is not None and len(calibration.temperatures) < draft.block_size:
        raise ConfigError(
            f"speculative_config model={str(path)!r}: calibrated for {len(calibration.temperatures)} positions, and a "
            f"block has {draft.block_size}; make the calibration anew with `runnerscope dspark calibrate`"
        )
    form, device = config.kernel_backend, config.torch_device
    sampler = DraftSampler(spec.draft_sample_method, num_rows, num_drafts, target.config.vocab_size, device, form)
    return DSparkDecoder(
        DSparkDrafter(draft, weights, target.model, form), num_drafts, sampler, num_rows=num_rows,
        max_num_tokens=config.max_num_batched_tokens, max_model_len=max_len, calibration=calibration,
    )  # fmt: skip
