"""Transcripts: exit code, stdout and stderr of the commands, as a pipe sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from loadmaster.edge.sample import write_sample

ARTICLE = (
    "--tensor-parallel-size 2 --max-model-len 4096 --enforce-eager --gpu-memory-utilization 0.9 --trust-remote-code"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    write_sample("Qwen3.5-35B-A3B", "ct-w4-g32", folder / "35b")
    write_sample("Qwen3-8B", "awq-g128", folder / "8b", layers=2)
    write_sample("Qwen3-8B", "bf16", folder / "cut", damage="truncated", layers=2)
    yield folder


def loadmaster(
    folder: Path, *arguments: str, stdin: str | None = None, environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, with the folder's path written as MODELS."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "VLLM_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "loadmaster", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        env={**base, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "no-cache"), **(environment or {})},
    )
    return done.returncode, done.stdout.replace(str(folder), "MODELS"), done.stderr.replace(str(folder), "MODELS")


def test_help_is_quick_and_says_what_there_is(tmp_path: Path) -> None:
    began = time.perf_counter()
    code, out, err = loadmaster(tmp_path, "--help")
    assert time.perf_counter() - began < 2
    assert (code, err) == (0, "")
    assert [name in out for name in ("inspect", "plan", "check", "gpus")] == [True] * 4


def test_wrong_usage(tmp_path: Path) -> None:
    assert loadmaster(tmp_path, "paln") == snapshot(
        (
            2,
            "",
            """\
Usage: loadmaster [OPTIONS] COMMAND [ARGS]...
Try 'loadmaster --help' for help.

Error: no command 'paln'; did you mean 'plan'?
""",
        )
    )
    assert loadmaster(tmp_path, "plan") == snapshot(
        (
            2,
            "",
            """\
Usage: loadmaster plan [OPTIONS] MODEL [-- VLLM FLAGS]
Try 'loadmaster plan --help' for help.

Error: Missing argument 'MODEL'.
""",
        )
    )
    assert loadmaster(tmp_path, "plan", "/nowhere", "--gpus", "24GiB") == snapshot(
        (
            2,
            "",
            """\
error: /nowhere: no such file or directory
hint: Give an existing path, or a hub name of the form owner/name
""",
        )
    )
    assert loadmaster(tmp_path, "plan", "org/unknown-model", "--gpus", "24GiB") == snapshot(
        (
            3,
            "",
            """\
error: org/unknown-model is in no cache, and HF_HUB_OFFLINE forbids the network
hint: Give the path of a complete local directory, or unset HF_HUB_OFFLINE
""",
        )
    )
    assert loadmaster(tmp_path, "check") == snapshot(
        (
            2,
            "",
            """\
error: give the command after --, or --command-file FILE
hint: loadmaster check -- vllm serve MODEL ...
""",
        )
    )
    assert loadmaster(tmp_path, "check", "--command-file", "nowhere.yaml") == snapshot(
        (
            2,
            "",
            """\
error: cannot read nowhere.yaml: No such file or directory
hint: give the path of a text file
""",
        )
    )
    assert loadmaster(tmp_path, "gpus", "RTX4099") == snapshot(
        (
            2,
            "",
            """\
error: 'RTX4099' is neither a size nor a known card
hint: did you mean RTX4090 or RTX4090M or RTX4090D? A size works too: 24GiB
""",
        )
    )


def test_cards_that_cannot_be_understood(models: Path) -> None:
    assert loadmaster(models, "plan", str(models / "8b"), "--gpus", "24GB") == snapshot(
        (
            2,
            "",
            """\
error: '24GB' is ambiguous: makers write GB for GiB, and CUDA sees less than either
hint: write 24GiB (2^30 each), 22.35GiB (10^9 each), or the card's name, as in RTX4090
""",
        )
    )
    assert loadmaster(models, "plan", str(models / "8b"), "--context", "9", "--gpus", "24GiB") == snapshot(
        (
            2,
            "",
            """\
