"""loadmaster.toml: origins, precedence, refusals in words, migrations, and what is written."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.config import (
    CONFIGURATION,
    ConfigError,
    deployment_folder,
    list_deployments,
    load_deployment,
    read_deployment,
    state_home,
    write_deployment,
)
from loadmaster.core import migrations
from loadmaster.core.deployment import SCHEMA, Deployment, EngineSection, problems
from loadmaster.core.deploymentfile import deployment_text, setting_keys, setting_type, toml_value
from loadmaster.core.keypaths import key_lines, line_of
from loadmaster.core.migrations import SchemaError, migrate
from loadmaster.core.tables import load_toml


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def write(text: str | bytes, name: str = "cat") -> Path:
    folder = deployment_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIGURATION
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(text: str | bytes, environment: dict[str, str] | None = None) -> tuple[str, str | None]:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_deployment("cat", environment or {})
    return caught.value.message.replace(str(path), "FILE"), caught.value.hint


GOOD = 'schema = 1\nname = "cat"\nmodel = "org/model"\n'

# ---------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"LOADMASTER_HOME": "/a/b", "XDG_STATE_HOME": "/x"}, "linux", "/a/b"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "linux", "/x/loadmaster"),
        ({"XDG_STATE_HOME": "x", "HOME": "/h"}, "linux", "/h/.local/state/loadmaster"),
        ({"HOME": "/h"}, "linux", "/h/.local/state/loadmaster"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Application Support/loadmaster"),
    ],
)
def test_state_home(environment: dict[str, str], platform: str, expected: str) -> None:
    assert state_home(environment, platform) == Path(expected)


@pytest.mark.parametrize("name", ["", "Cat", "-cat", "a/b", "..", "c" * 41, "cat\n", "katze.1"])
def test_names_that_cannot_be_folders(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        deployment_folder(name)


def test_deployments_are_listed_by_their_files() -> None:
    assert list_deployments() == []
    for name in ("dog", "cat"):
        write(GOOD.replace("cat", name), name)
    (state_home() / "deployments" / "empty").mkdir()
    (state_home() / "deployments" / ".removing").mkdir()
    assert list_deployments() == ["cat", "dog"]


def test_an_unknown_deployment_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_deployment("cat")
    assert (caught.value.message, caught.value.hint) == (
        "no deployment 'cat'",
        "make one with: loadmaster init cat --model MODEL",
    )
    write(GOOD)
    with pytest.raises(ConfigError) as caught:
        load_deployment("cta")
    assert caught.value.hint == "did you mean 'cat'?"


# ---------------------------------------------------------------------------------------------- origins


def test_the_environment_comes_before_the_file_and_the_file_before_the_defaults() -> None:
    path = write(
        GOOD
        + """
engine.flags = [  # a comment with ] and "
  "--max-model-len", "8192 = [",
]
[gateway]   # the door
  'port' = 7000
host = \"\"\"\\
  127.0.0.1\"\"\"
