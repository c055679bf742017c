"""What the engine refuses while it reads the configuration or loads weights, whatever memory there is."""

from __future__ import annotations

from loadmaster.core.checks.catalogue import finding
from loadmaster.core.facts import Evidence, Finding, Fix, ModelFacts

_STORED_WHOLE = "bitsandbytes"


def stored_whole(model: ModelFacts | None) -> bool:
    """Whether the checkpoint was quantised by bitsandbytes: its blocks cannot be cut, so no tensor parallelism.

    vLLM 0.6.4 to 0.27, bitsandbytes_loader.py: the loader raises on more than one tensor rank.
    """
    return model is not None and model.quantization.method == _STORED_WHOLE


def split_refused(model: ModelFacts, tensor: int, pipeline: int = 1) -> Finding | None:
    """A checkpoint of whole blocks on several tensor ranks."""
    if tensor < 2 or not stored_whole(model):
        return None
    label = model.quantization.label or _STORED_WHOLE
    stages = tensor * pipeline
    return finding(
        "quant-format-unsupported",
        f"The checkpoint is stored as {label}, and vLLM's loader of such checkpoints refuses more than one tensor "
        f"rank ({tensor} are asked for).",
        evidence=[Evidence("config", f"quantization_config.quant_method: {_STORED_WHOLE}", path="config.json")],
        fixes=[
            Fix(
                "Each card then holds a part of the layers.",
                ("--pipeline-parallel-size", str(stages), "--tensor-parallel-size", "1"),
            ),
            Fix("Or a checkpoint in AWQ, GPTQ or compressed-tensors, which tensor parallelism can cut."),
        ],
    )


def experts_refused(model: ModelFacts) -> bool:
    """Whether the model surely has no experts, so that --enable-expert-parallel is refused (config/model.py)."""
    if model.text.num_experts or not model.text.hidden_size or model.format == "gguf":
        return False
    return not _names_experts(model.config, 0)


def _names_experts(config: object, depth: int) -> bool:
    """Whether any key of the configuration speaks of experts, in whatever spelling."""
    if not isinstance(config, dict) or depth > 4:
        return False
    return any(
        "expert" in str(key) or "moe" in str(key) or _names_experts(value, depth + 1) for key, value in config.items()
    )
