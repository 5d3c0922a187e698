"""Names that files of version 0.1 use for settings of methods and for classes.

In version 0.1 one class held all readings of a paper, with settings that chose between protocols. Files of that version
hold every setting, so that `coterie.methods.restored` can find the class that does the same today.
"""

from typing import Any

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
# Class: the dataclass of its server's state, which is a dictionary in checkpoints of version 0.1.
SERVERS = {"PFedHN": "PFedHNServer", **dict.fromkeys(_SCFPFL, "SCFPFLServer")}
# Class: the dataclass of its clients' states, which are dictionaries in files of version 0.1.
CLIENTS = dict.fromkeys(_SCFPFL, "SCFPFLClient")
# Class: the name that checkpoints of version 0.1 have for it.
FORMER = {
    "FedCPMDCode": "FedCPMD",
    "FedCPMDMended": "FedCPMD",
    "FedCPMDCodeAuto": "FedCPMDAuto",
    "FedCPMDCodeOracle": "FedCPMDOracle",
    "FedCPMDCodeRandom": "FedCPMDRandom",
    "FedCPMDCodeClassifier": "FedCPMDClassifier",
    "FedCPMDMendedAuto": "FedCPMDAuto",
    "FedCPMDMendedOracle": "FedCPMDOracle",
    "FedCPMDMendedRandom": "FedCPMDRandom",
    "FedCPMDMendedClassifier": "FedCPMDClassifier",
    "ECSFLMended": "ECSFL",
    "ECSFLMendedFarthest": "ECSFLFarthest",
    "ECSFLMendedMeanAll": "ECSFLMeanAll",
    "ECSFLMendedRandom": "ECSFLRandom",
    "ECSFLWeighted": "ECSFL",
    "FedGMHMended": "FedGMH",
    "SCFPFLMended": "SCFPFL",
    "SCFPFLMendedClusterOnly": "SCFPFLClusterOnly",
    "SCFPFLMendedFourierOnly": "SCFPFLFourierOnly",
    "SCFPFLMendedNoAgent": "SCFPFLNoAgent",
    "SCFPFLMendedNoKL": "SCFPFLNoKL",
    "FedPCMended": "FedPC",
    "FedPCMendedJ1": "FedPCJ1",
    "FedPCMendedNoProto": "FedPCNoProto",
    "FedPCMendedNoMixing": "FedPCNoMixing",
    "FedPCMendedMean": "FedPCMean",
    "FedPCMendedRandom": "FedPCRandom",
}
