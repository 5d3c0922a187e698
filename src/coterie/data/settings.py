"""How a data set becomes a federation: every knob, checked with a sentence before any work."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from coterie.data.dataset import Normalize
from coterie.data.scheme import Scheme, parse
from coterie.data.turn import Interp
from coterie.errors import CoterieError, unknown


class PartitionSettings(BaseModel):
    """Who gets what, and how each client's own samples are split."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    partition: str = "dirichlet(0.1)"
    clients: int | None = None  # None: 20, and with `natural` everybody the data name
    pool: Literal["merged", "train"] = "merged"  # what is dealt out: all samples, or the official training part
    test_share: float = 0.25
    test_from: Literal["own", "official"] = (
        "own"  # official: dealt by the class shares of the clients, needs pool=train
    )
    val_share: float = 0.1  # of the client's samples that are not test
    min_size: int = 10  # drawn again until every client has so many; natural clients with fewer are left out
    short: Literal["redraw", "fill"] = "redraw"  # fill: one draw, then the largest clients give to those below min_size
    cap: bool = False  # a client that holds its equal share gets no more (dirichlet, rotate)
    stratify: bool = True
    public: int = 0  # unlabelled items that every party has and no client owns
    public_from: Literal["holdout", "test", "noise"] = "holdout"
    normalize: Normalize = "standard"
    exdir_prior: Literal["indicator", "normalized"] = "indicator"  # concentration alpha, or alpha / holders, per holder
    exdir_cap: bool = True
    exdir_min_holders: int | None = None  # None: half of what an even spread gives each label
    rotate_interp: Interp = "bilinear"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    raise unknown("partition setting", str(name), cls.model_fields)
        return given

    @model_validator(mode="after")
    def _possible(self) -> "PartitionSettings":
        scheme = self.scheme
        _need(self.clients is None or self.clients >= 1, f"clients must be at least 1, not {self.clients}")
        _need(0 < self.test_share < 1, f"test_share must lie between 0 and 1, not {self.test_share:g}")
        _need(0 <= self.val_share < 1, f"val_share must be at least 0 and below 1, not {self.val_share:g}")
        _need(self.min_size >= 1, f"min_size must be at least 1, not {self.min_size}")
        _need(self.public >= 0, f"public must not be negative, but is {self.public}")
        holders = self.exdir_min_holders
        _need(holders is None or holders >= 1, f"exdir_min_holders must be at least 1, not {holders}")
        for name in ("test_from", "public_from"):
            if getattr(self, name) in ("official", "test") and (name == "test_from" or self.public):
                _need(
                    self.pool == "train", f"{name} = {getattr(self, name)} needs pool = train: merged has no test part"
                )
        _need(
            self.short == "redraw" or scheme.name in ("dirichlet", "rotate"),
            f"short = fill works with dirichlet and rotate, not with {scheme.name}",
        )
        return self

    @property
    def scheme(self) -> Scheme:
        return parse(self.partition)


def _need(ok: bool, sentence: str) -> None:
    if not ok:
        raise CoterieError(sentence)
