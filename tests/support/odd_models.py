"""Ten models that are not a plain chain of layers, for pictures of 1 x 8 x 8."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE = (1, 8, 8)


class UnusedLayers(nn.Module):
    """An auxiliary layer that never runs, and one whose output is thrown away."""

    def __init__(self, classes: int):
        super().__init__()
        self.body, self.hidden, self.head = nn.Linear(64, 16), nn.Linear(16, 12), nn.Linear(12, classes)
        self.norm, self.aux = nn.BatchNorm1d(16), nn.Linear(12, classes)
        self.never, self.spare_norm = nn.Linear(64, 7), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.hidden(F.relu(self.norm(self.body(x.flatten(1))))))
        out = self.head(z)
        self.aux(z)
        return out


class FreeParameters(nn.Module):
    """A small vision transformer: a class token and positions that belong to no layer, attention, layer norm."""

    def __init__(self, classes: int):
        super().__init__()
        self.patch = nn.Conv2d(1, 12, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 12)), nn.Parameter(torch.randn(1, 5, 12) * 0.02)
        self.block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.patch(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.cls.expand(len(z), -1, -1), z], 1) + self.pos
        return self.head(self.block(z)[:, 0])


class Attention(nn.Module):
    """Rows as words; attention never calls its inner projection as a module."""

    def __init__(self, classes: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp, self.head = nn.Linear(8, 10), nn.Linear(10, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = x.squeeze(1)
        return self.head(F.relu(self.mlp(self.attention(z, z, z, need_weights=False)[0].mean(1))))


class Recurrent(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


class ResidualNet(nn.Module):
    """A residual block whose shortcut has a convolution and a batch norm of its own."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))
        return self.fc(x.mean((2, 3)))


class SqueezeExcite(nn.Module):
    """Channels weighed by a small net of 1x1 convolutions."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.hidden, self.head = nn.Linear(8 * 16, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(F.relu(self.hidden(F.max_pool2d(x, 2).flatten(1))))


class TiedWeights(nn.Module):
    """A matrix that is used twice, the second time in a layer with a bias of its own."""

    def __init__(self, classes: int):
        super().__init__()
        self.inner = nn.Linear(64, 12)
        self.there, self.back = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
        self.back.weight = self.there.weight
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.back(torch.tanh(self.there(F.relu(self.inner(x.flatten(1))))))))


class FrozenStem(nn.Module):
    """A first stage that came with requires_grad=False, batch norm included."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        for p in self.stem.parameters():
            p.requires_grad_(False)
        self.conv, self.bn = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        self.hidden, self.head = nn.Linear(6 * 16, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(F.relu(self.stem(x)))))
        return self.head(F.relu(self.hidden(x.flatten(1))))


class ConvHead(nn.Module):
    """A 1x1 convolution and a mean over the picture instead of a linear head."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x)))).mean((2, 3))


class GroupNormed(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8)
        self.hidden, self.head = nn.Linear(8 * 9, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


ODD: dict[str, type[nn.Module]] = {
    "unused layers": UnusedLayers,
    "free parameters": FreeParameters,
    "attention": Attention,
    "LSTM": Recurrent,
    "ResNet": ResidualNet,
    "squeeze-excite": SqueezeExcite,
    "tied weights": TiedWeights,
    "frozen stem": FrozenStem,
    "1x1-conv head": ConvHead,
    "group norm": GroupNormed,
}
