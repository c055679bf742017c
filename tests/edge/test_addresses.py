"""Addresses of hubs and proxies that are none: words, never a traceback."""

from __future__ import annotations

import pytest

from loadmaster.edge.hub import is_address, open_hub
from loadmaster.edge.modelscope import open_modelscope
from loadmaster.edge.source import ModelError

BAD = [
    "http://127.0.0.1:abc",
    "http://a b",
    "http://[bad",
    "http://",
    "ftp://host",
    "host.example",
    "http://h\x00st",
    "http://host:99999999",
    "http://hóst",
    "http://host\r\nX: y",
    "http://:80",
]


@pytest.mark.parametrize("address", BAD)
def test_endpoints(address: str) -> None:
    assert not is_address(address)
    with pytest.raises(ModelError, match="HF_ENDPOINT"):
        open_hub("foo/bar", "main", {"HF_ENDPOINT": address, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})
    with pytest.raises(ModelError, match=r"MODELSCOPE_DOMAIN|cannot reach"):
        open_modelscope("foo/bar", "master", {"MODELSCOPE_DOMAIN": address if "://" in address else "a b"})


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:notaport", "::bad", "http://[bad", "http://" + "a" * 70 + ".x:1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxies(proxy: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    environment = {"HF_ENDPOINT": f"{scheme}://hub.invalid", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    with pytest.raises(ModelError, match=r"cannot reach hub\.invalid") as caught:
        open_hub("foo/bar", "main", environment)
    assert caught.value.hint