error: --context, --concurrency and --max-image-pixels are wishes for --recommend
hint: add --recommend
""",
        )
    )


def test_inspect(models: Path) -> None:
    assert loadmaster(models, "inspect", str(models / "8b")) == snapshot(
        (
            0,
            """\
8b
Qwen3ForCausalLM, awq w4 g128
1.63 B parameters, 2.51 GiB of weights
in MODELS/8b

  part                            parameters         bytes   tensors
  language.embeddings                622.3 M      1.16 GiB         1
  language.mlp                       302.0 M     149.6 MiB        18
  language.attention                  83.9 M      41.6 MiB        28
  language.norms                      20,480      40.0 KiB         5
  language.lm_head                   622.3 M      1.16 GiB         1

  read from the tensors       scheme                               bytes
  embeddings                  bfloat16                          1.16 GiB
  mlp                         w4 g128 zero points              149.6 MiB
  attention                   w4 g128 zero points               41.6 MiB
  attention                   bfloat16                           1.0 KiB
  norms                       bfloat16                          40.0 KiB
  lm_head                     bfloat16                          1.16 GiB

  limits
  positions       40,960
  chat template   present

  file                                                      size  status
  model-00001-of-00001.safetensors                      2.51 GiB  ok
  chat_template.jinja                                      426 B  ok
  config.json                                              782 B  ok
  generation_config.json                                    55 B  ok
  model.safetensors.index.json                           4.2 KiB  ok
  tokenizer.json                                         1.6 KiB  ok
  tokenizer_config.json                                     80 B  ok

WHOLE: no findings
""",
            "",
        )
    )


def test_inspect_of_a_damaged_checkpoint(models: Path) -> None:
    assert loadmaster(models, "inspect", str(models / "cut")) == snapshot(
        (
            1,
            """\
cut
Qwen3ForCausalLM, not quantised
1.63 B parameters, 3.04 GiB of weights
in MODELS/cut

  part                            parameters         bytes   tensors
  language.embeddings                622.3 M      1.16 GiB         1
  language.mlp                       302.0 M     576.0 MiB         6
  language.attention                  83.9 M     160.0 MiB        12
  language.norms                      20,480      40.0 KiB         5
  language.lm_head                   622.3 M      1.16 GiB         1

  read from the tensors       scheme                               bytes
  embeddings                  bfloat16                          1.16 GiB
  mlp                         bfloat16                         576.0 MiB
  attention                   bfloat16                         160.0 MiB
  norms                       bfloat16                          40.0 KiB
  lm_head                     bfloat16                          1.16 GiB

  limits
  positions       40,960
  chat template   present

  file                                                      size  status
  model-00001-of-00001.safetensors                      1.52 GiB  truncated
  chat_template.jinja                                      426 B  ok
  config.json                                              562 B  ok
  generation_config.json                                    55 B  ok
  model.safetensors.index.json                           2.0 KiB  ok
  tokenizer.json                                         1.6 KiB  ok
  tokenizer_config.json                                     80 B  ok

error[weights-truncated]: model-00001-of-00001.safetensors: cut short or damaged
  The download or copy ended early; the engine says MetadataIncompleteBuffer
  | model-00001-of-00001.safetensors: header and tensors need 3,261,116,200
  | bytes, the file has 1,630,558,100: 1,630,558,100 are missing
  try: Fetch again from where the model came from:
       model-00001-of-00001.safetensors

NOT WHOLE: 1 error
""",
            "",
        )
    )


def test_the_reference_case_fits_and_refuses_a_large_picture(models: Path) -> None:
    arguments = ["plan", str(models / "35b"), "--gpus", "2x24GiB", "--engine-version", "0.24.0", "--"]
    assert loadmaster(models, *arguments, *ARTICLE.split()) == snapshot(
        (
            0,
            """\
