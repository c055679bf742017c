"""Values that no release has, where its parser takes any text."""

import pytest

from loadmaster.core.argv import parse_argv


def refused(flags: str, version: str | None) -> list[str]:
    launch = parse_argv(["vllm", "serve", "m", *flags.split()], engine_version=version)
    return [item.text for item in launch.refused]


@pytest.mark.parametrize("version", ["0.17.0", "0.20.0", "0.24.0", "0.28.0", "0.33.0"])
@pytest.mark.parametrize(
    ("flag", "bad", "good"),
    [
        ("--kv-cache-dtype", "fp7", "fp8"),
        ("--kv-cache-dtype", "int8", "bfloat16"),
        ("--attention-backend", "FOO", "FLASHINFER"),
        ("--attention-backend", "xformers", "flash_attn"),
        ("--mm-encoder-attn-backend", "FOO", "TORCH_SDPA"),
        ("--load-format", "zip", "safetensors"),
        ("--load-format", "zip", "Dummy"),
        ("--tokenizer-mode", "x", "hf"),
        ("--config-format", "toml", "mistral"),
        ("--model-impl", "torch", "transformers"),
        ("--reasoning-parser", "qwen", "qwen3"),
    ],
)
def test_what_nothing_registers(flag: str, bad: str, good: str, version: str) -> None:
    assert refused(f"{flag} {good}", version) == []
    (text,) = refused(f"{flag} {bad}", version)
    assert text.startswith(f"{flag} takes ") and text.endswith(f"{bad!r} was given")


def test_values_come_and_go_with_versions() -> None:
    assert refused("--load-format bitsandbytes", "0.27.0") == [] != refused("--load-format bitsandbytes", "0.28.0")
    assert refused("--attention-backend auto", "0.33.0") == [] != refused("--attention-backend auto", "0.17.0")
    assert refused("--tokenizer-mode deepseek_v41", "0.33.0") == []  # in the registry, not among the literals
    assert refused("--kv-cache-dtype nvfp4_4over6", None) == [] != refused("--kv-cache-dtype fp7", None)


def test_plugins_and_class_paths_bring_values_of_their_own() -> None:
    parser = "--enable-auto-tool-choice --tool-call-parser mine"
    assert len(refused(parser, "0.24.0")) == 1
    assert refused(parser + " --tool-parser-plugin mine.py", "0.24.0") == []
    assert refused("--tool-call-parser mine", "0.24.0") == []  # nobody asks for it
    assert refused("--distributed-executor-backend my.module.Executor", "0.24.0") == []
    assert refused("--load-format $FORMAT", "0.24.0") == []


def test_of_many_values_those_alike_are_named() -> None:
    (text,) = refused("--enable-auto-tool-choice --tool-call-parser hermez", "0.33.0")
    assert "hermes" in text and len(text) < 200
