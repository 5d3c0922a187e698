"""Names that files of version 0.1 use for methods, settings of methods and classes.

Version 0.1 had one class for all readings of a paper, with settings that chose between protocols, and the paper's name
ran the mended method. Files of that version hold every setting, so that the class that does the same today is found.
"""

from collections.abc import Mapping
from typing import Any

# Name of a method in version 0.1: the method that does the same today, in words.
RENAMED = {
    "fedcpmd-paper": "fedcpmd",
    "fedpc-paper": "fedpc with reading = text",
    "fedpc-code": "fedpc",
    "fedgmh-paper": "fedgmh",
    "ecs-fl-paper": "ecs-fl with aggregation = invdist_all, distance_norm = per_step and train_fraction = 0.1",
    "ecs-fl-nearest": "ecs-fl with train_fraction = 1",
    "sc-fpfl-paper": "sc-fpfl",
}
_PAPERS = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")
_READINGS = ("-paper", "-code", "-nearest")


def mended_name(name: str) -> str:
    """Return the name of the mended version of a method or of its control: fedpc-mean is fedpc-mended-mean there."""
    paper = next((p for p in _PAPERS if name == p or name.startswith(f"{p}-")), "")
    return f"{paper}-mended{name.removeprefix(paper)}" if paper else ""


def names_today(name: str, reading: str | None) -> list[str]:
    """Return the names that the method of a file may have today, the most likely first; [] if no name has changed."""
    if not (mended := mended_name(name)) or "-mended" in name:
        return []
    if name == "fedcpmd-code" or (name, reading) == ("fedcpmd", "code"):
        return ["fedcpmd-code"]
    plain = name
    for suffix in _READINGS:
        plain = plain.removesuffix(suffix)
    return [mended, plain] if reading == "mended" else [plain, mended]


def run_settings_of_0_1(stored: Mapping[str, Any]) -> dict[str, str | None]:
    """Return settings of the run that methods of version 0.1 had as their own: rule of use and FedGMH's weighting."""
    rule = {"own": "received"}.get(stored.get("score", ""), stored.get("use", stored.get("score")))
    out: dict[str, str | None] = {}
    if rule in ("best", "received") and stored.get("reading") == "mended":
        out["use"] = rule
    if "feature_weight" in stored:  # FedGMH, which did not read the weighting of the run
        out["weighting"] = "samples" if stored["feature_weight"] == "samples" else None
    return out


# Class: settings of version 0.1 that it has no longer, with the value that it acts on. All other settings of version
# 0.1 which a class lacks have no effect on it.
ALWAYS: dict[str, dict[str, Any]] = {
    "FedCPMD": {"shared_by": "cluster", "relay": False, "use": "received"},
    "FedCPMDCode": {"relay": True, "phase1_personal": "none", "switch_init": "global"},
    "FedCPMDMended": {
        "shared_by": "all",
        "relay": False,
        "phase1_personal": "none",
        "switch_init": "global",
        "min_participants": 1,
        "phi_of": "rows",
        "phi_input": "delta",
        "phi_weight": "log",
    },
    "ECSFL": {"use": "received"},
    "ECSFLMended": {"aggregation": "mean", "select": "herding", "distance_norm": "none", "two_stage": True},
    "ECSFLMendedRandom": {"select": "random"},
    "ECSFLMendedFarthest": {"select": "farthest"},
    "SCFPFL": {"accept": "agent", "sends": "kept", "kl_when": "always", "compare": "items"},
    "SCFPFLMended": {
        "accept": "best",
        "sends": "agent",
        "kl_when": "own_better",
        "compare": "centred",
        "predict": "logits",
        "local_train_each_round": False,
        "agent_fail": "keep",
    },
    "FedPC": {"rehearsal": 0.0, "use": "received"},
    "FedPCMended": {"proto_loss": "contrast"},
    "FedGMHMended": {"heads": "common", "write": "average", "decay_on": "round"},
}
_ABLATIONS = ("", "ClusterOnly", "FourierOnly", "NoAgent", "NoKL")
_SCFPFL = [f"SCFPFL{reading}{ablation}" for reading in ("", "Mended") for ablation in _ABLATIONS]
_CONTROLS = ("", "Auto", "Random", "Oracle", "Classifier")
_FEDPC = ("", "J1", "NoProto", "NoMixing", "Mean", "Random")
_FEDCPMD = [f"FedCPMD{control}" for control in (*_CONTROLS, "Code", "OnlyCluster", "OnlyDecoupling")]
# Class: the dataclass of its server's state, which is a dictionary in checkpoints of version 0.1.
SERVERS = {
    "PFedHN": "PFedHNServer",
    **dict.fromkeys(_SCFPFL, "SCFPFLServer"),
    **dict.fromkeys(_FEDCPMD, "FedCPMDServer"),
    **{f"FedCPMDMended{control}": "FedCPMDMendedServer" for control in _CONTROLS},
    **{f"FedPC{reading}{control}": "FedPCServer" for reading in ("", "Mended") for control in _FEDPC},
}
# Class: the dataclass of its clients' states, which are dictionaries in files of version 0.1.
CLIENTS = dict.fromkeys(_SCFPFL, "SCFPFLClient")
# Class: the name that checkpoints of version 0.1 have for it.
FORMER = {
    "FedCPMDCode": "FedCPMD",
    "FedCPMDMended": "FedCPMD",
    "FedCPMDMendedAuto": "FedCPMDAuto",
    "FedCPMDMendedOracle": "FedCPMDOracle",
    "FedCPMDMendedRandom": "FedCPMDRandom",
    "FedCPMDMendedClassifier": "FedCPMDClassifier",
    "ECSFLMended": "ECSFL",
    "ECSFLMendedFarthest": "ECSFLFarthest",
    "ECSFLMendedMeanAll": "ECSFLMeanAll",
    "ECSFLMendedRandom": "ECSFLRandom",
    "FedGMHMended": "FedGMH",
    "SCFPFLMended": "SCFPFL",
    "SCFPFLMendedClusterOnly": "SCFPFLClusterOnly",
    "SCFPFLMendedFourierOnly": "SCFPFLFourierOnly",
    "SCFPFLMendedNoAgent": "SCFPFLNoAgent",
    "SCFPFLMendedNoKL": "SCFPFLNoKL",
    **{f"FedPCMended{control}": f"FedPC{control}" for control in _FEDPC},
}
