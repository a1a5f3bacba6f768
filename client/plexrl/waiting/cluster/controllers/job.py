"""Jobs: pods that run to their end, as many at once and as often as asked for."""

from collections.abc import Iterable

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.controllers.events import EventRecorder
from plexrl.waiting.cluster.controllers.pods import is_active, is_ready, pod_from_template
from plexrl.waiting.cluster.objects import (
    Object,
    condition_is,
    controller_of,
    is_deleting,
    look_up,
    name_of,
    namespace_of,
    uid_of,
    where,
    with_condition,
)
from plexrl.waiting.cluster.registry import Deletion, Registry
from plexrl.waiting.cluster.resources import JOBS, PODS, ResourceType
from plexrl.waiting.cluster.store import Change, ChangeKind, Key

BACKOFF_S = 10.0
BACKOFF_LIMIT_S = 600.0


class JobController:
    """Counts how a job's pods end; a pod that was counted stays counted when it is deleted."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._events = EventRecorder(registry, "job-controller")
        # Pods that ended and were taken away, by job uid: succeeded, failed.
        self._lost: dict[str, list[int]] = {}
        self._failed_at_s: dict[str, float] = {}

    def concerns(self, kind: ResourceType, change: Change) -> Iterable[Key]:
        item = change.item
        if kind is JOBS:
            if change.kind is ChangeKind.DELETED:
                self._lost.pop(uid_of(item), None)
                self._failed_at_s.pop(uid_of(item), None)
            return [(namespace_of(item), name_of(item))]
        owner = controller_of(item) if kind is PODS else None
        if owner is None or owner["kind"] != "Job":
            return []
        if self._registry.is_gone(JOBS, (namespace_of(item), owner["name"])):
            return []
        phase = look_up(item, "status", "phase")
        before = look_up(change.previous, "status", "phase") if change.previous is not None else None
        if phase == "Failed" and before != "Failed":
            self._failed_at_s[owner["uid"]] = self._registry.clock.now_s
        if change.kind is ChangeKind.DELETED:
            lost = self._lost.setdefault(owner["uid"], [0, 0])
            if phase == "Succeeded":
                lost[0] += 1
            elif phase == "Failed":
                lost[1] += 1
        return [(namespace_of(item), owner["name"])]

    def reconcile(self, key: Key) -> float | None:
        job = self._registry.store.get(JOBS, key)
        if job is None or is_deleting(job):
            return None
        if condition_is(job, "Complete") or condition_is(job, "Failed"):
            return self._expire(job)
        pods = [pod for kind, pod in self._registry.store.owned_by(uid_of(job)) if kind is PODS]
        active = where(pods, is_active)
        lost = self._lost.get(uid_of(job), (0, 0))
        succeeded = lost[0] + sum(1 for pod in pods if look_up(pod, "status", "phase") == "Succeeded")
        failed = lost[1] + sum(1 for pod in pods if look_up(pod, "status", "phase") == "Failed")
        again_s: float | None = None
        if self._must_fail(job, failed, pods) or self._is_complete(job, succeeded, active):
            again_s = self._finish(job, active, succeeded, failed, pods)
        else:
            active, again_s = self._keep_running(job, active, succeeded, failed)
            self._write(job, active, succeeded, failed, [], [])
        return again_s

    def _keep_running(
        self, job: Object, active: list[Object], succeeded: int, failed: int
    ) -> tuple[list[Object], float | None]:
        spec = job["spec"]
        wanted = 0 if spec.get("suspend") else spec["parallelism"]
        if spec.get("completions") is not None:
            wanted = min(wanted, spec["completions"] - succeeded)
        elif succeeded:
            # Without a number of completions, the first success ends the work: no pods are added.
            wanted = min(wanted, len(active))
        again_s = self._deadline_s(job)
        if len(active) > wanted:
            for pod in active[wanted:]:
                self._registry.delete(PODS, namespace_of(pod), name_of(pod), Deletion())
                self._events.record(job, "SuccessfulDelete", f"Deleted pod: {name_of(pod)}")
            return active[:wanted], again_s
        wait_s = self._backoff_s(job, failed)
        if len(active) < wanted and wait_s > 0:
            return active, wait_s if again_s is None else min(wait_s, again_s)
        template = pod_from_template(job, spec["template"], f"{name_of(job)}-")
        for _ in range(wanted - len(active)):
            try:
                pod = self._registry.create(PODS, namespace_of(job), template)
            except ApiError as error:
                # A namespace that ends, or a template that no pod may have: said once, tried again at the next change.
                self._events.record(job, "FailedCreate", f"Error creating: {error.message}", "Warning")
                break
            self._events.record(job, "SuccessfulCreate", f"Created pod: {name_of(pod)}")
            active = [*active, pod]
        return active, again_s

    def _backoff_s(self, job: Object, failed: int) -> float:
        """How long to wait after a failure: ten seconds, doubled with each."""
        at_s = self._failed_at_s.get(uid_of(job))
        if at_s is None or failed == 0:
            return 0.0
        pause_s = min(BACKOFF_LIMIT_S, BACKOFF_S * 2.0 ** min(failed - 1, 30))
        return max(0.0, at_s + pause_s - self._registry.clock.now_s)

    def _deadline_s(self, job: Object) -> float | None:
        deadline_s, start = job["spec"].get("activeDeadlineSeconds"), look_up(job, "status", "startTime")
        if deadline_s is None or job["spec"].get("suspend"):
            return None
        passed_s = self._registry.clock.seconds_since(start) if start else 0.0
        return float(max(0.0, deadline_s - passed_s))

    def _must_fail(self, job: Object, failed: int, pods: list[Object]) -> tuple[str, str] | None:
        """Why a job has failed, if it has."""
        restarts = sum(
            entry.get("restartCount", 0)
            for pod in pods
            if pod["spec"]["restartPolicy"] == "OnFailure"
            for entry in look_up(pod, "status", "containerStatuses", default=[])
        )
        if failed + restarts > job["spec"]["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if self._deadline_s(job) == 0.0:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        return None

    def _is_complete(self, job: Object, succeeded: int, active: list[Object]) -> bool:
        completions = job["spec"].get("completions")
        if completions is None:
            return succeeded > 0 and not active
        return bool(succeeded >= completions)

    def _finish(
        self, job: Object, active: list[Object], succeeded: int, failed: int, pods: list[Object]
    ) -> float | None:
        why = self._must_fail(job, failed, pods)
        for pod in active:
            self._registry.delete(PODS, namespace_of(pod), name_of(pod), Deletion())
        if why is not None:
            reason, message = why
            early = {"type": "FailureTarget", "status": "True", "reason": reason, "message": message}
            last = {"type": "Failed", "status": "True", "reason": reason, "message": message}
            self._events.record(job, reason, message, "Warning")
        else:
            reason, message = "CompletionsReached", "Reached expected number of succeeded pods"
            early = {"type": "SuccessCriteriaMet", "status": "True", "reason": reason, "message": message}
            last = {"type": "Complete", "status": "True", "reason": reason, "message": message}
            self._events.record(job, "Completed", "Job completed")
        self._write(job, [], succeeded, failed, [early, last], active)
        return None

    def _write(
        self,
        job: Object,
        active: list[Object],
        succeeded: int,
        failed: int,
        conditions: list[Object],
        terminating: list[Object],
    ) -> None:
        now = self._registry.clock.timestamp()
        status = dict(job.get("status") or {})
        suspended = bool(job["spec"].get("suspend"))
        if "startTime" not in status and not suspended:
            status["startTime"] = now
        listed = list(status.get("conditions") or [])
        if suspended or condition_is(job, "Suspended"):
            state = {
                "type": "Suspended",
                "status": "True" if suspended else "False",
                "reason": "JobSuspended" if suspended else "JobResumed",
                "message": "Job suspended" if suspended else "Job resumed",
            }
            listed = with_condition(listed, {"lastProbeTime": now, **state}, now)
        for entry in conditions:
            listed = with_condition(listed, {"lastProbeTime": now, **entry}, now)
        counts = {"active": len(active), "succeeded": succeeded, "failed": failed}
        status = {key: value for key, value in status.items() if key not in counts}
        status |= {key: value for key, value in counts.items() if value}
        # Probe times would make a write of every look.
        known = {entry["type"]: entry for entry in look_up(job, "status", "conditions", default=[])}
        for index, entry in enumerate(listed):
            old = known.get(entry["type"])
            if old is not None and {**old, "lastProbeTime": 0} == {**entry, "lastProbeTime": 0}:
                listed[index] = old
        if listed:
            status["conditions"] = listed
        status["ready"] = sum(1 for pod in active if is_ready(pod))
        status["terminating"] = len(terminating)
        status["uncountedTerminatedPods"] = {}
        if any(entry["type"] == "Complete" for entry in conditions):
            status["completionTime"] = now
        self._registry.update_status(JOBS, job, status)

    def _expire(self, job: Object) -> float | None:
        """Deletes a finished job when its time to live is over."""
        ttl_s = job["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is None:
            return None
        ended = max(
            entry["lastTransitionTime"]
            for entry in look_up(job, "status", "conditions", default=[])
            if entry["type"] in ("Complete", "Failed") and entry["status"] == "True"
        )
        left_s = ttl_s - self._registry.clock.seconds_since(ended)
        if left_s > 0:
            return float(left_s)
        self._registry.delete(JOBS, namespace_of(job), name_of(job), Deletion())
        return None
