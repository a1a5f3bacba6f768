"""The engine child: one process around one engine, driven by its daemon over an inherited socket.

    python -m plexrl_worker.engine.child --fd 5 --parent-pid 4711 --engine vllm

The main thread runs one function at a time, but for concurrent generates, which run together; a second one runs those
that move memory beside it (`BESIDE`); a reader thread takes frames, so that an abort is heard at once. The process ends
when its parent dies (PR_SET_PDEATHSIG), when the socket closes, or by an error that is not a typed one of the engine
inside start. It decides nothing: what to run, when, and what to do about failures is the daemon's.
"""

import argparse
import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

import numpy as np

from plexrl.v1 import engine_pb2 as e
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import codec, environment, frames, port
from plexrl_worker.engine.concurrent import SharedTime
from plexrl_worker.engine.errors import Aborted, EngineError, InvalidArgument, Yielded
from plexrl_worker.engine.settings import EngineSettings

_PR_SET_PDEATHSIG = 1
_PROGRESS_INTERVAL_S = 0.05
# Of each of the generates that run together.
_PROGRESS_TOGETHER_S = 0.25
# While requests are queued, responses wait for each other so long, or until there are so many bytes of them.
_TOGETHER_S = 0.002
_TOGETHER_BYTES = 1 << 18

log = logging.getLogger("plexrl.engine")

EngineFactory = Callable[[EngineSettings, Path | None], port.Engine]


def start_vllm(settings: EngineSettings, directory: Path | None) -> port.Engine:
    """The real engine. Imported here because importing it takes seconds and needs its environment set before."""
    environment.prepare(settings.threads)
    from plexrl_worker.engine.vllm_torch import start

    return start(settings, directory)


def start_fake(settings: EngineSettings, _: Path | None) -> port.Engine:
    """The test double, without torch and vLLM."""
    from plexrl_worker.engine.fake import FakeEngine

    return FakeEngine(settings)


FACTORIES: dict[str, EngineFactory] = {"vllm": start_vllm, "fake": start_fake}


# What another deployment can do while the main thread computes.
BESIDE = frozenset({"declare", "attach_host", "detach_host", "preload"})

# A request, with the file descriptor that came with it.
Queued = tuple[e.EngineRequest, int | None]


class Requests:
    """Functions in order of arrival, put by one thread and taken by another. Bounded by the daemon, which has so many
    calls in flight at most.
    """

    def __init__(self) -> None:
        self._waiting: deque[Queued] = deque()
        self._came = threading.Condition()

    def put(self, queued: Queued) -> None:
        """Adds one at the end."""
        with self._came:
            self._waiting.append(queued)
            self._came.notify()

    def get(self) -> Queued:
        """Waits for the next one."""
        with self._came:
            while not self._waiting:
                self._came.wait()
            return self._waiting.popleft()

    def take_while(self, wanted: Callable[[e.EngineRequest], bool]) -> list[Queued]:
        """Takes those at the front that are wanted."""
        taken: list[Queued] = []
        if not self._waiting:
            return taken
        with self._came:
            while self._waiting and wanted(self._waiting[0][0]):
                taken.append(self._waiting.popleft())
        return taken

    def empty(self) -> bool:
        """Whether none waits."""
        return not self._waiting


class RequestControl:
    """The Control of one request: heard through the child's abort set, speaks in progress frames, one per interval, the
    first of them at once, or after an interval for functions that are often shorter.
    """

    def __init__(
        self, child: "Child", request_id: int, first_after_s: float = 0.0, interval_s: float = _PROGRESS_INTERVAL_S
    ) -> None:
        self._child = child
        self._request_id = request_id
        self._interval_s = interval_s
        self._next_frame_s = time.monotonic() + first_after_s

    def aborted(self) -> bool:
        """Whether the daemon asked to end this request."""
        self._child.send_late()
        return self._child.is_aborted(self._request_id)

    def yielding(self) -> bool:
        """Whether the daemon asked this request to give way."""
        return self._child.is_yielding(self._request_id)

    def progress(self, done: int, total: int) -> None:
        """Sends a progress frame, at most one per interval."""
        now_s = time.monotonic()
        if now_s >= self._next_frame_s:
            self._next_frame_s = now_s + self._interval_s
            self._child.send(
                e.EngineResponse(request_id=self._request_id, progress=e.EngineProgress(done=done, total=total))
            )


