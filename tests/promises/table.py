"""Which test shows which promise, and one change to the code that this test must not survive.

Data alone. Each row is a defect that somebody could make: a line of the code, what it becomes, and what that breaks.
"""

from dataclasses import dataclass

PROMISES = {
    "G01": "a mutating call carries a key and runs once, whoever resends it",
    "G02": "accumulated gradients are part of a model's state and survive a swap",
    "G03": "every accepted call ends, with a reason, within its deadline",
    "G04": "a dead engine is never reported as success, nor a living daemon as dead for ever",
    "G05": "the database never carries bulk; heartbeats never queue behind calls",
    "G06": "generation uses the weights that were named, and says which",
    "G07": "no cache survives a change of weights",
    "G08": "weights are verified after every swap, before the first token",
    "G09": "memory that a swap frees is measured, and residue ends the engine",
    "G10": "a restart reaps its own orphans before it says ready",
    "G11": "a lost client frees what it held; its last snapshot stays",
    "G12": "one job's calls, errors and end never stall or fail another's",
    "G13": "waiting is bounded and explained",
    "G14": "demand is durable before work is dispatched",
    "G15": "a checkpoint counts only with its hashed commit record",
    "G16": "the last checkpoint of a job never expires by itself",
    "G17": "what cannot be honoured is refused at submit, with the reason",
    "G18": "what is not ready yet is retryable; results stay until they are acknowledged",
    "G19": "addresses are leased and fenced, never guessed",
    "G20": "a controller's death loses no accepted call and stops no running one",
    "G21": "a worker's death ends no job: snapshot and replay, bit for bit",
    "G22": "what the control plane keeps does not grow without bound",
    "G23": "a hostile tenant gets nothing of another's",
}


@dataclass(frozen=True)
class Mutation:
    """A change that breaks a promise, and the test that must notice.

    test: a pytest node id. file, old, new: the change. breaks: what is wrong then. seen: what the test's failure must
    say, where that is no plain assertion. engine: whether the test needs the real engine.
    """

    promise: str
    test: str
    file: str
    old: str
    new: str
    breaks: str
    seen: str = ""
    engine: bool = False


CONTROLLER, WORKER = "controller/plexrl_controller", "worker/plexrl_worker"

