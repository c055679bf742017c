"""The model's identity against the engine: architecture, own code, files, speculation, hub."""

from __future__ import annotations

import pytest

from loadmaster.core.facts import Finding, TensorGroup
from loadmaster.core.releasetable import has_class
from tests.launchcases import codes, dense, found, of, vision

QWEN35 = "Qwen3_5MoeForConditionalGeneration"
MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""


@pytest.mark.parametrize(
    ("architecture", "version", "answer"),
    [
        (QWEN35, "0.17.0", True),
        (QWEN35, "0.33.0", True),
        (QWEN35, "0.40.0", True),
        (QWEN35, "0.16.0", False),
        ("Qwen2_5_VLForConditionalGeneration", "0.7.2", None),  # between two releases that differ
        ("Qwen2_5_VLForConditionalGeneration", "0.6.6", False),
        ("LlamaForCausalLM", "0.2.0", None),  # before the oldest release looked at
        ("MllamaForConditionalGeneration", "0.33.0", False),
        ("MllamaForConditionalGeneration", "0.8.5", True),
        ("NoSuchForCausalLM", "0.33.0", False),
        ("ChatGLMForConditionalGeneration", "0.6.6", True),  # there, gone for a while, and there again
        ("ChatGLMForConditionalGeneration", "0.7.3", False),
        ("ChatGLMForConditionalGeneration", "0.33.0", True),
    ],
)
def test_has_class(architecture: str, version: str, answer: bool | None) -> None:
    assert has_class(architecture, version) is answer


def test_architecture_newer_than_the_engine() -> None:
    item = of(found("vllm serve m", dense(architecture=QWEN35), version="0.14.0"), "arch-unknown-engine")
    assert item.severity == "error" and "0.17.0" in item.cause
    assert "arch-unknown-engine" not in codes(found("vllm serve m", dense(architecture=QWEN35), version="0.17.0"))
    assert "arch-unknown-engine" not in codes(found("vllm serve m", dense(architecture=QWEN35)))


def test_architecture_that_was_taken_out() -> None:
    model = vision(architecture="MllamaForConditionalGeneration")
    assert of(found("vllm serve m", model, version="0.24.0"), "arch-unknown-engine").severity == "error"
    assert "arch-unknown-engine" not in codes(found("vllm serve m", model, version="0.10.2"))


def test_architecture_that_nobody_knows_is_only_a_warning() -> None:
    item = of(found("vllm serve m", dense(architecture="NoSuchForCausalLM")), "transformers-fallback")
    assert (item.severity, item.confidence) == ("warning", "possible")


def test_remote_code_not_needed() -> None:
    item = of(found("vllm serve m --trust-remote-code", dense()), "trust-remote-code-unneeded")
    assert item.severity == "note" and item.fixes[0].remove == ("--trust-remote-code",)
    assert "trust-remote-code-unneeded" not in codes(found("vllm serve m", dense()))
    assert "trust-remote-code-unneeded" not in codes(found("vllm serve m --trust-remote-code", dense(auto_map=True)))
    own = dense(architecture="NoSuchForCausalLM", auto_map=True)
    assert "trust-remote-code-unneeded" not in codes(found("vllm serve m --trust-remote-code", own))


def test_remote_code_needed() -> None:
    own = dense(architecture="NoSuchForCausalLM", auto_map=True)
    assert of(found("vllm serve m", own), "trust-remote-code").severity == "error"
    assert "trust-remote-code" not in codes(found("vllm serve m --trust-remote-code", own))
    internvl = vision(architecture="InternVLChatModel", model_type="internvl_chat", auto_map=True)
    assert "trust-remote-code" in codes(found("vllm serve m", internvl))
    deepseek = dense(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", auto_map=True)
    assert "trust-remote-code" not in codes(found("vllm serve m", deepseek))


def test_gguf() -> None:
    assert of(found("vllm serve ./m-Q4_K_M.gguf", version="0.24.0"), "gguf-unsupported").confidence == "certain"
    assert "gguf-unsupported" not in codes(found("vllm serve ./m-Q4_K_M.gguf", version="0.20.0"))
    assert "gguf-unsupported" not in codes(found("vllm serve ./gguf-notes", version="0.24.0"))


def test_chat_template() -> None:
    base = dense(has_chat_template=False)
    assert of(found("vllm serve m", base), "chat-template-missing").severity == "warning"
    assert "chat-template-missing" not in codes(found("vllm serve m --chat-template t.jinja", base))
    assert "chat-template-missing" not in codes(found("vllm serve m", dense(has_chat_template=None)))
    assert "chat-template-missing" not in codes(found("vllm serve m", dense()))


def integrity(code: str) -> Finding:
    return Finding(code, "error", "t", "c")


def test_what_the_files_show_is_passed_on() -> None:
    broken = dense(findings=(integrity("weights-truncated"), integrity("tokenizer-broken")))
    assert {"weights-truncated", "tokenizer-broken"} <= codes(found("vllm serve m", broken))
    dummy = codes(found("vllm serve m --load-format dummy --tokenizer other/model", broken))
    assert not {"weights-truncated", "tokenizer-broken"} & dummy


def group(name: str, layers: dict[int, int] | None = None) -> TensorGroup:
    return TensorGroup(name, "BF16", (8, 8), 128, 1, layers)


def test_speculation_without_heads() -> None:
    plain = dense(format="safetensors", tensors=(group("model.layers.{l}.mlp.up_proj.weight", {0: 1, 35: 1}),))
    item = of(found(f"vllm serve m {MTP}", plain), "speculative-weights-missing")
    assert item.fixes[0].remove == ("--speculative-config",)
    assert "speculative-weights-missing" not in codes(found("vllm serve m", plain))
    named = dense(format="safetensors", tensors=(group("mtp.layers.0.mlp.up_proj.weight"),))
    assert "speculative-weights-missing" not in codes(found(f"vllm serve m {MTP}", named))
    beyond = dense(format="safetensors", tensors=(group("model.layers.{l}.mlp.up_proj.weight", {35: 1, 36: 1}),))
    assert "speculative-weights-missing" not in codes(found(f"vllm serve m {MTP}", beyond))
    assert "speculative-weights-missing" not in codes(found(f"vllm serve m {MTP}", dense()))
    other = MTP.replace('"mtp"', '"eagle", "model": "x/y"')
    assert "speculative-weights-missing" not in codes(found(f"vllm serve m {other}", plain))


def test_hub() -> None:
    gated = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
    assert of(found(gated), "gated-or-auth").severity == "note"
    assert "gated-or-auth" not in codes(found(f"HF_TOKEN=hf_x {gated}"))
    assert "gated-or-auth" not in codes(found("vllm serve Qwen/Qwen3-8B"))
    assert "gated-or-auth" not in codes(found("vllm serve /data/meta-llama/Llama-3.1-8B-Instruct"))
    assert "hub-offline" in codes(found("HF_HUB_OFFLINE=1 vllm serve Qwen/Qwen3-8B"))
    assert "hub-offline" not in codes(found("HF_HUB_OFFLINE=1 vllm serve /data/Qwen3-8B"))
    assert "hub-offline" not in codes(found("HF_HUB_OFFLINE=0 vllm serve Qwen/Qwen3-8B"))
