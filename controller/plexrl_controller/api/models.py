"""ModelService: models, their sequences, tokenizers and checkpoints."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from plexrl import wire
from plexrl.v1 import model_pb2, model_pb2_grpc, worker_pb2_grpc
from plexrl_controller.api import messages, validation
from plexrl_controller.api.auth import identity, require_visible
from plexrl_controller.api.jobs import key_of
from plexrl_controller.dispatch import limits, models
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.grpc_transport import GrpcTransport
from plexrl_controller.domain.errors import (
    ControllerError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from plexrl_controller.domain.ids import CheckpointId, JobId, ModelId, WorkerId
from plexrl_controller.domain.records import Job, Model
from plexrl_controller.domain.states import ModelState

MAX_TEXTS = 4096
MAX_TEXT_BYTES = 16 * 1024 * 1024
RELAY_TIMEOUT_S = 60.0


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """The wire's ModelService over the dispatcher's core; tokenizers and checkpoint files are the worker's."""

    def __init__(self, core: Core, transport: GrpcTransport) -> None:
        self._core = core
        self._transport = transport

    async def CreateModel(self, request: model_pb2.CreateModelRequest, context: Any) -> model_pb2.Model:
        """Creates and places a model."""
        job = self._job(request.job_id)
        validation.check_settings(request.settings)
        self._check_base(request.base)
        if request.role not in model_pb2.ModelRole.values():
            raise InvalidArgument(f"role: {request.role} is no known value")
        if request.role == model_pb2.MODEL_ROLE_ROLLOUT and request.settings.HasField("lora"):
            raise InvalidArgument("settings.lora: a model of role rollout has no adapters; leave it out")
        messages.labels_of(request.affinity.require, "affinity.require")
        for model_id in (*request.affinity.colocate_model_ids, *request.affinity.avoid_model_ids):
            self._model(model_id)
        spec = models.ModelSpec(
            name=messages.name_of(request.name, "name"),
            base=request.base,
            role=request.role or model_pb2.MODEL_ROLE_POLICY,
            settings=request.settings,
            affinity=request.affinity,
        )
        model = await models.create_model(self._core, key_of(f"{job.tenant}/CreateModel", request), job, spec)
        return messages.model_message(self._core, model)

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.Model:
        """Reads one model."""
        model = self._core.ledger.models.get(ModelId(request.model_id))
        model = model or await self._core.store.get_model(ModelId(request.model_id))
        if model is None:
            raise NotFound(f"no model {request.model_id!r}")
        require_visible(model.tenant, "model", request.model_id)
        return messages.model_message(self._core, model)

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        """Lists a job's models."""
        job = self._job(request.job_id)
        mine = [self._core.ledger.models[m] for m in self._core.ledger.models_of_job.get(job.job_id, ())]
        return model_pb2.ListModelsResponse(models=[messages.model_message(self._core, m) for m in mine])

    async def DeleteModel(self, request: model_pb2.DeleteModelRequest, context: Any) -> model_pb2.Model:
        """Takes a model off its worker."""
        messages.request_id_of(request.request_id)
        model = await models.delete_model(self._core, self._model(request.model_id))
        return messages.model_message(self._core, model)

    async def ResumeSequence(
        self, request: model_pb2.ResumeSequenceRequest, context: Any
    ) -> model_pb2.ResumeSequenceResponse:
        """Frees a blocked sequence."""
        model = self._model(request.model_id)
        key = key_of(f"{model.model_id}/ResumeSequence", request)
        next_sequence = await models.resume_sequence(self._core, key, model)
        return model_pb2.ResumeSequenceResponse(next_sequence=next_sequence)

    async def Tokenize(self, request: model_pb2.TokenizeRequest, context: Any) -> model_pb2.TokenizeResponse:
        """Turns text into token ids."""
        model = self._with_tokenizer(request.model_id)
        if not 1 <= len(request.texts) <= MAX_TEXTS or request.ByteSize() > MAX_TEXT_BYTES:
            raise InvalidArgument(f"texts: want 1 to {MAX_TEXTS} texts of together at most {MAX_TEXT_BYTES} bytes")
        stub, metadata = self._worker(model)
        try:
            tokenized: model_pb2.TokenizeResponse = await stub.TokenizeText(
                request, metadata=metadata, timeout=RELAY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._relayed(error, model) from error
        return tokenized

    async def Detokenize(self, request: model_pb2.DetokenizeRequest, context: Any) -> model_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        model = self._with_tokenizer(request.model_id)
        _, lengths = wire.batch_arrays(request.batch, min_length=0)
        if not 1 <= lengths.size <= MAX_TEXTS:
            raise InvalidArgument(f"batch: {lengths.size} sequences, want 1 to {MAX_TEXTS}")
        stub, metadata = self._worker(model)
        try:
            texts: model_pb2.DetokenizeResponse = await stub.DetokenizeIds(
                request, metadata=metadata, timeout=RELAY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._relayed(error, model) from error
        return texts

    async def ListCheckpoints(
        self, request: model_pb2.ListCheckpointsRequest, context: Any
    ) -> model_pb2.ListCheckpointsResponse:
        """Lists a model's checkpoints, newest first."""
        model = await self._core.store.get_model(ModelId(request.model_id))
        if model is None:
            raise NotFound(f"no model {request.model_id!r}")
        require_visible(model.tenant, "model", request.model_id)
        checkpoints = await self._core.store.list_checkpoints(model.model_id)
        return model_pb2.ListCheckpointsResponse(checkpoints=[messages.checkpoint_message(c) for c in checkpoints])

    async def ExportCheckpoint(
        self, request: model_pb2.ExportCheckpointRequest, context: Any
    ) -> AsyncIterator[model_pb2.FileChunk]:
        """Streams a checkpoint's files through from a worker that can read them."""
        checkpoint_id = CheckpointId(request.checkpoint_id)
        known = self._core.ledger.checkpoints.get(checkpoint_id)
        checkpoint = known or await self._core.store.get_checkpoint(checkpoint_id)
        if checkpoint is None or not identity().may_see(checkpoint.tenant):
            raise NotFound(f"no checkpoint {request.checkpoint_id!r}")
        model = self._core.ledger.models.get(checkpoint.model_id)
        preferred = [model.worker_id] if model is not None and model.worker_id is not None else []
        for worker_id in [*preferred, *self._core.ledger.workers]:
            channel = self._transport.channel(WorkerId(worker_id))
            if channel is None:
                continue
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                async for chunk in stub.ReadCheckpoint(request, metadata=self._transport.metadata):
                    yield chunk
            except grpc.aio.AioRpcError as error:
                raise relayed(error) from error
            return
        raise Unavailable("no worker is connected to read the checkpoint from; retry", retry_after_s=1.0)

    def _check_base(self, base: model_pb2.ModelBase) -> None:
        match base.WhichOneof("source"):
            case "init":
                if len(base.init.config_json.encode()) > limits.MAX_CONFIG_BYTES:
                    raise InvalidArgument(f"base.init.config_json: more than {limits.MAX_CONFIG_BYTES} bytes")
                models.architecture_of(base)
            case "catalogue":
                messages.name_of(base.catalogue, "base.catalogue")
            case "bundle":
                validation.check_payload_names(base.bundle.payload_ids)
            case _:
                raise InvalidArgument("base: set one of init, catalogue, bundle")

    def _with_tokenizer(self, model_id: str) -> Model:
        model = self._model(model_id)
        if model.state is ModelState.CREATING:
            raise _not_ready(model)
        if not model.has_tokenizer:
            raise FailedPrecondition(
                f"model {model.name} has no tokenizer: its base is a bare config; send token ids", reason="NO_TOKENIZER"
            )
        return model

    def _worker(self, model: Model) -> tuple[Any, tuple[tuple[str, str], ...]]:
        channel = self._transport.channel(model.worker_id) if model.worker_id is not None else None
        if channel is None:
            raise Unavailable(f"the worker of model {model.name} is not connected; retry", retry_after_s=1.0)
        return worker_pb2_grpc.WorkerServiceStub(channel), self._transport.metadata

    def _relayed(self, error: grpc.aio.AioRpcError, model: Model) -> ControllerError:
        """As `relayed`; a worker that does not have the model yet will have it."""
        present = self._core.ledger.models.get(model.model_id, model)
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and present.state is ModelState.RECOVERING:
            return _not_ready(present)
        return relayed(error)

    def _job(self, job_id: str) -> Job:
        job = self._core.ledger.job(JobId(job_id))
        require_visible(job.tenant, "job", job_id)
        return job

    def _model(self, model_id: str) -> Model:
        model = self._core.ledger.model(ModelId(model_id))
        require_visible(model.tenant, "model", model_id)
        return model


def _not_ready(model: Model) -> Unavailable:
    return Unavailable(f"model {model.name} is {model.state.name}; retry", reason="MODEL_NOT_READY", retry_after_s=0.5)


def relayed(error: grpc.aio.AioRpcError) -> ControllerError:
    """A worker's answer, told as the controller's own."""
    detail = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(detail)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(detail)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return FailedPrecondition(detail)
        case grpc.StatusCode.DATA_LOSS:
            return DataLoss(detail)
        case _:
            return Unavailable(f"the worker did not answer ({error.code().name}); retry", retry_after_s=1.0)
