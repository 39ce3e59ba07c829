"""From the configuration to a drafter."""

from __future__ import annotations

from ..config import ConfigError, EngineConfig
from ..models import LoadedModel, ModelConfigError, load_model, resolve_model
from .draft_model import DraftModelDecoder, check_draft_model
from .draw import DraftSampler
from .interface import SpecDecoder
from .mtp import MtpDecoder, MtpHead
from .mtp_checkpoint import check_target, read_mtp
from .ngram import NgramDecoder
from .shipped import SPEC_MODEL, shipped_head


def build_spec_decoder(config: EngineConfig, target: LoadedModel, num_rows: int) -> SpecDecoder | None:
    """The drafter that stands above the runner; None without speculation, and for "dspark", which is the runner's own.

    Args:
        config: resolved.
        num_rows: R, rows of the runner's state.

    Raises:
        ConfigError: the draft does not go with the target.
        CheckpointError, ModelNotFoundError, ...: it cannot be loaded, see `load_model`.
    """
    spec = config.speculative_config
    if spec is None or spec.method == "dspark":
        return None
    assert config.max_model_len is not None
    max_len, form, method = config.max_model_len, config.kernel_backend, spec.draft_sample_method
    device, vocab_size = config.torch_device, target.config.vocab_size
    if spec.method == "mtp":
        path = shipped_head("mtp", target) if spec.model is None else resolve_model(spec.model, what=SPEC_MODEL)
        head_config, weights = read_mtp(path)
        try:
            check_target(head_config, target.config)
        except ModelConfigError as error:
            raise ConfigError(f"speculative_config model={str(path)!r}: {error}") from None
        sampler = DraftSampler(method, num_rows, 1, vocab_size, device, form)
        return MtpDecoder(MtpHead(head_config, weights, target.model), sampler, max_len, form)
    count = spec.num_speculative_tokens
    assert count is not None, "checked when the config was made"
    if spec.method == "ngram":
        return NgramDecoder(count, *spec.prompt_lookup, max_len, form)
    assert spec.model is not None
    if config.load_format == "auto":
        resolve_model(spec.model, what=SPEC_MODEL)  # so that an error speaks of the draft
    draft = load_model(
        spec.model, dtype=config.torch_dtype, device=device, load_format=config.load_format, seed=config.seed,
        skip_tokenizer_init=config.skip_tokenizer_init,
    )  # fmt: skip
    check_draft_model(draft, target, max_len)
    sampler = DraftSampler(method, num_rows, count, vocab_size, device, form)
    return DraftModelDecoder(draft, count, sampler, max_len, form)