[limits]
queue = 3
"""
    )
    loaded = load_deployment(
        "cat", {"LOADMASTER_LIMITS_QUEUE": "5", "LOADMASTER_GPUS": "2x24GiB", "LOADMASTER_MODEL": ""}
    )
    assert loaded.path == path
    assert loaded.deployment.limits.queue == 5
    assert loaded.deployment.gateway.port == 7000
    assert loaded.deployment.engine.flags == ["--max-model-len", "8192 = ["]
    assert set(loaded.origins) == set(setting_keys())
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "schema": "file loadmaster.toml line 1",
        "name": "file loadmaster.toml line 2",
        "model": "file loadmaster.toml line 3",
        "gpus": "environment LOADMASTER_GPUS",
        "engine.flags": "file loadmaster.toml line 5",
        "gateway.port": "file loadmaster.toml line 9",
        "gateway.host": "file loadmaster.toml line 10",
        "limits.queue": "environment LOADMASTER_LIMITS_QUEUE",
    }


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("LOADMASTER_MODEL", "/m", "model", "/m"),
        ("LOADMASTER_ENGINE_FLAGS", "--a '{\"b\": 1}' c", "flags", ["--a", '{"b": 1}', "c"]),
        ("LOADMASTER_ENGINE_ENV", "A=1 B='x y'", "env", {"A": "1", "B": "x y"}),
        ("LOADMASTER_ENGINE_START_TIMEOUT_S", "2.5", "start_timeout_s", 2.5),
        ("LOADMASTER_GATEWAY_INSECURE", "Yes", "insecure", True),
        ("LOADMASTER_LIMITS_CONCURRENCY", " 7 ", "concurrency", 7),
    ],
)
def test_variables_are_read_by_type(variable: str, text: str, key: str, value: Any) -> None:
    write(GOOD)
    deployment = load_deployment("cat", {variable: text}).deployment
    holders = (deployment, deployment.engine, deployment.gateway, deployment.limits)
    assert next(getattr(holder, key) for holder in holders if hasattr(holder, key)) == value


@pytest.mark.parametrize(
    ("environment", "message", "hint"),
    [
        (
            {"LOADMASTER_GATEWAY_PROT": "1"},
            "environment LOADMASTER_GATEWAY_PROT: no such setting",
            "did you mean LOADMASTER_GATEWAY_PORT?",
        ),
        (
            {"LOADMASTER_GATEWAY_PORT": "many"},
            'environment LOADMASTER_GATEWAY_PORT: gateway.port: expected a whole number, got the text "many"',
            None,
        ),
        (
            {"LOADMASTER_GATEWAY_PORT": "70000"},
            "environment LOADMASTER_GATEWAY_PORT: gateway.port: 70000 is no port, 1 to 65535 are",
            None,
        ),
        (
            {"LOADMASTER_ENGINE_KIND": "vlm"},
            'environment LOADMASTER_ENGINE_KIND: engine.kind: expected one of "vllm", "llamacpp", "command", '
            'got the text "vlm"',
            'did you mean "vllm"?',
        ),
        (
            {"LOADMASTER_ENGINE_FLAGS": "'x"},
            "environment LOADMASTER_ENGINE_FLAGS: engine.flags: a quote is not closed",
            None,
        ),
        (
            {"LOADMASTER_ENGINE_ENV": "A"},
            "environment LOADMASTER_ENGINE_ENV: engine.env: expected NAME=value words",
            None,
        ),
        ({"LOADMASTER_MODEL": "\udcff"}, "environment LOADMASTER_MODEL: model: not UTF-8 text", None),
        (
            {"LOADMASTER_LIMITS_QUEUE": "9" * 5000},
            'environment LOADMASTER_LIMITS_QUEUE: limits.queue: expected a whole number, got the text "'
            + "9" * 40
            + '…"',
            None,
        ),
    ],
)
def test_variables_that_are_refused(environment: dict[str, str], message: str, hint: str | None) -> None:
    assert refused(GOOD, environment) == (message, hint)


def test_variables_of_other_purposes_are_left_alone() -> None:
    write(GOOD)
    load_deployment("cat", {"LOADMASTER_HOME": "/x", "LOADMASTER_RUN": "1-2", "LOADMASTER_SOMETHING_ELSE": "y"})


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (GOOD + "[gatway]\nport = 1\n", "FILE: line 4: gatway: no such key", "did you mean gateway?"),
        (
            GOOD + "[gateway]\n\nprot = 1\n",
            "FILE: line 6: gateway.prot: no such key",
            "did you mean gateway.port?",
        ),
        (
            GOOD + "[gateway]\nqqq = 1\n",
            "FILE: line 5: gateway.qqq: no such key",
            "known here: host, port, insecure, max_body_bytes, allow_url_images, allowed_hosts, "
            "allowed_origins, backends, extra_routes",
        ),
        (
            GOOD + '[gateway]\nport = "7860"\n',
            'FILE: line 5: gateway.port: expected a whole number, got the text "7860"',
            "without quotes: port = 7860",
        ),
        (
            GOOD + "[gateway]\nport = true\n",
            "FILE: line 5: gateway.port: expected a whole number, got true",
            None,
        ),
        (
            GOOD + "[gateway]\nport = 2024-01-01\n",
            "FILE: line 5: gateway.port: expected a whole number, got a date or time",
            None,
        ),
        (
            GOOD + f"[gateway]\nport = {'9' * 30}\n",
            "FILE: line 5: gateway.port: the number is too large",
            None,
        ),
        (
            GOOD + "[limits]\nqueue = nan\n",
            "FILE: line 5: limits.queue: expected a whole number, got the number nan",
            None,
        ),
        (
            GOOD + "gateway = 3\n",
            "FILE: line 4: gateway: expected a section, got the number 3",
            "write it as [gateway]",
        ),
        (
            GOOD + "[engine]\nflags = '--max-model-len 8192'\n",
            'FILE: line 5: engine.flags: expected a list of texts, got the text "--max-model-len 8192"',
            'as a list of words: flags = ["--flag", "value"]',
        ),
        (
            GOOD + "[engine]\nflags = ['--max-model-len',\n 8192]\n",
            "FILE: line 5: engine.flags[1]: expected a text, got the number 8192",
            'in quotes: "8192"',
        ),
        (
            GOOD + "[engine.env]\nOMP_NUM_THREADS = 1\n",
            "FILE: line 5: engine.env.OMP_NUM_THREADS: expected a text, got the number 1",
            'in quotes: "1"',
        ),
        ("name = 'cat'\n", "FILE: model: is missing", None),
        (GOOD.replace("1", "2"), "FILE: schema: the file has 2, this release reads up to 1", "update loadmaster"),
        (GOOD.replace("1", "'1'"), "FILE: schema: expected a whole number, 0 or more", None),
        (GOOD + "[gateway]\nport = 0\n", "FILE: line 5: gateway.port: 0 is no port, 1 to 65535 are", None),
        (GOOD + "x = \n", "FILE: not TOML: invalid value (at line 4, column 5)", None),
        (GOOD.encode() + b"# \xff\n", "FILE: line 4 is not UTF-8 text", "save the file as UTF-8"),
        ("x = " + "[" * 100_000, "FILE: nested too deeply", None),
        ("x = " + "{a=" * 60_000, "FILE: nested too deeply", None),
        (b"#" * (10 << 20), "FILE: more than 256 KiB, which is no configuration", None),
        (
            GOOD.replace("cat", "dog"),
            "FILE: name is 'dog', but the folder is 'cat'",
            'set name = "cat" in the file',
        ),
    ],
)
def test_files_that_are_refused(text: str | bytes, message: str, hint: str | None) -> None:
    assert refused(text) == (message, hint)


def test_every_senseless_value_is_named_at_once() -> None:
    message, _ = refused(GOOD + "[gateway]\nport = 0\n[limits]\nqueue = -1\n")
    assert message.splitlines() == [
        "FILE: line 5: gateway.port: 0 is no port, 1 to 65535 are",
        "       FILE: line 7: limits.queue: -1 is under 0",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "9" * 100_000,
        "a." * 60_000 + "b = 1",
        "[" + "a." * 60_000 + "b]",
        "[[a]]\n" * 30_000,
        "\n".join(f"k{number} = 1" for number in range(20_000)),
        'x = "' + "\\" * 200_000,
        "x = '''" + "'" * 200_000,
        "\0" * 1000,
        "a" * 250_000,
        "a " * 120_000,
        "\"a'" * 80_000,
        'x = """' + '"' * 100_000 + "\n",
    ],
)
def test_hostile_files_are_refused_quickly(text: str) -> None:
    started = time.monotonic()
    refused(text)
    assert time.monotonic() - started < 5


