"""How cards hang together, from a stand-in of NVML."""

from __future__ import annotations

from loadmaster.core.machinereport import Link
from loadmaster.edge.topology import read_topology


class Nvml:
    """Two cards. ``lacks``: calls that raise, as an old driver's do."""

    def __init__(self, *lacks: str) -> None:
        self._lacks = lacks

    def __getattribute__(self, name: str) -> object:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_lacks"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *arguments: object) -> None:
        raise RuntimeError("Not Supported")

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13000

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.95.05"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index + 100

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:  # noqa: N802
        return 30

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, kind: int) -> int:  # noqa: N802
        return 0 if kind == 0 else 1 if kind == 2 else 4


def test_two_cards() -> None:
    found = read_topology(Nvml())
    assert (found.driver, found.cuda, found.unread) == ("580.95.05", "13.0", None)
    assert found.links == (Link(first=0, second=1, path="one PCIe host bridge", nvlink=False, read=True, write=False),)


def test_an_old_driver_says_less() -> None:
    found = read_topology(
        Nvml("nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus")
    )
    assert (found.driver, found.cuda) == ("580.95.05", None)
    assert found.links == (Link(first=0, second=1),)


def test_no_driver_is_said() -> None:
    found = read_topology(Nvml("nvmlInit"))
    assert found.driver is None and found.links == ()
    assert found.unread == "the NVIDIA driver's library does not answer (Not Supported)"
