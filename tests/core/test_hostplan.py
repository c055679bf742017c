"""Host memory plans of GGUF models: the rules, their laws, and the real engine where it is installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.core import hostmemory
from loadmaster.core.facts import (
    GIB,
    MIB,
    EngineFacts,
    Finding,
    HostFacts,
    LaunchArgs,
    LoadSheet,
    ModelFacts,
    TextConfig,
)
from loadmaster.core.ggufconfig import ggml_types, group_tensors, processor, text_config, vision_config
from loadmaster.core.hostplan import make_host_plan
from loadmaster.core.hostsettings import HostSettings, host_settings, parse_flags
from loadmaster.core.watchlimits import limits_of
from loadmaster.edge.gguf import read_gguf
from tests import gguf_writer as writer
from tests import llamacpp_engine

HOST = HostFacts(memory_total_bytes=16 * GIB, memory_available_bytes=12 * GIB)
ENGINE = EngineFacts("llamacpp", "2026.10.11549")
PEAKS = ("start", "steady", "serving")


def facts(architecture: str = "qwen3", tower: bool = False, **shape: Any) -> ModelFacts:
    """A model as ``read_gguf`` gives it, without a file."""
    metadata, tensors = writer.text_model(architecture, **shape)
    lists = {
        key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.") and isinstance(value, list)
    }
    kept = {key: tuple(v) if isinstance(v, list) else v for key, v in metadata.items() if key not in lists}
    other, more = writer.projector() if tower else ({}, {})
    seen = {key: tuple(v) if isinstance(v, list) else v for key, v in other.items()}
    entries = [
        (name, ggml_types()[kind]["name"], tuple(reversed(size)), writer.tensor_bytes(size, kind))
        for name, (size, kind) in {**tensors, **more}.items()
    ]
    groups = group_tensors(entries)
    vision = vision_config(seen) if tower else None
    return ModelFacts(
        name="m",
        path="/models/m.gguf",
        format="gguf",
        architecture=architecture,
        text=text_config(kept, vocab_size=len(metadata["tokenizer.ggml.tokens"]), tied=False),
        vision=vision,
        processor=processor(seen, vision),
        tensors=groups,
        config={"gguf": kept},
    )


def plan(model: ModelFacts, flags: str = "", host: HostFacts = HOST, engine: EngineFacts = ENGINE) -> LoadSheet:
    return make_host_plan(model, host, LaunchArgs(argv=tuple(flags.split())), engine)


def settings(model: ModelFacts, flags: str) -> HostSettings:
    found = host_settings(parse_flags(flags.split()), model)
    assert found is not None
    return found


def component(sheet: LoadSheet, name: str) -> int:
    return next(c.bytes for c in sheet.gpus[0].components if c.name == name)


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("flags", "context", "per_slot", "slots", "streams", "micro_batch"),
    [
        ("-c 4096 -np 1", 4096, 4096, 1, 1, 512),
        ("-c 1000 -np 3", 1536, 512, 3, 3, 512),
        ("-c 100 -np 1", 256, 256, 1, 1, 100),
        ("-c 16384", 16384, 16384, 4, 1, 512),
        ("--ctx-size=16384 --parallel 4", 16384, 4096, 4, 4, 512),
        ("-c 16384 -np 4 -kvu", 16384, 16384, 4, 1, 512),
        ("-np 5", 20480, 4096, 5, 5, 512),
        ("", 4096, 4096, 4, 1, 512),
        ("-c 8192 -np 1 -ub 1024 -b 256", 8192, 8192, 1, 1, 256),
    ],
)
def test_context_and_slots(flags: str, context: int, per_slot: int, slots: int, streams: int, micro_batch: int) -> None:
    found = settings(facts(), flags)
    assert (found.context, found.context_per_slot, found.slots, found.streams, found.micro_batch) == (
        context,
        per_slot,
        slots,
        streams,
        micro_batch,
    )


def test_flags_in_every_spelling() -> None:
    flags = parse_flags(
        ["llama-server", "-ctk", "q8_0", "--cache_type_v=q4_0", "--no-mmap", "--no-mmproj", "-fa", "off"]
    )
    assert flags.values == {
        "--cache-type-k": "Q8_0",
        "--cache-type-v": "Q4_0",
        "--mmap": False,
        "--mmproj-auto": False,
        "--flash-attn": "off",
    }
    assert parse_flags(["-fa", "-c", "8"]).values == {"--flash-attn": "on", "--ctx-size": 8}
    assert parse_flags(["-c", "1", "-c", "2"]).values == {"--ctx-size": 2}


def test_unknown_and_bad_flags() -> None:
    flags = parse_flags(["--nonsense", "5", "-c", "many", "-ctk", "q9", "-np"])
    assert flags.unknown == ("--nonsense",)
    assert [name for name, _, _ in flags.bad] == ["-c", "-ctk", "-np"]
    findings = plan(facts(), "--nonsense 5 -c many").findings
    assert [(f.code, f.severity) for f in findings] == [("unknown-flag", "warning"), ("flag-value-invalid", "error")]


def test_flags_may_come_parsed() -> None:
    launch = LaunchArgs(flags={"--ctx-size": 1024, "--parallel": 2, "--mmap": False})
    sheet = make_host_plan(facts(), HOST, launch, ENGINE)
    assert sheet.kv_cache is not None
    assert sheet.kv_cache.tokens == 1024


# ------------------------------------------------------------------------------------------ rules


def test_kv_cache_of_each_kind() -> None:
    dense = hostmemory.cache(facts(), settings(facts(), "-c 4096 -np 1"))
    assert dense is not None
    assert dense.total == 4 * 4096 * 2 * 32 * 2 * 2  # layers, cells, heads, head size, key and value, F16

    quantised = hostmemory.cache(facts(), settings(facts(), "-c 4096 -np 1 -ctk q8_0 -ctv q4_0"))
    assert quantised is not None
    assert quantised.total == 4 * 4096 * (64 // 32 * 34 + 64 // 32 * 18)

    latent = facts("deepseek2", latent=512, rope=64, head_size=192)
    one = hostmemory.cache(latent, settings(latent, "-c 4096 -np 1"))
    assert one is not None
    assert one.total == 4 * 4096 * 576 * 2  # no values

    hybrid = facts("qwen35")
    state = hostmemory.cache(hybrid, settings(hybrid, "-c 4096 -np 3"))
    assert state is not None
    assert state.full_bytes == 3 * 1536 * 2 * 32 * 2 * 2
    assert state.state_bytes == 3 * 3 * (3 * (128 + 2 * 2 * 32) + 32 * 128) * 4

    window = facts("gemma3", layers=7, window=512)
    sliding = hostmemory.cache(window, settings(window, "-c 4096 -np 1"))
    assert sliding is not None
    assert sliding.window_bytes == 6 * 1024 * 256
    assert sliding.full_bytes == 4096 * 256
    whole = hostmemory.cache(window, settings(window, "-c 4096 -np 1 --swa-full"))
    assert whole is not None
    assert whole.total == 7 * 4096 * 256


def test_prediction_layers_take_no_memory() -> None:
    plain, more = facts("qwen35"), facts("qwen35", predict_layers=1)
    assert hostmemory.language_weights(plain)[0] == hostmemory.language_weights(more)[0]
    assert hostmemory.language_weights(more)[1] > 0
    assert component(plan(plain), "kv_cache") == component(plan(more), "kv_cache")


def test_architecture_without_a_rule_has_wide_bounds() -> None:
    model = structs.replace(facts(), architecture="novel")
    model = structs.replace(
        model, config={"gguf": {key.replace("qwen3.", "novel."): v for key, v in model.config["gguf"].items()}}
    )
    cache = next(c for c in plan(model).gpus[0].components if c.name == "kv_cache")
    assert cache.basis == "assumed"
    assert cache.low < cache.bytes < cache.high


def test_rearranged_weights() -> None:
    quantised = facts(kind=writer.Q4_0, width=256, feed_forward=256, heads=4, kv_heads=4, head_size=64)
    matrices = 4 * (4 * 256 * 256 + 3 * 256 * 256) + 512 * 256  # the output matrix, not the embeddings
    assert hostmemory.repacked_weights(quantised) == matrices // 32 * 18
    assert hostmemory.repacked_weights(facts(kind=writer.BF16)) == 0
    locked = plan(quantised, "--mlock").gpus[0]
    free = plan(quantised).gpus[0]
    assert locked.peak_high_bytes["start"] - free.peak_high_bytes["start"] == matrices // 32 * 18
    assert plan(quantised, "--mlock --no-repack").gpus[0].peak_high_bytes["start"] == free.peak_high_bytes["start"]


def test_an_older_build_may_hold_logits_for_every_token() -> None:
    model = facts(vocab=50000)
    new = plan(model, engine=EngineFacts("llamacpp", "b11549")).gpus[0]
    old = plan(model, engine=EngineFacts("llamacpp", "b4000")).gpus[0]
    assert old.peak_high_bytes["serving"] - new.peak_high_bytes["serving"] == 512 * 50000 * 4
    assert old.peak_low_bytes == new.peak_low_bytes


# ------------------------------------------------------------------------------------------ the sheet


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma3", "deepseek2", "llama"])
def test_components_add_up(architecture: str) -> None:
    model = facts(architecture, tower=True, experts=4 if "moe" in architecture else 0, window=512)
    (load,) = plan(model, "-c 2048").gpus
    parts = [c for c in load.components if c.name != "headroom"]
    assert sum(c.bytes for c in parts) == load.peak_bytes["serving"]
    assert sum(c.low for c in parts) == load.peak_low_bytes["serving"]
    assert sum(c.high for c in parts) == load.peak_high_bytes["serving"]
    assert (load.name, load.index, load.total_bytes, load.free_bytes) == ("cpu", 0, 16 * GIB, 12 * GIB)
    for part in parts:
        assert part.low <= part.bytes <= part.high
        assert part.basis in ("read", "computed", "assumed")
        assert (part.low < part.high) == (part.basis == "assumed")
    for peak in PEAKS:
        assert load.peak_low_bytes[peak] <= load.peak_bytes[peak] <= load.peak_high_bytes[peak]
    names = [c.name for c in parts]
    assert len(set(names)) == len(names)
    assert set(names) == {
        "weights.language", "weights.vision", "kv_cache", "workspace", "activations.vision", "sampler", "context",
    }  # fmt: skip
    assert load.peak_bytes["steady"] <= load.peak_bytes["serving"]


def test_projector_left_out() -> None:
    model = facts("qwen3vl", tower=True)
    names = {c.name for c in plan(model, "--no-mmproj").gpus[0].components}
    assert not {"weights.vision", "activations.vision"} & names
    assert plan(model, "--no-mmproj").images is None


def test_pictures() -> None:
    model = facts("qwen3vl", tower=True)
    images = plan(model, "-c 8192").images
    assert images is not None
    assert (images.largest_tokens, images.largest_pixels, images.largest_size) == (4096, 2048 * 2048, (2048, 2048))
    assert images.profiled_tokens == 2116
    short = plan(model, "-c 1024").images
    assert short is not None
    assert short.largest_tokens == 1024
    assert short.refused
    capped = plan(model, "-c 8192 --image-max-tokens 256")
    assert capped.images is not None
    assert capped.images.largest_tokens == 256
    assert component(capped, "activations.vision") < component(plan(model, "-c 8192"), "activations.vision")


def test_verdicts() -> None:
    model = facts()
    assert plan(model, host=HostFacts(memory_total_bytes=64 * GIB)).fits is True
    assert plan(model, host=HostFacts(memory_total_bytes=16 * MIB)).fits is False
    assert plan(model, host=HostFacts(memory_total_bytes=1 * GIB)).fits is None  # what it keeps of prompts decides
    assert plan(model, "--cache-ram 0 --ctx-checkpoints 0", host=HostFacts(memory_total_bytes=1 * GIB)).fits is True
    assert plan(model, host=HostFacts()).fits is None
    free = HostFacts(memory_total_bytes=64 * GIB, memory_available_bytes=1 * GIB)
    assert plan(model, host=free).fits is None


def test_fixes_are_planned_again_and_hold() -> None:
    model = facts(context=1 << 20, layers=8)
    host = HostFacts(memory_total_bytes=2 * GIB)
    sheet = plan(model, "-c 1048576 -np 1", host=host)
    assert sheet.fits is False
    (finding,) = [f for f in sheet.findings if f.code == "host-ram-killed"]
    assert finding.severity == "error"
    replanned = [fix for fix in finding.fixes if fix.replanned]
    assert replanned
    for fix in replanned:
        assert plan(model, " ".join(["-c 1048576 -np 1", *fix.argv]), host=host).fits is True
    assert sheet.kv_cache is not None
    largest = sheet.kv_cache.largest_model_len
    assert largest is None or largest < 1048576


def test_longest_context_fits_and_the_next_does_not() -> None:
    model, host = facts(context=1 << 20), HostFacts(memory_total_bytes=2 * GIB)
    quiet = "-np 1 --cache-ram 0 --ctx-checkpoints 0"
    sheet = plan(model, f"-c 4096 {quiet}", host=host)
    assert sheet.kv_cache is not None
    longest = sheet.kv_cache.largest_model_len
    assert longest is not None
    assert plan(model, f"-c {longest} {quiet}", host=host).fits is True
    assert plan(model, f"-c {longest + 256} {quiet}", host=host).fits is not True


def test_requests_at_once_are_those_that_memory_holds() -> None:
    model, host = facts(context=1 << 20), HostFacts(memory_total_bytes=2 * GIB)
    quiet = "-np 1 --cache-ram 0 --ctx-checkpoints 0"
    cache = plan(model, f"-c 4096 {quiet}", host=host).kv_cache
    assert cache is not None and cache.max_concurrency == 1 and cache.largest_model_len is not None
    beyond = plan(model, f"-c {2 * cache.largest_model_len} {quiet}", host=host)
    assert beyond.fits is not True and beyond.kv_cache is not None
    assert beyond.kv_cache.max_concurrency == pytest.approx(0.5)


def test_engine_shortens_the_context_itself() -> None:
    model, host = facts(context=1 << 22), HostFacts(memory_total_bytes=4 * GIB)
    sheet = plan(model, host=host)
    assert sheet.kv_cache is not None
    assert sheet.kv_cache.tokens is not None
    assert 4096 < sheet.kv_cache.tokens < 1 << 22
    assert any("shortens the context" in note for note in sheet.notes)
    assert plan(model, "--fit off", host=host).fits is False


def test_context_beyond_the_model() -> None:
    codes = {f.code for f in plan(facts(context=4096), "-c 65536 -np 1").findings}
    assert "context-beyond-model" in codes
    assert "context-beyond-model" not in {f.code for f in plan(facts(context=4096), "-c 4096 -np 1").findings}


def test_quantised_values_need_flash_attention() -> None:
    model = facts()
    assert any(f.severity == "error" for f in plan(model, "-ctv q8_0 -fa off").findings)
    assert not plan(model, "-ctk q8_0 -fa off").findings


def test_a_file_that_says_nothing() -> None:
    sheet = plan(ModelFacts(name="m", format="gguf"))
    assert sheet.fits is None
    assert sheet.gpus == ()
    assert any(f.severity == "error" for f in sheet.findings)
    half = plan(ModelFacts(name="m", format="gguf", text=TextConfig(hidden_size=64)), "-c 512")
    assert half.fits is None
    assert any("KV cache: unknown" in note for note in half.notes)


def test_command() -> None:
    sheet = plan(facts(), "-c 4096")
    assert sheet.launch.argv == ("llama-server", "-m", "/models/m.gguf", "-c", "4096")


# ------------------------------------------------------------------------------------------ laws


@given(
    st.sampled_from(["qwen3", "qwen35", "gemma3", "deepseek2"]),
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 20),
    st.integers(1, 8),
    st.sampled_from(["", " -kvu", " -fa off", " -ctk q8_0", " --swa-full", " -ub 64"]),
)
def test_need_never_falls_as_the_context_grows(architecture: str, one: int, two: int, slots: int, more: str) -> None:
    model = _MODELS[architecture]
    host = HostFacts(memory_total_bytes=1 << 50)
    small, large = sorted((one, two))
    less = plan(model, f"-c {small} -np {slots}{more}", host=host).gpus[0]
    many = plan(model, f"-c {large} -np {slots}{more}", host=host).gpus[0]
    for peak in PEAKS:
        assert less.peak_bytes[peak] <= many.peak_bytes[peak]
        assert less.peak_low_bytes[peak] <= many.peak_low_bytes[peak]
        assert less.peak_high_bytes[peak] <= many.peak_high_bytes[peak]


@given(st.integers(1, 16), st.integers(1, 16))
def test_need_never_falls_as_slots_are_added(one: int, two: int) -> None:
    model = _MODELS["qwen35"]
    few, many = sorted((one, two))
    less = plan(model, f"-c 65536 -np {few} -kvu").gpus[0].peak_bytes["serving"]
    assert less <= plan(model, f"-c 65536 -np {many} -kvu").gpus[0].peak_bytes["serving"]


@given(st.lists(st.text(alphabet="-=abc019_ ", max_size=8), max_size=8))
def test_any_tokens_are_read(tokens: list[str]) -> None:
    sheet = make_host_plan(_MODELS["qwen3"], HOST, LaunchArgs(argv=tuple(tokens)), ENGINE)
    assert sheet.engine is ENGINE


_MODELS = {
    name: facts(name, window=512 if name == "gemma3" else 0, context=1 << 20)
    for name in ("qwen3", "qwen35", "gemma3", "deepseek2")
}


# ------------------------------------------------------------------------------------------ the real engine

needs_engine = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


@needs_engine
@pytest.mark.parametrize(
    ("architecture", "shape", "flags"),
    [
        ("qwen3", {"kind": writer.Q4_0, "width": 256, "head_size": 64, "feed_forward": 512}, "-c 1000 -np 3"),
        ("qwen35moe", {"experts": 4}, "-c 2048"),
        ("gemma3", {"layers": 7, "window": 512}, "-c 4096 -np 2"),
        ("deepseek2", {"latent": 512, "rope": 64, "head_size": 192}, "-c 2048 -np 1"),
    ],
)
def test_against_the_engine(tmp_path: Path, architecture: str, shape: dict[str, Any], flags: str) -> None:
    path = writer.write_gguf(tmp_path / "model.gguf", *writer.text_model(architecture, **shape))
    log, _ = llamacpp_engine.load(path, None, llamacpp_engine.parameters(flags))
    model = read_gguf(path)
    found = settings(model, flags)
    cache, buffer = hostmemory.cache(model, found), hostmemory.compute_buffer(model, found)
    assert cache is not None
    assert buffer is not None
    printed = llamacpp_engine.sizes(log, "KV buffer size") + llamacpp_engine.sizes(log, "RS buffer size")
    assert abs(printed * MIB - cache.total) < 0.02 * MIB
    compute = llamacpp_engine.sizes(log, r"sched_reserve: +CPU compute buffer size")
    assert buffer.low <= compute * MIB <= buffer.high
    slots = re.findall(r"initializing, n_slots = (\d+), n_ctx_slot = (\d+)", log)
    assert slots == [(str(found.slots), str(found.context_per_slot))]


@needs_engine
def test_projector_against_the_engine(tmp_path: Path) -> None:
    path = writer.write_gguf(tmp_path / "model.gguf", *writer.text_model("qwen3vl"))
    tower = writer.write_gguf(tmp_path / "mmproj.gguf", *writer.projector())
    flags = "-c 2048 -np 1 --image-max-tokens 256"
    log, _ = llamacpp_engine.load(path, tower, llamacpp_engine.parameters(flags) | {"warmup": True})
    model = read_gguf(path)
    found = settings(model, flags)
    buffer = hostmemory.projector_buffer(model, found, 256)
    assert buffer is not None
    assert (
        buffer.low <= llamacpp_engine.sizes(log, "reserve_compute_meta: +CPU compute buffer size") * MIB <= buffer.high
    )
    (weights,) = re.findall(r"model size: +([\d.]+) MiB", log)
    assert abs(float(weights) * MIB - hostmemory.projector_weights(model)) < 0.01 * MIB


def test_a_damaged_file_and_a_flag_without_its_value_decide() -> None:
    host = structs.replace(HOST, memory_total_bytes=512 * GIB, memory_available_bytes=500 * GIB)
    assert plan(facts(), "-c 4096", host).fits is True
    cut = Finding("weights-truncated", "error", "cut short", "in a test")
    broken = plan(structs.replace(facts(), findings=(cut,)), "-c 4096", host)
    assert broken.fits is None
    assert broken.findings[0].code == "weights-truncated"
    assert "damaged" in broken.notes[0]
    assert plan(facts(), "-c many", host).fits is False


def test_the_watch_holds_a_plan_of_the_host_against_no_card() -> None:
    sheet = make_host_plan(facts(), HOST, LaunchArgs(argv=()), ENGINE)
    limits = limits_of(sheet)
    assert limits.cards == ()
    assert limits.host is not None
    load = sheet.gpus[0]
    assert limits.host.steady_bytes == load.peak_bytes["steady"]
    assert limits.host.serving_high_bytes == load.peak_high_bytes["serving"]
    assert limits.host.total_bytes == HOST.memory_total_bytes
