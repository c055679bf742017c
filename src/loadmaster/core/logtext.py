"""A line of a log apart from what others have put around it: colours, quotation, time, and through which program.

Around the message of an engine may stand, from the outside in: a mail's or an issue's ``> ``, docker's JSON, the
prefixes of docker compose, journald, Kubernetes (CRI, ``--prefix``, ``--timestamps``) and Ray, then what the engine
itself writes: process, level, time, source file.
"""

from __future__ import annotations

import re
from collections import deque
from datetime import date
from html import unescape

from msgspec import DecodeError, Struct
from msgspec.json import decode

LONGEST_LINE = 16_000
_LONGEST_END = 4_000
_LONGEST_FRAME = 400
_FRAMES_KEPT = 200
_SPEAKERS_KEPT = 64
_LONGEST_WINDOW = 1_500
_MOST_PREFIXES = 12

_COLOUR = re.compile(
    r"(?:\x1b|\^\[|\\x1b|\\u001b|\\033|#033|#x1b|␛)(?:\[[0-9;:?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9])"
    r"|\[(?:\d{1,3};)+\d{1,3}m|\[\d{1,2}m",  # the second: copied without its escape
    re.IGNORECASE,
)
_ENTITY = re.compile(r"&(?:quot|lt|gt|amp|#39|#x27|#34);")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff]")
_DAY = r"\d{4}-\d\d-\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_ISO = rf"(?P<iso>{_DAY}[T ]{_CLOCK})(?:\s?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|TRACE)"
_FILE = r"[\w./\\<>-]*\w\.(?:py|cpp|cc|cu|cuh|rs|h):\d+"

