"""A conversation as a file: JSON with its pictures inside, or Markdown beside its pictures in a zip.

Both hold the same JSON, so both can be taken in again. What is taken in is a stranger's: bounded before it is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import time
import zipfile
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from loadmaster.core.conversation import MOST_PICTURES, MOST_TEXT, Conversation, Message, MessageState, Numbers, Role

SCHEMA = 1
MOST_MESSAGES = 10_000
MOST_FILES = 2000
MOST_BYTES = 96 << 20  # of all files of a zip, unpacked
_JSON = "conversation.json"
_ENDINGS = {"image/jpeg": "jpg", "image/png": "png", "image/webp": "webp", "image/gif": "gif", "image/bmp": "bmp"}
_SPEAKERS = {"user": "You", "assistant": "Model", "system": "System"}


class FileError(Exception):
    """A file that is no exported conversation; the text says why."""


class _Picture(Struct):
    sha256: str
    width: int = 0
    height: int = 0
    original_width: int | None = None
    original_height: int | None = None
    name: str | None = None


class _Message(Struct):
    role: Role
    text: str = ""
    thinking: str | None = None
    pictures: list[_Picture] = []
    state: MessageState = "done"
    numbers: Numbers | None = None
    created: float = 0.0
    model: str | None = None


class _Conversation(Struct):
    messages: list[_Message]
    title: str = ""


class _File(Struct, kw_only=True):
    conversation: _Conversation
    pictures: dict[str, str] = {}


def as_json(conversation: Conversation, pictures: Mapping[str, tuple[str, bytes]]) -> bytes:
    """``pictures``: media type and bytes by SHA-256."""
    files = {sha256: base64.b64encode(content).decode() for sha256, (_, content) in pictures.items()}
    return msgspec.json.encode({"schema": SCHEMA, "conversation": conversation, "pictures": files})


def as_markdown(conversation: Conversation, pictures: Mapping[str, tuple[str, bytes]]) -> bytes:
    """A zip of ``conversation.md``, its pictures, and the JSON from which it can be taken in again."""
    packed = io.BytesIO()
    names = {sha256: f"pictures/{sha256}.{_ENDINGS.get(kind, 'bin')}" for sha256, (kind, _) in pictures.items()}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversation.md", _markdown(conversation, names))
        archive.writestr(_JSON, as_json(conversation, {}))
        for sha256, (_, content) in pictures.items():
            archive.writestr(zipfile.ZipInfo(names[sha256]), content)  # stored: pictures are compressed already
    return packed.getvalue()


def _markdown(conversation: Conversation, names: Mapping[str, str]) -> str:
    blocks = [f"# {' '.join(conversation.title.split()) or 'Conversation'}"]
    for message in conversation.messages:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(message.created))
        blocks.append(f"## {_SPEAKERS[message.role]} · {when} UTC")
        for picture in message.pictures:
            name = names.get(picture.sha256)
            blocks.append(f"![{picture.width}x{picture.height}]({name})" if name else "*(picture not kept)*")
        if message.thinking:
            blocks.append("\n".join(f"> {line}" for line in message.thinking.splitlines()))
        if message.text:
            blocks.append(message.text)
        if message.state in ("stopped", "failed"):
            blocks.append(f"*({message.state})*")
    return "\n\n".join(blocks) + "\n"


def read_file(content: bytes) -> tuple[Conversation, dict[str, bytes]]:
    """The conversation of a file and its pictures by their SHA-256. Raises :class:`FileError`."""
    files: dict[str, bytes] = {}
    if content[:4] == b"PK\x03\x04":
        content, files = _unpacked(content)
    try:
        value = msgspec.json.decode(content)
        if isinstance(value, dict) and "conversation" not in value:
            value = {"conversation": value}
        file = msgspec.convert(value, _File)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FileError(f"the file is no exported conversation: {error}") from None
    if len(file.conversation.messages) > MOST_MESSAGES or len(file.pictures) > MOST_FILES:
        raise FileError(f"at most {MOST_MESSAGES:,} messages and {MOST_FILES:,} pictures are taken in")
    for sha256, text in file.pictures.items():
        try:
            files[sha256] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise FileError("a picture of the file is not in base64") from None
    for sha256, data in files.items():
        if hashlib.sha256(data).hexdigest() != sha256:
            raise FileError("a picture of the file is not the one that its SHA-256 names")
    return _conversation(file.conversation), files


def _conversation(source: _Conversation) -> Conversation:
    for message in source.messages:
        if len(message.text) > MOST_TEXT or len(message.thinking or "") > MOST_TEXT:
            raise FileError(f"a message has more than {MOST_TEXT:,} letters")
        if len(message.pictures) > MOST_PICTURES:
            raise FileError(f"a message has more than {MOST_PICTURES} pictures")
    messages = tuple(msgspec.convert(msgspec.to_builtins(message) | {"id": ""}, Message) for message in source.messages)
    return Conversation(id="", title=source.title, created=0.0, changed=0.0, messages=messages)


def _unpacked(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The JSON and the pictures of a zip, by the names that we give them."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise FileError(f"the zip holds more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")
            files = {}
            for entry in entries:
                folder, _, name = entry.filename.partition("/")
                if folder == "pictures" and name:
                    files[name.partition(".")[0]] = _read(archive, entry)
            return _read(archive, archive.getinfo(_JSON)), files
    except (zipfile.BadZipFile, KeyError, RuntimeError, NotImplementedError, EOFError, OSError, ValueError) as error:
        raise FileError(f"the file is no zip of an exported conversation: {error}") from None


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """No more than the entry claims to have."""
    with archive.open(entry) as file:
        content = file.read(entry.file_size + 1)
    if len(content) > entry.file_size:
        raise FileError("the zip is damaged")
    return content
