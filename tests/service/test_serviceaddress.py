"""Addresses of services: what is asked, what is refused, and that no password is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service.serviceaddress import AddressError, ServiceAddress, parse_address, without_credentials


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8000", ServiceAddress("http://127.0.0.1:8000")),
        ("https://models.example.org/base/v1/", ServiceAddress("https://models.example.org/base")),
        ("http://[::1]:8000/v1", ServiceAddress("http://[::1]:8000")),
        ("http://me:pw@host:81/v1", ServiceAddress("http://host:81", "me", "pw")),
        ("http://me:p%40w@host", ServiceAddress("http://host", "me", "p@w")),
        ("http://me@host", ServiceAddress("http://host", "me", "")),
    ],
)
def test_addresses(text: str, address: ServiceAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("localhost:8000", "it begins with"),
        ("ftp://me:secretpw@host", "it begins with"),
        ("http://", "it names no host"),
        ("http://:8000", "it names no host"),
        ("http://[::1", "its host"),
        ("http://[nonsense]", "its host"),
        ("http://a,b", "its host"),
        ("http://127.0.0.1:abc", "its port"),
        ("http://127.0.0.1:99999", "its port"),
        ("http://127.0.0.1:0", "its port"),
        ("http://me:secretpw@host:abc", "its port"),
        ("http://me:sec/retpw@host", "its port"),
        ("http://host/?key=secretpw", "it has no query"),
        ("http://host/ x", "it has a space"),
        ("http://host/\x1b[31m", "it has a space"),
    ],
)
def test_what_is_no_address(text: str, hint: str) -> None:
    with pytest.raises(AddressError) as refused:
        parse_address(text)
    assert refused.value.hint.startswith(hint)
    assert "secretpw" not in refused.value.message and "retpw" not in refused.value.message


@given(user=st.text("ab:/?#@%", max_size=5), password=st.text("xy", min_size=4, max_size=6).map("QZ".__add__))
def test_nothing_before_the_last_at_sign_is_shown(user: str, password: str) -> None:
    assert "QZ" not in without_credentials(f"http://{user}:{password}@host:80/v1")
