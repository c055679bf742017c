"""The command line of vLLM: spellings, versions, values, and the laws of reading and writing it."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.argv import launch_from_settings, normalise_argv, parse_argv, with_flags
from loadmaster.core.facts import LaunchArgs
from loadmaster.core.flagtable import (
    flag_history,
    flag_table,
    known_flags,
    quantization_methods,
    releases_looked_at,
    version_numbers,
)
from loadmaster.core.flagvalues import ValueRefusedError, human_integer, json_value


def parse(text: str, version: str | None = None) -> LaunchArgs:
    return parse_argv(shlex.split(text), engine_version=version)


def meaning(launch: LaunchArgs) -> LaunchArgs:
    """The launch without what only tells how it was written."""
    return msgspec.structs.replace(launch, raw=(), refused=())


# ---------------------------------------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--tensor-parallel-size 2", {"--tensor-parallel-size": 2}),
        ("--tensor_parallel_size=2", {"--tensor-parallel-size": 2}),
        ("-tp 2 -pp=3 -dp 4", {"--tensor-parallel-size": 2, "--pipeline-parallel-size": 3, "--data-parallel-size": 4}),
        ("-q fp8", {"--quantization": "fp8"}),
        ("--gpu-memory-util .85", {"--gpu-memory-utilization": 0.85}),
        ("--max-model-len 32k", {"--max-model-len": 32000}),
        ("--max-model-len 32K", {"--max-model-len": 32768}),
        ("--max-model-len 1.5m", {"--max-model-len": 1500000}),
        ("--max-model-len -1", {"--max-model-len": -1}),
        ("--max-model-len auto", {"--max-model-len": -1}),
        ("--kv-cache-memory-bytes 2G", {"--kv-cache-memory-bytes": 2 << 30}),
        ("--enforce-eager", {"--enforce-eager": True}),
        ("--no-enable-prefix-caching", {"--enable-prefix-caching": False}),
        ("--enable-chunked-prefill False", {"--enable-chunked-prefill": False}),
        ("--enable-chunked-prefill=true --port 1", {"--enable-chunked-prefill": True, "--port": 1}),
        ("--limit-mm-per-prompt image=4,video=0", {"--limit-mm-per-prompt": {"image": 4, "video": 0}}),
        ("--limit-mm-per-prompt '{\"image\": 4}'", {"--limit-mm-per-prompt": {"image": 4}}),
        ("--limit-mm-per-prompt.video 0", {"--limit-mm-per-prompt": {"video": 0}}),
        ("--limit_mm_per_prompt.a_b=1", {"--limit-mm-per-prompt": {"a_b": 1}}),
        ("-cc.mode none -cc.cudagraph_mode=full", {"--compilation-config": {"mode": "none", "cudagraph_mode": "full"}}),
        ("-cc.a.b 1 -cc.a.c true", {"--compilation-config": {"a": {"b": 1, "c": True}}}),
        ("-cc.ops+ a,b -cc.ops+ c", {"--compilation-config": {"ops": ["a", "b", "c"]}}),
        ("-cc.x=True", {"--compilation-config": {"x": "True"}}),
        ("-O3", {"--optimization-level": 3}),
        ("-O 2", {"--optimization-level": 2}),
        ("-O=1", {"--optimization-level": 1}),
        ("-O.cudagraph_mode=NONE", {"--compilation-config": {"cudagraph_mode": "NONE"}}),
        ("--served-model-name a b --port 1", {"--served-model-name": ["a", "b"], "--port": 1}),
        ("--served-model-name a --port 1", {"--served-model-name": "a", "--port": 1}),
        ("--middleware a.b --middleware c.d", {"--middleware": ["a.b", "c.d"]}),
        ("--hf-token --port 1", {"--hf-token": True, "--port": 1}),
        ("--hf-token t", {"--hf-token": "t"}),
        ("--port ${PORT}", {"--port": "${PORT}"}),
        ("--port 1 --port 2", {"--port": 2}),
        ("--disable-log-requests", {"--disable-log-requests": True}),
        ("--lora-modules a=/x b=/y", {"--lora-modules": ["a=/x", "b=/y"]}),
        ("'--dtype half'", {"--dtype": "half"}),
    ],
)
def test_spellings_of_an_unknown_version(text: str, flags: dict[str, Any]) -> None:
    launch = parse("org/m " + text)
    assert launch.model == "org/m"
    assert launch.flags == flags
    assert launch.unknown_flags == ()
    assert meaning(parse_argv(launch.argv)) == meaning(launch)


def test_the_dotted_parts_stand_for_json_that_comes_last() -> None:
    assert parse("m --compilation-config '{\"mode\": 3}' -cc.x 1").flags == {"--compilation-config": {"x": 1}}


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.8.5", {"--compilation-config": 3}),
        ("0.11.0", {"--compilation-config": {"level": 3}}),
        ("0.11.2", {"--compilation-config": {"mode": 3}}),
        ("0.20.0", {"--optimization-level": 3}),
    ],
)
def test_what_o3_means_depends_on_the_version(version: str, flags: dict[str, Any]) -> None:
    assert parse("m -O3", version).flags == flags


def test_the_model_is_the_first_word_or_the_value_of_model() -> None:
    assert parse("vllm serve a/b --port 1").model == "a/b"
    assert parse("serve a/b").model == "a/b"
    assert parse("--port 1 a/b").model == "a/b"
    assert parse("--model=a/b --port 1").model == "a/b"
    assert parse("--port 1").model is None
    assert "--model" not in parse("--model a/b").flags


# ---------------------------------------------------------------------------------------------- not known


def test_unknown_flags_are_named_without_values_and_stay_in_place() -> None:
    launch = parse("org/m --port 1 --omni --stage_path=/x --dtype half --tp 4 -tp 2")
    assert launch.unknown_flags == ("--omni", "--stage-path", "--tp")
    assert launch.extra == ("--omni", "--stage_path=/x", "--tp", "4")
    assert launch.flags == {"--port": 1, "--dtype": "half", "--tensor-parallel-size": 2}
    assert launch.argv == (
        *("vllm", "serve", "org/m", "--port", "1", "--omni", "--stage_path=/x", "--dtype", "half"),
        *("--tp", "4", "--tensor-parallel-size", "2"),
    )


def test_the_model_may_follow_an_unknown_flag() -> None:
    launch = parse("--omni org/m --port 1")
    assert (launch.model, launch.unknown_flags, launch.extra) == ("org/m", ("--omni",), ("--omni",))


def test_a_flag_of_another_version_is_unknown_in_this_one() -> None:
    assert parse("m --enable-reasoning --reasoning-parser x", "0.10.0").unknown_flags == ("--enable-reasoning",)
    assert parse("m --enable-reasoning --reasoning-parser x", "0.9.0").unknown_flags == ()
    assert parse("m --task generate --port 1", "0.33.0").extra == ("--task", "generate")
    assert parse("m --enable-reasoning").unknown_flags == ()


@pytest.mark.parametrize(
    ("text", "version", "part"),
    [
        ("--max-num-seqs many", None, "--max-num-seqs 'many' is no whole number"),
        ("--max-model-len 1.5K", None, "decimals"),
        ("--max-model-len 32k", "0.8.3", "for this version"),
        ("--limit-mm-per-prompt '{image: 1}'", None, "no valid JSON"),
        ("--limit-mm-per-prompt image=1", "0.12.0", "no longer"),
        ("--gpu-memory-utilization nan", None, "no finite number"),
        ("--port", None, "--port has no value"),
        ("--dtype int3", None, "--dtype takes auto"),
        ("--enforce-eager=1", None, "takes no value"),
        ("--max-num 1", "0.20.0", "ambiguous"),
        ("'--dtype half'", None, "one word"),
        ("word", None, "'word' belongs to no flag"),
    ],
)
def test_what_the_engine_would_refuse_is_said(text: str, version: str | None, part: str) -> None:
    launch = parse("m " + text, version)
    assert any(part in item.text for item in launch.refused), launch.refused


def test_nothing_is_refused_of_a_good_command() -> None:
    launch = parse(
        "m -tp 2 --max-model-len 4k --limit-mm-per-prompt image=2 --port $PORT --enable-chunked-prefill True"
    )
    assert launch.refused == ()


def test_the_words_as_written_are_kept_without_program_and_model() -> None:
    assert parse("vllm serve m --max_model_len=4k -tp 2").raw == ("--max_model_len=4k", "-tp", "2")
    assert parse("--model m --port 1").raw == ("--port", "1")


# ---------------------------------------------------------------------------------------------- changing


def test_flags_are_set_and_removed_and_the_rest_keeps_its_place() -> None:
    launch = parse("m --port 1 --omni --dtype half")
    changed = with_flags(launch, {"--port": None, "--max-num-seqs": 4, "--enable-prefix-caching": False})
    assert changed.argv == (
        *("vllm", "serve", "m", "--omni", "--dtype", "half", "--max-num-seqs", "4", "--no-enable-prefix-caching"),
    )
    assert with_flags(launch, {}).argv == launch.argv


def test_a_configuration_means_what_its_flags_would() -> None:
    settings = {
        "model": "org/m",
        "max_model_len": "32k",
        "served-model-name": ["a", "b"],
        "enforce-eager": False,
        "compilation-config": {"mode": 3},
        "api-key": 5,
        "no_such": 1,
        "dtype": None,
    }
    launch = launch_from_settings(settings)
    assert launch.model == "org/m"
    assert launch.flags == {
        "--max-model-len": 32000,
        "--served-model-name": ["a", "b"],
        "--enforce-eager": False,
        "--compilation-config": {"mode": 3},
        "--api-key": "5",
    }
    assert launch.unknown_flags == ("--no-such",)
    assert parse_argv(launch.argv).flags == launch.flags


# ---------------------------------------------------------------------------------------------- the table


def test_versions_between_and_beyond_the_releases_looked_at() -> None:
    releases = releases_looked_at()
    assert list(releases) == sorted(releases, key=lambda text: version_numbers(text) or ())
    assert flag_table("0.11.1").flags.keys() == flag_table("0.11.0").flags.keys() | flag_table("0.11.2").flags.keys()
    assert known_flags("99.0") == known_flags(releases[-1])
    assert known_flags("0.1") == known_flags(releases[0])
    assert set(known_flags("0.9.0")) < set(known_flags(None))
    assert flag_table("nightly").version is None


def test_the_history_of_a_flag() -> None:
    assert flag_history("--guided-decoding-backend") == (("0.4.1", "0.11.2"),)
    assert flag_history("-tp")[0][0] == releases_looked_at()[0]
    assert flag_history("--no-such-flag") == ()


def test_quantisation_methods_by_version() -> None:
    assert "mxfp4" in quantization_methods("0.20.0") and "mxfp4" not in quantization_methods("0.8.5")
    assert "int4" not in quantization_methods(None)


def test_inverse_names_of_the_newest_version_do_not_hide_an_older_flag() -> None:
    assert parse("m --disable-log-requests", "0.9.0").flags == {"--disable-log-requests": True}
    assert parse("m --disable-log-requests", "0.33.0").flags == {"--enable-log-requests": False}


# ---------------------------------------------------------------------------------------------- laws

VERSIONS = st.sampled_from([None, "0.2.7", "0.6.6", "0.8.5", "0.9.2", "0.11.0", "0.11.2", "0.12.0", "0.24.0", "0.33.0"])
NAMES = sorted(flag_table(None).options)
WORD = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES).map(lambda name: name.replace("-", "_").replace("__", "--", 1)),
    st.sampled_from(["-O3", "-O", "-O.x", "-cc.a.b", "--foo", "--foo_bar=1", "-x", "--", "-", "--model", "-1", "-.5"]),
    st.sampled_from(["1", "true", "False", "4K", "1.5k", "a=1,b=2", '{"a": 1}', '{"a":', "None", "null", '"3"', "[1]"]),
    st.sampled_from(["$@", "$X", "a b", "--dtype half", "--port=1 2", "", "=", "org/m", "3", "-tp=2", "-tp2", "-qfp8"]),
    st.text(max_size=8),
)
JOINED = st.builds(lambda name, value: f"{name}={value}", st.sampled_from(NAMES), WORD)
DOTTED = st.builds(
    lambda name, key, value: f"{name}.{key}={value}",
    st.sampled_from(NAMES),
    st.sampled_from(["a", "a.b", "a_b+", "c+", "", "a..b"]),
    WORD,
)
LINE = st.lists(st.one_of(WORD, WORD, JOINED, DOTTED), max_size=12)


@given(LINE, VERSIONS)
def test_writing_and_reading_again_changes_nothing(words: list[str], version: str | None) -> None:
    launch = parse_argv(words, engine_version=version)
    again = parse_argv(normalise_argv(launch), engine_version=version)
    assert meaning(again) == meaning(launch)
    assert launch.argv == normalise_argv(launch)


@given(LINE, VERSIONS)
def test_a_launch_is_json_and_knows_only_flags_of_its_version(words: list[str], version: str | None) -> None:
    launch = parse_argv(words, engine_version=version)
    assert msgspec.json.decode(msgspec.json.encode(launch))["flags"] == json_form(launch.flags)
    assert set(launch.flags) <= set(known_flags(version))
    assert len(launch.extra) == len(launch.extra_places)


def json_form(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@given(st.sampled_from(NAMES), VERSIONS)
def test_every_known_spelling_is_known(name: str, version: str | None) -> None:
    table = flag_table(version)
    launch = parse_argv(["m", name, "1"], engine_version=version)
    assert (name in table.options) == (not launch.unknown_flags) or not name.startswith("--")


@given(st.integers(0, 10**12))
def test_plain_and_human_integers(number: int) -> None:
    assert human_integer(str(number)) == number
    assert human_integer(f"{number % 1000}K") == number % 1000 * 1024
    assert human_integer(f"{number % 1000}k") == number % 1000 * 1000


@given(st.text(max_size=40))
def test_json_is_refused_or_can_be_written_again(text: str) -> None:
    try:
        value = json_value(text)
    except ValueRefusedError:
        return
    assert json_form(value) == value


def test_values_beyond_64_bits_or_depth_are_refused() -> None:
    for text in ("9" * 30, "[" * 100 + "]" * 100, "NaN", "1e999", '{"a": Infinity}'):
        with pytest.raises(ValueRefusedError):
            json_value(text)


def test_the_words_of_a_yaml_configuration_are_kept_as_written() -> None:
    settings = {"model": "m", "max-model-len": "32k", "enforce_eager": True, "limit-mm-per-prompt": {"image": 1}}
    launch = launch_from_settings(settings)
    assert launch.raw == ("--max-model-len", "32k", "--enforce_eager", "--limit-mm-per-prompt", '{"image": 1}')
    assert launch.flags["--max-model-len"] == 32000
