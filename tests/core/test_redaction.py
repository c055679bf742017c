"""A report must not say who and where: planted secrets of every shape, in every kind of sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.redaction import Identity, redact, redact_value
from loadmaster.core.secrets import HIDDEN

WHO = Identity(
    users=("zhangwei", "root"),
    hosts=("gpubox01", "gpubox01.corp.example"),
    homes=("/srv/people/zhangwei", "/root"),
    secrets=("correct horse battery", "pw"),
    keep=("12.8.4.1",),
)

# what must not survive → a line in which it stands
PLANTED = {
    "hf_AbCdEfGhIjKlMnOp": "HF_TOKEN=hf_AbCdEfGhIjKlMnOp vllm serve m",
    "sk-proj-12ab34cd56ef": "using key sk-proj-12ab34cd56ef now",
    "ghp_0123456789abcdef": "git clone with ghp_0123456789abcdef",
    "github_pat_11AAAA_bbbb": "token github_pat_11AAAA_bbbb",
    "glpat-abcdefgh1234": "glpat-abcdefgh1234",
    "xoxb-1234-abcd-efgh": "slack xoxb-1234-abcd-efgh",
    "AKIAIOSFODNN7EXAMPLE": "aws AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv": "g AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "nvapi-abcDEF123456": "NGC nvapi-abcDEF123456",
    "dckr_pat_abcdefgh": "docker login dckr_pat_abcdefgh",
    "eyJhbGciOi.eyJzdWIiOi.c2lnbmF0dXJl": "jwt eyJhbGciOi.eyJzdWIiOi.c2lnbmF0dXJl",
    "Zm9vOmJhcg==": "Authorization: Basic Zm9vOmJhcg==",
    "abcdef0123456789": "-H 'Authorization: Bearer abcdef0123456789'",
    "s3cr3t!x": "vllm serve m --api-key s3cr3t!x --port 8000",
    "s3cr3t-y": "vllm serve m --api-key=s3cr3t-y",
    "s3cr3t-z": "non-default args: {'api_key': ['s3cr3t-z'], 'port': 8000}",
    "s3cr3t-w": "['serve', '--api-key', 's3cr3t-w']",
    "hunter2": "password: hunter2",
    "s3ssion": "Cookie: id=s3ssion; theme=dark",
    "MIIEvQIBADANBg": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    "AAAAC3NzaC1lZDI1NTE5": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 alice@laptop",
    "alice@example.org": "mail alice@example.org about it",
    "bob:pass": "https://bob:pass@git.example.org/x",
    "registry.example.org": "image registry https://registry.example.org:5000/team/vllm",
    "sig=abc123": "GET https://bucket.example.net/a?sig=abc123&x=1",
    "192.168.178.23": "listening on 192.168.178.23:8000",
    "203.0.113.9": '203.0.113.9:52110 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "2001:db8:0:1::17": "peer 2001:db8:0:1::17 left",
    "fe80::1ff:fe23:4567:890a": "on fe80::1ff:fe23:4567:890a%eth0",
    "3c:22:fb:01:02:03": "mac 3c:22:fb:01:02:03",
    "ip-10-0-3-7": "node ip-10-0-3-7.ec2.internal is lost",
    "trainer-3.lab.internal": "tcp://trainer-3.lab.internal:29500",
    "/home/alice": 'File "/home/alice/work/serve.py", line 3',
    "/Users/alice": "model /Users/alice/models/Qwen",
    "C:\\Users\\Alice": "model C:\\Users\\Alice\\models\\x.gguf",
    "fileserver": "\\\\fileserver\\share\\models",
    "/data/secret-project": "--model /data/secret-project/Qwen3.5-35B",
    "/mnt/nas/my models": "loading '/mnt/nas/my models/a b.safetensors'",
    "~carol/models": "cd ~carol/models",
    "zhangwei": "started by zhangwei on tty1",
    "gpubox01": "GPUBOX01 kernel: NVRM".lower(),
    "box7": "Nov 30 12:00:00 box7 vllm[12]: INFO ready",
    "dave@box8": "dave@box8:~$ vllm serve m",
    "erin": "USER=erin HOME=/x/y SHELL=/bin/sh",
    "3c4d0000-1111-2222-3333-444455556666": "uuid GPU-3c4d0000-1111-2222-3333-444455556666",
    "9f86d081884c7d659a2feaa0c55ad015": "key 9f86d081884c7d659a2feaa0c55ad015",
    "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA": "header aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA",
    "correct horse battery": "the phrase is correct horse battery",
    "what is on my bank statement": "Received request cmpl-1: prompt: 'what is on my bank statement', params",
    "basicpw99": "curl -u admin:basicpw99 http://127.0.0.1/",
    "pgsecretpw": "PGPASSWORD=pgsecretpw psql",
    "cmdsecretpw4": "serve --pw cmdsecretpw4 --port 1",
    "dockersecretpw": "docker login -p dockersecretpw",
    "jsonsecretuser": '{"username": "jsonSECRETuser", "n": 1}',
    "C:/Users/Frank": "model C:/Users/Frank/m",
    "/etc/ssl/private": "--ssl-keyfile /etc/ssl/private/server.pem",
    "/opt/optsecret": "LD_LIBRARY_PATH=/home/x/lib:/opt/optsecret/lib",
    "1322421034567": "Serial Number: 1322421034567",
}

# What a report is for, and must keep.
KEPT = [
    "Qwen3_5MoeForConditionalGeneration",
    "Model loading took 11.30 GiB and 12.345678 seconds",
    "tensor_parallel_size=2, max_num_batched_tokens=2048, api_key=None",
    'File "site-packages/vllm/v1/engine/core.py", line 77, in run',
    "(EngineCore pid=123) INFO 11-30 12:34:56 [core.py:77] init engine took 85.31 seconds",
    "GPU KV cache size: 831,162 tokens",
    "http://127.0.0.1:8000/v1/models and ::1 and 0.0.0.0",
    "see https://docs.vllm.ai/en/latest/serving and https://huggingface.co/Qwen/Qwen3-VL-8B",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. at::native c10::Error",
    "triton_poi_fused_add_mul_sigmoid_view_12",
    "/dev/shm 64 MiB, /proc/self/status, /usr/lib/x86_64-linux-gnu/libc.so.6",
    "driver 580.95.05, nvidia-cublas-cu12 12.8.4.1",
    "vllm serve Qwen/Qwen3.5-35B-A3B --max-model-len 32768",
    "the user asked for tokens: 5 of them, key and lock",
    '127.0.0.1:1 - "GET /v1/models HTTP/1.1" 200 OK',
]


def test_the_shapes_are_many() -> None:
    assert len(PLANTED) >= 30


@pytest.mark.parametrize("secret", PLANTED)
def test_a_planted_secret_is_gone(secret: str) -> None:
    assert secret.lower() not in redact(PLANTED[secret], WHO).lower()


@pytest.mark.parametrize("line", KEPT)
def test_what_explains_stays(line: str) -> None:
    assert redact(line, WHO) == line


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*PLANTED.values(), *KEPT]), min_size=1, max_size=12))
def test_together_nothing_survives_and_twice_changes_nothing(lines: list[str]) -> None:
    text = redact("\n".join(lines), WHO)
    for secret, line in PLANTED.items():
        if line in lines:
            assert secret.lower() not in text.lower()
    assert redact(text, WHO) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    redact(text, WHO)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PLANTED)), st.text(st.characters(codec="ascii", categories=["L", "P"]), max_size=12))
def test_neighbours_do_not_save_a_secret(secret: str, other: str) -> None:
    text = redact(f"{other}\n{PLANTED[secret]}\n{other}", WHO)
    assert secret not in other and secret.lower() not in text.lower()


def test_a_long_line_takes_no_long_time() -> None:
    for letter in ("a", "/a", "a.", "1.", "a:", "a@", "-a", " ", "\\a", "'", "eyJ", "=a", "0"):
        redact(letter * (40_000 // len(letter)), WHO)


def test_objects() -> None:
    value = {"env": {"HF_TOKEN": "x", "OMP_NUM_THREADS": "2"}, "lines": ["at 10.1.2.3", 5, None], "ok": True}
    shown = redact_value(value, WHO)
    assert json.loads(json.dumps(shown)) == {
        "env": {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "2"},
        "lines": ["at (address)", 5, None],
        "ok": True,
    }
