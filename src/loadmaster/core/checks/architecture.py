"""The model itself against the engine: architecture, own code, templates, files, speculation, hub."""

from __future__ import annotations

import re
from collections.abc import Iterator

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.checks.spelling import newest_release
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Evidence, Finding, Fix
from loadmaster.core.releasetable import architecture_runs, has_class
from loadmaster.core.tables import load_toml

_GGUF_UNTIL = "0.24"
_MTP_TENSOR = re.compile(r"(^|\.)(mtp|nextn|mtp_layers|mtp_block)(\.|_|$)")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_YES = ("1", "true", "yes", "on")


def check_architecture(case: LaunchCase) -> Iterator[Finding]:
    """Everything that the model's identity decides."""
    yield from check_gguf(case)
    yield from _unknown_architecture(case)
    yield from _remote_code(case)
    yield from _template(case)
    yield from check_files(case)
    yield from _speculation(case)
    yield from _hub(case)


def built_in(case: LaunchCase) -> bool | None:
    """Whether the launch's version (the newest if unknown) has the architecture; None when nobody can say."""
    if case.model is None or case.model.architecture is None:
        return None
    return has_class(case.model.architecture, case.version or newest_release())


# ------------------------------------------------------------------------------------------ architecture


def check_gguf(case: LaunchCase) -> Iterator[Finding]:
    """Whether the launch's version of vLLM reads GGUF files."""
    name = case.model_name or ""
    is_file = name.lower().split(":")[0].endswith(".gguf") or (case.model is not None and case.model.format == "gguf")
    by_flag = (case.text("--quantization") or "").lower() == "gguf" or (case.text("--load-format") or "") == "gguf"
    if case.engine.name != "vllm" or not (is_file or by_flag):
        return
    evidence = [Evidence("command", name)] if name else []
    if case.newest_or_since(_GGUF_UNTIL):
        known = case.version is not None
        yield finding(
            "gguf-unsupported",
            "vLLM has no loader for GGUF from 0.24 on.",
            evidence=[*evidence, *case.evidence("--quantization", "--load-format")],
            fixes=[
                Fix("A safetensors checkpoint of the same model: AWQ, GPTQ, FP8 or compressed-tensors."),
                Fix("Or llama.cpp, which GGUF is made for.", command=f"llama-server -m {name}" if is_file else None),
            ],
            confidence="certain" if known else "likely",
        )
    elif is_file and case.model is not None and case.model.vision is not None:
        yield finding(
            "gguf-unsupported",
            f"{case.version_words} reads GGUF for text; the projector of a vision model is not loaded.",
            evidence=evidence,
            fixes=[Fix("A safetensors checkpoint of the same model.")],
            severity="warning",
            confidence="likely",
        )


def _unknown_architecture(case: LaunchCase) -> Iterator[Finding]:
    model = case.model
    if model is None or model.architecture is None or model.format == "gguf" or built_in(case) is not False:
        return
    found = architecture_runs(model.architecture)
    evidence = [case.model_evidence(f"architectures: {model.architecture}")]
    if not found:
        yield finding(
            "transformers-fallback" if model.auto_map is False else "arch-unknown-engine",
            f"No vLLM release up to {newest_release()} has a class for {model.architecture}; "
            "what transformers or the repository bring is tried instead.",
            evidence=evidence,
            severity="warning",
            confidence="possible",
        )
        return
    first, last = found[0][0], found[-1][1]
    if last != newest_release() and at_least(case.version or newest_release(), last):
        yield finding(
            "arch-unknown-engine",
            f"{model.architecture} was taken out after vLLM {last}.",
            evidence=evidence,
            fixes=[Fix(f"vLLM {last} is the last that has it.")],
            severity="error" if case.version else "warning",
            confidence="certain" if case.version else "likely",
        )
        return
    yield finding(
        "arch-unknown-engine",
        f"{model.architecture} is in vLLM from {first} on, and this is {case.version}.",
        evidence=evidence,
        fixes=[Fix(f"vLLM {first} or newer, with the transformers that it was released with.")],
        confidence=case.model_confidence,
    )


