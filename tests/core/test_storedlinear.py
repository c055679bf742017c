"""Which tensors a quantised layer consists of."""

from __future__ import annotations

from loadmaster.core.facts import Quantization
from loadmaster.core.storedlinear import stored_linear


def test_modelopt_formats_differ_by_bits_and_mixed_ones_are_unknown() -> None:
    def dtypes(bits: int | None) -> list[str] | None:
        stored = stored_linear(Quantization(method="modelopt", bits=bits), 64, 128, "BF16")
        return None if stored is None else [dtype for _, dtype, _ in stored]

    assert dtypes(8) == ["F8_E4M3", "F32", "F32"]
    assert dtypes(4) == ["U8", "F8_E4M3", "F32", "F32"]
    assert dtypes(None) is None
