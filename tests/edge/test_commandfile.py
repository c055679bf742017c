"""Files that hold a launch: what kind they are, YAML within limits, and hostile input."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from loadmaster.core.argv import parse_argv
from loadmaster.edge.commandfile import CommandError, read_command, read_command_file

COMPOSE = """\
# the chat model
x-env: &env
  HF_HOME: /hf
services:
  db:
    image: postgres:15
  chat:
    image: vllm/vllm-openai:${TAG:-v0.24.0}
    ipc: host
    environment:
      <<: *env
      OMP_NUM_THREADS: 1
      DEBUG: off
      EMPTY:
      #NCCL_DEBUG: INFO
    command: >
      --model org/chat
      --served-model-name chat
        chat-small
      --max-model-len ${LEN:-32k}
      --no-enable-prefix-caching
    deploy:
      resources:
        reservations:
          devices:
            - {driver: nvidia, count: 2, capabilities: [gpu]}
"""

POD = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: x}
---
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: chat
      image: vllm/vllm-openai:v0.12.0
      args: ["--model=$(MODEL)", "--max-model-len", "4096", "--trust-remote-code"]  # all
      env:
        - {name: MODEL, value: org/chat}
      resources: {limits: {nvidia.com/gpu: 4}}
"""

SETTINGS = """\
model: org/chat
max_model_len: 32768
gpu-memory-utilization: 0.9
enforce-eager: false
served-model-name: [a, b]
limit-mm-per-prompt: {image: 4, video: 0}
speculative-config:
  method: mtp
seed: 0
not-a-flag: 1
"""

SUPERVISOR = """\
[program:web]
command=gunicorn app
environment=CUDA_VISIBLE_DEVICES="7"

[program:chat]
command=/bin/bash -lc 'source /v/bin/activate; \\
  export CUDA_VISIBLE_DEVICES=0,1; \\
  exec vllm serve org/chat --port 8000'
autostart=true
"""

UNIT = """\
[Unit]
Description=chat
[Service]
Environment="CUDA_VISIBLE_DEVICES=0"
ExecStart=/v/bin/python -m vllm.entrypoints.openai.api_server \\
    --model org/chat \\
    --port 8000
Restart=always
"""


def test_a_compose_file(tmp_path: Path) -> None:
    path = tmp_path / "docker-compose.yml"
    path.write_text(COMPOSE, encoding="utf-8")
    launch = read_command_file(path)
    assert launch.kind == "compose" and launch.model == "org/chat"
    assert launch.flags == {
        "--served-model-name": ["chat", "chat-small"],
        "--max-model-len": 32000,
        "--enable-prefix-caching": False,
    }
    assert launch.env == {"HF_HOME": "/hf", "OMP_NUM_THREADS": "1", "DEBUG": "off"}
    assert (launch.engine_version, launch.visible_gpus, launch.ipc_host) == ("0.24.0", 2, True)


@pytest.mark.parametrize("name", [None, "x.yaml", "x.txt", "x.conf", "x.service"])
@pytest.mark.parametrize(
    ("text", "kind", "flags"),
    [
        (POD, "kubernetes", {"--max-model-len": 4096, "--trust-remote-code": True}),
        (SUPERVISOR, "supervisor", {"--port": 8000}),
        (UNIT, "systemd", {"--port": 8000}),
        ("vllm serve org/chat --port 8000", "serve", {"--port": 8000}),
        ("docker run vllm/vllm-openai --model org/chat --port 8000", "docker-run", {"--port": 8000}),
        ("model: org/chat\nport: 8000\n", "yaml", {"--port": 8000}),
        (
            "  chat:\n    image: vllm/vllm-openai\n    command: --model org/chat --port 8000\n",
            "compose",
            {"--port": 8000},
        ),
        (
            "cat <<E | kubectl apply -f -\n" + POD + "E\n",
            "kubernetes",
            {"--max-model-len": 4096, "--trust-remote-code": True},
        ),
        ("models:\n  chat:\n    cmd: vllm serve org/chat --port 8000\n", "other", {"--port": 8000}),
    ],
)
def test_the_kind_is_told_by_the_text(text: str, kind: str, flags: dict[str, object], name: str | None) -> None:
    launch = read_command(text, name)
    assert (launch.kind, launch.model, launch.flags) == (kind, "org/chat", flags)


def test_a_configuration_keeps_its_types() -> None:
    launch = read_command(SETTINGS)
    assert launch.flags == {
        "--max-model-len": 32768,
        "--gpu-memory-utilization": 0.9,
        "--enforce-eager": False,
        "--served-model-name": ["a", "b"],
        "--limit-mm-per-prompt": {"image": 4, "video": 0},
        "--speculative-config": {"method": "mtp"},
        "--seed": 0,
    }
    assert launch.unknown_flags == ("--not-a-flag",)
    assert parse_argv(launch.argv).flags == launch.flags


