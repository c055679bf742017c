"""The tokenizer: a byte-level vocabulary of Qwen's kind, merged from the dialogues, and dialogues as token numbers.

``python -m demo_model.tokens`` learns it again; the result is tokenizer.json beside this file.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any

from demo_model.world import Language

FILE = Path(__file__).with_name("tokenizer.json")
VOCABULARY = 1024
CONTROLS = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end")),
    *(f"<|{name}|>" for name in ("box_start", "box_end", "quad_start", "quad_end")),
    *(f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# ChatML with the picture's place. Every answer begins with a closed thought, so that a dialogue's first turns look
# the same when they are asked and when they are remembered; "enable_thinking": true leaves the thought to the model.
TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}{{ '\n' }}"
    "{%- if message.role == 'assistant' -%}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{%- endif -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' or part.type == 'image_url' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is true -%}<think>{{ '\n' }}"
    "{%- else -%}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)


@cache
def learned() -> dict[str, Any]:
    """``vocabulary``: the tokens in order, ``merges``: pairs, best first."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def tokens() -> list[str]:
    """All tokens in order: learned ones, Qwen's special ones, unused ones up to VOCABULARY."""
    known = [*learned()["vocabulary"], *CONTROLS, *MARKERS]
    return known + [f"[unused{n}]" for n in range(len(known), VOCABULARY)]


@cache
def number_of(token: str) -> int:
    return tokens().index(token)


@cache
def tokenizer() -> Any:
    """A transformers tokenizer of Qwen3.5's class."""
    from tokenizers import AddedToken
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    vocabulary = {token: n for n, token in enumerate(learned()["vocabulary"])}
    merges = [tuple(pair) for pair in learned()["merges"]]
    made = Qwen3_5Tokenizer(vocab=vocabulary, merges=merges, eos_token=None, pad_token=None, unk_token=None)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS], special_tokens=True)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    made.eos_token, made.pad_token = "<|im_end|>", "<|endoftext|>"
    made.model_max_length = 4096
    made.chat_template = TEMPLATE
    return made


@lru_cache(200_000)
def encoded(text: str) -> tuple[int, ...]:
    """The token numbers of a piece of text that begins and ends where the tokenizer splits anyway."""
    return tuple(tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def _corpus(count: int) -> list[str]:
    from demo_model import questions, scenes, talk

    random, texts = Random("tokenizer"), []
    for _ in range(count):
        language: Language = "en" if random.random() < 0.5 else "zh"
        scene = scenes.any_scene(random, 224, 192, False)
        turns = [*questions.ask(scene, random, language), *questions.ask(scene, random, language)]
        if random.random() < 0.2:
            turns = talk.without_picture(random, language)
        elif random.random() < 0.15:
            turns = talk.about_two(scene, scenes.single(random, 192, 192, False), random, language)
        texts += [
            text for turn in turns for text in (turn.question, turn.answer, "user\n", "\n\n", "assistant\n", "system\n")
        ]
    return texts


def main() -> None:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROLS) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_corpus(8000), trainer)
    model = json.loads(made.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    FILE.write_text(
        json.dumps({"vocabulary": vocabulary, "merges": model["merges"]}, ensure_ascii=False, separators=(",", ":"))
        + "\n",
        "utf-8",
    )


if __name__ == "__main__":
    main()
