"""The shipped model back as a checkpoint: ``python -m demo_model.restore FOLDER`` writes, from the package's files,

- ``hf/``: the safetensors checkpoint with tokenizer, template and processor that transformers and vLLM load;
- ``demo.half``: the weights that ``demo_model.train`` goes on from and ``demo_model.evaluate`` asks.

Its weights are the shipped ones, 8-bit blocks taken apart; the head that training alone uses is not among them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from demo_model import export
from demo_model.network import Network, made
from loadmaster.edge.ggufheader import TensorInfo, read_header


def values(raw: bytes, tensor: TensorInfo) -> np.ndarray:
    """A tensor's values in 32 bits, in its shape."""
    if tensor.type_id == 8:  # Q8_0: blocks of a 16-bit scale and 32 bytes
        blocks = np.frombuffer(raw, np.uint8).reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        found = scale * blocks[:, 2:].copy().view(np.int8)
    else:
        found = np.frombuffer(raw, {0: "<f4", 1: "<f2"}[tensor.type_id]).astype(np.float32)
    return found.reshape(tensor.shape)


def tensors(path: Path) -> dict[str, np.ndarray]:
    header = read_header(path)
    content = path.read_bytes()
    found = {}
    for tensor in header.tensors:
        assert tensor.nbytes is not None
        start = header.data_start + tensor.offset
        found[tensor.name] = values(content[start : start + tensor.nbytes], tensor)
    return found


def network(model: Path, projector: Path, size: str = "demo") -> Network:
    """The network with the weights of the two files."""
    made_network = Network(made(size, 0))
    config = made_network.model.config
    shipped = tensors(model) | tensors(projector)
    # the export's own lists, with each weight's name in its place, tell which tensor is whose
    state = made_network.model.state_dict()
    names = dict(enumerate(state))
    marked = {name: np.full(tuple(state[name].shape), number, np.float64) for number, name in names.items()}
    listed = [
        *export.text_tensors(marked, config.text_config.num_hidden_layers),
        *export.vision_tensors(marked, config.vision_config.depth),
    ]
    kernel = "model.visual.patch_embed.proj.weight"
    state[kernel] = torch.from_numpy(np.stack((shipped["v.patch_embd.weight"], shipped["v.patch_embd.weight.1"]), 2))
    for name, mark, _ in listed:
        if name.startswith("v.patch_embd.weight"):
            continue
        if name.endswith(".ssm_a"):
            number, value = round(float(np.log(-mark).flat[0])), np.log(-shipped[name])
        else:
            shifted = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
            number, value = round(float(mark.flat[0])) - shifted, shipped[name] - shifted
        target = names[number]
        state[target] = torch.from_numpy(np.ascontiguousarray(value)).reshape(state[target].shape)
    made_network.model.load_state_dict(state)
    return made_network.eval()


def main() -> None:
    from loadmaster.edge.demomodel import write_demo_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    restored = network(*write_demo_model(options.folder / "gguf"))
    export.write_checkpoint(restored, options.folder / "hf")
    weights = {name: weight.half() for name, weight in restored.state_dict().items()}
    torch.save({"network": weights, "step": 0, "minutes": 0.0}, options.folder / "demo.half")


if __name__ == "__main__":
    main()