# By the characters that they begin with. Each is tried at the front of what is left, until none fits.
_DIGIT, _UPPER, _LETTER = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_BY_BEGINNING = (
    (" >\t", r"[ \t]{0,3}>(?:[ \t]|(?=[^\w]))"),
    # docker compose
    (_DIGIT + _UPPER + _LETTER, r"[A-Za-z0-9][\w.-]{0,60}\s*\|(?:\s|$)"),
    # kubectl logs --prefix, stern
    ("[", r"\[pod/[^\]\s]+\]\s?"),
    (_DIGIT + _LETTER, r"[a-z0-9][a-z0-9.-]*-[a-z0-9]{4,10}-[a-z0-9]{5} [a-z0-9.-]+ (?=\S)"),
    # CRI
    (_DIGIT, rf"(?P<cri>{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:\d\d)) (?:stdout|stderr) (?P<part>[FP])(?::[A-Z]+)? "),
    # journald and syslog
    (_UPPER, rf"(?P<syslog>[A-Z][a-z]{{2}} [ \d]\d {_CLOCK}) (?P<host>[\w.-]+) (?P<program>[\w./@:-]+)(?:\[\d+\])?: ?"),
    (_DIGIT, rf"{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:?\d\d) [\w.-]+ [\w./@-]+\[\d+\]: ?"),
    (_DIGIT, rf"\d{{1,2}}月 {{1,2}}\d{{1,2}} {_CLOCK} [\w.-]+ [\w./@:-]+(?:\[\d+\])?: ?"),
    # SGLang
    ("[", rf"\[(?P<sglang>{_DAY} {_CLOCK})(?P<ranks>(?: (?:DP|PP|TP|EP|ATTN_TP|ATTN_CP)\d+)*)\] ?"),
    # FastChat around what an engine writes; Google's log explorer
    (_DIGIT, rf"{_ISO} \| (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \| \w{{1,40}} \| ?"),
    (_UPPER, rf"(?:[A-Z]{{4,9}} )?{_ISO} \[resource\.labels\.[^\]]{{1,200}}\] ?"),
    # LMDeploy and others that use Python's logging
    (_DIGIT, rf"{_ISO} - (?P<logger>[\w.]+) - {_LEVEL} - (?:(?P<source>{_FILE}) - )?"),
    (
        "[" + _DIGIT,
        rf"\[?{_ISO}\]?(?:\s+\[?{_LEVEL}\]?(?:[ :]|$))?(?: ?(?:[\w.]+(?:::[\w.]+)+|[\w.-]*\[\d+\]): )?\s?",
    ),
    # vLLM: with the date, without it, and as uvicorn writes
    (
        _UPPER,
        rf"{_LEVEL} (?P<when>\d\d-\d\d {_CLOCK}) "
        r"(?:\[(?P<source>[^\]]{0,200})\]|(?P<old_source>[\w./<>-]+:\d+)\])(?: |$)",
    ),
    (_UPPER, rf"{_LEVEL} (?:{_ISO} )?\[(?P<source>{_FILE})\](?: |$)"),
    (_UPPER, rf"{_LEVEL}:[ \t]{{1,5}}"),
    ("[", rf"\[(?P<source>{_FILE})\](?: |$)"),
    # torch
    ("[", rf"\[(?P<letter>[DIWEF])\d{{3,4}} {_CLOCK} (?P<source>{_FILE})\] ?"),
    # glog
    (_UPPER, rf"(?P<letter>[IWEF])\d{{4}} {_CLOCK}\s+\d+ (?P<source>{_FILE})\] ?"),
    # llama.cpp
    (_DIGIT, r"\d+\.\d\d\.\d{3}\.\d{3} (?P<letter>[DIWE]) "),
    # who speaks: vLLM, Ray, torchrun; the opening bracket may be cut off
    (
        "(" + _UPPER,
        r"\(?(?P<speaker>(?:APIServer|ApiServer|EngineCore|DPEngineCore|Worker|VllmWorker|RayWorker|PatchedvLLM)\w*"
        r"(?: (?:TP\d+|PP\d+|DP\d+))*(?:[ ,]+(?:rank|pid|ip)=[\w.:]+)*)\)(?: |$)",
    ),
    (
        "(",
        r"\((?P<speaker>[A-Za-z_][\w.:-]*(?:\([^)]*\))?(?: [\w.:-]+)?"
        r"(?:,? (?:rank|pid|ip)=[\w.:]+)+(?:, ip=[\w.:]+)?)\)(?: |$)",
    ),
    ("[", r"\[(?P<rank>rank ?\d+)\]:(?: |(?=\[)|$)"),
    ("[", r"\[(?P<rank>Stage-\d+|TP\d+|DP\d+(?: TP\d+)?)\] ?"),
    ("│", r"│ ?"),
    ("^", r"\^C"),
)
# vllm/entrypoints/logger.py and serve/utils/request_logger.py 0.4-0.33; SGLang's --log-requests, whose objects end
# with the line.
ASKED = ("Received request ", "Generated response ", " details: prompt: ", "Receive: obj=", "Finish: obj=")
_ASKED = re.compile(
    r"Received request \S+: prompt: |Generated response [^:]{0,200}: output: |Request \S+ details: prompt: "
    r"|(?P<in_one_line>(?:Receive|Finish): obj=)"
)
_ASKED_END = re.compile(
    r"""(?:['"]|None), (?:params|prompt_token_ids|prompt_embeds shape|sampling_params|lora_request"""
    r"""|output_token_ids|finish_reason): """
)
_LONGEST_ASKED = 2_000  # lines
_OTHER_PROGRAMS = ("systemd", "kernel", "dockerd", "containerd", "kubelet")  # write between an engine's lines
_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "NOTICE": "INFO", "TRACE": "DEBUG"}
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_LEAP_YEAR = 2024  # has every day
_TEXT_KEYS = ("log", "MESSAGE", "message", "msg", "line", "textPayload")


def _by_first() -> dict[str, tuple[re.Pattern[str], ...]]:
    found: dict[str, list[re.Pattern[str]]] = {}
    for beginnings, pattern in _BY_BEGINNING:
        compiled = re.compile(pattern)
        for char in beginnings:
            found.setdefault(char, []).append(compiled)
    return {char: tuple(patterns) for char, patterns in found.items()}


_PREFIXES = _by_first()


