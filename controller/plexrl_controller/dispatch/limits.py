"""Bounds of the service: what exceeds one is refused with its name and number."""

MAX_OUTSTANDING_CALLS = 4096
"""Calls of a job that are not terminal or not acknowledged."""
MAX_SEQUENCE_AHEAD = 1024
"""How far a sequence number may run ahead of the next one due."""
MAX_SESSIONS_PER_MODEL = 8
"""Open ones."""
MAX_HELLO_SESSIONS = 1024
"""That a client asks after when it opens its stream."""
SESSION_IN_USE_S = 60.0
"""One of which something was asked within so long is not ended to make room for another."""
MAX_CONCURRENT = 64
DEFAULT_CONCURRENT = 16
"""Calls of a session that are with the engine at a time."""
DEFAULT_GRACE_S = 5.0
GRACE_RANGE_S = (0.0, 60.0)
DEFAULT_IDLE_LIMIT_S = 3600.0
IDLE_LIMIT_RANGE_S = (10.0, 86_400.0)
MAX_IDLE_HINT_S = 86_400.0
MAX_MODELS_PER_JOB = 16
MAX_LIVE_JOBS_PER_TENANT = 256
MAX_LABELS = 32
MAX_CLIENT_STATE_BYTES = 64 * 1024
MAX_REMEMBERED_PUTS = 64
"""Requests of a job that replaced its client state and are known by their ids."""
MAX_LORA_RANK = 4096
"""What a worker takes is less, and what it registers."""
MAX_CONFIG_BYTES = 64 * 1024
MAX_BATCH_TOKENS = 4_000_000
MAX_BATCH_SEQUENCES = 65_536
MAX_COMPLETIONS = 1024
MAX_STOP_STRINGS = 16
MAX_ACK_CALLS = 1024
MAX_FRAME_MESSAGES = 256
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A frame with several messages; one large message goes alone."""
DEFAULT_LEASE_S = 60.0
LEASE_RANGE_S = (5.0, 3600.0)
DEFAULT_CALL_TIMEOUT_S = 3600.0
CALL_TIMEOUT_RANGE_S = (1.0, 86_400.0)
WORKER_LEASE_S = 10.0
WORKER_SYNC_INTERVAL_S = 2.0
