"""VGG11 without batch norm, for small pictures, from scratch or from a local safetensors file."""

from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coterie.errors import CoterieError
from coterie.models.blocks import Conv, ConvNet, ItemShape, shape_text

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
_POOLED = (1, 2, 4, 6, 8)  # blocks that end in a max-pool
_SMALLEST = 32  # side of the smallest picture that five pools can halve
_SIDES = {512: 1, 2048: 2, 25088: 7}  # input size of fc1 -> side of the last feature map

# torchvision's layer names -> ours
_TORCHVISION_NAMES = {f"features.{n}": f"block{i}.conv" for i, n in enumerate((0, 3, 6, 8, 11, 13, 16, 18), 1)}
_TORCHVISION_NAMES |= {"classifier.0": "fc1", "classifier.3": "fc2", "classifier.6": "classifier"}


class VGG11(ConvNet):
    """VGG11; grey pictures become three equal channels, and pictures below 32x32 are padded with zeros or resized."""

    def __init__(self, shape: ItemShape, classes: int, head_input: int | None, resize: Literal["pad", "bilinear"]):
        if shape[0] not in (1, 3):
            raise CoterieError(
                f"vgg11 takes pictures of 1 or 3 channels; the data's items have shape {shape_text(shape)}"
            )
        height, width = (max(n, _SMALLEST) for n in shape[1:])
        to = None if head_input is None else (_SIDES[head_input], _SIDES[head_input])
        blocks = [Conv(out, 3, padding=1, pool=i in _POOLED) for i, out in enumerate(WIDTHS, 1)]
        super().__init__((3, height, width), classes, blocks, [4096, 4096], to=to)
        self.size = (height, width)
        self.resize = resize

    def forward(self, x: Tensor) -> Tensor:
        short = self.size[0] - x.shape[2], self.size[1] - x.shape[3]
        if any(short):
            if self.resize == "bilinear":
                x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
            else:
                top, left = short[0] // 2, short[1] // 2
                x = F.pad(x, (left, short[1] - left, top, short[0] - top))
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        return super().forward(x)

    @staticmethod
    def layer_alias(layer: str) -> str:
        """Return the name of a layer that torchvision calls `layer`."""
        return _TORCHVISION_NAMES.get(layer, layer)

    def load_pretrained(self, path: str) -> None:
        """Load every layer that fits by name and size; all convolutions must fit, other layers may stay."""
        weights = _read_weights(path)
        renamed = {}
        for name, value in weights.items():
            layer, _, local = name.rpartition(".")
            renamed[f"{_TORCHVISION_NAMES.get(layer, layer)}.{local}"] = value
        own = dict(self.named_parameters())
        fits = {k: renamed[k] for k, p in own.items() if k in renamed and renamed[k].shape == p.shape}
        missing = [k for k in own if k.startswith("block") and k not in fits]
        if missing:
            raise CoterieError(f'the model option pretrained_path "{path}" has no fitting tensor for {missing[0]}')
        with torch.no_grad():
            for name, value in fits.items():
                own[name].copy_(value)
                self.get_submodule(name.rpartition(".")[0]).keep_initial = True  # type: ignore[assignment]


def _read_weights(path: str) -> dict[str, Tensor]:
    """Read a safetensors file; other formats may contain pickled code and are not opened."""
    if Path(path).suffix != ".safetensors":
        raise CoterieError(f'the model option pretrained_path "{path}" must name a .safetensors file')
    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise CoterieError(f'the model option pretrained_path "{path}" names a file that does not exist') from None
    except (SafetensorError, OSError) as e:
        raise CoterieError(f'the model option pretrained_path "{path}" is damaged: {e}') from e
