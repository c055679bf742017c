"""Pasted shell text: what the shell would pass on, what copying broke, what stands around the engine."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.commands import CommandError
from loadmaster.core.commands.compose import interpolate, read_compose
from loadmaster.core.commands.docker import given_gpus, read_run, run_start
from loadmaster.core.commands.found import docker_size, image_version, kubernetes_size, listed, visible_gpus
from loadmaster.core.commands.kubernetes import read_kubernetes, substitute
from loadmaster.core.commands.parameters import Variables, expand_text
from loadmaster.core.commands.paste import clean, without_prompts
from loadmaster.core.commands.shell import Shell
from loadmaster.core.commands.text import read_shell_text
from loadmaster.core.commands.units import read_supervisor, read_systemd
from loadmaster.core.commands.windows import c_words, dialect
from loadmaster.core.facts import GIB, LaunchArgs


def read(text: str, version: str | None = None) -> LaunchArgs:
    return read_shell_text(text).launch(version)


def words(text: str) -> list[list[str]]:
    return [command.words for command in Shell(text).commands()]


# ---------------------------------------------------------------------------------------------- the shell


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", [["a", "b", "c"]]),
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a \"\" ''", [["a", "", ""]]),
        ('a "x\\"y" \'{"k": 1}\'', [["a", 'x"y', '{"k": 1}']]),
        ("a \\\n  b", [["a", "b"]]),
        ("a; b && c || d | e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a # b\nc", [["a"], ["c"]]),
        ("a b#c", [["a", "b#c"]]),
        ("a > out 2>&1 < in b", [["a", "b"]]),
        ("a > >(tee log) 2>&1", [["a"]]),
        ("X=1\na $X ${X} '$X'", [["a", "1", "1", "$X"]]),
        ("a $X ${X} ${X:-d} ${X:-${Y:-e}}", [["a", "$X", "${X}", "d", "e"]]),
        ('X="1 2"; a $X "$X" p${X}q', [["a", "1", "2", "1 2", "p1", "2q"]]),
        ("X=/a/b.gguf; a ${X##*/} ${X%.gguf} ${X/a/c}", [["a", "b.gguf", "/a/b", "/c/b.gguf"]]),
        ("A=(1 '2 3' # no\n 4); A+=(5); a \"${A[@]}\"", [["a", "1", "2 3", "4", "5"]]),
        ('a "${A[@]}" "$@"', [["a", "${A[@]}", "$@"]]),
        ("a $(b; c) `d e`", [["a", "$(b; c)", "`d e`"]]),
        ("cat <<E\nx y\nE\na", [["cat"], ["a"]]),
        ("if [ 1 ]; then a; fi", [["[", "1", "]"], ["a"]]),
        (": ${X:=5}\na $X", [["a", "5"]]),
        ("export X=1 Y=$X; a $Y", [["a", "1"]]),
        ("a $'b\\nc'", [["a", "b\nc"]]),
        ("(a; b)", [["a"], ["b"]]),
    ],
)
def test_words_are_what_a_shell_makes_of_them(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


SIMPLE = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)


@given(st.lists(SIMPLE, min_size=1, max_size=5))
def test_quoted_words_come_back_as_they_were(given_words: list[str]) -> None:
    text = "run " + " ".join("'" + word.replace("'", "'\\''") + "'" for word in given_words)
    assert words(text) == [["run", *given_words]]


@given(st.text(max_size=60))
def test_any_text_can_be_walked(text: str) -> None:
    try:
        for command in Shell(text).commands():
            assert all(isinstance(word, str) for word in command.words)
    except CommandError as error:
        assert error.hint


# ---------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/m --port 8",
        "/opt/v/bin/vllm serve org/m --port=8",
        "python3 -m vllm.entrypoints.openai.api_server --model org/m --port 8",
        "python -m vllm.entrypoints.cli.main serve org/m --port 8",
        "python /x/vllm/entrypoints/openai/api_server.py --model org/m --port 8",
        "nohup numactl -N 0 uv run vllm serve org/m --port 8 > log 2>&1 &",
        "source /v/bin/activate; exec vllm serve org/m --port 8",
        "vllm serve org/m --port 8 2>&1 | tee log",
        "root@box:/app# vllm serve org/m --port 8",
        "(venv) user@box:~/x$ vllm serve org/m --port 8",
        "[root@box ~]# vllm serve org/m --port 8",
        "(base) % vllm serve org/m --port 8",
        "user@mac models % vllm serve org/m --port 8",
        "bash-5.1# vllm serve org/m --port 8",
        "$ vllm serve org/m \\\n>   --port 8",
        "> vllm serve org/m \\\n>   --port 8",
        "!vllm serve org/m --port 8",
        "In [3]: !vllm serve org/m --port 8",
        "```bash\nvllm serve org/m --port 8\n```",
        "It doesn't start:\n\nvllm serve org/m --port 8",
        "pip install vllm && vllm serve org/m --port 8",
        'pkill -f "vllm serve"; vllm serve org/m --port 8',
        "bash -c 'cd /x && vllm serve org/m --port 8'",
        "tmux new -d 'vllm serve org/m --port 8'",
        'ssh box "nohup vllm serve org/m --port 8 &"',
        'CMD="vllm serve org/m --port 8"\n$CMD',
        'CMD="vllm serve org/m --port 8"\neval "$CMD"',
        'CMD="vllm serve org/m --port 8"',
        "cmd=(vllm serve org/m --port 8)\necho hi",
        "M=org/m\nA=(--port 8)\nvllm serve $M ${A[@]}",
        "M=${M:-org/m}\nvllm serve ${M} --port ${PORT:-8}",
        "cat > run.sh <<'EOF'\nvllm serve org/m --port 8\nEOF\nbash run.sh",
        "# vllm serve org/m --port 8",
        "--model org/m --port 8",
        "--model org/m\n--port 8",
        "./entry.sh --model org/m --port 8",
        "--args=--model=org/m,--port=8",
        '["vllm", "serve", "org/m", "--port", "8"]',
        'CMD ["--model", "org/m", "--port", "8"]',
        "vllm serve org/m --port 8 &\nsleep 5\nvllm serve org/n --port 9",
        "docker run --gpus all vllm/vllm-openai --model org/m --port 8",
        "docker run -it --rm -p 8:8 -v a:b vllm/vllm-openai:latest org/m --port 8",
        "docker run --entrypoint vllm some/image serve org/m --port 8",
        "sudo docker run -d 0123abcd serve org/m --port 8",
        "podman run img bash -lc 'vllm serve org/m --port 8'",
        'docker run --entrypoint bash img -c "pip install x && vllm serve org/m --port 8"',
        "docker exec -it c vllm serve org/m --port 8",
        "call activate.bat\nset M=org/m\nvllm serve %M% ^\n  --port 8",
        "PS C:\\x> vllm serve org/m `\n>>   --port 8",
        '$m = "org/m"\n$p = @("--port", "8")\nvllm serve $m @p',
    ],
)
def test_the_launch_is_found(text: str) -> None:
    launch = read(text)
    assert launch.model == "org/m"
    assert launch.flags == {"--port": 8}
    assert launch.unknown_flags == ()


@pytest.mark.parametrize("text", ["", "hello", "vllm bench serve", "ls -la", "pip install vllm", "pgrep vllm"])
def test_no_launch_is_said(text: str) -> None:
    with pytest.raises(CommandError) as caught:
        read_shell_text(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("A=1 vllm serve m", {"A": "1"}),
        ("A=1 \\\nB='x y' vllm serve m", {"A": "1", "B": "x y"}),
        ("export A=1\nB=2\nvllm serve m", {"A": "1"}),
        ("export A=1 B=$A && vllm serve m", {"A": "1", "B": "1"}),
        ("env A=1 vllm serve m", {"A": "1"}),
        ("sudo A=1 vllm serve m", {"A": "1"}),
        ("set -a; A=1; set +a; B=2; vllm serve m", {"A": "1"}),
        ("set -gx A 1\nvllm serve m", {"A": "1"}),
        ("export A=1; unset A; vllm serve m", {}),
        ("bash -c 'export A=1; B=2 vllm serve m'", {"A": "1", "B": "2"}),
        ("export A=1\ndocker run -e A -e B -e C=3 vllm/vllm-openai m", {"A": "1", "C": "3"}),
        ("docker run --env=A=1 -eB=2 vllm/vllm-openai m", {"A": "1", "B": "2"}),
        ("set A=C:\\x\nvllm serve m ^\n --port 1", {"A": "C:\\x"}),
        ("$env:A='1'; vllm serve m", {"A": "1"}),
        ("export A=$B\nvllm serve m", {"A": "$B"}),
    ],
)
def test_the_environment_that_the_engine_gets(text: str, env: dict[str, str]) -> None:
    assert read(text).env == env


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("text", "flags", "line", "part"),
    [
        ("vllm serve m \\\n --port 8 \\ # the port\n --dtype half", {"--port": 8}, 2, "comment after the backslash"),
        ("vllm serve m \\\n --port 8 \\  \n --dtype half", {"--port": 8}, 2, "blank after the backslash"),
        ("vllm serve m \\\n --port 8\n --dtype half", {"--port": 8}, 3, "--dtype begins a line of its own"),
        (
            "vllm serve m \\\n --port 8 \\\n\n --dtype half",
            {"--port": 8},
            4,
            "an empty line stands after the backslash",
        ),
        ("vllm serve m \\\n # --port 8 \\\n --dtype half", {}, 2, "comment among continued lines"),
        ("vllm serve m --port 8\\\n--dtype half", {"--port": "8--dtype"}, 1, "no blank before the backslash"),
        ("vllm serve m –port 8", {"--port": 8}, 1, "typographic dash"),
        ("vllm serve m --dtype “half”", {"--dtype": "half"}, 1, "typographic quotes"),
        ("vllm serve m --port\u00a08", {"--port": 8}, 1, "no ASCII spaces"),
        ("vllm serve m --po\u200brt 8", {"--port": 8}, 1, "invisible"),
        ("vllm serve m --dtype 'half", {"--dtype": "half"}, 1, "never closed"),
        ("vllm serve m ^ \n --port 8\nset A=1", {}, 1, "blank after the ^"),
    ],
)
def test_damage_is_reported_with_its_line(text: str, flags: dict[str, Any], line: int, part: str) -> None:
    launch = read(text)
    assert launch.flags == flags
    assert any(item.line == line and part in item.text for item in launch.damage), launch.damage


def test_a_short_flag_behind_a_typographic_dash_keeps_one_hyphen() -> None:
    assert read("vllm serve m –tp 2").flags == {"--tensor-parallel-size": 2}


def test_an_undamaged_text_has_no_damage() -> None:
    text = "# it’s fine – “really”\nexport A=1\nvllm serve m \\\n  --served-model-name it’s \\\n  --port 8\n\nls -la"
    assert read(text).damage == ()


def test_a_redirection_below_a_backslash_is_no_prompt() -> None:
    assert read("vllm serve m \\\n  --port 8 \\\n  > run.log 2>&1 &").flags == {"--port": 8}
    assert read("vllm serve m \\\n  > run.log 2>&1 &").flags == {}


def test_a_container_command_that_ends_before_its_image_passes_nothing_on() -> None:
    launch = read("docker run --gpus all \\ \n  vllm/vllm-openai --model m")
    assert (launch.kind, launch.model, launch.flags) == ("docker-run", None, {})
    assert launch.damage[0].line == 1


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve \\ # the model\n  org/m \\\n  --port 8",
        "vllm serve\n  --model org/m\n  --port 8",
        "docker run --gpus all \\\n  # the cards\n  -p 8:8 \\\n  vllm/vllm-openai --model org/m --port 8",
    ],
)
def test_words_that_the_shell_never_sees_are_not_there(text: str) -> None:
    launch = read(text)
    assert (launch.model, launch.flags) == (None, {})
    assert launch.damage


def test_cleaning_keeps_line_numbers_and_prompts_are_taken_off() -> None:
    text = "a\u00a0b\n\n$ c"
    assert clean(text)[0] == "a b\n\n$ c"
    assert without_prompts("$ a \\\n> b\n(x) u@h:/# c").split("\n") == ["a \\", "b", "c"]


# ---------------------------------------------------------------------------------------------- containers


def test_what_stands_around_a_container() -> None:
    launch = read(
        "docker run -d --gpus '\"device=0,2\"' --shm-size=16g --ipc=host --name x -p 1:2 "
        "vllm/vllm-openai:v0.9.1 --model m"
    )
    assert (launch.kind, launch.image, launch.engine_version) == ("docker-run", "vllm/vllm-openai:v0.9.1", "0.9.1")
    assert (launch.visible_gpus, launch.shm_bytes, launch.ipc_host) == (2, 16 * GIB, True)
    assert read("docker run vllm/vllm-openai:v0.9.1 --model m", "0.10.0").engine_version == "0.10.0"


def test_options_of_docker_run() -> None:
    run = read_run(["-it", "-p8:8", "--rm", "-v", "a:b", "--net", "host", "--name=x", "img:1", "-c", "x"], {})
    assert (run.image, run.words) == ("img:1", ["-c", "x"])
    assert run_start(["sudo", "docker", "--context", "x", "container", "run", "img"]) == 6
    assert run_start(["docker", "ps"]) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("all", None), ("2", 2), ("device=0", 1), ('"device=0,1,2"', 3), ("count=2", 2), ("device=GPU-a,GPU-b", 2)],
)
def test_cards_given_to_a_container(text: str, count: int | None) -> None:
    assert given_gpus(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("all", None), ("$GPUS", None), ("GPU-1", 1), ("none", 0)],
)
def test_lists_of_cards(text: str, count: int | None) -> None:
    assert listed(text) == count
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}, None) == count


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.11.0", "0.11.0"),
        ("vllm/vllm-openai:v0.8.5.post1", "0.8.5.post1"),
        ("x/vllm:0.7.4-r36.4.0-cu128", "0.7.4"),
        ("rocm/vllm:rocm6.3.1_vllm_0.8.5_20250513", "0.8.5"),
        ("rocm/vllm:rocm6.3.1_instinct_vllm0.8.3_2025", "0.8.3"),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai", None),
        ("nvcr.io/nvidia/vllm:25.09.1-py3", None),
        ("localhost:5000/vllm", None),
        ("postgres:15.1.2", None),
        (None, None),
    ],
)
def test_the_version_in_an_image_tag(image: str | None, version: str | None) -> None:
    assert image_version(image) == version


def test_sizes() -> None:
    assert [docker_size(text) for text in ("16gb", "2g", "10.5G", "64m", "1024", "x")] == [
        *(16 * GIB, 2 * GIB, int(10.5 * GIB), 64 << 20, 1024, None),
    ]
    assert [kubernetes_size(text) for text in ("16Gi", "2G", "512Mi", "1k", "?")] == [
        *(16 * GIB, 2 * 10**9, 512 << 20, 1000, None),
    ]


# ---------------------------------------------------------------------------------------------- documents


def test_a_compose_service() -> None:
    found = read_compose(
        {
            "services": {
                "db": {"image": "postgres:15", "environment": {"A": "1"}},
                "llm": {
                    "image": "${IMAGE:-vllm/vllm-openai:v0.10.0}",
                    "command": "--model ${M:-org/m} --port '8' --limit-mm-per-prompt '{\"image\": 2}' --seed $SEED",
                    "environment": ["A=${X:-${Y:-0}}", "B", 'C="q"', "D=$${E}"],
                    "shm_size": "8gb",
                    "ipc": "host",
                    "deploy": {"resources": {"reservations": {"devices": [{"device_ids": ["0", "3"]}]}}},
                },
            }
        }
    )
    assert found is not None
    launch = found.launch()
    assert launch.model == "org/m"
    assert launch.flags == {"--port": 8, "--limit-mm-per-prompt": {"image": 2}, "--seed": "$SEED"}
    assert launch.env == {"A": "0", "C": '"q"', "D": "${E}"}
    assert (launch.visible_gpus, launch.shm_bytes, launch.ipc_host) == (2, 8 * GIB, True)
    assert (launch.kind, launch.engine_version) == ("compose", "0.10.0")


@pytest.mark.parametrize(
    "service",
    [
        {"image": "i", "entrypoint": ["/bin/bash", "-c"], "command": ["export A=1; vllm serve m --port 8"]},
        {"image": "i", "command": ["vllm", "serve", "m", "--port", "8"]},
        {"image": "i", "entrypoint": "vllm serve", "command": "m --port 8"},
        {"image": "i", "entrypoint": ["vllm"], "command": ["serve", "m", "--port", "8"]},
        {"image": "vllm/vllm-openai", "command": ["m", "--port", "8"]},
        {"build": ".", "command": "python3 -m vllm.entrypoints.openai.api_server --model m --port 8"},
        {"image": "vllm/vllm-openai", "command": ["--model m", "--port 8"]},
    ],
)
def test_entry_points_of_compose(service: dict[str, Any]) -> None:
    found = read_compose({"services": {"x": service}})
    assert found is not None
    assert (found.launch().model, found.launch().flags) == ("m", {"--port": 8})


def test_documents_of_other_kinds_hold_no_service() -> None:
    documents: list[Any] = [None, [], "x", {}, {"services": None}, {"services": {"a": None}}, {"a": {"image": 1}}]
    for document in documents:
        assert read_compose(document) is None
        assert read_kubernetes(document) is None


def test_interpolation() -> None:
    assert interpolate("${A:-b}-$$C-${D}-$E-${F-${G:-h}}") == "b-$C-${D}-$E-h"
    assert substitute("$(A) $$(B) $(C)", {"A": "1"}) == "1 $(B) $(C)"


def test_a_kubernetes_container() -> None:
    found = read_kubernetes(
        {
            "kind": "Deployment",
            "spec": {
                "template": {
                    "spec": {
                        "hostIPC": "true",
                        "initContainers": [{"image": "vllm/vllm-openai", "args": ["--model", "other"]}],
                        "containers": [
                            {"image": "nginx", "args": ["-g"]},
                            {
                                "image": "vllm/vllm-openai:v0.9.0",
                                "command": ["/bin/sh", "-c"],
                                "args": ["vllm serve $(M) --served-model-name $N \\\n --port 8"],
                                "env": [
                                    {"name": "M", "value": "org/m"},
                                    {"name": "N", "value": "n"},
                                    {"name": "T", "valueFrom": {"secretKeyRef": {}}},
                                ],
                                "resources": {"limits": {"nvidia.com/gpu": "2"}},
                                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                            },
                        ],
                        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
                    }
                }
            },
        }
    )
    assert found is not None
    launch = found.launch()
    assert (launch.model, launch.flags) == ("org/m", {"--served-model-name": "n", "--port": 8})
    assert launch.env == {"M": "org/m", "N": "n"}
    assert (launch.visible_gpus, launch.shm_bytes, launch.ipc_host, launch.kind) == (2, 16 * GIB, True, "kubernetes")


def test_supervisor_programs() -> None:
    found = read_supervisor(
        "[supervisord]\nenvironment=S=1\n[program:a]\ncommand=python x.py\n[program:b]\n"
        "command=/v/bin/vllm serve m --port 8 ; the server\n  --limit-mm-per-prompt '{\"image\": 1}'\n"
        "environment=A=\"x,y\",B=%(ENV_C)s,\n  D='2'\n"
    )
    assert found is not None
    launch = found.launch()
    assert launch.flags == {"--port": 8, "--limit-mm-per-prompt": {"image": 1}}
    assert launch.env == {"S": "1", "A": "x,y", "B": "%(ENV_C)s", "D": "2"}
    assert read_supervisor("[program:a]\ncommand=ls\n") is None


def test_systemd_units() -> None:
    found = read_systemd(
        '[Service]\nEnvironment="A=1 2" M=m\nEnvironment=B=3\nExecStartPre=/bin/ls\n'
        "ExecStart=-/v/bin/vllm serve ${M} \\\n  # not this one\n  --port 8 --api-key $$x --seed ${SEED}\n"
    )
    assert found is not None
    launch = found.launch()
    assert launch.model == "m"
    assert launch.flags == {"--port": 8, "--api-key": "$x", "--seed": "${SEED}"}
    assert launch.env == {"A": "1 2", "M": "m", "B": "3"}
    container = read_systemd(
        "[Container]\nImage=vllm/vllm-openai:v0.9.0\nExec=--model m\nShmSize=2g\nEnvironment=A=1\n"
    )
    assert container is not None
    assert (container.launch().model, container.launch().shm_bytes) == ("m", 2 * GIB)


# ---------------------------------------------------------------------------------------------- small parts


def test_dialects() -> None:
    assert dialect("vllm serve m \\\n --port 1") == "posix"
    assert dialect("vllm serve m ^\n --port 1") == "cmd"
    assert dialect("vllm serve m `\n --port 1") == "powershell"
    assert dialect("C:\\x>vllm serve m") == "cmd"


def test_windows_words() -> None:
    assert c_words('a "b c" "{\\"k\\": 1}" C:\\x\\ ^& d\\\\"e"') == ["a", "b c", '{"k": 1}', "C:\\x\\", "&", "d\\e"]


def test_variables_that_blow_up_are_refused() -> None:
    growing = "A=aaaaaaaaaa\n" + "A=$A$A$A$A$A$A\n" * 30 + "vllm serve $A"
    with pytest.raises(CommandError, match="too long"):
        read_shell_text(growing)
    with pytest.raises(CommandError, match="nested"):
        expand_text("${a:-" * 40 + "}" * 40, Variables())


# ---------------------------------------------------------------------------------------------- damage put right


@pytest.mark.parametrize(
    ("text", "lines", "whole", "repaired"),
    [
        (
            "export A=1\nB=2 vllm serve m \\ # the model\n --port 8 \\ \n --seed 3\n --max-modl-len 4 \\\n # not\n # now\n"
            " --dtype half \\\n\n --enforce-eager\n",
            [2, 3, 5, 6, 7, 10],
            {"--port": 8, "--seed": 3, "--dtype": "half", "--enforce-eager": True},
            "A=1 B=2 vllm serve m --port 8 --seed 3 --max-modl-len 4 --dtype half --enforce-eager",
        ),
        (
            "docker run --gpus all\n -v ~/m:/models -e T=$HF_TOKEN \\\n vllm/vllm-openai:v0.24.0 --model /models/q \\ \n"
            " --max-model-len 4k",
            [2, 3],
            {"--max-model-len": 4000},
            "docker run --gpus all -v ~/m:/models -e T=$HF_TOKEN vllm/vllm-openai:v0.24.0 --model /models/q"
            " --max-model-len 4k",
        ),
        (
            """vllm serve m --limit-mm-per-prompt '{"image": 2}' \\ \n --port 8""",
            [1],
            {"--limit-mm-per-prompt": {"image": 2}, "--port": 8},
            """vllm serve m --limit-mm-per-prompt '{"image": 2}' --port 8""",
        ),
    ],
)
def test_a_damaged_command_is_read_whole_too(
    text: str, lines: list[int], whole: dict[str, object], repaired: str
) -> None:
    """What the shell passes on stays what is judged; beside it stands what was meant, one reason for each line."""
    launch = read(text)
    assert [item.line for item in launch.damage] == lines
    assert launch.whole is not None and launch.whole.flags == whole
    assert launch.repaired == repaired
    again = read(repaired)
    assert (again.flags, again.damage, again.model) == (whole, (), launch.whole.model)


def test_a_whole_command_has_nothing_to_put_right() -> None:
    launch = read("vllm serve m \\\n --port 8")
    assert (launch.whole, launch.repaired, launch.damage) == (None, None, ())


def test_what_cannot_be_read_beside_the_launch_leaves_it_alone() -> None:
    deep = "true"
    for _ in range(4):
        deep = "bash -c " + shlex.quote(deep + "; vllm serve inner")
    launch = read("vllm serve m --port 8\n" + deep)
    assert (launch.model, launch.flags) == ("m", {"--port": 8})
    assert len(launch.others) == 1


def test_many_breaks_are_put_right_within_a_second() -> None:
    import time

    text = "vllm serve m \\ \n" + " --port 8 # x\n --seed 3 \\ \n\n" * 300
    began = time.perf_counter()
    launch = read(text)
    assert time.perf_counter() - began < 2
    assert launch.model == "m" and launch.flags == {} and launch.damage
    assert (launch.whole, launch.repaired) == (None, None)
