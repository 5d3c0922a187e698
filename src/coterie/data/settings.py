"""Settings of a federation: how a data set is divided among clients."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from coterie.data.dataset import InputScale
from coterie.data.partition_spec import Scheme, parse_scheme
from coterie.data.rotation import Interp
from coterie.data.timeline import Change, parse_timeline
from coterie.errors import CoterieError, unknown


class PartitionSettings(BaseModel):
    """How samples are divided among clients, and how each client's samples are split."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    partition: str = Field(
        "dirichlet(0.1)",
        description="how the samples are divided among the clients; by default natural if the data name their clients",
    )
    clients: int | None = Field(None, description="number of clients; empty: 20, or all clients in the data (natural)")
    pool: Literal["merged", "train"] = Field(
        "merged", description="samples that are divided: all, or the official training part only"
    )
    test_share: float = Field(0.25, description="fraction of a client's samples used for testing")
    test_from: Literal["own", "official", "given"] | None = Field(
        None,
        description="own: a client's test samples are drawn from its samples; official: they come from the official "
        "test part (needs pool = train), its own items there (natural) or in proportion to its classes; given: the "
        "split of the data decides; empty: given for data with a split, official for data of your own with a test "
        "part (then pool is train), otherwise own",
    )
    val_share: float = Field(0.1, description="fraction of a client's remaining samples used for validation")
    min_size: int = Field(
        10,
        description="smallest number of samples of a client; partitions are redrawn until all clients have it, and "
        "natural clients with fewer samples are left out",
    )
    short: Literal["redraw", "fill"] = Field(
        "redraw",
        description="for clients below min_size: redraw the partition, or fill them with samples of large clients",
    )
    cap: bool = Field(
        False, description="a client that holds an equal share of all samples gets no more (dirichlet, rotate)"
    )
    stratify: bool = Field(True, description="keep the class proportions when a client's samples are split")
    public: int = Field(
        0, description="number of unlabelled samples that the server and all clients have and that belong to no client"
    )
    public_from: Literal["holdout", "test", "noise"] = Field(
        "holdout",
        description="source of the public samples: taken from the pool, from the official test part, or random noise",
    )
    normalize: InputScale = Field(
        "standard",
        description="preprocessing of items: standardise bytes, and floats that are far from 1, by the training part; "
        "unit: scale bytes to 0..1; or none",
    )
    scaling: Literal["pooled", "client"] = Field(
        "pooled",
        description="columns of a table are standardised with mean and deviation of all clients' training rows, or "
        "each client with its own",
    )
    exdir_prior: Literal["indicator", "normalized"] = Field(
        "indicator", description="concentration for each holder of a class: alpha, or alpha / number of holders"
    )
    exdir_cap: bool = Field(False, description="a client that holds an equal share of all samples gets no more (exdir)")
    exdir_min_holders: int | None = Field(
        1, description="smallest number of clients that hold a class (exdir); empty: half of an even spread"
    )
    rotate_interp: Interp = Field("bilinear", description="interpolation of rotated pictures")
    timeline: str | tuple[Change, ...] | None = Field(
        None,
        description="changes of the clients' data during the run: a file, a list of changes, or swap_labels(round), "
        "new_labels(round), move_data(round), rotate(round, degrees); empty: none",
    )

    @field_validator("timeline", mode="before")
    @classmethod
    def _parse_timeline(cls, given: Any) -> Any:
        return parse_timeline(given)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    raise unknown("partition setting", str(name), cls.model_fields)
        return given

    @model_validator(mode="after")
    def _check_values(self) -> "PartitionSettings":
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
            self.test_from != "given" or self.pool == "merged",
            "test_from = given keeps the split of all samples; leave pool at merged",
        )
        _need(
            self.short == "redraw" or scheme.name in ("dirichlet", "rotate"),
            f"short = fill works with dirichlet and rotate, not with {scheme.name}",
        )
        return self

    @property
    def scheme(self) -> Scheme:
        return parse_scheme(self.partition)


def _need(ok: bool, sentence: str) -> None:
    if not ok:
        raise CoterieError(sentence)
