"""init, config, list, remove and completion: exit code, stdout, stderr."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from inline_snapshot import snapshot

from loadmaster.commands.deployments import completion, config, init, remove
from loadmaster.commands.listing import list as list_command
from loadmaster.commands.reading import read_model
from loadmaster.config import deployment_folder, load_deployment
from loadmaster.core.secrets import hide_in_environment, hide_in_words
from loadmaster.edge.sample import write_sample
from loadmaster.edge.statehome import list_deployments
from loadmaster.failure import Failure
from tests import gguf_writer
from tests.commands.transcript import Transcript, run

COMMANDS = {"init": init, "config": config, "list": list_command, "remove": remove, "completion": completion}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen"
    write_sample("Qwen3.5-9B", "bf16", folder)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("LOADMASTER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOADMASTER_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "scope"))
    return tmp_path / "state"


def loadmaster(*arguments: str) -> Transcript:
    return run(COMMANDS[arguments[0]], arguments[1:], arguments[0])


def written(name: str) -> str:
    return (deployment_folder(name) / "loadmaster.toml").read_text()


# ---------------------------------------------------------------------------------------------- init


def test_init_writes_the_flags_of_the_plan(model: Path, home: Path) -> None:
    seen = loadmaster("init", "cat", "--model", str(model), "--gpus", "2x24GiB")
    assert seen.without(home=str(home)) == snapshot(
        (
            0,
            """\
wrote HOME/deployments/cat/loadmaster.toml

engine   vllm, the plan's flags: 2
fits     yes: at most 23.94 of 24.00 GiB
gateway  http://127.0.0.1:7860
next     loadmaster up cat
""",
            "",
        )
    )
    text = written("cat").replace(str(model), "MODEL")
    assert text[text.index("# The engine's own flags") : text.index("# Variables for")] == snapshot("""\
# The engine's own flags, passed on verbatim.
# Planned for vllm on 2x24GiB: it fits.
flags = [
  # Each of 2 cards holds 8.81 GiB of weights
  "--tensor-parallel-size", "2",
  # The largest picture is 2560x2560: 1.73 GiB less at the serving peak
  "--mm-processor-kwargs", "{\\"max_pixels\\": 6553600}",
]
""")
    deployment = load_deployment("cat").deployment
    assert deployment.model == str(model)
    assert deployment.gpus == "2x24GiB"


def test_init_keeps_given_flags_that_fit(model: Path, home: Path) -> None:
    given = ["--tensor_parallel_size=2", "--max-model-len", "32k", "--gpu-memory-utilization=0.85", "--seed=3"]
    seen = loadmaster("init", "cat", "--model", str(model), "--gpus", "2x24GiB", "--", *given)
    assert seen.code == 0
    assert "engine   vllm, flags as given: 4\nfits     yes" in seen.out
    assert load_deployment("cat").deployment.engine.flags == given


def test_init_pins_the_release_that_is_installed(model: Path, home: Path) -> None:
    python = home / "engines" / "vllm-0.24.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert loadmaster("init", "cat", "--model", str(model), "--gpus", "2x24GiB").code == 0
    assert "# Planned for vllm 0.24.0 on 2x24GiB: it fits.\n" in written("cat")
    assert load_deployment("cat").deployment.engine.version == "0.24.0"


def test_init_without_cards_says_that_nothing_was_planned(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadmaster.edge import gpus

    def no_cards() -> None:
        raise gpus.GpuSpecError("no NVIDIA driver answers here", "name the cards")

    monkeypatch.setattr(gpus, "read_nvml", no_cards)
    assert loadmaster("init", "cat", "--model", str(model)).without(home=str(home)) == snapshot(
        (
            0,
            """\
wrote HOME/deployments/cat/loadmaster.toml

engine   vllm, flags as given: 0
fits     not planned
gateway  http://127.0.0.1:7860
next     loadmaster up cat
""",
            "note: not planned: no NVIDIA driver answers here\n",
        )
    )
    assert "# Not planned: no NVIDIA driver answers here.\nflags = []\n" in written("cat")


def test_init_of_a_name_while_the_hub_is_away(home: Path) -> None:
    assert loadmaster("init", "cat", "--model", "org/model").without(home=str(home)) == snapshot(
        (
            0,
            """\