def test_the_version_can_be_given() -> None:
    text = "docker run vllm/vllm-openai:v0.9.0 --model m --enable-reasoning"
    assert read_command(text).unknown_flags == ()
    launch = read_command(text, engine_version="0.12.0")
    assert (launch.engine_version, launch.unknown_flags) == ("0.12.0", ("--enable-reasoning",))


def test_a_compose_file_that_is_no_yaml_is_read_as_text_and_said() -> None:
    text = "services:\n  x:\n    command: vllm serve m --limit-mm-per-prompt '{\"image\": 2}'\n"
    launch = read_command(text, "compose.yaml")
    assert launch.flags == {"--limit-mm-per-prompt": {"image": 2}}
    assert "YAML cannot be parsed" in launch.damage[0].text


def test_a_helm_template_is_read_with_its_holes() -> None:
    text = POD.replace('"4096"', "{{ .Values.len | quote }}").replace("spec:\n", "{{- if .x }}\nspec:\n{{- end }}\n")
    assert read_command(text, "pod.yaml").flags == {"--max-model-len": "$(template)", "--trust-remote-code": True} or (
        read_command(text, "pod.yaml").flags["--max-model-len"] == "$(.Values.len | quote)"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read"):
        read_command_file(tmp_path / "none")
    with pytest.raises(CommandError, match="cannot read"):
        read_command_file(tmp_path)
    (tmp_path / "empty").write_text("")
    with pytest.raises(CommandError, match="empty"):
        read_command_file(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0\xff\xfe")
    with pytest.raises(CommandError):
        read_command_file(tmp_path / "binary")
    (tmp_path / "utf16.txt").write_bytes("vllm serve m --port 8\r\n".encode("utf-16"))
    assert read_command_file(tmp_path / "utf16.txt").flags == {"--port": 8}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
HOSTILE = {
    "nul": "vllm serve \0 m",
    "one line of 10 MB": "vllm serve " + "a" * 10_000_000,
    "many lines": "vllm serve m \\\n" + "--port 1 \\\n" * 90_000,
    "nested defaults": "vllm serve " + "${a:-" * 20_000,
    "nested closed defaults": "vllm serve " + "${a:-" * 150 + "}" * 150,
    "open brackets": "$(\n" * 15_000,
    "here-documents": "<<EOF\n" * 15_000,
    "growing variable": "A=aaaaaaaaaa\n" + "A=$A$A$A$A$A\n" * 40 + "vllm serve $A",
    "growing array": "A=(a b)\n" + 'A+=( "${A[@]}" )\n' * 40 + 'vllm serve "${A[@]}"',
    "growing line of cmd": "set A=" + "x" * 90_000 + "\nvllm serve " + "%A%" * 30_000,
    "shells in shells": 'bash -c "' * 12 + "vllm serve m",
    "deep YAML": "a: " + "[" * 5000,
    "alias bomb": BOMB,
    "YAML that holds itself": "a: &a\n  b: *a\n",
    "merges of merges": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 200)),
    "large YAML": "a:\n" + "- b\n" * 15_000,
    "nested JSON value": "vllm serve m --hf-overrides " + "[" * 50_000,
    "sections": "[program:x]\n" * 15_000,
    "apostrophes": "it's vllm serve\n" * 15_000,
    "prompts": ("a@b:" + "x" * 3000 + "\n") * 100,
    "surrogate": "vllm serve \ud800 --port 1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_answered_soon(name: str) -> None:
    start = time.monotonic()
    try:
        launch = read_command(HOSTILE[name])
        assert launch.argv[:2] == ("vllm", "serve")
    except CommandError as error:
        assert error.message and error.hint
    assert time.monotonic() - start < 5


def test_mutated_texts_give_a_launch_or_an_error() -> None:
    """1500 mutations of real forms: never anything but CommandError."""
    source = random.Random(7)
    texts = [COMPOSE, POD, SETTINGS, SUPERVISOR, UNIT, "A=1 vllm serve m \\\n  --port ${P:-8} \\\n  --dtype 'half'"]
    pieces = ["\\\n", "\\ \n", '"', "'", "${", "}", "$(", ")", "`", "{", "[", "<<EOF\n", "&a", "*a", "^\n", "`\n", "# "]
    pieces += [
        "> ",
        "- ",
        ": ",
        "\n",
        "--",
        "\u201c",
        "\u2013",
        "\ud800",
        "\x1b[0m",
        ".a.b",
        "<(",
        "((",
        "|",
        "%A%",
        "\r",
    ]
    launches = 0
    for _ in range(1500):
        text = source.choice(texts)
        for _ in range(source.randint(1, 6)):
            at = source.randint(0, len(text))
            if source.random() < 0.6:
                text = text[:at] + source.choice(pieces) * source.choice([1, 1, 2, 30]) + text[at:]
            elif source.random() < 0.5:
                text = text[:at] + text[at + source.randint(1, 30) :]
            else:
                text = text[:at] + "".join(chr(source.randint(0, 0x2FFF)) for _ in range(4)) + text[at:]
        try:
            read_command(text, source.choice([None, "a.yaml", "a.txt"]))
            launches += 1
        except CommandError:
            continue
    assert launches > 500


def test_random_bytes_are_no_command(tmp_path: Path) -> None:
    source = random.Random(3)
    path = tmp_path / "x"
    for _ in range(200):
        path.write_bytes(source.randbytes(source.randint(0, 400)))
        with pytest.raises(CommandError):
            read_command_file(path)


# ---------------------------------------------------------------------------------------------- around the launch

TWO = """\
services:
  chat:
    image: vllm/vllm-openai:v0.24.0
    runtime: nvidia
    command: --model /models/chat
    volumes:
      - ./models:/models:ro
      - cache:/root/.cache
      - {type: bind, source: "${DATA:-~/data}", target: /data}
  db: {image: "postgres:15", command: ["x"]}
  embed:
    image: vllm/vllm-openai:v0.24.0
    command: --model org/embed
"""

NODE = """\
kind: Deployment
metadata: {name: chat}
spec:
  template:
    spec:
      volumes:
        - {name: m, hostPath: {path: /srv/models}}
        - {name: s, emptyDir: {medium: Memory}}
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.24.0
          args: [--model, /models/q]
          volumeMounts:
            - {name: m, mountPath: /models, subPath: vl}
            - {name: s, mountPath: /dev/shm}
---
kind: Deployment
metadata: {name: embed}
spec: {template: {spec: {containers: [{name: vllm, image: "vllm/vllm-openai:v0.24.0", args: [--model, org/embed]}]}}}
"""

FLAGS = """\
services:
  chat:
    image: vllm/vllm-openai:v0.24.0
    command: --model /models/q1 --tensor-parallel-size 2
  embed:
    image: vllm/vllm-openai:v0.24.0
    command: --model org/embed
"""

PROGRAMS = "[program:chat]\ncommand=vllm serve org/chat\n[program:x]\ncommand=true\n[program:embed]\ncommand=vllm serve org/embed\n"


@pytest.mark.parametrize(("text", "name"), [(TWO, "a.yaml"), (FLAGS, "d.yaml"), (NODE, "b.yaml"), (PROGRAMS, "c.conf")])
def test_one_of_several_services_is_read_and_the_others_are_named(text: str, name: str) -> None:
    first = read_command(text, name)
    assert (first.name, first.others) == ("chat", ("embed",))
    second = read_command(text, name, service="embed")
    assert (second.name, second.model, second.others) == ("embed", "org/embed", ())
    with pytest.raises(CommandError, match="db") as raised:
        read_command(text, name, service="db")
    assert raised.value.hint == "services that do: chat, embed"


def test_a_text_without_services_has_none_to_choose() -> None:
    with pytest.raises(CommandError, match="no service 'x'"):
        read_command("vllm serve m", service="x")


def test_mounts_are_kept_as_written() -> None:
    assert read_command(TWO, "a.yaml").mounts == (("./models", "/models"), ("~/data", "/data"))
    assert read_command(NODE, "b.yaml").mounts == (("/srv/models/vl", "/models"),)
    line = (
        "docker run -v /tmp/m:/models -v cache:/c --mount type=bind,src=./d,dst=/d,readonly vllm/vllm-openai --model m"
    )
    assert read_command(line).mounts == (("/tmp/m", "/models"), ("./d", "/d"))


@pytest.mark.parametrize(
    ("text", "access"),
    [
        ("docker run vllm/vllm-openai --model m", False),
        ("docker run --gpus all vllm/vllm-openai --model m", True),
        ("docker run --runtime nvidia vllm/vllm-openai --model m", True),
        ("docker run --device /dev/kfd --device /dev/dri rocm/vllm --model m --dtype half --port 1", True),
        ("podman run --device nvidia.com/gpu=all vllm/vllm-openai --model m", True),
        ("docker run -e NVIDIA_VISIBLE_DEVICES=0 vllm/vllm-openai --model m", True),
        (TWO, True),
        (TWO.replace("    runtime: nvidia\n", ""), False),
        (COMPOSE, True),
        ("vllm serve m", None),
        (NODE, None),
    ],
)
def test_whether_a_container_is_given_cards(text: str, access: bool | None) -> None:
    assert read_command(text).gpu_access is access
