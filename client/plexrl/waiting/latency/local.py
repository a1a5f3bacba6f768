"""The latency engine on a simulated cluster in this process, in the cluster's virtual time.

It is a client like any other, without the socket: it watches and calls, and in between the controllers come to rest.
"""

from plexrl.waiting.cluster.api.errors import ApiError
from plexrl.waiting.cluster.api.requests import ApiRequest
from plexrl.waiting.cluster.api.watch import Watch
from plexrl.waiting.cluster.clock import Timer
from plexrl.waiting.cluster.resources import ResourceType
from plexrl.waiting.cluster.simulation import Simulation
from plexrl.waiting.latency.presets import PRESETS, Preset
from plexrl.waiting.latency.stages import WATCHED, Call, StageEngine

_EVENTS = 10_000


class LocalLatency:
    """Runs an engine on a simulation, from now on."""

    def __init__(self, simulation: Simulation, engine: StageEngine) -> None:
        self._simulation = simulation
        self._engine = engine
        self._timer: Timer | None = None
        for call in engine.begin(simulation.clock.timestamp()):
            self._make(call)
        self._watches = {kind: self._watch(kind) for kind in WATCHED}
        simulation.join(self)

    def pump(self) -> bool:
        """Takes in what has changed and does the first thing that is due; returns whether there was anything."""
        now_s = self._simulation.now_s
        seen = False
        for kind, watch in self._watches.items():
            for event, item in watch.read_objects(_EVENTS):
                seen = True
                self._engine.observe(kind, event, item, now_s)
        calls = self._engine.step(now_s, self._simulation.clock.timestamp())
        for call in calls or ():
            self._make(call)
        self._set_timer()
        return seen or calls is not None

    def _watch(self, kind: ResourceType) -> Watch:
        path = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        answer = self._simulation.api.handle(ApiRequest("GET", f"{path}/{kind.plural}", {"watch": "true"}))
        if not isinstance(answer, Watch):
            raise TypeError(f"{kind.plural} cannot be watched")
        return answer

    def _make(self, call: Call) -> None:
        request = ApiRequest(
            call.method, call.path, content_type=call.content_type, value=call.value, user_agent="latency"
        )
        try:
            self._simulation.api.handle(request)
        except ApiError as error:
            # What it was about has gone or moved on meanwhile, which the watch tells too.
            if error.code not in (403, 404, 409):
                raise
            if call.on_refusal is not None:
                call.on_refusal()

    def _set_timer(self) -> None:
        due_s = self._engine.next_due_s()
        if self._timer is not None and self._timer.callback is not None:
            if self._timer.due_s == due_s:
                return
            self._timer.cancel()
        self._timer = None if due_s is None else self._simulation.clock.call_at(due_s, _nothing)


def simulate(preset: Preset | str = "calm", *, seed: int = 0, episode: int = 0) -> Simulation:
    """A cluster whose work takes the time of a preset. Raises KeyError for a preset of no such name."""
    simulation = Simulation(seed=seed)
    engine = StageEngine(PRESETS[preset] if isinstance(preset, str) else preset, seed=seed, episode=episode)
    LocalLatency(simulation, engine)
    simulation.settle()
    return simulation


def _nothing() -> None:
    """A timer only brings the clock to its time; settling then pumps."""