MUTATIONS = (
    Mutation(
        "G01",
        "tests/component/test_dispatch.py::test_the_same_request_is_the_same_call_and_other_content_is_refused",
        f"{CONTROLLER}/dispatch/submit.py",
        "known = ledger.call_by_request.get((submission.model.job_id, submission.request_id))",
        "known = None",
        "a resent request is another call",
        seen="is taken",
    ),
    Mutation(
        "G01",
        "tests/component/test_worker_orders.py::test_a_call_sent_again_does_not_run_again",
        f"{WORKER}/orders.py",
        "        known = self._attempts.find(order.call)\n",
        "        known = None\n",
        "a worker executes an order again that it has executed",
    ),
    Mutation(
        "G02",
        "tests/component/test_worker_orders.py::test_states_come_back_bit_equal_after_the_other_model_had_the_device",
        f"{WORKER}/engine/ledger.py",
        "        self._resident.add(component)\n        self._parked.pop(component, None)\n",
        "        self._resident.add(component)\n",
        "what changed on the device is not copied when its model leaves",
    ),
    Mutation(
        "G03",
        "tests/component/test_dispatch.py::test_a_deadline_ends_a_call_that_waits",
        f"{CONTROLLER}/dispatch/reaper.py",
        "call_lifecycle.TERMINAL and c.deadline < batch.now]",
        "call_lifecycle.TERMINAL and c.deadline < 0.0]",
        "nobody looks at deadlines",
    ),
    Mutation(
        "G03",
        "tests/component/test_dispatch.py::test_a_cancel_whose_end_was_lost_with_a_stream_still_ends",
        f"{CONTROLLER}/dispatch/workers.py",
        "    await _send_again(core, worker_id)\n    _stop",
        "    _stop",
        "what was on a stream that broke is not sent again",
    ),
    Mutation(
        "G04",
        "tests/fault/test_worker_engine_death.py"
        "::test_an_idle_engine_that_dies_with_a_changed_state_is_told_without_an_order",
        f"{WORKER}/residency.py",
        "lost = any(not copies.parked for copies in self.components(model_id).values())",
        "lost = False",
        "an older host copy is taken for the state that died with its engine",
    ),
    Mutation(
        "G06",
        "tests/e2e/test_engine_vllm.py::TestQwen3::test_another_version_is_refused",
        f"{WORKER}/engine/vllm_torch.py",
        "        if held != weights_version:\n",
        "        if False:\n",
        "an engine generates with whatever weights it has",
        engine=True,
    ),
    Mutation(
        "G06",
        "tests/component/test_dispatch.py"
        "::test_a_sync_lets_earlier_generates_finish_also_where_both_waited_for_the_worker",
        f"{CONTROLLER}/dispatch/readiness.py",
        "older = [call_id for call_id, version in index.generates.items() if version < sync.sequence]",
        "older: list[CallId] = []",
        "a sync does not wait for generates at the version before it",
    ),
    Mutation(
        "G06",
        "tests/component/test_pulls.py::test_a_pull_waits_for_its_version_and_the_next_version_for_the_pull",
        f"{CONTROLLER}/dispatch/readiness.py",
        "return older + older_pulls(ledger, sync.model_id, sync.sequence)",
        "return older",
        "a sync does not wait for those who are to take the version before it elsewhere",
    ),
    Mutation(
        "G06",
        "tests/component/test_worker_weights.py::test_a_source_says_why_not",
        f"{WORKER}/weight_serving.py",
        "if deployment.weights_version > weights_version:",
        "if False:",
        "a worker gives the weights that it has, whatever version is asked for",
    ),
    Mutation(
        "G08",
        "tests/unit/test_worker_tiers.py::test_a_damaged_file_is_never_taken_for_the_state",
        f"{WORKER}/parked_files.py",
        "if digest.hexdigest() != segment.sha256:",
        "if False:",
        "what comes from disk is not compared with its hash",
    ),
    Mutation(
        "G09",
        "tests/component/test_worker_tiers.py"
        "::test_an_engine_that_keeps_memory_after_a_swap_is_replaced_and_no_state_is_lost",
        f"{WORKER}/host.py",
        "if process.residue_bytes > self._settings.residue_bytes and not in_use:",
        "if False:",
        "an engine that keeps memory goes on",
    ),
    Mutation(
        "G10",
        "tests/fault/test_worker_daemon_process.py"
        "::test_after_kill_nine_of_the_daemon_no_engine_is_left_and_the_next_life_works",
        f"{WORKER}/daemon.py",
        'if reaped := reap_orphans(settings.state_dir / "engines"):',
        "if reaped := []:",
        "a new life does not look for what the life before left",
    ),
    Mutation(
        "G10",
        "tests/fault/test_worker_daemon_process.py::test_reaping_ends_exactly_what_an_earlier_life_left",
        f"{WORKER}/supervisor.py",
        'if leftovers.intersection(process.info["cmdline"] or ()) and _lives(process):',
        "if False:",
        "an orphan is left alone",
    ),
    Mutation(
        "G11",
        "tests/component/test_dispatch.py::test_an_expired_lease_frees_the_worker_and_ends_every_call",
        f"{CONTROLLER}/dispatch/reaper.py",
        "facts.lease_end < batch.now:",
        "facts.lease_end < 0.0:",
        "a lost client's job is kept",
    ),
    Mutation(
        "G12",
        "tests/component/test_dispatch.py::test_finishing_a_job_stops_its_running_call_and_another_job_goes_on",
        f"{CONTROLLER}/dispatch/core.py",
        "                    self._abort(record)",
        "                    pass",
        "the calls of a job that ended run on",
    ),
    Mutation(
        "G12",
        "tests/fault/test_worker_engine_death.py"
        "::test_an_engine_that_dies_while_it_parks_loses_its_model_and_the_load_goes_on",
        f"{WORKER}/host.py",
        "                self.engine_failed(process, error, journal)\n                return",
        "                raise self.engine_failed(process, error, journal) from error",
        "the death of one job's engine fails the next job's swap",
    ),
    Mutation(
        "G13",
        "tests/unit/test_wait_bound.py::test_a_flood_starves_nobody",
        f"{CONTROLLER}/scheduling/next_slice.py",
        "    starving = [job for job in waiting if now - waiting_since(job) >= policy.starvation_bound_s]\n"
        "    if view.in_flight:",
        "    starving = []\n    if view.in_flight:",
        "a job may wait for ever behind others",
    ),
    Mutation(
        "G14",
        "tests/unit/test_group_writer.py::test_commit_returns_when_the_store_has_it",
        f"{CONTROLLER}/store/writer.py",
        "        self._queue.append(_Waiting(changes, rows, _inline_bytes(changes), then))",
        "        then(None)\n"
        "        self._queue.append(_Waiting(changes, rows, _inline_bytes(changes), lambda _: None))",
        "what is not durable yet is told",
    ),
    Mutation(
        "G15",
        "tests/component/test_worker_snapshots.py::test_a_damaged_snapshot_is_refused_and_the_one_before_is_used",
        f"{WORKER}/snapshots.py",
        "or digest.hexdigest() != file.sha256:",
        "or False:",
        "a snapshot's bytes are not compared with their hash",
    ),
    Mutation(
        "G15",
        "tests/component/test_worker_checkpoints.py"
        "::test_what_was_never_committed_is_not_found_and_is_swept_by_the_next_life",
        f"{WORKER}/daemon.py",
        "        checkpoints.remove_partial()\n",
        "",
        "what a killed worker had begun stays",
    ),
    Mutation(
        "G16",
        "tests/component/test_worker_snapshots.py::test_the_budget_takes_the_oldest_but_never_the_last_of_a_model",
        f"{WORKER}/snapshots.py",
        "expendable = [c for c in others if c is not newest[c.facts.model_id]]",
        "expendable = others",
        "a full directory takes a model's last snapshot",
    ),
    Mutation(
        "G16",
        "tests/component/test_recovery.py"
        "::test_the_last_snapshot_of_a_job_that_nobody_renewed_stays_and_a_deleted_models_go",
        f"{CONTROLLER}/dispatch/cascade.py",
        "if committed and job is not None and job.state in (JobState.EXPIRED, JobState.FAILED):",
        "if False:",
        "the last snapshot of a job that expired goes with it",
    ),
    Mutation(
        "G16",
        "tests/store/test_g22_retention.py::test_what_a_checkpoint_belongs_to_stays",
        f"{CONTROLLER}/store/retention.py",
        "          AND NOT EXISTS (SELECT FROM checkpoints WHERE checkpoints.model_id = models.model_id)\n",
        "",
        "what a checkpoint belongs to goes with history",
        seen="the database refused",
    ),
    Mutation(
        "G17",
        "tests/component/test_dispatch.py::test_a_lora_rank_that_no_worker_offers_is_refused",
        f"{CONTROLLER}/dispatch/models.py",
        "            lora_rank=settings.lora.rank,\n",
        "",
        "a LoRA rank is ignored",
    ),
    Mutation(
        "G17",
        "tests/component/test_worker_orders.py::test_settings_that_are_not_offered_are_refused",
        f"{WORKER}/placement.py",
        "        check_settings(order.settings)\n",
        "",
        "a worker ignores settings that it does not know",
    ),
    Mutation(
        "G19",
        "tests/component/test_order_stream.py::test_g19_another_worker_at_a_reused_address_gets_no_orders",
        f"{CONTROLLER}/dispatch/grpc_transport.py",
        "if status.worker_id != worker_id:",
        "if False:",
        "whoever answers at a worker's old address gets its orders",
    ),
    Mutation(
        "G19",
        "tests/component/test_worker_orders.py::test_orders_of_another_life_or_an_older_controller_are_refused",
        f"{WORKER}/fences.py",
        "if worker_incarnation != self.worker_incarnation:",
        "if False:",
        "orders for an earlier life are executed",
    ),
    Mutation(
        "G20",
        "tests/component/test_dispatch.py::test_a_new_leader_goes_on_where_the_old_one_stopped",
        f"{CONTROLLER}/dispatch/workers.py",
        "    await _send_again(core, worker_id)\n    _stop",
        "    _stop",
        "a new leader does not ask for the calls that run",
    ),
    Mutation(
        "G21",
        "tests/component/test_recovery.py"
        "::test_a_worker_that_dies_is_given_its_models_calls_again_and_nobody_hears_of_it",
        f"{CONTROLLER}/dispatch/replay_log.py",
        "REPLAYED = frozenset({CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP,",
        "REPLAYED = frozenset({CallKind.OPTIM_STEP,",
        "forward_backward is not executed again",
    ),
    Mutation(
        "G22",
        "tests/store/test_g22_retention.py::test_g22_a_week_of_traffic_levels_off",
        f"{CONTROLLER}/store/retention.py",
        "for step in (EVENTS, INTERVALS,",
        "for step in (INTERVALS,",
        "events stay for ever",
    ),
    Mutation(
        "G23",
        "tests/component/test_authorization.py::test_another_tenants_resources_do_not_exist",
        f"{CONTROLLER}/api/auth.py",
        "return self.role in (Role.ADMIN, Role.VIEWER, Role.WORKER) or self.tenant == tenant",
        "return True",
        "whoever knows an id reaches what it names",
    ),
    Mutation(
        "G01",
        "tests/component/test_resends.py::test_a_client_state_that_comes_again_late_does_not_undo_the_next",
        f"{CONTROLLER}/dispatch/jobs.py",
        "    known[key.request_id] = key.request_hash\n",
        "",
        "a client state that comes again late undoes a later one",
    ),
    Mutation(
        "G01",
        "tests/component/test_resends.py::test_a_resume_that_comes_again_late_frees_nothing_that_failed_since",
        f"{CONTROLLER}/dispatch/models.py",
        "if (resumed := done_before(core, key)) is not None:",
        "if (resumed := None) is not None:",
        "a resume that comes again late frees a sequence that failed since",
        seen="a request id is already stored",
    ),
    Mutation(
        "G01",
        "tests/component/test_resends.py::test_the_same_request_again_is_the_same_outcome_and_changes_nothing",
        f"{CONTROLLER}/dispatch/jobs.py",
        "    remember(batch, key, job.job_id)\n",
        "",
        "a job is created, and its request forgotten",
        seen="a live job is named",
    ),
    Mutation(
        "G05",
        "tests/component/test_heartbeats.py::test_leases_are_renewed_while_the_store_does_not_answer",
        f"{CONTROLLER}/api/jobs.py",
        "        lease_end = jobs.heartbeat(self._core, job, idle_s)",
        "        await self._core.commit(self._core.batch())\n"
        "        lease_end = jobs.heartbeat(self._core, job, idle_s)",
        "a client's heartbeat queues behind calls",
    ),
    Mutation(
        "G05",
        "tests/component/test_heartbeats.py::test_leases_are_renewed_while_the_store_does_not_answer",
        f"{CONTROLLER}/dispatch/workers.py",
        "    group.resident_bytes = request.resident_bytes\n",
        "    group.resident_bytes = request.resident_bytes\n    await core.commit(core.batch())\n",
        "a worker's heartbeat queues behind calls",
    ),
    Mutation(
        "G05",
        "tests/component/test_heartbeats.py::test_rows_carry_small_arguments_and_results_only",
        f"{CONTROLLER}/payloads/inline.py",
        "INLINE_LIMIT_BYTES = 64 * 1024",
        "INLINE_LIMIT_BYTES = 64 * 1024 * 1024",
        "large arguments and results go into the database",
    ),
    Mutation(
        "G13",
        "tests/component/test_learning.py::test_explain_names_the_job_that_has_the_group_and_the_numbers",
        f"{CONTROLLER}/api/explain.py",
        "if why_not.blocker is None:",
        "if True:",
        "ExplainCall does not say who has the group",
    ),
    Mutation(
        "G14",
        "tests/component/test_heartbeats.py::test_no_order_leaves_before_its_attempt_is_durable",
        f"{CONTROLLER}/dispatch/cycle.py",
        "        return alone and not waiting and all(ready.kind is CallKind.GENERATE for ready in calls)",
        "        return alone and not waiting",
        "a worker is given a call that is not in the store yet",
    ),
    Mutation(
        "G15",
        "tests/component/test_killed_writes.py::test_a_snapshot_is_whole_or_not_there_at_every_moment_of_its_writing",
        f"{WORKER}/checkpoints.py",
        '        leaving = final.with_name(f"{final.name}.deleted{self._partial_suffix}")',
        "        leaving = final",
        "a snapshot that is deleted counts while its files go",
        seen="plexrl_worker.errors.CheckpointCorrupt",
    ),
    Mutation(
        "G15",
        "tests/component/test_killed_writes.py::test_a_checkpoint_counts_with_its_record_alone_at_every_moment",
        f"{WORKER}/checkpoints.py",
        "            _write_synced(partial / COMMIT_FILE, json.dumps(manifest, indent=1, sort_keys=True).encode())\n"
        "            _sync_directory(partial)\n"
        "            if replace:\n"
        "                self.delete(facts.checkpoint_id)\n"
        "            os.rename(partial, final)\n",
        "            if replace:\n"
        "                self.delete(facts.checkpoint_id)\n"
        "            os.rename(partial, final)\n"
        "            _write_synced(final / COMMIT_FILE, json.dumps(manifest, indent=1, sort_keys=True).encode())\n",
        "the record is written where it counts, byte after byte",
        seen="CheckpointCorrupt",
    ),
    Mutation(
        "G18",
        "tests/component/test_results.py::test_a_result_is_there_until_it_is_acknowledged_whoever_asks",
        f"{CONTROLLER}/dispatch/core.py",
        "            for payload in (call.spec, call.result):",
        "            for payload in (call.spec,):",
        "a restart forgets that large results are waited for",
        seen="NotFound",
    ),
    Mutation(
        "G18",
        "tests/component/test_results.py::test_a_tokenizer_that_is_away_with_its_model_is_retryable",
        f"{CONTROLLER}/api/models.py",
        "if error.code() is grpc.StatusCode.FAILED_PRECONDITION and present.state is ModelState.RECOVERING:",
        "if False:",
        "a model that is being restored is told as one that cannot be used",
        seen="FailedPrecondition",
    ),
    Mutation(
        "G20",
        "tests/store/test_conformance.py::TestTerms::test_an_older_term_can_no_longer_write",
        f"{CONTROLLER}/store/statements.py",
        'FENCE = "UPDATE leader SET commit_id = $2 WHERE term = $1 AND',
        'FENCE = "UPDATE leader SET commit_id = $2 WHERE $1::bigint > 0 AND',
        "a controller that was replaced writes on",
    ),
    Mutation(
        "G06",
        "tests/e2e/test_engine_vllm.py::TestQwen3::test_trainer_and_generator_agree_only_after_a_sync",
        f"{WORKER}/engine/weight_slot.py",
        "        for segment in self._segments:\n            self._view(segment).copy_",
        "        for segment in list(self._segments)[1:]:\n            self._view(segment).copy_",
        "a sync leaves one tensor of the generator as it was",
        engine=True,
    ),
    Mutation(
        "G07",
        "tests/e2e/test_engine_vllm.py::TestQwen3::test_cached_prefixes_of_older_weights_are_never_used",
        f"{WORKER}/engine/generator.py",
        "cache_salt=content.key",
        'cache_salt="any"',
        "cached attention states are used with other weights than made them",
        engine=True,
    ),
    Mutation(
        "G08",
        "tests/e2e/test_engine_vllm.py::TestQwen3::test_a_flipped_bit_in_a_parked_component_is_found",
        f"{WORKER}/engine/moves.py",
        "            if self._device.unpark(place, pieces) != copy.checksum:",
        "            if self._device.unpark(place, pieces) is None:",
        "what comes back onto the device is not compared with its checksum",
        engine=True,
    ),
)