wrote HOME/deployments/cat/loadmaster.toml

engine   vllm, flags as given: 0
fits     not planned
gateway  http://127.0.0.1:7860
next     loadmaster up cat
""",
            "note: not planned: org/model is in no cache, and HF_HUB_OFFLINE forbids the network\n",
        )
    )
    assert load_deployment("cat").deployment.model == "org/model"


def test_init_of_a_model_that_does_not_fit(model: Path, home: Path) -> None:
    seen = loadmaster("init", "cat", "--model", str(model), "--gpus", "1x8GiB")
    assert seen.without(home=str(home), model=str(model)) == snapshot(
        (
            1,
            """\
wrote HOME/deployments/cat/loadmaster.toml

engine   vllm, flags as given: 0
fits     no: at most 25.00 of 8.00 GiB
gateway  http://127.0.0.1:7860
next     loadmaster up cat
""",
            "note: it does not fit as it stands; loadmaster plan MODEL --gpus 1x8GiB says why and what would\n",
        )
    )
    assert load_deployment("cat").deployment.engine.flags == []


def test_init_of_a_gguf_file_finds_its_projector(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_vision_model(folder)
    seen = loadmaster("init", "cat", "--model", str(folder))
    assert (seen.code, seen.err) == (0, "")
    deployment = load_deployment("cat").deployment
    assert deployment.engine.kind == "llamacpp"
    assert deployment.model == str(folder / "model.gguf")
    assert deployment.projector == str(folder / "mmproj-model.gguf")


@pytest.mark.parametrize(
    "arguments",
    [
        ["cat"],
        ["Cat", "--model", "org/model"],
        ["cat", "--model", "/no/such/model"],
        ["cat", "--model", "./model"],
        ["cat", "--model", "~/no-such-model"],
        ["cat", "--model", "m/nonexist.gguf"],
        ["cat", "--model", "m/model.safetensors"],
        ["cat", "--model", "MODEL", "--gpus", "2xNOSUCHCARD"],
        ["cat", "--model", "MODEL", "--engine", "llamacpp"],
        ["cat", "--model", "org/model", "--port", "0"],
        ["cat", "--model", "org/model", "--port", "8000", "--engine", "vlm"],
    ],
)
def test_init_refuses(arguments: list[str], model: Path, home: Path) -> None:
    seen = loadmaster("init", *(word.replace("MODEL", str(model)) for word in arguments))
    assert (seen.code, seen.out) == (2, "")
    assert seen.err and "Traceback" not in seen.err
    assert not home.exists()


@pytest.mark.parametrize("path", ["m/nonexist.gguf", "./m", "../m", "/m/model.safetensors", "~/m/n", "model.gguf"])
def test_a_mistyped_path_is_never_asked_for_on_a_hub(path: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("loadmaster.edge.modeldir.read_model", ask)
    with pytest.raises(Failure, match="no such file or directory") as refused:
        read_model(path)
    assert refused.value.exit_code == 2
    assert not home.exists()


def test_init_never_overwrites_without_force(home: Path) -> None:
    loadmaster("init", "cat", "--model", "org/model")
    before = written("cat")
    assert loadmaster("init", "cat", "--model", "org/other").without(home=str(home)) == snapshot(
        (
            2,
            "",
            """\
error: HOME/deployments/cat/loadmaster.toml exists already
hint: --force writes it anew and keeps the old one as .bak
""",
        )
    )
    assert written("cat") == before
    assert loadmaster("init", "cat", "--model", "org/other", "--force").code == 0
    assert load_deployment("cat").deployment.model == "org/other"
    assert (deployment_folder("cat") / "loadmaster.toml.bak").read_text() == before


def test_init_picks_ports_that_no_other_deployment_has(home: Path) -> None:
    for name in ("cat", "dog"):
        loadmaster("init", name, "--model", "org/model")
    seen = loadmaster("init", "mouse", "--model", "org/model", "--port", "7860")
    assert seen.without(home=str(home)) == snapshot(
        (
            0,
            """\
