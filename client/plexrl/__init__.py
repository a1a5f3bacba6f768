"""PlexRL's client: an RLVR job holds the algorithm, the cluster executes the functions of its models.

    import plexrl

    with plexrl.connect() as cluster, cluster.job("reverse") as job:
        policy = job.model("policy", base=plexrl.Init(config, seed=0))
        completions = policy.generate(prompts, n=8, max_tokens=16)
        batch = plexrl.TrainingBatch.from_completions(prompts, completions, advantages)
        policy.forward_backward(batch, loss="grpo")
        policy.optim_step(lr=1e-4)
        policy.sync_weights()

Every function waits for its result; its `.submit` returns a future instead, which is also awaitable.
"""

from plexrl.bases import Bundle, Catalogue, Init
from plexrl.batch import TrainingBatch
from plexrl.cluster import Cluster, connect
from plexrl.errors import (
    AlreadyExists,
    CallCancelled,
    CallExpired,
    CallFailed,
    ConfigurationError,
    DataLoss,
    EngineError,
    FailedPrecondition,
    InvalidArgument,
    JobEnded,
    ModelEnded,
    NoFeasibleWorker,
    NonFinite,
    NotFound,
    OutOfMemory,
    PermissionDenied,
    PlexRLError,
    PredecessorFailed,
    RequestIdReused,
    ResourceExhausted,
    SessionEnded,
    StateLost,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VersionGone,
)
from plexrl.futures import CallFuture
from plexrl.job import Job
from plexrl.model import BASE, Affinity, AtLeast, Lora, Model
from plexrl.replicas import RolloutReplicas
from plexrl.results import (
    Checkpoint,
    Completions,
    ForwardBackward,
    LoadCheckpoint,
    OptimStep,
    Scores,
    SyncWeights,
)
from plexrl.session import Session

__all__ = [
    "BASE",
    "Affinity",
    "AlreadyExists",
    "AtLeast",
    "Bundle",
    "CallCancelled",
    "CallExpired",
    "CallFailed",
    "CallFuture",
    "Catalogue",
    "Checkpoint",
    "Cluster",
    "Completions",
    "ConfigurationError",
    "DataLoss",
    "EngineError",
    "FailedPrecondition",
    "ForwardBackward",
    "Init",
    "InvalidArgument",
    "Job",
    "JobEnded",
    "LoadCheckpoint",
    "Lora",
    "Model",
    "ModelEnded",
    "NoFeasibleWorker",
    "NonFinite",
    "NotFound",
    "OptimStep",
    "OutOfMemory",
    "PermissionDenied",
    "PlexRLError",
    "PredecessorFailed",
    "RequestIdReused",
    "ResourceExhausted",
    "RolloutReplicas",
    "Scores",
    "Session",
    "SessionEnded",
    "StateLost",
    "SyncWeights",
    "TrainingBatch",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "VersionGone",
    "connect",
]
