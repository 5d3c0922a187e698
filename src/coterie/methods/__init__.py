"""Methods, one file or folder each.

BUILT_IN lists the methods of Coterie; other packages add theirs by the entry point group `coterie.methods`. Where a
paper has been read in several ways, READINGS lists the class of each reading, and the setting `reading` chooses one.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from coterie.core.method import Method
from coterie.errors import CoterieError, unknown
from coterie.methods.stored import ALWAYS, CLIENTS, FORMER, SERVERS

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
    "fedgmh": "fedgmh:FedGMHMended",
    "fedgmh-paper": "fedgmh:FedGMH",
    "fedgmh-o": "fedgmh:FedGMHo",
    "fedgmh-a": "fedgmh:FedGMHa",
    "fedgmh-oa": "fedgmh:FedGMHoa",
    "fedpc": "fedpc:FedPCMended",
    "fedpc-paper": "fedpc:FedPC",
    "fedpc-code": "fedpc:FedPCCode",
    "fedpc-j1": "fedpc:FedPCMendedJ1",
    "fedpc-no-proto": "fedpc:FedPCMendedNoProto",
    "fedpc-no-mixing": "fedpc:FedPCMendedNoMixing",
    "fedpc-mean": "fedpc:FedPCMendedMean",
    "fedpc-random": "fedpc:FedPCMendedRandom",
    "sc-fpfl": "scfpfl:SCFPFLMended",
    "sc-fpfl-paper": "scfpfl:SCFPFL",
    "sc-fpfl-cluster-only": "scfpfl:SCFPFLMendedClusterOnly",
    "sc-fpfl-fourier-only": "scfpfl:SCFPFLMendedFourierOnly",
    "sc-fpfl-no-agent": "scfpfl:SCFPFLMendedNoAgent",
    "sc-fpfl-no-kl": "scfpfl:SCFPFLMendedNoKL",
    "ecs-fl": "ecsfl:ECSFLMended",
    "ecs-fl-paper": "ecsfl:ECSFLWeighted",
    "ecs-fl-nearest": "ecsfl:ECSFLNearest",
    "ecs-fl-invdist": "ecsfl:ECSFLInvDist",
    "ecs-fl-invdist-all": "ecsfl:ECSFLInvDistAll",
    "ecs-fl-random": "ecsfl:ECSFLMendedRandom",
    "ecs-fl-farthest": "ecsfl:ECSFLMendedFarthest",
    "ecs-fl-mean-all": "ecsfl:ECSFLMendedMeanAll",
    "fedcpmd": "fedcpmd:FedCPMDMended",
    "fedcpmd-paper": "fedcpmd:FedCPMD",
    "fedcpmd-code": "fedcpmd:FedCPMDCode",
    "fedcpmd-auto": "fedcpmd:FedCPMDMendedAuto",
    "fedcpmd-oracle": "fedcpmd:FedCPMDMendedOracle",
    "fedcpmd-random": "fedcpmd:FedCPMDMendedRandom",
    "fedcpmd-classifier": "fedcpmd:FedCPMDMendedClassifier",
    "fedcpmd-only-cluster": "fedcpmd:FedCPMDOnlyCluster",
    "fedcpmd-only-decoupling": "fedcpmd:FedCPMDOnlyDecoupling",
    "fedcpmd-full": "fedcpmd:FedCPMDFull",
}


def _classes(module: str, *presets: str, **classes: str) -> dict[str, str]:
    """Name the class of each reading; `presets` are further readings that the class `paper` has as settings."""
    return {r: f"{module}:{name}" for r, name in {**classes, **dict.fromkeys(presets, classes["paper"])}.items()}


# Name of a method: reading of its paper: module and class. BUILT_IN says which one runs without the setting `reading`.
READINGS: dict[str, dict[str, str]] = {
    "fedcpmd": _classes("fedcpmd", mended="FedCPMDMended", paper="FedCPMD", code="FedCPMDCode"),
    "fedcpmd-auto": _classes("fedcpmd", mended="FedCPMDMendedAuto", paper="FedCPMDAuto", code="FedCPMDCodeAuto"),
    "fedcpmd-oracle": _classes(
        "fedcpmd", mended="FedCPMDMendedOracle", paper="FedCPMDOracle", code="FedCPMDCodeOracle"
    ),
    "fedcpmd-random": _classes(
        "fedcpmd", mended="FedCPMDMendedRandom", paper="FedCPMDRandom", code="FedCPMDCodeRandom"
    ),
    "fedcpmd-classifier": _classes(
        "fedcpmd", mended="FedCPMDMendedClassifier", paper="FedCPMDClassifier", code="FedCPMDCodeClassifier"
    ),
    "fedcpmd-only-cluster": _classes("fedcpmd", paper="FedCPMDOnlyCluster"),
    "fedcpmd-only-decoupling": _classes("fedcpmd", paper="FedCPMDOnlyDecoupling"),
    "fedgmh": _classes("fedgmh", "code", mended="FedGMHMended", paper="FedGMH"),
    "fedpc": _classes("fedpc", "text", "code", mended="FedPCMended", paper="FedPC"),
    "fedpc-j1": _classes("fedpc", "text", "code", mended="FedPCMendedJ1", paper="FedPCJ1"),
    "fedpc-no-proto": _classes("fedpc", "text", "code", mended="FedPCMendedNoProto", paper="FedPCNoProto"),
    "fedpc-no-mixing": _classes("fedpc", "text", "code", mended="FedPCMendedNoMixing", paper="FedPCNoMixing"),
    "fedpc-mean": _classes("fedpc", "text", "code", mended="FedPCMendedMean", paper="FedPCMean"),
    "fedpc-random": _classes("fedpc", "text", "code", mended="FedPCMendedRandom", paper="FedPCRandom"),
    "sc-fpfl": _classes("scfpfl", mended="SCFPFLMended", paper="SCFPFL"),
    "sc-fpfl-cluster-only": _classes("scfpfl", mended="SCFPFLMendedClusterOnly", paper="SCFPFLClusterOnly"),
    "sc-fpfl-fourier-only": _classes("scfpfl", mended="SCFPFLMendedFourierOnly", paper="SCFPFLFourierOnly"),
    "sc-fpfl-no-agent": _classes("scfpfl", mended="SCFPFLMendedNoAgent", paper="SCFPFLNoAgent"),
    "sc-fpfl-no-kl": _classes("scfpfl", mended="SCFPFLMendedNoKL", paper="SCFPFLNoKL"),
    "ecs-fl": _classes("ecsfl", mended="ECSFLMended", paper="ECSFLWeighted"),
    "ecs-fl-nearest": _classes("ecsfl", paper="ECSFLNearest"),
    "ecs-fl-invdist": _classes("ecsfl", paper="ECSFLInvDist"),
    "ecs-fl-invdist-all": _classes("ecsfl", paper="ECSFLInvDistAll"),
    "ecs-fl-random": _classes("ecsfl", mended="ECSFLMendedRandom", paper="ECSFLRandom"),
    "ecs-fl-farthest": _classes("ecsfl", mended="ECSFLMendedFarthest", paper="ECSFLFarthest"),
    "ecs-fl-mean-all": _classes("ecsfl", mended="ECSFLMendedMeanAll", paper="ECSFLMeanAll"),
}


@cache
def _points() -> dict[str, EntryPoint]:
    """All methods by name. A built-in name cannot be replaced by an entry point."""
    others = {p.name: p for p in entry_points(group=GROUP)}
    ours = {name: _point(name, where) for name, where in BUILT_IN.items()}
    return {**others, **ours}


def _point(name: str, where: str) -> EntryPoint:
    return EntryPoint(name, f"coterie.methods.{where}", GROUP)


def known() -> list[str]:
    """Return the names of all methods, sorted."""
    return sorted(_points())


def canonical(name: str) -> str:
    """Return a name as it is registered; case, dashes and underscores may differ. An unknown name stays as it is."""
    plain = name.lower().replace("_", "-")
    return next((key for key in (plain, plain.replace("-", "")) if key in _points()), name)


def find(name: str, reading: str | None = None) -> type[Method]:
    """Return the class behind a name, or behind one reading of its paper."""
    key = canonical(name)
    if key not in _points():
        raise unknown("method", name, _points())
    point = _points()[key]
    if reading is not None:
        if reading not in (classes := READINGS.get(key, {})):
            raise unknown(f"reading of {key}", str(reading), classes)
        point = _point(key, classes[reading])
    try:
        method = point.load()
    except (ImportError, AttributeError) as e:
        raise CoterieError(f'the method "{key}" is registered but cannot be loaded: {e}') from e
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise CoterieError(f'the entry point "{key}" of group {GROUP} is not a Method')
    return method


def controls(method: str | type[Method]) -> tuple[str, ...]:
    """Return the controls that a method names itself; those of its base class are not its own."""
    cls = find(method) if isinstance(method, str) else method
    return tuple(vars(cls).get("controls", ()))


# ---- settings --------------------------------------------------------------------------------------------------------
def resolve(
    method: str | type[Method], settings: Mapping[str, Any] | None = None
) -> tuple[type[Method], dict[str, Any]]:
    """Return the class that runs a method with these settings, and the settings that this class takes."""
    own = dict(settings or {})
    if not isinstance(method, str):
        return method, own
    if "reading" not in own or canonical(method) not in READINGS:
        return find(method), own
    cls = find(method, own["reading"])
    if own["reading"] not in getattr(cls.Settings, "readings", {}):
        del own["reading"]
    return cls, own


def fields(method: str | type[Method], settings: Mapping[str, Any] | None = None) -> dict[str, FieldInfo]:
    """Return the settings that a method has, by name; of the given settings only the reading matters."""
    cls, _ = resolve(method, {k: v for k, v in (settings or {}).items() if k == "reading"})
    own = dict(cls.Settings.model_fields)
    if not isinstance(method, str) or (key := canonical(method)) not in READINGS:
        return own
    options: Any = Literal[tuple(READINGS[key])]
    default = next((r for r, where in READINGS[key].items() if where == BUILT_IN[key]), None)
    return {**own, "reading": FieldInfo(annotation=options, default=default, description="reading of the paper")}


def written_out(name: str | type[Method], method: Method) -> dict[str, Any]:
    """Return the settings of a method for JSON, with its reading: `build(name, ...)` makes the same method of them."""
    own: dict[str, Any] = method.hp.model_dump(mode="json")
    if not isinstance(name, str):
        return own
    readings = [r for r in READINGS.get(canonical(name), {}) if find(name, r) is type(method)]
    return {"reading": readings[0], **own} if readings else own


def unusual_reading(method: Method) -> str:
    """Return the reading of the paper, if it has several and this is not the one that its name runs; else ""."""
    cls, preset = type(method), type(method).Settings.model_fields.get("reading")
    unusual = "" if preset is None or method.hp.reading == preset.default else str(method.hp.reading)
    for name, classes in READINGS.items():
        for reading, where in classes.items():
            module, _, attribute = where.partition(":")
            if attribute == cls.__name__ and f"{cls.__module__}.".startswith(f"{__name__}.{module}."):
                return unusual if where == BUILT_IN[name] else unusual or reading
    return unusual


def build(method: str | type[Method], settings: Mapping[str, Any] | None = None) -> Method:
    """Return an unbound method with its settings checked."""
    cls, own = resolve(method, settings)
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
        raise CoterieError(sentence(cls.__name__, e)) from None


def restored(name: str | type[Method], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a file, also of version 0.1, so that `build(name, ...)` makes a method that does the same."""
    if not isinstance(name, str) or (readings := READINGS.get(canonical(name))) is None:
        return dict(stored)
    for reading in dict.fromkeys((stored["reading"], *readings)):
        has = fields(name, {"reading": reading})
        bases = find(name, reading).__mro__
        always = {k: v for base in reversed(bases) for k, v in ALWAYS.get(base.__name__, {}).items()}
        odd = {k: v for k, v in stored.items() if k not in has and always.get(k, v) != v}
        kept = {k: v for k, v in {**stored, "reading": reading}.items() if k in has}
        if not odd and _fits(name, kept):
            return kept
    raise CoterieError(
        f'the method "{canonical(name)}" was run by version 0.1 with settings of several readings, which no '
        f"method of this version combines: {', '.join(f'{k} = {v}' for k, v in stored.items())}"
    )


def _fits(name: str, settings: Mapping[str, Any]) -> bool:
    """True if a method can be built with these settings."""
    try:
        build(name, settings)
    except CoterieError:
        return False
    return True


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


__all__ = [
    "BUILT_IN", "CLIENTS", "FORMER", "GROUP", "READINGS", "SERVERS", "build", "canonical", "controls", "fields", "find",
    "known", "resolve", "restored", "sentence", "unusual_reading", "written_out",
]  # fmt: skip