wrote HOME/deployments/mouse/loadmaster.toml

engine   vllm, flags as given: 0
fits     not planned
gateway  http://127.0.0.1:7860
next     loadmaster up mouse
""",
            """\
warning: cat has the port 7860 for its gateway too
note: not planned: org/model is in no cache, and HF_HUB_OFFLINE forbids the network
""",
        )
    )
    assert loadmaster("list").without() == snapshot(
        (
            1,
            """\
name   engine  model      gpus  gateway         engine port
cat    vllm    org/model  auto  127.0.0.1:7860  8000
dog    vllm    org/model  auto  127.0.0.1:7861  8001
mouse  vllm    org/model  auto  127.0.0.1:7860  8002

port 7860: the gateways of cat and mouse cannot run at the same time
""",
            "",
        )
    )


def test_init_says_that_the_disk_is_full(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    assert loadmaster("init", "cat", "--model", "org/model").without(home=str(home)) == snapshot(
        (
            1,
            "",
            """\
error: cannot write HOME/deployments/cat/loadmaster.toml: the disk is full
hint: make room on the file system of HOME/deployments/cat
""",
        )
    )


# ---------------------------------------------------------------------------------------------- config


def test_config_shows_values_and_origins_and_no_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = deployment_folder("cat")
    folder.mkdir(parents=True)
    (folder / "loadmaster.toml").write_text(
        """name = "cat"
model = "https://me:hunter2@example.org/m"
engine.flags = ["--api-key", "s3cret", "s3cret2", "--max-num-batched-tokens=4096", "--hf-token=s3cret"]
engine.env = { HF_TOKEN = "s3cret", OMP_NUM_THREADS = "1" }
limits.queue = 3
"""
    )
    monkeypatch.setenv("LOADMASTER_GATEWAY_PORT", "9000")
    seen = loadmaster("config", "cat")
    assert "s3cret" not in seen.out and "hunter2" not in seen.out
    assert seen.without(home=str(home)) == snapshot(
        (
            0,
            """\
HOME/deployments/cat/loadmaster.toml

schema                              1                     default
name                                cat                   line 1
model                                                     line 2
                                    https://(hidden)@example.org/m
projector                           -                     default
gpus                                auto                  default
engine.kind                         vllm                  default
engine.version                      -                     default
engine.python                       -                     default
engine.container                    -                     default
engine.flags                        --api-key '(hidden)'  line 3
                                    '(hidden)'
                                    --max-num-batched-tokens=4096
                                    '--hf-token=(hidden)'
engine.env                          'HF_TOKEN=(hidden)'   line 4
                                    OMP_NUM_THREADS=1
engine.command                      -                     default
engine.port                         8000                  default
engine.start_timeout_s              1800                  default
gateway.host                        127.0.0.1             default
gateway.port                        9000                  environment LOADMASTER_GATEWAY_PORT
gateway.insecure                    false                 default
gateway.max_body_bytes              67108864              default
gateway.allow_url_images            false                 default
gateway.allowed_hosts               -                     default
gateway.allowed_origins             -                     default
gateway.backends                    -                     default
gateway.extra_routes                /v1/responses         default
                                    /v1/messages
                                    /v1/embeddings
                                    /tokenize
keys.file                           -                     default
keys.environment                    -                     default
limits.max_images                   4                     default
limits.max_image_pixels             -                     default
limits.queue                        3                     line 5
limits.concurrency                  -                     default
limits.per_key_requests_per_minute  -                     default
page.storage                        server                default
page.quota_bytes                    2147483648            default
page.retention_days                 -                     default
supervision.backoff_first_s         2                     default
supervision.backoff_most_s          120                   default
supervision.steady_after_s          600                   default
supervision.stuck_after_s           60                    default
supervision.memory_wait_s           600                   default
supervision.stop_s                  20                    default
alerts.webhook                      -                     default
alerts.webhook_environment          -                     default
alerts.command                      -                     default
alerts.least                        warning               default
alerts.ended                        true                  default
alerts.timeout_s                    10                    default
""",
            "",
        )
    )
    shown = loadmaster("config", "cat", "--json")
    assert "s3cret" not in shown.out and "hunter2" not in shown.out
    document = json.loads(shown.out)
    assert document["schema"] == 1
    assert document["values"]["gateway.port"] == {"value": 9000, "origin": "environment LOADMASTER_GATEWAY_PORT"}
    assert document["values"]["limits.queue"] == {"value": 3, "origin": "file loadmaster.toml line 5"}
    assert document["values"]["engine.env"]["value"] == {"HF_TOKEN": "(hidden)", "OMP_NUM_THREADS": "1"}
    assert document["values"]["engine.version"] == {"value": None, "origin": "default"}


def test_config_of_what_is_not_there_and_of_what_is_wrong(home: Path) -> None:
    assert loadmaster("config", "cat").without() == snapshot(
        (
            2,
            "",
            """\
