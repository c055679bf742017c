"""The page's files behind an API that answers as a script says: for states that a real service shows only by accident.

It keeps conversations in memory, streams the given answer, and tells the given plan, readings and findings. The real
gateway is driven by the other tests of this folder; here only what the page draws counts.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from PIL import Image

STATIC = Path(__file__).parents[2] / "src" / "loadmaster" / "service" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
GIB = 1 << 30


class Script:
    """What the server says. ``pieces``: of the answer, with the seconds before each."""

    def __init__(self) -> None:
        self.engine: dict[str, Any] = {"state": "ready", "phase": "serving", "seconds": 300}
        self.session: dict[str, Any] = {
            "schema": 1,
            "deployment": "cat",
            "models": [
                {
                    "id": "Qwen3.5-35B-A3B-AWQ-4bit",
                    "context_tokens": 262144,
                    "max_images": 8,
                    "max_pixels": 1048576,
                    "patch": {"size": 16, "merge": 2, "min_pixels": 65536},
                    "thinking": True,
                }
            ],
            "keys_required": False,
            "user": None,
            "storage": "server",
            "read_only": None,
            "quota": {"bytes": 4 * GIB, "used": 200 << 20},
            "version": "0.1.0",
            "examples": json.loads((STATIC / "examples" / "examples.json").read_text()),
        }
        self.plan: dict[str, Any] | None = None
        self.findings: list[dict[str, Any]] = []
        self.reconcile: dict[str, Any] | None = None
        self.cards = 2
        self.log: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.conversations: dict[str, dict[str, Any]] = {}
        self.pictures: dict[str, tuple[bytes, str]] = {}
        self.pieces: list[tuple[float, str, dict[str, Any]]] = []
        self.refusal: tuple[int, str, str] | None = None  # status, code, message of the next question
        self.asked: list[dict[str, Any]] = []
        self.key: str | None = None
        self.quiet_events = False


def _error(status: int, code: str, message: str, retry: int | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "server_error", "code": code, "param": None}, "source": "loadmaster"}
    headers = {"Retry-After": str(retry)} if retry else {}
    return web.json_response(body, status=status, headers=headers)


def snapshot(script: Script, at: float) -> dict[str, Any]:
    """Two cards at work: figures that move a little, as recorded ones do."""
    wave = math.sin(at / 9)
    busy = 0.5 + 0.42 * math.sin(at / 17)
    cards = [
        {
            "index": index,
            "name": "NVIDIA GeForce RTX 4090",
            "total_bytes": 24 * GIB,
            "used_bytes": int((21.4 + 0.25 * wave + 0.1 * index) * GIB),
            "utilization": max(0.0, min(1.0, busy + 0.03 * index)),
            "temperature_c": 61.0,
            "power_w": 280.0,
        }
        for index in range(script.cards)
    ]
    engine = {
        "state": "ready",
        "running": 2 + int(2 * busy),
        "waiting": max(0, int(4 * busy - 2)),
        "kv_cache_usage": 0.04 + 0.1 * busy,
        "generation_tokens": int(at * 190 + 900 * wave),
        "time_to_first_token_s": 0.33 + 0.1 * wave,
    }
    return {"at": at, "cards": cards, "engine": engine, "missing": []}


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.port = 0
        self.ended = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        add = app.router.add_route
        add("GET", "/", self.index)
        app.router.add_static("/static/", STATIC)
        add("GET", "/api/session", self.session)
        add("POST", "/api/login", self.login)
        add("GET", "/api/events", self.events)
        add("GET", "/api/history", self.history)
        add("POST", "/api/verify", self.verify)
        add("GET", "/api/conversations", self.listed)
        add("POST", "/api/conversations", self.create)
        add("GET", "/api/conversations/{id}", self.get)
        add("PATCH", "/api/conversations/{id}", self.rename)
        add("DELETE", "/api/conversations/{id}", self.remove)
        add("POST", "/api/conversations/{id}/answer", self.answer)
        add("POST", "/api/conversations/{id}/stop", self.stop)
        add("HEAD", "/api/pictures/{sha}", self.picture)
        add("GET", "/api/pictures/{sha}", self.picture)
        add("PUT", "/api/pictures/{sha}", self.put)

        async def policy(request: web.Request, response: web.StreamResponse) -> None:
            response.headers["Content-Security-Policy"] = POLICY

        app.on_response_prepare.append(policy)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        self.ended.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def session(self, request: web.Request) -> web.StreamResponse:
        if self.script.key is not None and request.cookies.get("key") != self.script.key:
            return _error(401, "api_key_missing", "send a key")
        return web.json_response(self.script.session)

    async def login(self, request: web.Request) -> web.StreamResponse:
        if (await request.json())["key"] != self.script.key:
            return _error(401, "api_key_invalid", "the key is not valid here")
        response = web.json_response({})
        response.set_cookie("key", self.script.key or "", httponly=True, samesite="Strict")
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)

        async def say(name: str, data: Any) -> None:
            await stream.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

        await say("state", script.engine)
        if script.plan is not None:
            await say("plan", script.plan)
        if script.reconcile is not None:
            await say("reconcile", script.reconcile)
        await say("findings", script.findings)
        await say("log", {"lines": script.log})
        while not self.ended.is_set():
            if not script.quiet_events:
                await say("snapshot", snapshot(script, time.time()))
            for step in script.steps:
                await say("verify", step)
            await self._ended_within(1.0)
        return stream

    async def _ended_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def history(self, request: web.Request) -> web.StreamResponse:
        now = time.time()
        at = [now - 300 + i for i in range(299)]
        shots = [snapshot(self.script, when) for when in at]
        columns: dict[str, list[Any]] = {}
        for card in range(self.script.cards):
            columns[f"used.{card}"] = [shot["cards"][card]["used_bytes"] for shot in shots]
            columns[f"utilization.{card}"] = [shot["cards"][card]["utilization"] for shot in shots]
        for name, key in {
            "running": "running", "waiting": "waiting", "cache": "kv_cache_usage", "first_token": "time_to_first_token_s",
        }.items():  # fmt: skip
            columns[name] = [shot["engine"][key] for shot in shots]
        columns["tokens"] = [190 + 100 * math.cos(when / 9) for when in at]
        return web.json_response({"at": at, "columns": columns})

    async def verify(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def listed(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("search", "").lower()
        found = [
            {
                **{name: one[name] for name in ("id", "title", "created", "changed")},
                "messages": len(one["messages"]),
                "pictures": sum(len(message["pictures"]) for message in one["messages"]),
            }
            for one in self.script.conversations.values()
            if wanted in one["title"].lower()
        ]
        return web.json_response({"conversations": sorted(found, key=lambda one: -one["changed"])})

    async def create(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.add((await request.json()).get("title", "")))

    def add(self, title: str, messages: list[dict[str, Any]] | None = None, age_s: float = 0.0) -> dict[str, Any]:
        now = time.time() - age_s
        name = f"c{len(self.script.conversations) + 1}"
        one = {"id": name, "title": title, "created": now, "changed": now, "settings": {}, "messages": messages or []}
        self.script.conversations[name] = one
        return one

    async def get(self, request: web.Request) -> web.StreamResponse:
        one = self.script.conversations.get(request.match_info["id"])
        return web.json_response(one) if one else _error(404, "conversation_not_found", "no such conversation")

    async def rename(self, request: web.Request) -> web.StreamResponse:
        one = self.script.conversations[request.match_info["id"]]
        one["title"] = (await request.json())["title"]
        return web.json_response(one)

    async def remove(self, request: web.Request) -> web.StreamResponse:
        del self.script.conversations[request.match_info["id"]]
        return web.Response(status=204)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        asked = await request.json()
        script.asked.append(asked)
        if script.refusal is not None:
            status, code, message = script.refusal
            return _error(status, code, message, retry=7)
        one = script.conversations[request.match_info["id"]]
        number = len(one["messages"])
        user = message_of(f"{one['id']}m{number}", "user", asked.get("text", ""))
        user["pictures"] = [self._facts(picture) for picture in asked.get("pictures", [])]
        reply = message_of(f"{one['id']}m{number + 1}", "assistant", "")
        again = next((at for at, said in enumerate(one["messages"]) if said["id"] == asked.get("regenerate")), None)
        if again is None:
            one["messages"] += [user, reply]
        elif one["messages"][again]["role"] == "user":
            again += 1
        one["title"] = one["title"] or asked.get("text", "")[:60]
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)

        async def say(name: str, data: Any) -> None:
            await stream.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

        await say(
            "start",
            {"user": user if again is None else None, "assistant": reply, "title": one["title"], "forgotten": 0},
        )
        for pause, name, data in script.pieces:
            if pause and await self._ended_within(pause):
                return stream
            if name == "delta":
                if again is not None:
                    one["messages"][again:] = [reply]
                    again = None
                kind = "text" if "text" in data else "thinking"
                data = {"at": len(reply[kind] or "")} | data
                reply[kind] = (reply[kind] or "") + data[kind]
            await say(name, data)
        return stream

    async def stop(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    def _facts(self, picture: dict[str, Any]) -> dict[str, Any]:
        with Image.open(io.BytesIO(self.script.pictures[picture["sha256"]][0])) as image:
            return picture | {"width": image.width, "height": image.height}

    async def picture(self, request: web.Request) -> web.StreamResponse:
        found = self.script.pictures.get(request.match_info["sha"])
        if found is None:
            return _error(404, "picture_not_found", "no such picture")
        return web.Response(body=found[0], content_type=found[1])

    async def put(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        self.script.pictures[request.match_info["sha"]] = (content, request.content_type)
        return web.json_response({"sha256": request.match_info["sha"], "bytes": len(content)})


def message_of(name: str, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "role": role,
        "text": text,
        "thinking": None,
        "pictures": [],
        "state": "done",
        "error": None,
        "numbers": None,
        "created": time.time(),
    } | more