35b
Qwen3_5MoeForConditionalGeneration, compressed-tensors w4 g32, 35.11 B
parameters
vLLM 0.24.0: tensor parallel 2, context 4,096, 256 sequences, 2,048 batched
tokens, eager

GPU 0, 1  24.00 GiB each, budget 21.60 GiB
  [ccWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWVowwasssKKKKKKKKKKKKKKKKKKKKKKKKKKKK....]
    component                   GiB       low - high  basis
  c context                    0.75      0.63 - 1.00  assumed
  W weights.language          10.74                   read
  V weights.vision             0.42                   read
  o weights.other              0.14                   read
  w workspace                  0.55      0.27 - 1.01  assumed
  a activations.language       0.24      0.23 - 0.26  computed
  s sampler                    1.05      0.89 - 1.21  computed
  K kv_cache                   8.69      8.26 - 8.89  computed
  . headroom                   1.42      0.97 - 1.79  computed
    peak                        GiB       low - high  against 24.00
    start                     22.34    21.99 - 22.78  1.22 left at least
    steady                    22.34    21.99 - 22.78  1.22 left at least
    serving                   22.58    22.21 - 23.03  0.97 left at least

KV cache  8.69 GiB (8.26 - 8.89)
  863 blocks of 1,056 tokens; the engine prints 504,978 tokens
  123.29 requests of 4,096 tokens at once, 0.07 GiB each
  longest single request that fits: 908,160 tokens (the launch takes 4,096)
  (each kind of layer takes blocks of its own, and state takes some for every
  request: blocks x tokens, printed tokens and the longest request differ)

Pictures  largest served 2240x1856, 4,060 tokens
  it takes 0.36 GiB of vision activations on each card
  profiled at start: one picture of 16,384 tokens
  a 4096x4096 picture is refused: 16,384 tokens > 4096
  a 2896x2896 picture is refused: 8,100 tokens > 4096
  a 2048x2048 picture is refused: 4,096 tokens and the text exceeds 4096

warning[image-tokens-exceed-context]: A picture has more tokens than the context
  A 4096x4096 picture is refused: 16,384 tokens > 4096; a 2896x2896 picture is
  refused: 8,100 tokens > 4096; a 2048x2048 picture is refused: 4,096 tokens and
  the text exceeds 4096. The largest that is served is 2240x1856 (4,060 tokens).

FITS
launch: vllm serve MODELS/35b --tensor-parallel-size 2 --max-model-len 4096 --enforce-eager --gpu-memory-utilization 0.9 --trust-remote-code
""",
            "",
        )
    )


def test_a_long_context_without_a_pixel_cap_says_by_how_much_a_picture_overshoots(models: Path) -> None:
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "262144", "--max-num-seqs", "16"]
    arguments = ["plan", str(models / "35b"), "--gpus", "2x24GiB", "--engine-version", "0.24.0", "--"]
    assert loadmaster(models, *arguments, *flags) == snapshot(
        (
            3,
            """\
35b
Qwen3_5MoeForConditionalGeneration, compressed-tensors w4 g32, 35.11 B
parameters
vLLM 0.24.0: tensor parallel 2, context 262,144, 16 sequences, 2,048 batched
tokens, CUDA graphs

GPU 0, 1  24.00 GiB each, budget 22.08 GiB
  [ccWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWVowwvvvvvvvvvsgKKKKKKKKKKKKKKKKKKKKKKKKKK!!]
  ! beyond the card's end
    component                   GiB       low - high  basis
  c context                    0.75      0.63 - 1.00  assumed
  W weights.language          10.74                   read
  V weights.vision             0.42                   read
  o weights.other              0.14                   read
  w workspace                  0.66      0.20 - 1.18  assumed
  v activations.vision         2.83      1.46 - 3.20  computed
  s sampler                    0.00      0.00 - 0.00  computed
  g cuda_graphs                0.11      0.08 - 0.14  measured
  K kv_cache                   8.92      8.32 - 9.28  computed
  . headroom                  -0.58     -1.36 - 1.27  computed
    peak                        GiB       low - high  against 24.00
    start                     21.75    21.27 - 22.16  1.84 left at least
    steady                    21.75    21.27 - 22.16  1.84 left at least
    serving                   24.58    22.73 - 25.36  may be 1.36 over

