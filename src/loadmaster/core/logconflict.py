"""Whether a checkpoint can be the one that a log is of, by what the engine printed about it."""

from __future__ import annotations

from loadmaster.core.logcase import LogCase
from loadmaster.core.replanning import Case
from loadmaster.core.verdict import gib

_OTHER_WEIGHT = 0.25  # of the weights as printed; formats that an engine repacks differ by less
_ENGINES_OWN = ("_marlin", "-marlin")  # an engine's kernels for a format have a name of their own


def other_checkpoint(case: LogCase) -> str | None:
    """Why the checkpoint cannot be the log's, a sentence; None where nothing speaks against it."""
    if case.model is None:
        return None
    reason = _format(case) or _weights(case)
    if reason is None:
        return None
    return (
        f"the checkpoint is not the one of this log: {reason}. No fix was planned with it; --model DIR names the log's"
    )


def _format(case: LogCase) -> str | None:
    assert case.model is not None
    said, method = case.facts.quantization, case.model.quantization.method
    if said is None or case.launch.flags.get("--quantization") is not None:
        return None
    logs, own = _plain(said), _plain(method)
    if logs == own:
        return None
    if "none" in (logs, own):
        return f"the log says quantization={said}, and it has {'none' if method is None else f'the format {method}'}"
    return None  # one format can have several names


def _plain(name: str | None) -> str:
    if name is None or name.lower() in ("none", "null", ""):
        return "none"
    plain = name.lower()
    for ending in _ENGINES_OWN:
        plain = plain.removesuffix(ending)
    return plain


def _weights(case: LogCase) -> str | None:
    """The heaviest rank's weights, as printed and as planned."""
    printed = max((size for size in case.readings.model_loading_bytes if size), default=None)
    if printed is None or case.model is None or not case.gpus or case.engine.name != "vllm":
        return None
    plan = Case(case.model, case.gpus, case.launch, case.engine).plan()
    planned = max((rank.weight_bytes for rank in plan.ranks), default=0)
    if not planned or not plan.weights_known or abs(planned - printed) <= _OTHER_WEIGHT * printed:
        return None
    return f"a rank loaded {gib(printed)}, and of this one it would be {gib(planned)}"
