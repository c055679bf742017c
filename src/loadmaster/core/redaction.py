"""A text that can be shown to strangers: no user, host, path, key or address in it.

Shapes are found by themselves; names of this machine and values that are known to be secret are given. What stands in
a text's place says of which kind it was.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from re import Match
from typing import Any

from msgspec import Struct

from loadmaster.core.secrets import HIDDEN, is_secret_name

USER, HOST, PATH, ADDRESS, MAIL = "(user)", "(host)", "(path)", "(address)", "(e-mail)"

# Names that are on every other machine: they identify nobody, and hiding them would spoil the text.
_COMMON_NAMES = frozenset(
    {
        "root", "user", "users", "admin", "administrator", "ubuntu", "debian", "centos", "ec2-user", "nobody",
        "daemon", "runner", "docker", "vllm", "sglang", "loadmaster", "llama", "gpu", "model", "models",
        "test", "server", "localhost", "localdomain", "python", "home", "default", "main",
    }
)  # fmt: skip
# Addresses in these are documentation or the source of a model, not somebody's machine.
_PUBLIC_HOSTS = (
    "huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn", "modelscope.ai", "github.com", "pytorch.org",
    "nvidia.com", "nvcr.io", "ghcr.io", "docker.io", "vllm.ai", "pypi.org", "python.org", "quay.io",
)  # fmt: skip
_SHORTEST_SECRET = 6  # a shorter value is found in words that have nothing to do with it
_SHORTEST_NAME = 2

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_SSH_KEY = re.compile(r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S+|sk-ssh-\S+)\s+AAAA[0-9A-Za-z+/=]+(?:\s+\S+@\S+)?")
_TOKENS = re.compile(
    r"""\b(?:
    eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?                                   # JSON web token
    | hf_\w{6,} | api_org_\w{10,} | r8_\w{10,} | nvapi-[\w-]{6,} | gsk_\w{10,} | wandb_v\d_\w{8,}
    | (?:sk|pk|rk)[-_][\w-]{6,} | xai-[\w-]{8,} | tgp_v1_[\w-]{8,} | ms-[0-9a-f-]{20,}
    | gh[pousr]_\w{8,} | github_pat_\w{8,} | glpat-[\w-]{8,} | gl(?:dt|rt|cbt|ptt)-[\w-]{8,}
    | xox[abposre]-[\w-]{6,} | xapp-[\w-]{8,} | SG\.[\w-]{10,}\.[\w-]{10,}
    | A(?:KIA|SIA|ROA|IDA)[0-9A-Z]{12,} | AIza[\w-]{30,} | ya29\.[\w-]{8,} | GOCSPX-[\w-]{8,}
    | npm_\w{8,} | pypi-[\w-]{12,} | dckr_(?:pat|oat)_[\w-]{8,} | dop_v1_\w{12,} | hvs\.[\w-]{8,} | tskey-[\w-]{8,}
    )""",
    re.VERBOSE,
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|cookie|set-cookie|x-api-key|x-auth-token|api-key)(\W{1,4}:\s*|:\s*|\W{1,4}=\s*)"
    r"[^\r\n'\"]+"
)
_LOGIN = re.compile(r"(?<![\w-])(-u|--user|--proxy-user)([ =]\s{0,3}['\"]?)[^\s:'\"]{1,80}:[^\s'\"]{1,200}")
_SHORT_PASSWORD = re.compile(r"(?<![\w-])(-p )(?![\d.:/(-]|['\"]?[\d.:]+)[^\s]{3,200}")  # -p 8000:8000 is a port
_NAMED_USER = re.compile(
    r"(?i)(?P<name>['\"](?:user_?name|user|login|owner|e?mail|host_?name|node_?name)['\"]\s{0,3}:\s{0,3})"
    r"(?:\"[^\"\r\n]{1,400}\"|'[^'\r\n]{1,400}')"
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic|token|digest)\s+(?=\S*[\d_=+/.-])[\w+/=.~-]{8,}")
# what a secret's name holds; whether it is one, core.secrets says
_NO_SECRETS = (HIDDEN, "None", "null", "''", '""', "True", "False")
_SECRET_PART = "key|token|secret|passw|passphrase|pwd|pw|credential|auth"
# beside what core.secrets knows: names that run words together, as variables of databases and short flags do
_RUN_TOGETHER = re.compile(r"passw|passphrase|secret|apikey|credential|privatekey|(?:^|[_-])pw$", re.IGNORECASE)
_VALUE = r"""(?P<value>\(hidden\)|\[[^\]\r\n]{0,400}\]|"[^"\r\n]{0,400}"|'[^'\r\n]{0,400}'|[^\s,;&)}\]"']+)"""
_NAMED = re.compile(
    rf"""(?<![\w.-])(?P<name>(?=[\w.-]{{0,40}}(?:{_SECRET_PART}))[A-Za-z_-][\w.-]{{0,60}})"""
    rf"""(?P<between>["']?\s{{0,3}}[:=]\s{{0,3}}){_VALUE}""",
    re.IGNORECASE,
)
_FLAG = re.compile(
    rf"""(?<![\w.-])(?P<name>--?(?=[\w-]{{0,40}}(?:{_SECRET_PART}))[A-Za-z][\w-]{{0,60}})"""
    rf"""(?P<between>["']?,?\s{{1,3}}){_VALUE}""",
    re.IGNORECASE,
)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]{1,15})://([^\s/?#'\"<>]*)([^\s'\"<>)\]]*)", re.IGNORECASE)
_MAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_PROMPT = re.compile(r"(?<![\w.-])[\w.-]{1,64}@[\w.-]{1,128}(?=[:\s]\S{0,200}\s{0,2}[$#%>])")  # alice@gpubox:~$
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)")
_IPV4_DASHED = re.compile(r"\b(?:ip|host|node)-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}\b[\w.-]*")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9A-Fa-f]{0,4})(?:%\w+)?(?![\w:]|\.\w)"
)
_PRIVATE_HOST = re.compile(
    r"(?i)(?<![\w.-])(?:[a-z0-9][a-z0-9-]{0,62}\.){1,8}"
    r"(?:local|lan|internal|intranet|corp|home|localdomain|arpa|cluster|private)\b(?!\.\w)"
)
_UUID = re.compile(r"\b(GPU-|MIG-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
_LONG = re.compile(r"(?<![\w+/=.-])[A-Za-z0-9+/_=-]{32,}(?![\w+/=-])")
_SERIAL = re.compile(r"(?i)\b(serial(?:\s*(?:no|number))?\W{1,3})(?=\w*\d)\w{6,}")
_IDENTITY = re.compile(
    r"(?i)\b((?:user(?:name|profile|domain)?|logname|sudo_user|host(?:name)?|computername|home(?:path)?|mail|ssh_\w+|"
    r"login|owner|uid|pwd|oldpwd)\s*=\s*)(?!\(hidden\))(?:\"[^\"\r\n]*\"|'[^'\r\n]*'|[^\s,;)]+)"
)
_SYSLOG = re.compile(
    r"^((?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.+Z-]+) )([\w.-]+)(?= [\w./-]+(?:\[\d+\])?: )",
    re.MULTILINE,
)
_QUOTED_PROMPT = re.compile(r"\b(prompt: )(?:'(?:[^'\\\r\n]|\\.)*'|\"(?:[^\"\\\r\n]|\\.)*\")")
_WORD = r"[^\s\\'\"<>|:*?,;)]{1,200}"
_WINDOWS_SLASHES = re.compile(r"(?<!\w)[A-Za-z]:/(?!/)[^\s'\"<>|*?,;)]{1,400}")
_WINDOWS_PATH = re.compile(rf"(?<!\w)(?:[A-Za-z]:\\|\\\\{_WORD}\\)(?:{_WORD}(?: {_WORD}){{0,3}}\\)*(?:{_WORD})?")
_QUOTED_PATH = re.compile(r"(?P<quote>['\"])(?P<path>/[^'\"\r\n]{1,400})(?P=quote)")  # spaces and all
_LETTER = r"[\w.@+%=,~\u0080-\U0010ffff-]"
_UNIX_PATH = re.compile(rf"(?<![\w./)~-])(?:~[\w.-]*)?/{_LETTER}+(?:/{_LETTER}*)*")
_HOME = re.compile(r"^(?:~[\w.-]*|/root|/home/[^/]+|/Users/[^/]+|/mnt/[a-z]/Users/[^/]+|/data/home/[^/]+)(?=/|$)")

# Parts of paths that are the same on every machine, from which on a path tells something.
_PACKAGE_ROOTS = ("/site-packages/", "/dist-packages/", "\\site-packages\\")
_SYSTEM_PATHS = (
    "/dev/", "/proc/", "/sys/", "/usr/lib", "/usr/local/cuda", "/usr/bin/", "/usr/local/bin/", "/lib/", "/lib64/",
    "/bin/", "/etc/os-release", "/v1/", "/health", "/metrics", "/ready", "/api/", "/tokenize",
)  # fmt: skip
_TELLING_FILES = re.compile(
    r"\.(?:safetensors|json|py|so(?:\.\d+)*|gguf|toml|yaml|yml|jinja|txt|log|model|bin|sh|cu|whl)$"
)


class Identity(Struct, frozen=True):
    """What is known of this machine and of who asks. ``secrets``: values; ``keep``: texts that are no address."""

    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


def redact(text: str, identity: Identity | None = None) -> str:
    """``text`` without what identifies a person, a machine or an account, and without secrets."""
    who = identity or Identity()
    for secret in sorted(who.secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, HIDDEN)
    keep = frozenset(who.keep)
    for change in _CHANGES:
        text = change(text)
    text = _IPV4.sub(lambda found: _address(found.group(), keep), text)
    for home in sorted(who.homes, key=len, reverse=True):
        if len(home) > 1:
            text = text.replace(home, PATH)
    text = _names(text, who.hosts, HOST)
    return _names(text, who.users, USER)


def redact_value(value: Any, identity: Identity, name: str = "") -> Any:
    """An object as JSON has it: each text in it redacted, the values of secret names taken out."""
    if isinstance(value, str):
        secret = is_secret_name(name) or _RUN_TOGETHER.search(name)
        return HIDDEN if secret and value else redact(value, identity)
    if isinstance(value, dict):
        return {key: redact_value(one, identity, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(one, identity) for one in value]
    return value


# ------------------------------------------------------------------------------------------------ each kind


def _named(found: Match[str]) -> str:
    """The value of a secret name; what only counts tokens, or is empty, stays."""
    name, value = found["name"], found["value"]
    if value in _NO_SECRETS or not (is_secret_name(name) or _RUN_TOGETHER.search(name)):
        return found.group()
    return f"{name}{found['between']}{HIDDEN}"


def _url(found: Match[str]) -> str:
    scheme, where, rest = found.groups()
    if scheme.lower() == "file":
        return f"{scheme}://{PATH}"
    if scheme.lower() == "data":
        return f"{scheme}:{HIDDEN}"
    _, _, host = where.rpartition("@")
    name, _, port = host.partition(":") if not host.startswith("[") else (host, "", "")
    shown = host if _is_public(name) or _is_loopback(name) else HOST + (f":{port}" if port else "")
    if host.startswith(HOST):
        return found.group()
    path, query, _ = rest.partition("?")
    kept = path if _is_public(name) or _is_loopback(name) else (PATH if path.strip("/") else path)
    return f"{scheme}://{shown}{kept}" + (f"?{HIDDEN}" if query else "")


def _is_public(host: str) -> bool:
    return any(host.lower() == known or host.lower().endswith(f".{known}") for known in _PUBLIC_HOSTS)


def _is_loopback(host: str) -> bool:
    name = host.strip("[]").lower()
    if name in ("localhost", "0.0.0.0", "::", ""):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _address(text: str, keep: frozenset[str]) -> str:
    if text in keep:
        return text
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return text if address.is_loopback or address.is_unspecified else ADDRESS


def _six(found: Match[str]) -> str:
    return _address(found.group(), frozenset())


def _long(found: Match[str]) -> str:
    """A long word of capitals, small letters and many digits is a key; names of classes and kernels are not."""
    word = found.group()
    digits = sum(letter.isdigit() for letter in word)
    mixed = any(letter.isupper() for letter in word) and any(letter.islower() for letter in word)
    return HIDDEN if digits >= 4 and mixed and word.count("/") < 3 and word.count("_") < 4 else word


def _quoted_path(found: Match[str]) -> str:
    path = found["path"]
    return found.group() if path.count("/") < 2 else f"{found['quote']}{_kept_of(path)}{found['quote']}"


def _unix_path(found: Match[str]) -> str:
    return _kept_of(found.group())


def _kept_of(path: str) -> str:
    for root in _PACKAGE_ROOTS:
        place = path.find(root)
        if place >= 0:
            return path[place + 1 :]
    if path.startswith(_SYSTEM_PATHS) and not _HOME.match(path):
        return path
    if path.count("/") == 1 and not _HOME.match(path):
        return path  # "/s" of a unit, "/chat" of a sentence, a folder of the root
    return _shortened(path.rstrip("/").rpartition("/")[2])


def _windows_path(found: Match[str]) -> str:
    path = found.group()
    place = path.find("\\site-packages\\")
    return path[place + 1 :] if place >= 0 else _shortened(path.rstrip("\\").rpartition("\\")[2])


def _shortened(name: str) -> str:
    """A path whose last name is a file of a telling kind keeps that; any other keeps nothing."""
    return f"{PATH}/{name}" if _TELLING_FILES.search(name) else PATH


def _names(text: str, names: Iterable[str], placeholder: str) -> str:
    known = {name for name in names if len(name) >= _SHORTEST_NAME and name.lower() not in _COMMON_NAMES}
    for name in sorted(known, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", placeholder, text, flags=re.IGNORECASE)
    return text


def _with(pattern: re.Pattern[str], by: str | Callable[[Match[str]], str]) -> Callable[[str], str]:
    return lambda text: pattern.sub(by, text)


# In this order: what holds others inside comes first.
_CHANGES: tuple[Callable[[str], str], ...] = (
    _with(_PEM, HIDDEN),
    _with(_SSH_KEY, HIDDEN),
    _with(_QUOTED_PROMPT, rf"\1{HIDDEN}"),
    _with(_HEADER, rf"\1\2{HIDDEN}"),
    _with(_SCHEME, rf"\1 {HIDDEN}"),
    _with(_URL, _url),
    _with(_TOKENS, HIDDEN),
    _with(_LOGIN, rf"\1\2{HIDDEN}"),
    _with(_SHORT_PASSWORD, rf"\1{HIDDEN}"),
    _with(_NAMED, _named),
    _with(_FLAG, _named),
    _with(_NAMED_USER, lambda found: f'{found["name"]}"{HIDDEN}"'),
    _with(_IDENTITY, rf"\1{HIDDEN}"),
    _with(_SYSLOG, rf"\1{HOST}"),
    _with(_MAIL, MAIL),
    _with(_PROMPT, f"{USER}@{HOST}"),
    _with(_MAC, ADDRESS),
    _with(_IPV6, _six),
    _with(_IPV4_DASHED, HOST),
    _with(_PRIVATE_HOST, HOST),
    _with(_UUID, lambda found: f"{found.group(1) or ''}{HIDDEN}"),
    _with(_SERIAL, rf"\1{HIDDEN}"),
    _with(_WINDOWS_PATH, _windows_path),
    _with(_WINDOWS_SLASHES, _unix_path),
    _with(_QUOTED_PATH, _quoted_path),
    _with(_UNIX_PATH, _unix_path),
    _with(_HEX, HIDDEN),
    _with(_LONG, _long),
)