KV cache  8.93 GiB (8.32 - 9.29)
  886 blocks of 1,056 tokens; the engine prints 921,665 tokens
  3.52 requests of 262,144 tokens at once, 2.54 GiB each
  longest single request that fits: 932,448 tokens (the launch takes 262,144)
  (each kind of layer takes blocks of its own, and state takes some for every
  request: blocks x tokens, printed tokens and the longest request differ)

Pictures  largest served 4096x4096, 16,384 tokens
  it takes 1.46 GiB of vision activations on each card
  profiled at start: one picture of 16,384 tokens

warning[oom-runtime]: A request takes more memory than is left (likely)
  The first 4096x4096 picture overshoots GPU 0 by 0.58 GiB: the serving peak is
  24.58 GiB of 24.00 GiB (between 22.73 GiB and 25.36 GiB). It makes the
  allocator reserve 2.83 GiB on top of 21.75 GiB at rest.
  | plan: GPU 0: context 0.75 GiB, weights.language 10.74 GiB, weights.other
  | 0.14 GiB, weights.vision 0.42 GiB, workspace 0.66 GiB, activations.vision
  | 2.83 GiB, kv_cache 8.92 GiB
  fix: --mm-processor-kwargs '{"max_pixels": 2359296}'
       pictures of at most 1536x1536

COULD NOT TELL
launch: vllm serve MODELS/35b --tensor-parallel-size 2 --max-model-len 262144 --max-num-seqs 16
""",
            "",
        )
    )


def test_one_card_is_too_small(models: Path) -> None:
    arguments = ["plan", str(models / "35b"), "--gpus", "24GiB", "--engine-version", "0.24.0"]
    assert loadmaster(models, *arguments) == snapshot(
        (
            1,
            """\
35b
Qwen3_5MoeForConditionalGeneration, compressed-tensors w4 g32, 35.11 B
parameters
vLLM 0.24.0: tensor parallel 1, context 262,144, 256 sequences, 2,048 batched
tokens, CUDA graphs

GPU 0  24.00 GiB, budget 22.08 GiB
  [cWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWVVowvv!!!!!!!!!!]
  ! beyond the card's end
    component                   GiB       low - high  basis
  c context                    0.45      0.30 - 0.60  assumed
  W weights.language          21.44                   read
  V weights.vision             0.83                   read
  o weights.other              0.14                   read
  w workspace                  0.50      0.29 - 0.93  assumed
  v activations.vision         2.77      1.88 - 2.77  computed
  s sampler                    0.89      0.76 - 1.02  computed
  g cuda_graphs                0.64      0.47 - 0.84  measured
  K kv_cache                   0.00                   computed
  . headroom                  -3.66    -4.57 - -2.10  computed
    peak                        GiB       low - high  against 24.00
    start                     34.16    33.42 - 35.18  9.42 over at least
    steady                    24.89    24.22 - 25.80  0.22 over at least
    serving                   27.66    26.10 - 28.57  2.10 over at least

KV cache  none: the budget is 2.78 GiB short before the first block

Pictures  largest served 4096x4096, 16,384 tokens
  it takes 1.88 GiB of vision activations on each card
  profiled at start: one picture of 16,384 tokens

error[no-kv-memory]: Nothing is left for the cache
  The weights take 22.40 GiB of a budget of 22.08 GiB (0.92 x 24.00 GiB): 0.32
  GiB too much before anything else. With the profile's peak 1.89 GiB (in its
  vision phase), libraries 0.07 GiB, graphs 0.49 GiB; 2.78 GiB are missing
  before the first block.
  | plan: GPU 0: the vision part of the memory profile needs 1.89 GiB, 0.91 GiB
  | are left beside the weights.
  | plan: GPU 0: the profiler of CUDA graphs allocates a temporary cache of
  | 10.31 GiB (one block for each of 512 tokens), 0.64 GiB are left beside the
  | weights.
  fix: --tensor-parallel-size 2 --gpu-memory-utilization 0.85
       2 cards of 24 GiB; planned with so many: serving 22.85 GiB; a smaller
       share of the card

