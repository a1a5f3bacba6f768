"""Identifiers: opaque strings with a type each, so that a job's id cannot be passed for a model's."""

from typing import NewType

JobId = NewType("JobId", str)
ModelId = NewType("ModelId", str)
CallId = NewType("CallId", str)
SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
GroupId = NewType("GroupId", str)
CheckpointId = NewType("CheckpointId", str)
SnapshotId = NewType("SnapshotId", str)
RequestId = NewType("RequestId", str)
Tenant = NewType("Tenant", str)
TokenId = NewType("TokenId", str)