def test_a_folder_in_the_place_of_the_file(home: Path) -> None:
    (home / "deployments" / "cat" / CONFIGURATION).mkdir(parents=True)
    with pytest.raises(ConfigError, match="no deployment"):
        load_deployment("cat")
    with pytest.raises(ConfigError, match=r"cannot read .*: is a directory"):
        read_deployment(home / "deployments" / "cat" / CONFIGURATION)


def test_windows_line_ends_and_a_byte_order_mark() -> None:
    write(b"\xef\xbb\xbf" + (GOOD + "[gateway]\nport = 9\n").replace("\n", "\r\n").encode())
    loaded = load_deployment("cat", {})
    assert loaded.origins["gateway.port"] == "file loadmaster.toml line 5"


PIECES = st.sampled_from(
    [
        "[",
        "]",
        "[[",
        "{",
        "}",
        "=",
        '"',
        "'",
        '"""',
        "\n",
        ".",
        ",",
        "#",
        "1",
        "-",
        "engine",
        "gateway",
        "port",
        "\\u",
        "é",
    ]
)


@given(st.integers(0, 4000), st.integers(0, 60), st.lists(PIECES, max_size=6).map("".join))
def test_damaged_files_are_read_or_refused_in_words(place: int, gone: int, put: str) -> None:
    text = deployment_text(Deployment(name="cat", model="org/model"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIGURATION)
        path.write_text(text[:place] + put + text[place + gone :], encoding="utf-8")
        try:
            loaded = read_deployment(path, {})
        except ConfigError as error:
            assert error.message and "Traceback" not in error.message
        else:
            assert set(loaded.origins) == set(setting_keys())
            assert problems(loaded.deployment) == []


@given(st.sampled_from(sorted(setting_keys())), st.text(st.characters(exclude_characters="\0"), max_size=20))
def test_variables_are_taken_or_refused_in_words(key: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIGURATION)
        path.write_text(GOOD)
        try:
            loaded = read_deployment(path, {f"LOADMASTER_{key.upper().replace('.', '_')}": text})
        except ConfigError as error:
            assert error.message.startswith("environment LOADMASTER_")
        else:
            assert problems(loaded.deployment) == []


# ---------------------------------------------------------------------------------------------- lines


def test_lines_of_keys_in_every_notation() -> None:
    text = """# top
a = 1
b.c = { d = "x\\"y", e = [1,
  2] } # }

["q.r" . 's']   # header ] = 3
t = '''
[not a header]
u = 1
'''
v = \"\"\"a\\\"\"\"\"b = 1\"\"\"\"
'w = x' = [
  # comment ]
  "]", ']',
]
[[list]]
y = 1
[[list]]
y = 2
"""
    lines = key_lines(text)
    assert lines == {
        ("a",): 2,
        ("b", "c"): 3,
        ("q.r", "s"): 6,
        ("q.r", "s", "t"): 7,
        ("q.r", "s", "v"): 11,
        ("q.r", "s", "w = x"): 12,
        ("list",): 16,
        ("list", "y"): 17,
    }
    assert line_of(("b", "c", "d"), lines) == 3
    assert line_of(("z",), lines) is None


# ---------------------------------------------------------------------------------------------- writing

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
DEPLOYMENTS = st.builds(
    Deployment,
    name=st.from_regex(r"[a-z0-9][a-z0-9-]{0,39}", fullmatch=True),
    model=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip),
    engine=st.builds(
        EngineSection,
        flags=st.lists(st.one_of(WORDS, st.sampled_from(["--a", "--b=c", "-x"])), max_size=5),
        env=st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), WORDS, max_size=3),
        port=st.integers(1, 7000),
        start_timeout_s=st.floats(0.5, 9000),
    ),
)