def _remote_code(case: LaunchCase) -> Iterator[Finding]:
    model = case.model
    if model is None or model.architecture is None or model.format == "gguf":
        return
    given = case.switch("--trust-remote-code")
    native = built_in(case)
    if given and native and not model.auto_map:
        yield finding(
            "trust-remote-code-unneeded",
            f"{model.architecture} is built in, and config.json names no code of its own.",
            evidence=[
                *case.evidence("--trust-remote-code"),
                case.model_evidence(f"architectures: {model.architecture}"),
            ],
            fixes=[Fix("The engine starts without it.", remove=("--trust-remote-code",))],
            confidence=case.model_confidence,
        )
    elif not given and model.auto_map and native is False:
        yield finding(
            "trust-remote-code",
            f"config.json names code of its own, and no vLLM release has {model.architecture} built in.",
            evidence=[case.model_evidence("auto_map")],
            fixes=[Fix("After you have read the code.", ("--trust-remote-code",))],
            confidence="likely",
        )
    elif not given and model.auto_map and model.model_type in load_toml("remote-code.toml")["needs_code"]:
        yield finding(
            "trust-remote-code",
            f"The configuration of model_type {model.model_type} is loaded from the repository's own code.",
            evidence=[case.model_evidence(f"auto_map, model_type: {model.model_type}")],
            fixes=[Fix("After you have read the code.", ("--trust-remote-code",))],
            severity=None if case.model_confidence == "certain" else "warning",
            confidence="likely",
        )


# ------------------------------------------------------------------------------------------ files


def _template(case: LaunchCase) -> Iterator[Finding]:
    model = case.model
    if model is None or model.has_chat_template is not False or case.has("--chat-template"):
        return
    if any(item.code == "chat-template-missing" for item in model.findings):
        return  # integrity says it
    if model.format == "gguf" or case.text("--tokenizer-mode") == "mistral":
        return
    yield finding(
        "chat-template-missing",
        "Chat requests are refused; completions work.",
        evidence=[Evidence("file", "no chat template among the tokenizer's files", path=model.path)],
        fixes=[Fix("A template of the model's family.", ("--chat-template", "FILE"))],
        severity="warning",
        confidence=case.model_confidence,
    )


def check_files(case: LaunchCase) -> Iterator[Finding]:
    """What reading the files found, less what the command makes up for."""
    if case.model is None:
        return
    cured = set()
    if case.has("--chat-template"):
        cured.add("chat-template-missing")
    if case.has("--tokenizer") or case.switch("--skip-tokenizer-init"):
        cured |= {"tokenizer-broken"}
    if case.switch("--language-model-only"):
        cured.add("processor-missing")
    if case.text("--load-format") == "dummy":
        cured |= {
            "weights-truncated",
            "weights-missing-shard",
            "weights-lfs-pointer",
            "header-invalid",
            "tensor-overlap",
            "tensor-duplicate",
            "download-incomplete",
        }
    for item in case.model.findings:
        if item.code not in cured:
            yield item


def _speculation(case: LaunchCase) -> Iterator[Finding]:
    config = case.table("--speculative-config")
    model = case.model
    if config is None or model is None or model.format != "safetensors" or not model.tensors:
        return
    method = str(config.get("method", "")).lower()
    if not method.endswith("mtp") or config.get("model") not in (None, case.model_name):
        return
    layers = model.text.num_hidden_layers
    for group in model.tensors:
        if _MTP_TENSOR.search(group.name):
            return
        if layers is not None and group.layers and max(group.layers) >= layers and "visual" not in group.name:
            return  # DeepSeek stores its heads as layers beyond the last
    yield finding(
        "speculative-weights-missing",
        "No tensor of a multi-token prediction head is in the files.",
        evidence=[
            *case.evidence("--speculative-config"),
            Evidence("file", f"{len(model.tensors)} kinds of tensors, none named mtp or nextn", path=model.path),
        ],
        fixes=[
            Fix("Without speculation.", remove=("--speculative-config",)),
            Fix("Or a build of the checkpoint that keeps the heads."),
        ],
        confidence="likely",
    )


# ------------------------------------------------------------------------------------------ hub


def _hub(case: LaunchCase) -> Iterator[Finding]:
    name = case.model_name
    if name is None or not case.is_hub_name or (case.model is not None and case.model.path is not None):
        return
    env = case.launch.env
    modelscope = env.get("VLLM_USE_MODELSCOPE", "").lower() in _YES
    offline = [variable for variable in _OFFLINE if env.get(variable, "").lower() in _YES]
    if offline:
        yield finding(
            "hub-offline",
            f"{name} must be whole in the cache: the hub is switched off.",
            evidence=[Evidence("command", name), *case.env_evidence(*offline)],
            fixes=[Fix("Fetch it before.", command=f"HF_HUB_OFFLINE=0 hf download {name}")],
            severity="note",
            confidence="possible",
        )
    gated = load_toml("remote-code.toml")["gated"]
    if not modelscope and not offline and name.lower().startswith(tuple(gated)):
        if any(env.get(token) for token in _TOKENS) or case.has("--hf-token"):
            return
        yield finding(
            "gated-or-auth",
            f"{name} wants its licence accepted on the hub, and the command has no token; one may be logged in.",
            evidence=[Evidence("command", name)],
            fixes=[Fix("A token of an account that has accepted it.", env={"HF_TOKEN": "hf_..."})],
            severity="note",
            confidence="possible",
        )
