"""Methods, one file or folder each.

BUILT_IN lists the methods of Coterie; other packages add theirs by the entry point group `coterie.methods`. A paper's
name runs the method that the paper describes. NAME-mended is Coterie's own method after that paper.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from coterie.core.method import Method
from coterie.errors import CoterieError, unknown
from coterie.methods.stored import RENAMED, mended_name

METHOD_GROUP = "coterie.methods"  # entry points of other packages
# name of a method: module below coterie.methods and class
BUILT_IN = {
    "local": "local:Local",
    "autopilot": "autopilot.method:Autopilot",
    "fedavg": "fedavg:FedAvg",
    "fedavg-ft": "fedavgft:FedAvgFT",
    "lp-ft": "fedavgft:LPFT",
    "fedprox": "fedprox:FedProx",
    "scaffold": "scaffold:Scaffold",
    "moon": "moon:Moon",
    "fedgkd": "fedgkd:FedGKD",
    "feduv": "feduv:FedUV",
    "fednova": "fednova:FedNova",
    "power-of-choice": "powerofchoice:PowerOfChoice",
    "divfl": "divfl:DivFL",
    "q-ffl": "qffl:QFFL",
    "fedper": "fedper:FedPer",
    "fedpav": "fedpav:FedPav",
    "fedrep": "fedrep:FedRep",
    "ditto": "ditto:Ditto",
    "mr-mtl": "mrmtl:MRMTL",
    "fedamp": "fedamp:FedAMP",
    "cfl": "cfl:CFL",
    "ifca": "ifca:IFCA",
    "fedsoft": "fedsoft:FedSoft",
    "fesem": "fesem:FeSEM",
    "fedgroup": "fedgroup:FedGroup",
    "pfedme": "pfedme:PFedMe",
    "fedmeta": "fedmeta:FedMeta",
    "per-fedavg": "perfedavg:PerFedAvg",
    "per-fedavg-hf": "perfedavg:PerFedAvgHF",
    "cgpfl": "cgpfl:CGPFL",
    "fl-hc": "flhc:FLHC",
    "fedproto": "fedproto:FedProto",
    "fednh": "fednh:FedNH",
    "fedcp": "fedcp:FedCP",
    "fedgh": "fedgh:FedGH",
    "fedbe": "fedbe:FedBE",
    "fedmd": "fedmd:FedMD",
    "fedrod": "fedrod:FedRoD",
    "gpfl": "gpfl:GPFL",
    "prr-fl": "prrfl:PRRFL",
    "cd2-pfed": "cd2pfed.method:CD2pFed",
    "apfl": "apfl:APFL",
    "feddyn": "feddyn:FedDyn",
    "fedbn": "fedbn:FedBN",
    "fedbabu": "fedbabu:FedBABU",
    "lg-fedavg": "lgfedavg:LGFedAvg",
    "fedap": "fedap:FedAP",
    "pfedsim": "pfedsim:PFedSim",
    "fedfomo": "fedfomo:FedFomo",
    "fedcmd": "fedcmd.method:FedCMD",
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
    "feddpa": "feddpa:FedDPA",
    "fedcpmd": "fedcpmd.text:FedCPMD",
    "fedcpmd-code": "fedcpmd.code:FedCPMDCode",
    "fedcpmd-auto": "fedcpmd.variants:FedCPMDAuto",
    "fedcpmd-oracle": "fedcpmd.variants:FedCPMDOracle",
    "fedcpmd-random": "fedcpmd.variants:FedCPMDRandom",
    "fedcpmd-classifier": "fedcpmd.variants:FedCPMDClassifier",
    "fedcpmd-only-cluster": "fedcpmd.variants:FedCPMDOnlyCluster",
    "fedcpmd-only-decoupling": "fedcpmd.variants:FedCPMDOnlyDecoupling",
    "fedcpmd-full": "fedcpmd.motivation:FedCPMDFull",
    "fedcpmd-assigned": "fedcpmd.motivation:FedCPMDAssigned",
    "fedcpmd-mended": "fedcpmd.mended:FedCPMDMended",
    "fedcpmd-mended-auto": "fedcpmd.variants:FedCPMDMendedAuto",
    "fedcpmd-mended-oracle": "fedcpmd.variants:FedCPMDMendedOracle",
    "fedcpmd-mended-random": "fedcpmd.variants:FedCPMDMendedRandom",
    "fedcpmd-mended-classifier": "fedcpmd.variants:FedCPMDMendedClassifier",
    "fedpc": "fedpc.text:FedPC",
    "fedpc-j1": "fedpc.variants:FedPCJ1",
    "fedpc-no-proto": "fedpc.variants:FedPCNoProto",
    "fedpc-no-mixing": "fedpc.variants:FedPCNoMixing",
    "fedpc-mean": "fedpc.variants:FedPCMean",
    "fedpc-random": "fedpc.variants:FedPCRandom",
    "fedpc-mended": "fedpc.mended:FedPCMended",
    "fedpc-mended-j1": "fedpc.variants:FedPCMendedJ1",
    "fedpc-mended-no-proto": "fedpc.variants:FedPCMendedNoProto",
    "fedpc-mended-no-mixing": "fedpc.variants:FedPCMendedNoMixing",
    "fedpc-mended-mean": "fedpc.variants:FedPCMendedMean",
    "fedpc-mended-random": "fedpc.variants:FedPCMendedRandom",
    "fedgmh": "fedgmh.text:FedGMH",
    "fedgmh-o": "fedgmh.variants:FedGMHo",
    "fedgmh-a": "fedgmh.variants:FedGMHa",
    "fedgmh-oa": "fedgmh.variants:FedGMHoa",
    "fedgmh-mended": "fedgmh.mended:FedGMHMended",
    "ecs-fl": "ecsfl.text:ECSFL",
    "ecs-fl-invdist": "ecsfl.variants:ECSFLInvDist",
    "ecs-fl-invdist-all": "ecsfl.variants:ECSFLInvDistAll",
    "ecs-fl-random": "ecsfl.variants:ECSFLRandom",
    "ecs-fl-farthest": "ecsfl.variants:ECSFLFarthest",
    "ecs-fl-mean-all": "ecsfl.variants:ECSFLMeanAll",
    "ecs-fl-mended": "ecsfl.mended:ECSFLMended",
    "ecs-fl-mended-random": "ecsfl.variants:ECSFLMendedRandom",
    "ecs-fl-mended-farthest": "ecsfl.variants:ECSFLMendedFarthest",
    "ecs-fl-mended-mean-all": "ecsfl.variants:ECSFLMendedMeanAll",
    "sc-fpfl": "scfpfl.text:SCFPFL",
    "sc-fpfl-cluster-only": "scfpfl.variants:SCFPFLClusterOnly",
    "sc-fpfl-fourier-only": "scfpfl.variants:SCFPFLFourierOnly",
    "sc-fpfl-no-agent": "scfpfl.variants:SCFPFLNoAgent",
    "sc-fpfl-no-kl": "scfpfl.variants:SCFPFLNoKL",
    "sc-fpfl-mended": "scfpfl.mended:SCFPFLMended",
    "sc-fpfl-mended-cluster-only": "scfpfl.variants:SCFPFLMendedClusterOnly",
    "sc-fpfl-mended-fourier-only": "scfpfl.variants:SCFPFLMendedFourierOnly",
    "sc-fpfl-mended-no-agent": "scfpfl.variants:SCFPFLMendedNoAgent",
    "sc-fpfl-mended-no-kl": "scfpfl.variants:SCFPFLMendedNoKL",
}

# Readings of a paper that differ in their protocol are methods with names of their own. Readings that differ in numbers
# or in a loss are presets of one class (parts/readings.py).
READINGS: dict[str, dict[str, str]] = {"fedcpmd": {"paper": "fedcpmd", "code": "fedcpmd-code"}}


@cache
def _points() -> dict[str, EntryPoint]:
    """All methods by name. A built-in name cannot be replaced by an entry point."""
    others = {p.name: p for p in entry_points(group=METHOD_GROUP)}
    ours = {name: _point(name, where) for name, where in BUILT_IN.items()}
    return {**others, **ours}


def _point(name: str, where: str) -> EntryPoint:
    return EntryPoint(name, f"coterie.methods.{where}", METHOD_GROUP)


def method_names() -> list[str]:
    """Return the names of all methods, sorted."""
    return sorted(_points())


def registered_name(name: str) -> str:
    """Return a name as it is registered; case, dashes and underscores may differ. An unknown name stays as it is."""
    plain = name.lower().replace("_", "-")
    return next((key for key in (plain, plain.replace("-", "")) if key in _points()), name)


def find(name: str) -> type[Method]:
    """Return the class behind a name."""
    key = registered_name(name)
    if key in RENAMED and key not in _points():
        raise CoterieError(f'the method "{key}" is called {RENAMED[key]} since version 0.2')
    if key not in _points():
        raise unknown("method", name, _points())
    try:
        method = _points()[key].load()
    except (ImportError, AttributeError) as e:
        raise CoterieError(f'the method "{key}" is registered but cannot be loaded: {e}') from e
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise CoterieError(f'the entry point "{key}" of group {METHOD_GROUP} is not a Method')
    return method


def controls(method: str | type[Method]) -> tuple[str, ...]:
    """Return the controls that a method names itself; those of its base class are not its own."""
    cls = find(method) if isinstance(method, str) else method
    return tuple(vars(cls).get("controls", ()))


# ---- settings --------------------------------------------------------------------------------------------------------
def resolve(
    method: str | type[Method], settings: Mapping[str, Any] | None = None
) -> tuple[str | type[Method], dict[str, Any]]:
    """Return the method that runs with these settings, and its settings without a reading that is a method itself."""
    own = dict(settings or {})
    if not isinstance(method, str) or "reading" not in own:
        return method, own
    key, reading = registered_name(method), own["reading"]
    if reading == "mended" and (mended := mended_name(key)) in BUILT_IN:
        raise CoterieError(f'reading = "mended" is a method of its own since version 0.2: {mended}')
    if key not in READINGS:
        return method, own
    if reading not in READINGS[key]:
        raise unknown(f"reading of {key}", str(reading), READINGS[key])
    del own["reading"]
    return READINGS[key][reading], own


def fields(method: str | type[Method], settings: Mapping[str, Any] | None = None) -> dict[str, FieldInfo]:
    """Return the settings that a method has, by name; only the reading among the given settings matters."""
    runs, _ = resolve(method, {k: v for k, v in (settings or {}).items() if k == "reading"})
    own = dict((find(runs) if isinstance(runs, str) else runs).Settings.model_fields)
    if not isinstance(method, str) or (key := registered_name(method)) not in READINGS:
        return own
    options: Any = Literal[tuple(READINGS[key])]
    return {**own, "reading": FieldInfo(annotation=options, default="paper", description="reading of the paper")}


def unusual_reading(method: Method) -> str:
    """Return the reading that a method has been set to, if it has several and this is not the default; else ""."""
    field = type(method).Settings.model_fields.get("reading")
    return "" if field is None or method.hp.reading == field.default else str(method.hp.reading)


def build_method(method: str | type[Method], settings: Mapping[str, Any] | None = None) -> Method:
    """Return an unbound method with its settings checked."""
    method, own = resolve(method, settings)
    cls = find(method) if isinstance(method, str) else method
    known_settings = cls.Settings.model_fields
    for key in own:
        if key not in known_settings:
            raise (
                unknown(f"setting of {cls.__name__}", key, known_settings)
                if known_settings
                else CoterieError(f'{cls.__name__} has no settings, so "{key}" cannot be set')
            )
    try:
        return cls(**own)
    except ValidationError as e:
        raise CoterieError(validation_sentence(cls.__name__, e)) from None


def validation_sentence(where: str, error: ValidationError) -> str:
    """Return the first error of pydantic as one sentence."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or "settings"
    text = first["msg"].removeprefix("Value error, ")
    text = f"{text[0].lower()}{text[1:]}"
    for old, new in (("input should be", "it must be"), ("input should have", "it must have")):
        text = text.replace(old, new, 1) if text.startswith(old) else text
    if first["type"] == "missing":
        return f"{where}: {name} is missing"
    return f"{where}: {name} = {first.get('input')!r} is invalid: {text}"
