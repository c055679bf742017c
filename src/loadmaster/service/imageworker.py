"""The process that decodes pictures: one job at a time, from stdin to stdout, within limits that it sets itself.

A message is two 32-bit lengths, a msgpack header and a payload. The worker ends when stdin ends, when its parent
dies (Linux), or when a job takes much longer than its limit, so that none is left behind by a gateway that was killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO

import msgspec

from loadmaster.service.dataurl import data_url, read_data_url
from loadmaster.service.imagerules import ImageError, ImageRules

LENGTHS = struct.Struct(">II")
MAX_HEADER = 64 << 10


class Job(msgspec.Struct, frozen=True):
    """The payload is a picture: a data: URL as the client spelt it, or with ``encoded`` the bytes of a file."""

    rules: ImageRules
    encoded: bool = False


class Reply(msgspec.Struct, frozen=True):
    """The payload is a data: URL in the plain form; empty: the client's own may stay. ``code``: it is refused.

    ``spent``: the worker met its memory limit and is to be replaced. ``source_size``, ``size``: see Converted.
    """

    notes: tuple[str, ...] = ()
    code: str | None = None
    message: str = ""
    spent: bool = False
    source_size: tuple[int, int] | None = None
    size: tuple[int, int] | None = None


def write_message(stream: IO[bytes], header: bytes, payload: bytes) -> None:
    stream.write(LENGTHS.pack(len(header), len(payload)) + header)
    stream.write(payload)
    stream.flush()


def read_message(stream: IO[bytes], max_payload: int) -> tuple[bytes, bytes] | None:
    """One message; None at the end of the stream. ValueError when a length is beyond its limit."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_length, payload_length = LENGTHS.unpack(lengths)
    if header_length > MAX_HEADER or payload_length > max_payload:
        raise ValueError("message too long")
    header = stream.read(header_length)
    payload = stream.read(payload_length)
    if len(header) < header_length or len(payload) < payload_length:
        return None
    return header, payload


def run_job(job: Job, payload: bytes) -> tuple[Reply, bytes]:
    """Converts one picture; every failure becomes a reply."""
    from loadmaster.service import imagecodec

    try:
        data, plain = (payload, False) if job.encoded else read_data_url(payload)
        converted = imagecodec.convert(data, job.rules)
        reply = Reply(notes=converted.notes, source_size=converted.source_size, size=converted.size)
        if converted.data is not None:
            return reply, data_url(converted.media_type, converted.data)
        if plain:
            return reply, b""
        notes = () if job.encoded else ("data: URL respelt",)
        return msgspec.structs.replace(reply, notes=notes), data_url(converted.media_type, data)
    except ImageError as error:
        return Reply(code=error.code, message=error.message), b""
    except MemoryError:
        message = "The picture needs more memory to decode than this service gives to one."
        return Reply(code="image_too_large", message=message, spent=True), b""


def _limit_process(memory_bytes: int) -> None:
    """Bounds address space, files and core dumps. What the system does not offer is left out."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with_parent() -> None:
    """Linux: SIGKILL when the parent dies, also in the middle of a job."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """``python -m loadmaster.service.imageworker MEMORY_BYTES MAX_PAYLOAD``."""
    memory_bytes, max_payload = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then closes stdin
    _end_with_parent()
    # Replies go to the pipe alone: whatever a library prints goes to stderr.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    from PIL import AvifImagePlugin, Image

    from loadmaster.service import imagecodec  # noqa: F401 - loaded before the limits, for run_job

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    Image.init()
    _limit_process(memory_bytes)

    reader = os.fdopen(0, "rb", buffering=1 << 16)
    decoder = msgspec.msgpack.Decoder(Job)
    encoder = msgspec.msgpack.Encoder()
    _send(output, b"", b"")
    while True:
        try:
            message = read_message(reader, max_payload)
        except (ValueError, MemoryError):
            return
        if message is None:
            return
        job = decoder.decode(message[0])
        # The default action of SIGALRM ends the process, whatever it is in.
        signal.setitimer(signal.ITIMER_REAL, 2 * job.rules.timeout_s + 1)
        reply, payload = run_job(job, message[1])
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            _send(output, encoder.encode(reply), payload)
        except BrokenPipeError:
            return
        del message, payload


def _send(stream: IO[bytes], header: bytes, payload: bytes) -> None:
    for part in (LENGTHS.pack(len(header), len(payload)) + header, payload):
        view = memoryview(part)
        while view:
            view = view[stream.write(view) :]


if __name__ == "__main__":
    main()
