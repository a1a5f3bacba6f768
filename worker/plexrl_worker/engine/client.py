"""The daemon's end of an engine child: starts the process, sends it functions, hears progress, notices death and hangs.

Every function returns an EngineCall: await it for its outcome, `abort()` it, read its progress. Functions run in the
order in which they were called, but for declare, attach_host, detach_host and preload, which run beside the others, in
order among themselves. Knows frames and wire messages; decides nothing.

    engine = await EngineProcess.start("vllm", settings)
    layout = await engine.declare("model-1", DeploymentSettings())
    call = engine.generate("model-1", spec, weights_version=3)
    result = await call
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from google.protobuf.message import DecodeError

from plexrl.v1 import engine_pb2 as e
from plexrl.v1 import types_pb2 as t
from plexrl_worker.engine import codec, frames, port
from plexrl_worker.engine.call import EngineCall
from plexrl_worker.engine.errors import EngineDied, EngineError, EngineHung
from plexrl_worker.engine.settings import Base, DeploymentSettings, EngineSettings

T = TypeVar("T")

_MAX_CALLS_IN_FLIGHT = 128
_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 18


class EngineProcess:
    """An engine child. `start` makes one; `close` or `kill` ends it.

    hang_limit_s: a running function that shows no progress for so long is a hang: the child is killed and what is in
    flight raises EngineHung. When the child ends by itself, what is in flight and what comes later raises EngineDied.
    """

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, hang_limit_s: float) -> None:
        self.description: port.EngineDescription
        self.started_s = time.monotonic()
        # Device memory that it held when it was new, and what it kept beyond that after the last move, in bytes.
        self.floor_bytes = 0
        self.residue_bytes = 0
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._sock = sock
        self._hang_limit_s = hang_limit_s
        self._calls: OrderedDict[int, EngineCall[Any]] = OrderedDict()
        self._next_request_id = 1
        self._last_frame_s = time.monotonic()
        self._death: EngineDied | None = None
        self._hung = False
        self._closing = False
        self._exited = asyncio.Event()
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._unsent = bytearray()
        self._flush_due = False
        self._received = bytearray()
        self._loop = loop = asyncio.get_running_loop()
        self._silent = loop.create_future()
        """Resolves when the child's end of the socket is closed."""
        loop.add_reader(sock, self._receive)
        self._watcher = loop.create_task(self._watch())
        self._reaper = loop.create_task(self._reap())

    @classmethod
    async def start(
        cls,
        kind: str,
        settings: EngineSettings,
        *,
        directory: Path | None = None,
        start_limit_s: float = 300.0,
        hang_limit_s: float = 120.0,
        log_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a child ("vllm" or "fake") and its engine. Must run in the daemon's main thread: the child dies with
        the thread that made it. `log_file` takes its output, else it goes where the daemon's goes. `directory` is the
        child's own, for the caller to remove; without one the child makes a temporary one.

        Raises Unsupported, InvalidArgument and other EngineErrors of the engine's start, EngineDied, EngineHung.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = None if log_file is None else log_file.open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plexrl_worker.engine.child"),
                *("--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid()), "--engine", kind),
                *(() if directory is None else ("--directory", str(directory))),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if log is not None:
                log.close()
        ours.setblocking(False)
        engine = cls(process, ours, max(start_limit_s, hang_limit_s))
        try:
            start = e.EngineRequest(start=codec.start_request(settings))
            engine.description = await engine._call(start, lambda r: codec.description(r.description))
        except BaseException:
            await engine.kill()
            raise
        engine._hang_limit_s = hang_limit_s
        return engine

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def death(self) -> EngineDied | None:
        """How the child ended; None while it lives."""
        return self._death

    @property
    def busy(self) -> bool:
        """Whether a function runs or is queued."""
        return bool(self._calls)

    async def wait_exit(self) -> EngineDied:
        """Waits until the child has ended and been reaped; says how."""
        await self._exited.wait()
        assert self._death is not None
        return self._death

    async def kill(self) -> EngineDied:
        """Ends the child at once; what is in flight raises EngineDied."""
        self._signal_kill()
        return await self.wait_exit()

    async def close(self, limit_s: float = 5.0) -> EngineDied:
        """Lets the child end by closing its socket; kills it when that takes longer than `limit_s`."""
        self._closing = True
        self._shut_socket()
        try:
            return await asyncio.wait_for(self.wait_exit(), limit_s)
        except TimeoutError:
            return await self.kill()

    # The functions of port.Engine. Those that the wire knows take and return its messages as they are.

    def declare(self, deployment_id: str, settings: DeploymentSettings) -> EngineCall[port.StateLayout]:
        """See port.Engine.declare."""
        request = e.EngineRequest(deployment_id=deployment_id, declare=codec.declare_request(settings))
        return self._call(request, lambda r: codec.layout(r.layout))

    def initialize(self, deployment_id: str, base: Base, rollout_version: int = 0) -> EngineCall[port.DeploymentState]:
        """See port.Engine.initialize."""
        initialize = codec.initialize_request(base, rollout_version)
        request = e.EngineRequest(deployment_id=deployment_id, initialize=initialize)
        return self._call(request, lambda r: codec.deployment_state(r.state))

    def attach_host(self, deployment_id: str, memory_fd: int, size_bytes: int) -> EngineCall[None]:
        """Maps shared memory (a memfd) as the deployment's host image; `memory_fd` stays the caller's."""
        attach = e.AttachHostRequest(size_bytes=size_bytes)
        request = e.EngineRequest(deployment_id=deployment_id, attach_host=attach)
        return self._call(request, _nothing, descriptor=os.dup(memory_fd))

    def detach_host(self, deployment_id: str) -> EngineCall[None]:
        """See port.Engine.detach_host."""
        return self._call(e.EngineRequest(deployment_id=deployment_id, detach_host=e.EngineNoArguments()), _nothing)

    def swap_out(self, deployment_id: str, components: Collection[port.Component]) -> EngineCall[port.SwapReport]:
        """See port.Engine.swap_out."""
        swap = e.SwapOutRequest(components=codec.component_values(components))
        request = e.EngineRequest(deployment_id=deployment_id, swap_out=swap)
        return self._call(request, lambda r: codec.swap_report(r.swap))

    def write_back(self, deployment_id: str, components: Collection[port.Component]) -> EngineCall[port.SwapReport]:
        """See port.Engine.write_back."""
        write_back = e.WriteBackRequest(components=codec.component_values(components))
        request = e.EngineRequest(deployment_id=deployment_id, write_back=write_back)
        return self._call(request, lambda r: codec.swap_report(r.swap))

    def swap_in(
        self, deployment_id: str, parked: port.ParkedState, components: Collection[port.Component]
    ) -> EngineCall[port.SwapReport]:
        """See port.Engine.swap_in."""
        swap = e.SwapInRequest(parked=codec.parked_message(parked), components=codec.component_values(components))
        request = e.EngineRequest(deployment_id=deployment_id, swap_in=swap)
        return self._call(request, lambda r: codec.swap_report(r.swap))

    def preload(self, deployment_id: str, parked: port.ParkedState) -> EngineCall[port.SwapReport]:
        """See port.Engine.preload."""
        preload = e.PreloadRequest(parked=codec.parked_message(parked))
        request = e.EngineRequest(deployment_id=deployment_id, preload=preload)
        return self._call(request, lambda r: codec.swap_report(r.swap))

    def state(self, deployment_id: str) -> EngineCall[port.DeploymentState]:
        """See port.Engine.state."""
        request = e.EngineRequest(deployment_id=deployment_id, state=e.EngineNoArguments())
        return self._call(request, lambda r: codec.deployment_state(r.state))

    def drop(self, deployment_id: str) -> EngineCall[None]:
        """See port.Engine.drop."""
        return self._call(e.EngineRequest(deployment_id=deployment_id, drop=e.EngineNoArguments()), _nothing)

    def acquire_device(self) -> EngineCall[None]:
        """See port.Engine.acquire_device."""
        return self._call(e.EngineRequest(acquire_device=e.EngineNoArguments()), _nothing)

    def release_device(self) -> EngineCall[port.DeviceRelease]:
        """See port.Engine.release_device."""
        request = e.EngineRequest(release_device=e.EngineNoArguments())
        return self._call(request, lambda r: port.DeviceRelease(r.released.released_bytes, r.released.held_bytes))

    def generate(
        self,
        deployment_id: str,
        spec: t.GenerateSpec,
        weights_version: int,
        execution: str = "",
        *,
        concurrent: bool = False,
    ) -> EngineCall[t.GenerateResult]:
        """Samples from exactly `weights_version`, whatever spec.version says; see port.Engine.generate.

        Concurrent ones that follow each other run together: see port.Engine.generate_concurrently.
        """
        generate = e.EngineGenerateRequest(
            weights_version=weights_version,
            prompts=spec.prompts,
            sampling=spec.sampling,
            execution=execution,
            concurrent=concurrent,
        )
        request = e.EngineRequest(deployment_id=deployment_id, generate=generate)
        return self._call(request, lambda r: r.generation)

    def forget_execution(self, execution: str) -> EngineCall[None]:
        """See port.Engine.forget_execution."""
        return self._call(e.EngineRequest(forget_execution=execution), _nothing)

    def score(self, deployment_id: str, spec: t.ScoreSpec) -> EngineCall[t.ScoreResult]:
        """See port.Engine.score."""
        request = e.EngineRequest(deployment_id=deployment_id, score=e.EngineScoreRequest(batch=spec.batch))
        return self._call(request, lambda r: r.scores)

    def score_rollout(self, deployment_id: str, spec: t.ScoreSpec, weights_version: int) -> EngineCall[t.ScoreResult]:
        """See port.Engine.score_rollout."""
        score = e.EngineScoreRequest(batch=spec.batch, rollout=True, weights_version=weights_version)
        request = e.EngineRequest(deployment_id=deployment_id, score=score)
        return self._call(request, lambda r: r.scores)

    def forward_backward(self, deployment_id: str, spec: t.ForwardBackwardSpec) -> EngineCall[t.ForwardBackwardResult]:
        """See port.Engine.forward_backward."""
        request = e.EngineRequest(deployment_id=deployment_id, forward_backward=spec)
        return self._call(request, lambda r: r.train)

    def optim_step(self, deployment_id: str, spec: t.OptimStepSpec) -> EngineCall[t.OptimStepResult]:
        """See port.Engine.optim_step."""
        request = e.EngineRequest(deployment_id=deployment_id, optim_step=spec.adamw)
        return self._call(request, lambda r: r.step)

    def sync(self, deployment_id: str, weights_version: int) -> EngineCall[None]:
        """See port.Engine.sync."""
        sync = e.EngineSyncRequest(weights_version=weights_version)
        return self._call(e.EngineRequest(deployment_id=deployment_id, sync=sync), _nothing)

    def save(self, deployment_id: str, directory: str) -> EngineCall[port.SavedState]:
        """See port.Engine.save."""
        request = e.EngineRequest(deployment_id=deployment_id, save=e.EngineSaveRequest(directory=directory))
        return self._call(request, lambda r: codec.saved(r.saved))

    def load(
        self, deployment_id: str, directory: str, rollout_version: int | None = None
    ) -> EngineCall[port.DeploymentState]:
        """See port.Engine.load."""
        load = e.EngineLoadRequest(directory=directory, weights_version=rollout_version)
        request = e.EngineRequest(deployment_id=deployment_id, load=load)
        return self._call(request, lambda r: codec.deployment_state(r.state))

    def _call(
        self, request: e.EngineRequest, unpack: Callable[[e.EngineResponse], T], descriptor: int | None = None
    ) -> EngineCall[T]:
        request.request_id = self._next_request_id
        self._next_request_id += 1
        call = EngineCall(self, request.request_id, unpack)
        if self._death is not None:
            call.fail(self._death)
        elif len(self._calls) >= _MAX_CALLS_IN_FLIGHT:
            call.fail(EngineError(f"{len(self._calls)} functions are in flight, the limit: wait for some"))
        else:
            if not self._calls:
                self._last_frame_s = time.monotonic()
            self._calls[request.request_id] = call
            self.send(request, descriptor)
            return call
        if descriptor is not None:
            os.close(descriptor)
        return call

    def send(self, request: e.EngineRequest, descriptor: int | None = None) -> None:
        """Queues a frame; what is queued in one turn of the loop leaves together."""
        self._outgoing.append((request.SerializeToString(), descriptor))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Writes what the socket takes; the rest when it takes more."""
        self._flush_due = False
        if self._sock.fileno() < 0:
            return
        try:
            while self._unsent or self._outgoing:
                if not self._unsent and not self._take_frames():
                    # A header is so small that the kernel takes it whole, with its descriptor, or not at all.
                    payload, descriptor = self._outgoing[0]
                    assert descriptor is not None
                    socket.send_fds(self._sock, [frames.header(payload)], [descriptor])
                    self._outgoing.popleft()
                    os.close(descriptor)
                    self._unsent += payload
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._flush_due = True
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._signal_kill()
        self._loop.remove_writer(self._sock)

    def _take_frames(self) -> bool:
        """Takes the next frames that have no descriptor; whether there are any."""
        while self._outgoing and self._outgoing[0][1] is None and len(self._unsent) < _WRITE_BYTES:
            self._unsent += frames.framed(self._outgoing.popleft()[0])
        return bool(self._unsent)

    def _receive(self) -> None:
        """Takes the frames that have come."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock)
            if not self._silent.done():
                self._silent.set_result(None)
            if not self._closing:
                self._signal_kill()
            return
        self._last_frame_s = time.monotonic()
        self._received += data
        start = 0
        try:
            while len(self._received) - start >= frames.HEADER.size:
                body = start + frames.HEADER.size
                end = body + frames.payload_bytes(self._received[start:body])
                if len(self._received) < end:
                    break
                response = e.EngineResponse.FromString(bytes(memoryview(self._received)[body:end]))
                start = end
                self._hear(response)
        except (ValueError, DecodeError):
            # No frame: nothing that follows can be read, and whoever waits must not wait for ever.
            self._loop.remove_reader(self._sock)
            self._signal_kill()
            raise
        del self._received[:start]

    def _hear(self, response: e.EngineResponse) -> None:
        if response.HasField("progress"):
            if call := self._calls.get(response.request_id):
                call.advance(response.progress)
        elif call := self._calls.pop(response.request_id, None):
            call.finish(response)

    async def _watch(self) -> None:
        """Kills the child when the running function has shown nothing for the hang limit."""
        while True:
            await asyncio.sleep(min(1.0, self._hang_limit_s / 4))
            if self._calls and time.monotonic() - self._last_frame_s > self._hang_limit_s:
                self._hung = True
                self._signal_kill()

    async def _reap(self) -> None:
        code = await self._process.wait()
        died_by = -code if code < 0 else None
        if self._hung:
            message = f"engine child {self.pid} showed no progress for {self._hang_limit_s:g} s and was killed"
            self._death = EngineHung(message, exit_code=None, signal=died_by)
        elif died_by is not None:
            message = f"engine child {self.pid} was ended by {signal.Signals(died_by).name}"
            self._death = EngineDied(message, exit_code=None, signal=died_by)
        else:
            self._death = EngineDied(f"engine child {self.pid} exited with code {code}", exit_code=code)
        # Frames that the child sent before it died still count.
        await asyncio.wait([self._silent], timeout=1.0)
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        os.close(self._pidfd)
        self._pidfd = -1
        for _, descriptor in self._outgoing:
            if descriptor is not None:
                os.close(descriptor)
        self._outgoing.clear()
        for call in self._calls.values():
            call.fail(self._death)
        self._calls.clear()
        self._exited.set()

    def _shut_socket(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _signal_kill(self) -> None:
        # Not Process.kill: it may reap a child that is just exiting, and asyncio then reports code 255 for it.
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def _nothing(_: e.EngineResponse) -> None:
    return None
