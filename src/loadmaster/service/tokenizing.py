"""``/tokenize`` as vLLM has it, for an engine that is llama.cpp: its server knows other names for the same.

Source: llama.cpp tools/server README, ``POST /tokenize``; vLLM 0.33.0 entrypoints/serve/tokenize.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadmaster.service.errors import ApiError, invalid

TOKENIZE_ROUTE = "/tokenize"


def llamacpp_request(body: dict[str, Any]) -> dict[str, Any]:
    """The request in llama.cpp's words. Raises :class:`ApiError` for a conversation, which it cannot tokenize."""
    if "prompt" not in body:
        raise invalid("tokenize_messages", "this engine tokenizes a prompt, not messages", "messages")
    return {
        "model": body["model"],
        "content": body["prompt"],
        "add_special": body.get("add_special_tokens", True) is not False,
        "with_pieces": body.get("return_token_strs") is True,
    }


def vllm_answer(answer: object, context: object) -> bytes:
    """llama.cpp's answer in vLLM's words. ``context``: tokens of the model's context, left out when it is no number.

    Raises :class:`ApiError` when the answer is none.
    """
    value = msgspec.json.decode(answer) if isinstance(answer, bytes) else None
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(tokens, list):
        raise ApiError(502, "engine_garbage", "the engine answered without tokens")
    found: dict[str, Any] = {"count": len(tokens)}
    if isinstance(context, int):
        found["max_model_len"] = context
    if tokens and isinstance(tokens[0], dict):
        found["tokens"] = [token.get("id") for token in tokens]
        found["token_strs"] = [_piece(token.get("piece")) for token in tokens]
    else:
        found["tokens"] = tokens
    return msgspec.json.encode(found)


def _piece(piece: object) -> str:
    """A token's text; llama.cpp gives the bytes of one that is no whole letter."""
    if isinstance(piece, list):
        return bytes(byte for byte in piece if isinstance(byte, int) and 0 <= byte < 256).decode("utf-8", "replace")
    return str(piece)