class Child:
    """Serves one engine on one socket."""

    def __init__(self, sock: socket.socket, factory: EngineFactory, directory: Path | None) -> None:
        self._sock = sock
        self._directory = directory
        self._factory = factory
        self._engine: port.Engine | None = None
        self._requests = Requests()
        self._moves = Requests()
        # Requests that came and are not answered; what is asked of others comes too late and is not kept.
        self._open: set[int] = set()
        self._aborted: set[int] = set()
        self._yielding: set[int] = set()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._unsent_since_s = 0.0

    def run(self) -> None:
        """Serves until the socket closes; does not return."""
        threading.Thread(target=self._read, name="engine-frames", daemon=True).start()
        threading.Thread(target=self._serve, args=(self._moves,), name="engine-moves", daemon=True).start()
        self._serve(self._requests)

    def _serve(self, requests: Requests) -> None:
        while True:
            request, descriptor = requests.get()
            start_unix_ns = time.time_ns()
            if request.generate.concurrent and self._engine is not None:
                Together(self, self._engine, request, requests).run(start_unix_ns)
                continue
            response = self._answer(request, descriptor)
            response.start_unix_ns, response.end_unix_ns = start_unix_ns, time.time_ns()
            self.finish(request, response, more_follows=not requests.empty())

    def finish(self, request: e.EngineRequest, response: e.EngineResponse, *, more_follows: bool) -> None:
        """Answers a request: nothing that is asked of it from now on is kept."""
        response.request_id = request.request_id
        if self._engine is not None and request.HasField("generate"):
            response.generator_steps = self._engine.generator_steps
        with self._lock:
            for ids in (self._open, self._aborted, self._yielding):
                ids.discard(request.request_id)
        self.send(response, more_follows=more_follows)

    def send(self, response: e.EngineResponse, *, more_follows: bool = False) -> None:
        """Sends a frame, or keeps it for a moment when another follows; ends the process when the daemon is gone."""
        frame = frames.framed(response.SerializeToString())
        with self._sending:
            now_s = time.monotonic()
            if not self._unsent:
                self._unsent_since_s = now_s
            self._unsent += frame
            late = now_s - self._unsent_since_s > _TOGETHER_S or len(self._unsent) > _TOGETHER_BYTES
            if late or not more_follows:
                self._flush()

    def send_late(self) -> None:
        """Sends what has been kept for its moment: a running function calls this between its steps."""
        if self._unsent and time.monotonic() - self._unsent_since_s > _TOGETHER_S:
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        try:
            self._sock.sendall(unsent)
        except OSError:
            os._exit(0)

    def is_aborted(self, request_id: int) -> bool:
        """Whether an abort of the request has arrived."""
        with self._lock:
            return request_id in self._aborted

    def is_yielding(self, request_id: int) -> bool:
        """Whether the request has been asked to give way."""
        return bool(self._yielding) and request_id in self._yielding

    def _read(self) -> None:
        """Takes frames until the daemon closes the socket, then ends the process, whatever the main thread does."""
        try:
            reader = frames.Reader(self._sock)
            while True:
                request = e.EngineRequest.FromString(reader.receive())
                function = request.WhichOneof("function")
                descriptor = reader.descriptors.popleft() if function == "attach_host" else None
                if function == "abort_request_id":
                    self._ask(self._aborted, request.abort_request_id)
                elif function == "yield_request_id":
                    self._ask(self._yielding, request.yield_request_id)
                else:
                    with self._lock:
                        self._open.add(request.request_id)
                    lane = self._moves if function in BESIDE else self._requests
                    lane.put((request, descriptor))
        except (frames.Closed, OSError):
            os._exit(0)

    def _ask(self, asked: set[int], request_id: int) -> None:
        with self._lock:
            if request_id in self._open:
                asked.add(request_id)

    def _answer(self, request: e.EngineRequest, descriptor: int | None) -> e.EngineResponse:
        function = request.WhichOneof("function")
        try:
            self.check_wanted(request)
            return self._run(request, descriptor)
        # The daemon decides what an unforeseen error means for the state: it gets it typed, and the log gets the trace.
        except Exception as error:  # noqa: BLE001
            return failure(str(function), error)

    def check_wanted(self, request: e.EngineRequest) -> None:
        """Raises Aborted or Yielded for a request that was asked to end or to give way before it began."""
        if self.is_aborted(request.request_id):
            raise Aborted("the request was aborted before it began")
        if request.HasField("generate") and self.is_yielding(request.request_id):
            raise Yielded("the request gave way before it began")

    def _run(self, request: e.EngineRequest, descriptor: int | None) -> e.EngineResponse:
        function = request.WhichOneof("function")
        if function == "start":
            if self._engine is not None:
                raise InvalidArgument("start: the engine is already started")
            self._engine = self._factory(codec.settings(request.start), self._directory)
            # An engine is a million objects that stay: looking through them would stop generation each time.
            gc.collect()
            gc.freeze()
            return e.EngineResponse(description=codec.description_response(self._engine.describe()))
        if self._engine is None:
            raise InvalidArgument(f"{function}: start the engine first")
        first_after_s = _PROGRESS_INTERVAL_S if function == "generate" else 0.0
        control = RequestControl(self, request.request_id, first_after_s)
        return run_function(self._engine, request, descriptor, control)