class LogLine(Struct):
    """``text``: the message, indented as it was; ``whole``: with who wrote it when.

    ``headed``: the engine wrote a prefix of its own before it.
    ``speaker``: the process that wrote it, "" where the line does not say. ``source``: "gpu_worker.py:508" or "".
    ``level``: DEBUG, INFO, WARNING, ERROR, CRITICAL or "". ``at``: seconds since the year began, by the engine's own
    clock if ``own_clock``, else by that of a program around it.
    ``partial``: the container runtime has cut the line here.
    """

    text: str
    whole: str = ""
    speaker: str = ""
    source: str = ""
    level: str = ""
    at: float | None = None
    own_clock: bool = False
    headed: bool = False
    partial: bool = False


def read_line(line: str) -> LogLine:
    """The parts of a line; what is longer than people write is cut in its middle."""
    if len(line) > LONGEST_LINE + _LONGEST_END:
        line = line[:LONGEST_LINE] + " " + line[-_LONGEST_END:]
    text = _without_colours(line.rstrip("\r\n"))
    read = LogLine(text, text)
    if text.startswith("{") and (inner := _unpacked(text)) is not None:
        read.whole = text = _without_colours(inner.rstrip("\r\n"))
    outer: float | None = None
    for _ in range(_MOST_PREFIXES):
        prefixes = _PREFIXES.get(text[:1], ())
        found = next((match for prefix in prefixes if (match := prefix.match(text)) is not None), None)
        if found is None or not found.end():
            break
        outer = _take(read, found.groupdict(), outer)
        text = text[found.end() :]
    read.text = text
    read.own_clock = read.at is not None
    if read.at is None:
        read.at = outer
    return read


def _take(read: LogLine, groups: dict[str, str | None], outer: float | None) -> float | None:
    """Keep what a prefix says; returns the time that the programs around the engine gave."""
    if (speaker := groups.get("speaker")) is not None:
        read.speaker, read.headed = speaker, True
    if (rank := groups.get("rank")) is not None:
        read.speaker, read.headed = read.speaker or rank, True
    if (ranks := groups.get("ranks")) is not None:
        read.speaker, read.headed = ranks.strip(), True
    if (program := groups.get("program")) is not None and program.rstrip(":") in _OTHER_PROGRAMS:
        read.speaker, read.headed = program.rstrip(":"), True
    if (source := groups.get("source") or groups.get("old_source")) is not None:
        read.source, read.headed = source, True
    letter = groups.get("letter")
    level = _LETTERS[letter] if letter else groups.get("level")
    if level:
        read.level, read.headed = _LEVELS.get(level, level), True
    if groups.get("part") == "P":
        read.partial = True
    if (when := groups.get("when")) is not None:
        read.at = _seconds(when[:2], when[3:5], when[6:])
    elif (when := groups.get("sglang")) is not None:
        read.at = _iso(when)
    elif (when := groups.get("iso") or groups.get("cri")) is not None:
        outer = _iso(when)
    elif (when := groups.get("syslog")) is not None:
        outer = _seconds(str(_MONTHS.index(when[:3]) + 1) if when[:3] in _MONTHS else "", when[4:6], when[7:])
    return outer


def _without_colours(text: str) -> str:
    if "\x1b" in text or "[" in text or "\\" in text or "^" in text:
        text = _COLOUR.sub("", text)
    if "&" in text and _ENTITY.search(text):
        text = unescape(text)
    return _CONTROL.sub("", text).replace("\\_", "_")  # an underscore that Markdown was told to leave alone


def _unpacked(text: str) -> str | None:
    """The message in a line of JSON, as docker, journald and collectors of logs write it."""
    try:
        record = decode(text)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(record, dict) or "error" in record:
        return None
    return next((value for key in _TEXT_KEYS if isinstance(value := record.get(key), str)), None)


def _iso(text: str) -> float | None:
    return _seconds(text[5:7], text[8:10], text[11:])


