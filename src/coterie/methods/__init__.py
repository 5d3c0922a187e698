"""Methods, one file or folder each. BUILT_IN lists those of Coterie; other packages add theirs by the entry point group
`coterie.methods`.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from coterie.core.method import Method
from coterie.errors import CoterieError, unknown

GROUP = "coterie.methods"  # entry points of other packages
# name of a method: module below coterie.methods and class
BUILT_IN = {
    "local": "local:Local",
    "autopilot": "autopilot:Autopilot",
    "fedavg": "fedavg:FedAvg",
    "fedavg-ft": "fedavgft:FedAvgFT",
    "lp-ft": "fedavgft:LPFT",
    "fedprox": "fedprox:FedProx",
    "scaffold": "scaffold:Scaffold",
    "moon": "moon:Moon",
    "fednova": "fednova:FedNova",
    "q-ffl": "qffl:QFFL",
    "fedper": "fedper:FedPer",
    "fedrep": "fedrep:FedRep",
    "ditto": "ditto:Ditto",
    "fedamp": "fedamp:FedAMP",
    "cfl": "cfl:CFL",
    "ifca": "ifca:IFCA",
    "fesem": "fesem:FeSEM",
    "fedgroup": "fedgroup:FedGroup",
    "pfedme": "pfedme:PFedMe",
    "per-fedavg": "perfedavg:PerFedAvg",
    "per-fedavg-hf": "perfedavg:PerFedAvgHF",
    "cgpfl": "cgpfl:CGPFL",
    "fl-hc": "flhc:FLHC",
    "fedproto": "fedproto:FedProto",
    "fednh": "fednh:FedNH",
    "fedcp": "fedcp:FedCP",
    "fedgh": "fedgh:FedGH",
    "fedmd": "fedmd:FedMD",
    "fedrod": "fedrod:FedRoD",
    "gpfl": "gpfl:GPFL",
    "prr-fl": "prrfl:PRRFL",
    "cd2-pfed": "cd2pfed:CD2pFed",
    "apfl": "apfl:APFL",
    "feddyn": "feddyn:FedDyn",
    "fedbn": "fedbn:FedBN",
    "fedbabu": "fedbabu:FedBABU",
    "lg-fedavg": "lgfedavg:LGFedAvg",
    "fedap": "fedap:FedAP",
    "pfedsim": "pfedsim:PFedSim",
    "fedfomo": "fedfomo:FedFomo",
    "fedcmd": "fedcmd:FedCMD",
    "fedala": "fedala:FedALA",
    "feddbe": "feddbe:FedDBE",
    "fedpac": "fedpac:FedPAC",
    "fedas": "fedas:FedAS",
    "fedtgp": "fedtgp:FedTGP",
    "floco": "floco:Floco",
    "knn-per": "knnper:KNNPer",
    "pfedfda": "pfedfda:PFedFDA",
    "pfedhn": "pfedhn:PFedHN",
    "fedcac": "fedcac:FedCAC",
    "fedgmh": "fedgmh:FedGMH",
    "fedgmh-o": "fedgmh:FedGMHo",
    "fedgmh-a": "fedgmh:FedGMHa",
    "fedgmh-oa": "fedgmh:FedGMHoa",
    "fedpc": "fedpc:FedPC",
    "fedpc-j1": "fedpc:FedPCJ1",
    "fedpc-no-proto": "fedpc:FedPCNoProto",
    "fedpc-no-mixing": "fedpc:FedPCNoMixing",
    "fedpc-mean": "fedpc:FedPCMean",
    "fedpc-random": "fedpc:FedPCRandom",
    "sc-fpfl": "scfpfl:SCFPFL",
    "sc-fpfl-cluster-only": "scfpfl:SCFPFLClusterOnly",
    "sc-fpfl-fourier-only": "scfpfl:SCFPFLFourierOnly",
    "sc-fpfl-no-agent": "scfpfl:SCFPFLNoAgent",
    "sc-fpfl-no-kl": "scfpfl:SCFPFLNoKL",
    "ecs-fl": "ecsfl:ECSFL",
    "ecs-fl-nearest": "ecsfl:ECSFLNearest",
    "ecs-fl-invdist": "ecsfl:ECSFLInvDist",
    "ecs-fl-invdist-all": "ecsfl:ECSFLInvDistAll",
    "ecs-fl-random": "ecsfl:ECSFLRandom",
    "ecs-fl-farthest": "ecsfl:ECSFLFarthest",
    "ecs-fl-mean-all": "ecsfl:ECSFLMeanAll",
    "fedcpmd": "fedcpmd:FedCPMD",
    "fedcpmd-auto": "fedcpmd:FedCPMDAuto",
    "fedcpmd-only-cluster": "fedcpmd:FedCPMDOnlyCluster",
    "fedcpmd-only-decoupling": "fedcpmd:FedCPMDOnlyDecoupling",
    "fedcpmd-full": "fedcpmd:FedCPMDFull",
    "fedcpmd-oracle": "fedcpmd:FedCPMDOracle",
    "fedcpmd-random": "fedcpmd:FedCPMDRandom",
    "fedcpmd-classifier": "fedcpmd:FedCPMDClassifier",
}


@cache
def _points() -> dict[str, EntryPoint]:
    """All methods by name. A built-in name cannot be replaced by an entry point."""
    others = {p.name: p for p in entry_points(group=GROUP)}
    ours = {name: EntryPoint(name, f"coterie.methods.{where}", GROUP) for name, where in BUILT_IN.items()}
    return {**others, **ours}


def known() -> list[str]:
    return sorted(_points())


def canonical(name: str) -> str:
    """As it is registered: spelling differs only by case, dashes and underscores. Unknown names stay as they are."""
    plain = name.lower().replace("_", "-")
    return next((key for key in (plain, plain.replace("-", "")) if key in _points()), name)


def find(name: str) -> type[Method]:
    """The class behind a name."""
    key = canonical(name)
    if key not in _points():
        raise unknown("method", name, _points())
    try:
        method = _points()[key].load()
    except (ImportError, AttributeError) as e:
        raise CoterieError(f'the method "{key}" is registered but cannot be loaded: {e}') from e
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise CoterieError(f'the entry point "{key}" of group {GROUP} is not a Method')
    return method


def controls(method: str | type[Method]) -> tuple[str, ...]:
    """The controls that a method names itself; those of its base class are not its own."""
    cls = find(method) if isinstance(method, str) else method
    return tuple(vars(cls).get("controls", ()))


def build(method: str | type[Method], settings: dict[str, Any] | None = None) -> Method:
    """An unbound method with its settings checked."""
    cls = find(method) if isinstance(method, str) else method
    fields = cls.Settings.model_fields
    for key in settings or {}:
        if key not in fields:
            raise (
                unknown(f"setting of {cls.__name__}", key, fields)
                if fields
                else CoterieError(f'{cls.__name__} has no settings, so "{key}" cannot be set')
            )
    try:
        return cls(**(settings or {}))
    except ValidationError as e:
        raise CoterieError(sentence(cls.__name__, e)) from None


def sentence(where: str, error: ValidationError) -> str:
    """The first error of pydantic as one sentence."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or "settings"
    text = first["msg"].removeprefix("Value error, ")
    text = f"{text[0].lower()}{text[1:]}"
    for old, new in (("input should be", "it must be"), ("input should have", "it must have")):
        text = text.replace(old, new, 1) if text.startswith(old) else text
    if first["type"] == "missing":
        return f"{where}: {name} is missing"
    return f"{where}: {name} = {first.get('input')!r} is invalid: {text}"