DOES NOT FIT
does not fit: vllm serve MODELS/35b
""",
            "",
        )
    )


def test_recommend(models: Path) -> None:
    arguments = ["plan", str(models / "35b"), "--gpus", "2x24GiB", "--engine-version", "0.24.0", "--recommend"]
    assert loadmaster(models, *arguments) == snapshot(
        (
            0,
            """\
35b
Qwen3_5MoeForConditionalGeneration, compressed-tensors w4 g32, 35.11 B
parameters
vLLM 0.24.0: tensor parallel 2, context 262,144, 256 sequences, 2,048 batched
tokens, CUDA graphs

GPU 0, 1  24.00 GiB each, budget 21.12 GiB
  [ccWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWVowwasssgggKKKKKKKKKKKKKKKKKKKKKKKKK....]
    component                   GiB       low - high  basis
  c context                    0.75      0.63 - 1.00  assumed
  W weights.language          10.74                   read
  V weights.vision             0.42                   read
  o weights.other              0.14                   read
  w workspace                  0.64      0.31 - 1.16  assumed
  a activations.language       0.24      0.23 - 0.26  computed
  s sampler                    1.05      0.89 - 1.21  computed
  g cuda_graphs                0.81      0.60 - 1.01  measured
  K kv_cache                   7.94      7.03 - 8.58  computed
  . headroom                   1.28      0.20 - 2.31  computed
    peak                        GiB       low - high  against 24.00
    start                     22.48    21.47 - 23.55  0.45 left at least
    steady                    22.48    21.47 - 23.55  0.45 left at least
    serving                   22.72    21.69 - 23.80  0.20 left at least

KV cache  7.94 GiB (7.04 - 8.58)
  788 blocks of 1,056 tokens; the engine prints 819,720 tokens
  3.13 requests of 262,144 tokens at once, 2.54 GiB each
  longest single request that fits: 828,960 tokens (the launch takes 262,144)
  (each kind of layer takes blocks of its own, and state takes some for every
  request: blocks x tokens, printed tokens and the longest request differ)

Pictures  largest served 3072x3072, 9,216 tokens
  it takes 0.83 GiB of vision activations on each card
  profiled at start: one picture of 9,216 tokens

Changed
  --tensor-parallel-size: default 1 -> 2
      each of 2 cards holds 11.30 GiB of weights
  --gpu-memory-utilization: default 0.92 -> 0.88
      keeps the serving peak below 24.00 GiB: 0.96 GiB less
  --mm-processor-kwargs: not set -> {"max_pixels": 9437184}
      the largest picture is 3072x3072: 0.86 GiB less at the serving peak

FITS
launch: vllm serve MODELS/35b --tensor-parallel-size 2 --gpu-memory-utilization 0.88 --mm-processor-kwargs '{"max_pixels": 9437184}'
""",
            "",
        )
    )


def test_recommended_flags_fit_when_they_are_planned_again(models: Path) -> None:
    arguments = ["plan", str(models / "35b"), "--gpus", "2x24GiB", "--engine-version", "0.24.0", "--json"]
    code, out, _ = loadmaster(models, *arguments, "--recommend")
    assert code == 0
    launch = json.loads(out)["launch"]["argv"]
    code, out, _ = loadmaster(models, *arguments, "--", *launch[3:])
    again = json.loads(out)
    assert code == 0
    assert again["fits"] is True
    assert again["settings"]["max_model_len"] == 262_144
    assert again["settings"]["enforce_eager"] is False
    assert again["settings"]["max_pixels"] is not None


def test_check_of_the_reference_command(models: Path) -> None:
    command = ["vllm", "serve", str(models / "35b"), *ARTICLE.split()]
    arguments = ["check", "--gpus", "2x24GiB", "--engine-version", "0.24.0", "--"]
    assert loadmaster(models, *arguments, *command) == snapshot(
        (
            0,
            """\