error: no deployment 'cat'
hint: make one with: loadmaster init cat --model MODEL
""",
        )
    )
    loadmaster("init", "cat", "--model", "org/model")
    path = deployment_folder("cat") / "loadmaster.toml"
    path.write_text('name = "cat"\nmodel = "x"\n[gateway]\nprot = 1\n')
    assert loadmaster("config", "cat").without(home=str(home)) == snapshot(
        (
            2,
            "",
            """\
error: HOME/deployments/cat/loadmaster.toml: line 4: gateway.prot: no such key
hint: did you mean gateway.port?
""",
        )
    )
    assert loadmaster("list").without(home=str(home)) == snapshot(
        (1, "cat: HOME/deployments/cat/loadmaster.toml: line 4: gateway.prot: no such key\n", "")
    )


def test_list_of_nothing() -> None:
    assert loadmaster("list").without() == snapshot(
        (0, "", "no deployments yet; make one with: loadmaster init NAME --model MODEL\n")
    )
    assert json.loads(loadmaster("list", "--json").out) == {"schema": 1, "deployments": [], "collisions": []}


def test_secrets_are_known_by_name_and_shape() -> None:
    words = [
        "--api-key",
        "a",
        "b",
        "--port",
        "1",
        "--hf-token=x",
        "--max-tokens",
        "5",
        "http://u:p@h/",
        "sk-abcdefghij",
    ]
    assert hide_in_words(words) == snapshot(
        [
            "--api-key",
            "(hidden)",
            "(hidden)",
            "--port",
            "1",
            "--hf-token=(hidden)",
            "--max-tokens",
            "5",
            "http://(hidden)@h/",
            "(hidden)",
        ]
    )
    assert hide_in_environment({"A_TOKEN": "x", "TOKENIZERS_PARALLELISM": "false", "KEY": "", "my_password": "y"}) == {
        "A_TOKEN": "(hidden)",
        "TOKENIZERS_PARALLELISM": "false",
        "KEY": "",
        "my_password": "(hidden)",
    }


# ---------------------------------------------------------------------------------------------- remove


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    variables = dict(word.split("=", 1) for word in arguments if "=" in word)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, env={**os.environ, **variables}
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


WAIT = "import sys, time; print('ready', flush=True); time.sleep(60)"
HOLD = "import sys, time; file = open(sys.argv[1], 'a'); print('ready', flush=True); time.sleep(60)"


def test_remove_leaves_nothing(home: Path) -> None:
    for name in ("cat", "dog"):
        loadmaster("init", name, "--model", "org/model")
    for folder in ("run", "logs"):
        (deployment_folder("cat") / folder).mkdir()
        (deployment_folder("cat") / folder / "file").write_text("x")
    assert loadmaster("remove", "cat", "--yes").without(home=str(home)) == snapshot(
        (0, "removed HOME/deployments/cat\n", "")
    )
    assert list_deployments() == ["dog"]
    assert [entry.name for entry in (home / "deployments").iterdir()] == ["dog"]
    (home / "ports.lock").touch()  # as every start leaves it
    loadmaster("remove", "dog", "--yes")
    assert not home.exists()


def test_remove_takes_a_deployment_that_cannot_be_read() -> None:
    folder = deployment_folder("cat")
    folder.mkdir(parents=True)
    (folder / "loadmaster.toml").write_text("[[[")
    assert loadmaster("remove", "cat", "--yes").code == 0
    assert not folder.exists()


def test_remove_asks_and_is_refused_where_nobody_can_answer() -> None:
    assert loadmaster("remove", "cat", "--yes").without() == snapshot(
        (
            2,
            "",
            """\
