"""The process environment that vLLM and torch need, set before either is imported. Imports neither."""

import os

# OMP: passive waiting, or idle threads burn the cores that other processes need. Dynamo: compiles for seconds on the
# first log-probabilities. In-process engine: the child owns the step loop. The rest: no network, no telemetry.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Deterministic matrix products on CUDA.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def prepare(threads: int) -> None:
    """Sets what is needed for `threads` compute threads. What the caller has set stays, but for the thread count."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
