from __future__ import annotations

import base64
import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.service.dataurl import data_url, is_data_url, read_data_url
from loadmaster.service.imagerules import ImageError

DATA = bytes(range(256)) * 3 + b"\xfb\xff\xfe?"  # its base64 holds +, / and padding
TEXT = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()


def test_the_plain_form_is_told_apart() -> None:
    assert read_data_url(f"data:image/png;base64,{TEXT}".encode()) == (DATA, True)
    assert read_data_url(data_url("image/jpeg", DATA)) == (DATA, True)


@pytest.mark.parametrize(
    "url",
    [
        f"DATA:image/png;base64,{TEXT}",
        f"Data:Image/PNG;BASE64,{TEXT}",
        f"  data:image/png;base64,{TEXT}\n",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        f'data:image/png; name="a.png"; base64,{TEXT}',
        f"data:;base64,{TEXT}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT.rstrip('=')}====",
        f"data:image/png;base64,{URL_SAFE.rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        "data:image/png;base64," + " ".join(TEXT[i : i + 4] for i in range(0, len(TEXT), 4)),
        f"data:image/png;base64,{quote(TEXT, safe='')}",
        f"data:image/png%3Bbase64,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        f"data:image/png,{quote(DATA)}",
    ],
)
def test_other_spellings_give_the_same_bytes(url: str) -> None:
    data, plain = read_data_url(url.encode())
    assert data == DATA
    assert not plain


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64", "invalid_image_url"),
        ("image/png;base64,AAAA", "invalid_image_url"),
        ("data:image/png;base64,", "empty_image_file"),
        ("data:,", "empty_image_file"),
        ("data:image/png;base64,A", "invalid_base64_image"),
        ("data:image/png;base64,AAAAA", "invalid_base64_image"),
        ("data:image/png;base64,AAA!", "invalid_base64_image"),
        ("data:image/png;base64,AA=AAA", "invalid_base64_image"),
        ("data:image/png;base64,AAAA\u00e9", "invalid_base64_image"),
        ('data:image/png;base64,AA"A', "invalid_base64_image"),
        ("data:image/png;base64,\\u0041AAA", "invalid_base64_image"),
        ("data:" + "x" * 2000 + ",AAAA", "invalid_image_url"),
    ],
)
def test_broken_ones_are_refused(url: str, code: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_data_url(url.encode())
    assert caught.value.code == code


def test_base64_with_loose_last_bits_is_not_plain() -> None:
    assert read_data_url(b"data:image/png;base64,QUI=") == (b"AB", True)
    assert read_data_url(b"data:image/png;base64,QUJ=") == (b"AB", False)


@given(st.binary(min_size=1, max_size=200))
def test_what_is_written_is_read(data: bytes) -> None:
    assert read_data_url(data_url("image/png", data)) == (data, True)
    text = base64.urlsafe_b64encode(data).rstrip(b"=")
    assert read_data_url(b"data:x;base64," + text)[0] == data


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_gives_bytes_or_an_image_error(text: str) -> None:
    for url in (text, "data:" + text, "data:image/png;base64," + text):
        try:
            data, plain = read_data_url(url.encode())
        except ImageError:
            continue
        assert data
        if plain:  # then a strict decoder agrees
            assert base64.b64decode(url.partition(",")[2], validate=True) == data


def test_the_scheme_is_known_however_written() -> None:
    assert is_data_url("data:x,") and is_data_url(" DATA:x,")
    assert not is_data_url("http://x/?data:") and not is_data_url("")
