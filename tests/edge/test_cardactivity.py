"""How busy cards are, through a stand-in with the binding's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loadmaster.edge.cardactivity import CardActivity, open_cards


class NvmlError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that is used. What a card lacks raises NVML's error."""

    NVMLError = NvmlError
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, *cards: dict[str, Any], driver: bool = True) -> None:
        self.all = cards
        self.driver = driver
        self.shut = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NvmlError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.all)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self.all[index]

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return self._get(card, "uuid")

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any], version: int) -> Any:  # noqa: N802
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=self._get(card, "used"))

    def nvmlDeviceGetUtilizationRates(self, card: dict[str, Any]) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._get(card, "busy"), memory=0)

    def _get(self, card: dict[str, Any], key: str) -> Any:
        if key not in card:
            raise NvmlError("Not Supported")
        return card[key]


def test_all_that_a_card_tells() -> None:
    library = FakeNvml({"uuid": "GPU-a", "used": 5, "busy": 90}, {"uuid": b"GPU-b", "used": 6, "busy": 0})
    with open_cards(library) as reader:
        assert reader is not None
        assert reader.read() == (CardActivity("GPU-a", 5, 90), CardActivity("GPU-b", 6, 0))
    assert library.shut == 1


def test_what_a_card_does_not_tell_is_unknown() -> None:
    with open_cards(FakeNvml({"uuid": "GPU-a"}, {"used": 5, "busy": 90})) as reader:
        assert reader is not None
        assert reader.read() == (CardActivity("GPU-a", None, None),)


def test_no_driver_is_no_reading() -> None:
    library = FakeNvml(driver=False)
    with open_cards(library) as reader:
        assert reader is None
    assert library.shut == 0