class Together:
    """Concurrent generates that run together: those of one deployment and version that follow each other in the queue.

    An engine's Arrivals: the first, and while it runs those that come. Each is answered at its own end.
    """

    def __init__(self, child: Child, engine: port.Engine, first: e.EngineRequest, requests: Requests) -> None:
        self._child = child
        self._engine = engine
        self._first = first
        self._requests = requests
        self._coming = [first]
        self._running: dict[port.ConcurrentGenerate, e.EngineRequest] = {}

    def run(self, now_ns: int) -> None:
        """Returns when none is left and all are answered."""
        self._time = SharedTime(now_ns)
        generate = self._first.generate
        try:
            self._engine.generate_concurrently(self._first.deployment_id, generate.weights_version, self)
        except Exception as error:  # noqa: BLE001 - as in Child._answer: whoever has not ended ends with it
            for request in self._coming:
                self._time.join(request.request_id, time.time_ns())
            for request in [*self._coming, *self._running.values()]:
                self._answer(request, failure("generate", error))

    def take(self) -> Sequence[port.ConcurrentGenerate]:
        """See port.Arrivals."""
        self._child.send_late()
        coming, self._coming = self._coming, []
        if not coming:
            coming = [request for request, _ in self._requests.take_while(self._joins)]
        taken: list[port.ConcurrentGenerate] = []
        for request in coming:
            self._time.join(request.request_id, time.time_ns())
            try:
                self._child.check_wanted(request)
                generate = self._generate(request)
            except Exception as error:  # noqa: BLE001 - as in Child._answer: it ends this one alone
                self._answer(request, failure("generate", error))
            else:
                self._running[generate] = request
                taken.append(generate)
        return taken

    def ended(self, generate: port.ConcurrentGenerate, outcome: port.Generation | EngineError) -> None:
        """See port.Arrivals."""
        if isinstance(outcome, EngineError):
            response = failure("generate", outcome)
        else:
            response = e.EngineResponse(generation=codec.generation_result(outcome))
        self._answer(self._running.pop(generate), response)

    def _joins(self, request: e.EngineRequest) -> bool:
        generate, first = request.generate, self._first.generate
        of_same = request.deployment_id == self._first.deployment_id
        return generate.concurrent and of_same and generate.weights_version == first.weights_version

    def _generate(self, request: e.EngineRequest) -> port.ConcurrentGenerate:
        control = RequestControl(self._child, request.request_id, _PROGRESS_INTERVAL_S, _PROGRESS_TOGETHER_S)
        prompts = codec.token_batch(request.generate.prompts, name="prompts")
        params = codec.sampling(request.generate.sampling)
        return port.ConcurrentGenerate(prompts, params, control, request.generate.execution)

    def _answer(self, request: e.EngineRequest, response: e.EngineResponse) -> None:
        response.start_unix_ns, response.end_unix_ns = self._time.leave(request.request_id, time.time_ns())
        # Its next turn may wait for it: it does not wait for the end of another step.
        self._child.finish(request, response, more_follows=False)


def failure(function: str, error: Exception) -> e.EngineResponse:
    """The answer of a function that raised."""
    match error:
        case EngineError():
            reason, message = error.reason, str(error)
        case MemoryError():
            reason, message = "OUT_OF_MEMORY", f"{function}: {error}"
        case _:
            log.error("engine_function_failed function=%s", function, exc_info=error)
            reason, message = EngineError.reason, f"{function}: {type(error).__name__}: {error}"
    return e.EngineResponse(failure=e.EngineFailure(reason=reason, message=message))