@given(DEPLOYMENTS, st.dictionaries(st.sampled_from(["--a", "--b", "model", "gateway.port"]), st.text(max_size=200)))
def test_what_is_written_reads_back(deployment: Deployment, notes: dict[str, str]) -> None:
    import tomllib

    assert problems(deployment) == []
    assert msgspec.convert(tomllib.loads(deployment_text(deployment, notes)), Deployment) == deployment


@given(DEPLOYMENTS)
def test_every_key_that_is_written_has_its_line(deployment: Deployment) -> None:
    text = deployment_text(deployment)
    rows = text.split("\n")
    for path, line in key_lines(text).items():
        row = rows[line - 1]
        assert row.startswith((f"{path[-1]} = ", f"[{path[-1]}]")), (path, row)


def test_every_key_has_its_meaning_and_a_type_in_words() -> None:
    from loadmaster.core.configvalues import expected_words

    assert set(load_toml("deployment-keys.toml")) == set(setting_keys())
    for key in setting_keys():
        assert expected_words(setting_type(key))
        example = load_toml("deployment-keys.toml")[key].get("example")
        if example is not None:
            import tomllib

            assert tomllib.loads(f"x = {toml_value(example)}") == {"x": example}


def test_the_written_file_is_private_and_kept(home: Path) -> None:
    path = write_deployment(
        Deployment(name="cat", model="org/model", engine=EngineSection(flags=["--max-model-len", "8192", "--x"])),
        notes={"--max-model-len": "8,192 tokens have room", "engine.flags": "Planned for 2x24GiB."},
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, home):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert """# The engine's own flags, passed on verbatim.
# Planned for 2x24GiB.
flags = [
  # 8,192 tokens have room
  "--max-model-len", "8192",
  "--x",
]
""" in path.read_text()
    with pytest.raises(ConfigError) as caught:
        write_deployment(Deployment(name="cat", model="other"))
    assert caught.value.hint == "loadmaster init --force writes it anew and keeps a .bak"
    write_deployment(Deployment(name="cat", model="other"), overwrite=True)
    assert 'model = "org/model"' in path.with_name("loadmaster.toml.bak").read_text()
    assert load_deployment("cat", {}).deployment.model == "other"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["loadmaster.toml", "loadmaster.toml.bak"]