def _seconds(month: str, day: str, clock: str) -> float | None:
    """Seconds since the year began; engines do not write the year, so no year counts."""
    try:
        hour, minute, second = clock.replace(",", ".").split(":")
        days = date(_LEAP_YEAR, int(month), int(day)).toordinal() - date(_LEAP_YEAR, 1, 1).toordinal()
        return days * 86400 + int(hour) * 3600 + int(minute) * 60 + float(second)
    except ValueError:
        return None


class RequestText:
    """Takes out of a log what people asked and what the model answered: these are no words of the engine.

    ``open``: the text goes on in the next line.
    """

    def __init__(self) -> None:
        self._head: LogLine | None = None
        self._left = 0

    @property
    def open(self) -> bool:
        return self._head is not None

    def take_out(self, line: LogLine) -> None:
        """Of ``line`` stays what the engine wrote."""
        if self._head is not None:
            if self._left and not self._ends_before(line):
                self._left -= 1
                line.text = self._rest(line.text)
                line.headed, line.level = True, "INFO"
                return
            self._head = None
        if ": " not in line.text or (begun := _ASKED.match(line.text)) is None:
            return
        head = line.text[: begun.end()]
        if begun["in_one_line"] is None:
            self._head, self._left = LogLine("", "", line.speaker, line.source, at=line.at), _LONGEST_ASKED
        line.text = head + self._rest(line.text[begun.end() :])

    def _rest(self, text: str) -> str:
        """What the engine wrote behind the text, which ends here, or "..."."""
        if self._head is None:
            return "..."
        ends = list(_ASKED_END.finditer(text))
        if not ends:
            return "..."
        self._head = None
        return "..." + text[ends[-1].start() :]

    def _ends_before(self, line: LogLine) -> bool:
        """Whether the engine itself wrote the line: what somebody has pasted is older, or of another process."""
        head = self._head
        if head is None or not line.headed or (line.source and line.source == head.source):
            return False
        if line.at is not None and head.at is not None:
            return line.at >= head.at
        if head.at is None and not head.speaker:
            return True
        return bool(line.speaker) and line.speaker == head.speaker


class Tracebacks:
    """The frames that each process has printed since its last traceback began."""

    def __init__(self) -> None:
        self._frames: dict[str, deque[str]] = {}
        self._open: deque[str] | None = None  # whose last frame may go on in a line without a head

    def above(self, line: LogLine) -> deque[str]:
        """The frames above this line that the same process wrote, this line's own among them."""
        if line.speaker not in self._frames and len(self._frames) >= _SPEAKERS_KEPT:
            self._frames.pop(next(iter(self._frames)))
        frames = self._frames.setdefault(line.speaker, deque(maxlen=_FRAMES_KEPT))
        if "Traceback (most recent call last)" in line.text:
            frames.clear()
            self._open = None
        if is_frame(line.text):
            # a traceback that has lost its line breaks is one frame
            frames.append(line.text[: _LONGEST_FRAME if line.text.count("File ") < 2 else LONGEST_LINE])
            self._open = frames if "File " in line.text else None
        elif self._open and line.text.strip():
            # the rest of a broken line, or a source line that has lost its indentation
            if not line.headed or self._open is frames:
                self._open[-1] = f"{self._open[-1]}{line.text}"[: 2 * _LONGEST_FRAME]
            self._open = None
        return frames


def is_frame(text: str) -> bool:
    """Whether the line belongs to a traceback: a file and function, or the source line under it."""
    return 'File "' in text or "    " in text or 'File \\"' in text or ".py:" in text


class Windows:
    """What each process wrote before a line, so that a wording broken over lines can be put together again."""

    def __init__(self) -> None:
        self._last = ""
        self._before: dict[str, str] = {}

    def before(self, line: LogLine) -> str:
        """The text that this line may go on from."""
        key = line.speaker if line.headed else self._last
        before = self._before.get(key, "")
        if key not in self._before and len(self._before) >= _SPEAKERS_KEPT:
            self._before.pop(next(iter(self._before)))
        joined = line.text if line.headed else f"{before}\n{line.text}"
        self._before[key] = joined[-_LONGEST_WINDOW:]
        self._last = key
        return before