error: no deployment 'cat'
hint: make one with: loadmaster init cat --model MODEL
""",
        )
    )
    loadmaster("init", "cat", "--model", "org/model")
    assert loadmaster("remove", "cat").without() == snapshot(
        (
            2,
            "",
            """\
error: nobody is here to ask
hint: give --yes
""",
        )
    )
    assert list_deployments() == ["cat"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize(
    ("code", "arguments", "sign"),
    [
        (HOLD, ["HERE/logs/backend.log"], "writes logs/backend.log"),
        (WAIT, ["-c", "HERE/run/supervisord.conf"], "started from its run folder"),
        (WAIT, ["run-engine", "cat"], "run-engine"),
        (WAIT, ["LOADMASTER_FOLDER=HERE"], "belongs to it"),
    ],
)
def test_remove_refuses_while_something_runs(code: str, arguments: list[str], sign: str) -> None:
    loadmaster("init", "cat", "--model", "org/model")
    folder = deployment_folder("cat")
    for part in ("run", "logs"):
        (folder / part).mkdir()
    with process(code, *(word.replace("HERE", str(folder)) for word in arguments)) as child:
        seen = loadmaster("remove", "cat", "--yes")
        assert (seen.code, seen.out) == (1, "")
        assert f"(process {child.pid}): {sign}\nhint: loadmaster down cat\n" in seen.err
        assert folder.is_dir()
    assert loadmaster("remove", "cat", "--yes").code == 0


def test_readers_and_namesakes_do_not_keep_a_deployment(tmp_path: Path) -> None:
    loadmaster("init", "cat", "--model", "org/model")
    path = deployment_folder("cat") / "loadmaster.toml"
    reader = HOLD.replace("'a'", "'r'")
    with process(reader, str(path)), process(WAIT, "run-engine", "cats"):
        assert loadmaster("remove", "cat", "--yes").code == 0


# ---------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize(("shell", "place"), [("bash", "bash-completion"), ("zsh", "$fpath"), ("fish", ".config/fish")])
def test_completion_scripts(shell: str, place: str) -> None:
    seen = loadmaster("completion", shell)
    assert (seen.code, seen.err) == (0, "")
    assert place in seen.out
    assert "_LOADMASTER_COMPLETE" in seen.out
    if shell == "zsh":
        assert seen.out.startswith("#compdef loadmaster\n")
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=seen.out.encode(), check=True, timeout=20)


def test_completion_of_another_shell_is_refused() -> None:
    assert loadmaster("completion", "tcsh").code == 2


COMPLETE = """
import sys, click
from loadmaster.commands.deployments import config
group = click.Group("loadmaster", commands={"config": config})
try:
    group.main([], prog_name="loadmaster", complete_var="_LOADMASTER_COMPLETE")
finally:
    heavy = {"rich", "yaml", "aiohttp", "msgspec", "pynvml", "PIL", "asyncio", "huggingface_hub"} & set(sys.modules)
    print("heavy:", *sorted(heavy), file=sys.stderr)
"""


def test_completion_of_names_imports_nothing_heavy(home: Path) -> None:
    for name in ("cat", "camel", "dog"):
        loadmaster("init", name, "--model", "org/model")
    environment = {
        **os.environ,
        "_LOADMASTER_COMPLETE": "bash_complete",
        "COMP_WORDS": "loadmaster config ca",
        "COMP_CWORD": "2",
    }
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "plain,camel\nplain,cat\n"
    assert done.stderr == "heavy:\n"
    assert time.monotonic() - started < 5


def write_vision_model(folder: Path) -> None:
    gguf_writer.write_gguf(folder / "model.gguf", *gguf_writer.text_model("qwen3vl"))
    gguf_writer.write_gguf(folder / "mmproj-model.gguf", *gguf_writer.projector())


def test_every_command_is_a_click_command() -> None:
    assert all(isinstance(command, click.Command) for command in COMMANDS.values())
