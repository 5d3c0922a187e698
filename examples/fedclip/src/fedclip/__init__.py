"""FedClip: FedPer whose clients send clipped updates (an example, not a published method).

The head stays private. What a client sends is its update of the body, shortened to a largest length, so that no single
client can move the shared body far. With a very large length it is FedPer.
"""

from collections.abc import Sequence

from pydantic import Field

from coterie import Card, Method, Settings, Upload
from coterie.core import tree as T
from coterie.core.schema import Schema, like


class FedClipSettings(Settings):
    length: float = Field(1.0, gt=0, description="largest Euclidean length of an update")


class FedClip(Method):
    Settings = FedClipSettings
    hp: FedClipSettings
    card = Card(title="FedClip", family="S", personal="the head")
    needs = ("head",)

    def private(self, name):
        return name in self.ctx.group("head")

    def schema(self, link, now=None):
        """A client sends differences, which have other bounds than a model."""
        return Schema(like(T.drop(self.ctx.w0, self.stays), "update")) if link == "up" else super().schema(link, now)

    def begin(self, state, download, data, round):
        return super().begin(state, download, data, round).adding(received=download)

    def end(self, state, trained, data, round):
        state, upload = super().end(state, trained, data, round)
        update = T.sub(upload.tree, trained.extras["received"])
        factor = min(1.0, self.hp.length / float(T.flatten(update).norm()))
        return state, Upload(T.scaled(update, factor), note={"clipped": float(factor < 1)})

    def aggregate(self, server, uploads: Sequence[Upload], round):
        return {"w": T.add(server["w"], T.mean([u.tree for u in uploads], self.weights(uploads)))}