model  MODELS/35b
  --tensor-parallel-size 2
  --max-model-len 4096
  --enforce-eager
  --gpu-memory-utilization 0.9
  --trust-remote-code

warning[eager-mode-cost]: --enforce-eager costs speed and saves next to nothing
  CUDA graphs take 0.81 GiB a card and fit. Without them decoding is several
  times slower.
  | command: --enforce-eager
  | plan: card 0 with graphs: 22.85 of 24.00 GiB while serving
  fix: drop --enforce-eager
       Graphs stay on, as by default.

warning[image-tokens-exceed-context]: A picture has more tokens than the context
  The largest picture that the processor makes has 16,384 tokens, and the
  context has 4,096: requests with it are refused. The largest that is served is
  2240x1856 (4,060 tokens).
  | command: --max-model-len 4096
  | config.json: 16,384 tokens a picture at most, a token is 32 x 32 pixels
  try: --mm-processor-kwargs '{"max_pixels": 3145728}'
       Larger pictures are scaled down to fit.
  try: --max-model-len 17408
       Or a context that holds them, if the memory allows it.

note[trust-remote-code-unneeded]: --trust-remote-code is not needed
  Qwen3_5MoeForConditionalGeneration is built in, and config.json names no code
  of its own.
  | command: --trust-remote-code
  | config.json: architectures: Qwen3_5MoeForConditionalGeneration
  try: drop --trust-remote-code
       The engine starts without it.

CLEAR TO LAUNCH: 2 warnings, 1 note
""",
            "",
        )
    )


def test_check_reads_a_pasted_command_from_stdin(models: Path) -> None:
    text = f"CUDA_VISIBLE_DEVICES=0 vllm serve {models / '8b'} \\\n  --gpu-memory-utilisation 1.2 \\ \n  --quantization awq\n"
    arguments = ["check", "--gpus", "24GiB", "--engine-version", "0.24.0", "--command-file", "-"]
    assert loadmaster(models, *arguments, stdin=text) == snapshot(
        (
            1,
            """\
model  MODELS/8b
env    CUDA_VISIBLE_DEVICES=0
  --gpu-memory-utilisation   (unknown)

error[command-damaged]: The pasted command lost something on the way
  The shell passes on only a part of the command, and only that part is checked
  here.
  | command line 2: a blank after the backslash: the command ends here, and the
  | shell never sees what follows
  | command: lost: --quantization awq
  try: CUDA_VISIBLE_DEVICES=0 vllm serve MODELS/8b --gpu-memory-utilisation 1.2 --quantization awq
       The whole command, its lines joined again.

error[unknown-flag]: The engine does not know a flag
  vLLM 0.24.0 has no --gpu-memory-utilisation; did you mean
  --gpu-memory-utilization?
  | command: --gpu-memory-utilisation 1.2
  try: drop --gpu-memory-utilisation
       See --gpu-memory-utilization.

DO NOT LAUNCH: 2 errors
""",
            "",
        )
    )


def test_a_command_that_cannot_be_judged_ends_with_3(tmp_path: Path) -> None:
    assert loadmaster(tmp_path, "check", "--", "vllm", "serve", "org/unknown-model") == snapshot(
        (
            3,
            """\
model  org/unknown-model

not checked: memory: no GPU is visible here and --gpus was not given
not checked: the model: org/unknown-model is not on this machine, and it is not
  among the public models known here

COULD NOT TELL: no findings
""",
            "",
        )
    )


def test_cards_of_the_table(tmp_path: Path) -> None:
    assert loadmaster(tmp_path, "gpus", "RTX4090") == snapshot(
        (
            0,
            """\
