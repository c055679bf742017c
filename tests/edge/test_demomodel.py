"""The demonstration's model: the package's bytes, read by our own reader, planned for a small host."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadmaster.core.facts import EngineFacts, HostFacts, LaunchArgs
from loadmaster.core.hostplan import make_host_plan
from loadmaster.edge import demomodel
from loadmaster.edge.gguf import read_gguf
from loadmaster.service.demo import FLAGS

MOST_BYTES = 16_000_000  # of all its files in the package


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return demomodel.write_demo_model(tmp_path_factory.mktemp("demo") / "new" / "folder")


def test_it_is_small_and_whole(files: tuple[Path, Path]) -> None:
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    facts = read_gguf(*files)
    assert facts.architecture == "qwen35"
    assert facts.findings == ()
    assert facts.vision is not None
    assert facts.has_chat_template is True
    assert facts.text.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2


def test_it_fits_into_a_small_host(files: tuple[Path, Path]) -> None:
    host = HostFacts(memory_total_bytes=2 << 30, memory_available_bytes=1 << 30)
    launch = LaunchArgs(model=str(files[0]), argv=FLAGS)
    assert make_host_plan(read_gguf(*files), host, launch, EngineFacts("llamacpp")).fits is True


def test_a_damaged_package_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "data").mkdir(parents=True)
    for path in demomodel.write_demo_model(tmp_path / "whole"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        (package / "data" / path.name).write_bytes(content)
    monkeypatch.setattr(demomodel, "files", lambda name: package)
    with pytest.raises(demomodel.DamagedModel, match=r"demo-qwen35\.gguf of this installation has the SHA-256"):
        demomodel.write_demo_model(tmp_path / "again")
    assert list((tmp_path / "again").iterdir()) == []