def run_function(
    engine: port.Engine, request: e.EngineRequest, descriptor: int | None, control: port.Control
) -> e.EngineResponse:
    """Runs one function of the engine and packs its outcome. Raises EngineError kinds."""
    deployment_id = request.deployment_id
    match request.WhichOneof("function"):
        case "declare":
            layout = engine.declare(deployment_id, codec.deployment_settings(request.declare))
            return e.EngineResponse(layout=codec.layout_response(layout))
        case "initialize":
            base = codec.base(request.initialize)
            state = engine.initialize(deployment_id, base, request.initialize.weights_version, control)
            return e.EngineResponse(state=codec.state_response(state))
        case "attach_host":
            engine.attach_host(deployment_id, _map(descriptor, request.attach_host.size_bytes))
            return _done()
        case "detach_host":
            engine.detach_host(deployment_id)
            return _done()
        case "preload":
            report = engine.preload(deployment_id, codec.parked(request.preload.parked), control)
            return e.EngineResponse(swap=codec.swap_response(report))
        case "swap_out":
            report = engine.swap_out(deployment_id, codec.components(request.swap_out.components), control)
            return e.EngineResponse(swap=codec.swap_response(report))
        case "write_back":
            report = engine.write_back(deployment_id, codec.components(request.write_back.components), control)
            return e.EngineResponse(swap=codec.swap_response(report))
        case "swap_in":
            parked, components = request.swap_in.parked, request.swap_in.components
            report = engine.swap_in(deployment_id, codec.parked(parked), codec.components(components), control)
            return e.EngineResponse(swap=codec.swap_response(report))
        case "state":
            return e.EngineResponse(state=codec.state_response(engine.state(deployment_id)))
        case "drop":
            engine.drop(deployment_id)
            return _done()
        case "acquire_device":
            engine.acquire_device()
            return _done()
        case "release_device":
            released = engine.release_device()
            return e.EngineResponse(
                released=e.ReleaseDeviceResponse(released_bytes=released.released_bytes, held_bytes=released.held_bytes)
            )
        case "generate":
            prompts = codec.token_batch(request.generate.prompts, name="prompts")
            params = codec.sampling(request.generate.sampling)
            generate = request.generate
            generation = engine.generate(
                deployment_id, generate.weights_version, prompts, params, control, generate.execution
            )
            return e.EngineResponse(generation=codec.generation_result(generation))
        case "forget_execution":
            engine.forget_execution(request.forget_execution)
            return _done()
        case "score":
            batch = codec.token_batch(request.score.batch)
            if request.score.rollout:
                scores = engine.score_rollout(deployment_id, request.score.weights_version, batch, control)
            else:
                scores = engine.score(deployment_id, batch, control)
            return e.EngineResponse(scores=codec.scores_result(scores))
        case "forward_backward":
            arguments = codec.loss_arguments(request.forward_backward)
            metrics = engine.forward_backward(deployment_id, *arguments, control)
            return e.EngineResponse(train=codec.metrics_result(metrics))
        case "optim_step":
            step = engine.optim_step(deployment_id, codec.adamw(request.optim_step))
            return e.EngineResponse(step=t.OptimStepResult(grad_norm=step.grad_norm, step=step.step))
        case "sync":
            engine.sync(deployment_id, request.sync.weights_version)
            return _done()
        case "save":
            saved = engine.save(deployment_id, request.save.directory, control)
            return e.EngineResponse(saved=codec.saved_response(saved))
        case "load":
            version = request.load.weights_version if request.load.HasField("weights_version") else None
            state = engine.load(deployment_id, request.load.directory, version, control)
            return e.EngineResponse(state=codec.state_response(state))
        case "start" | "abort_request_id" | "yield_request_id" | None:
            raise InvalidArgument(f"function {request.WhichOneof('function')} cannot be run here")
        case unreachable:
            assert_never(unreachable)


def _done() -> e.EngineResponse:
    return e.EngineResponse(done=e.EngineNoArguments())


def _map(descriptor: int | None, size_bytes: int) -> port.ByteArray:
    """Maps shared memory writable and closes its descriptor; the mapping lives as long as the array."""
    if descriptor is None:
        raise InvalidArgument("attach_host: no file descriptor came with the frame")
    try:
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"attach_host: cannot map {size_bytes} bytes: {error}") from error
    finally:
        os.close(descriptor)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies; ends it now if that has happened already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent died before the engine child began")


def main() -> None:
    """Process entry."""
    parser = argparse.ArgumentParser(prog="plexrl-engine", description="An engine child of a PlexRL worker.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the daemon")
    parser.add_argument("--parent-pid", type=int, required=True, help="the daemon; this process dies with it")
    parser.add_argument("--engine", choices=sorted(FACTORIES), required=True, help="which engine")
    parser.add_argument("--directory", type=Path, help="private directory of this process (default: a temporary one)")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # The daemon ends children itself; a terminal's Ctrl-C must not reach them first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Child(socket.socket(fileno=arguments.fd), FACTORIES[arguments.engine], arguments.directory).run()


if __name__ == "__main__":
    main()