GPU 0  NVIDIA GeForce RTX 4090
  memory, CUDA        23.52 GiB
  memory, driver      23.99 GiB
  free now            unknown
  compute capability  8.9
  bandwidth           1,010 GB/s
  peer to peer        no
  NVLink              no
  source              table
""",
            "",
        )
    )


def test_a_recording_is_taken_in_place_of_cards(models: Path) -> None:
    code, recording, _ = loadmaster(models, "gpus", "2xRTX4090", "--json")
    assert code == 0
    (models / "cards.json").write_text(recording)
    arguments = ["plan", str(models / "35b"), "--json", "--gpus"]
    by_name = json.loads(loadmaster(models, *arguments, "2xRTX4090", "--", "-tp", "2")[1])
    recorded = json.loads(loadmaster(models, *arguments, str(models / "cards.json"), "--", "-tp", "2")[1])
    assert by_name["gpus"] == recorded["gpus"]


def test_a_picture_is_written_and_a_bad_place_is_said(models: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(models / "8b"), "--gpus", "24GiB", "--engine-version", "0.24.0", "--json", "--svg"]
    assert loadmaster(models, *arguments, str(tmp_path / "load.svg"))[0] == 0
    assert (tmp_path / "load.svg").read_text().startswith("<svg ")
    code, out, err = loadmaster(models, *arguments, str(tmp_path / "no" / "load.svg"))
    assert (code, json.loads(out)["fits"]) == (2, True)  # one document: the plan itself was made
    assert err.replace(str(tmp_path), "FOLDER") == snapshot(
        "error: cannot write FOLDER/no/load.svg: No such file or directory\nhint: the sheet itself is above\n"
    )


def test_a_reader_that_leaves_early_is_no_error(models: Path) -> None:
    command = f"'{sys.executable}' -m loadmaster plan '{models / '35b'}' --gpus 2x24GiB -- -tp 2 | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def plan_8b(models: Path, *words: str) -> dict[str, Any]:
    code, out, err = loadmaster(models, "plan", f"{models}/8b", "--gpus", "24GiB", "--json", *words)
    assert err == ""
    document: dict[str, Any] = json.loads(out)
    assert code == {True: 0, False: 1, None: 3}[document["fits"]]
    return document


def test_a_whole_command_after_the_dashes_is_read_once(models: Path) -> None:
    given = ("--engine-version", "0.24.0", "--", "--max-model-len", "4096")
    alone = plan_8b(models, *given)["launch"]["argv"]
    assert alone == ["vllm", "serve", "MODELS/8b", "--max-model-len", "4096"]
    for words in (("vllm", "serve", f"{models}/8b"), ("serve", f"{models}/8b"), (f"{models}/8b",)):
        assert plan_8b(models, *given[:3], *words, *given[3:])["launch"]["argv"] == alone
    image = plan_8b(models, "--", "docker", "run", "vllm/vllm-openai:v0.19.0", "--model", "Qwen/Qwen3-8B")
    assert image["engine"]["version"] == "0.19.0"
    assert image["launch"]["argv"] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert "the command serves Qwen/Qwen3-8B, the plan is of MODELS/8b" in image["notes"]


def test_an_option_of_plan_among_the_flags_of_the_engine_is_refused(models: Path) -> None:
    for words in (("--engine-version", "0.24.0"), ("--recommend",)):
        code, out, err = loadmaster(models, "plan", f"{models}/8b", "--gpus", "24GiB", "--", *words)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {words[0]} is an option of loadmaster plan, not of vLLM")


def test_a_damaged_checkpoint_never_fits_for_sure(models: Path) -> None:
    for words in ((), ("--recommend",)):
        code, out, err = loadmaster(models, "plan", f"{models}/cut", "--gpus", "80GiB", "--json", *words)
        document = json.loads(out)
        assert (code, document["fits"], err) == (3, None, "")
        assert document["findings"][0]["code"] == "weights-truncated"