def test_a_senseless_deployment_is_not_written(home: Path) -> None:
    with pytest.raises(ConfigError, match="model: is empty"):
        write_deployment(Deployment(name="cat", model=""))
    assert not home.exists()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "input/output error"),
    ],
)
def test_a_full_or_read_only_disk_is_said_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    path = write(GOOD)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=f"cannot write .*: {said}"):
        write_deployment(Deployment(name="cat", model="other"), overwrite=True)
    assert path.read_text() == GOOD
    assert [entry.name for entry in path.parent.iterdir()] == [CONFIGURATION]


# ---------------------------------------------------------------------------------------------- migrations


def rename_gate(raw: dict[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in raw.items() if key != "gate"}
    return {**changed, "gateway": {"port": raw.get("gate", 7860)}}


def test_migrations_are_steps_that_leave_their_input_alone() -> None:
    steps = {0: rename_gate, 1: lambda raw: {**raw, "gpus": "auto"}}
    old = {"schema": 0, "name": "cat", "gate": 9}
    assert migrate(old, steps, 2) == {"schema": 2, "name": "cat", "gateway": {"port": 9}, "gpus": "auto"}
    assert old == {"schema": 0, "name": "cat", "gate": 9}
    assert migrate({"name": "cat"}, steps, 2) == {"schema": 2, "name": "cat", "gpus": "auto"}
    assert migrate({"schema": 2}, steps, 2) == {"schema": 2}
    with pytest.raises(SchemaError, match="has 3, this release reads up to 2"):
        migrate({"schema": 3}, steps, 2)
    with pytest.raises(SchemaError, match="has 0, this release reads from 1 on"):
        migrate({"schema": 0}, {}, 1)


def test_every_step_to_the_current_schema_exists() -> None:
    assert set(migrations.MIGRATIONS) == set(range(migrations.FIRST, SCHEMA))


def test_a_migrated_file_is_rewritten_and_the_old_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migrations.MIGRATIONS, 0, rename_gate)
    old = 'schema = 0\nname = "cat"\nmodel = "org/model"\ngate = 7001\n'
    path = write(old)
    loaded = load_deployment("cat", {"LOADMASTER_LIMITS_QUEUE": "5"})
    assert loaded.migrated_from == 0
    assert loaded.deployment.gateway.port == 7001
    assert loaded.origins["gateway.port"] == "file loadmaster.toml, from schema 0"
    assert path.with_name("loadmaster.toml.bak").read_text() == old
    again = load_deployment("cat", {})
    assert again.migrated_from is None
    assert again.deployment.gateway.port == 7001
    assert again.deployment.limits.queue == 64


def test_a_file_that_cannot_be_rewritten_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migrations.MIGRATIONS, 0, rename_gate)
    path = write('schema = 0\nname = "cat"\nmodel = "org/model"\ngate = 7001\n')

    def fail(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", fail)
    assert load_deployment("cat", {}).deployment.gateway.port == 7001
    assert path.read_text().startswith("schema = 0")


def test_the_page_of_the_keys_is_up_to_date() -> None:
    script = Path(__file__).resolve().parent.parent / "scripts" / "docs_configuration.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=60, check=False)
    assert done.returncode == 0, "run scripts/docs_configuration.py"
