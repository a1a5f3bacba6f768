"""Every parameter of scheduling, in one frozen object. Each lever is a switch of its own, so that what it is worth can
be measured by turning it off (`docs/scheduling.md` has the figures)."""

from dataclasses import dataclass
from enum import Enum


class Order(Enum):
    """Who comes next among the jobs that wait."""

    LAS = "las"
    """Least attained service, divided by weight, set-up charged: equal shares whatever the calls look like."""
    HRRS = "hrrs"
    """Highest response ratio with set-up, (wait * weight + service + swap) / (service + swap)."""
    FIFO = "fifo"
    """The job whose oldest call has waited longest."""


class HoldRule(Enum):
    """When a group is kept for a job that has nothing to run while others wait."""

    SKI_RENTAL = "ski_rental"
    """Release at every turn: kept about as long as one move would take, less when the job is known to stay away for
    longer, more when it is known to come back sooner. At worst twice the optimum without predictions (Karlin et al.
    1988, "Competitive snoopy caching"), and bounded per call with wrong ones (docs/waiting.md; the trade-off is that of
    Purohit et al. 2018, "Improving online algorithms via ML predictions")."""
    PHASE = "phase"
    """Until the phase (rollout or training) is over: tool calls within it keep the group idle."""
    ITERATION = "iteration"
    """Until the job has synced its weights: the coarsest sharing, which the demo measures."""
    NEVER = "never"
    """Released at once, whatever the swap costs."""


class Strategy(Enum):
    """Which of the groups that fit gets a job whose demand is known."""

    PACK = "pack"
    """The fullest one."""
    SPREAD = "spread"
    """The emptiest one, a new one before that."""
    BACKFILL = "backfill"
    """Spread, and the first job that does not fit gets a reservation, which later jobs must not delay."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The parameters of `next_slice` and `place`."""

    order: Order = Order.HRRS
    hold: HoldRule = HoldRule.SKI_RENTAL
    quantum_s: float = 10.0
    """A job that always has work keeps the group this long while others wait."""
    max_swap_share: float = 0.25
    """It keeps it for longer where swaps are dear: they take at most this share of a slice's length."""
    starvation_bound_s: float = 600.0
    """Jobs whose oldest call has waited for longer are served first, in turn, a chunk each."""
    hold_limit_s: float = 120.0
    """No rule keeps the group idle for a job longer than this while others wait."""
    trust: float = 0.5
    """How much a learned stall changes the hold, in (0, 1]: 1 not at all, towards 0 entirely."""
    use_hints: bool = True
    """Believe what jobs say of their idle time (corrected)."""
    use_learned_stalls: bool = True
    """Predict stalls of jobs that say nothing."""
    chunking: bool = True
    """Long calls yield to waiting jobs, on groups that can."""
    chunk_s: float = 30.0
    """How long a call runs before it yields to others that wait; also the most work given ahead while others wait."""
    prefetch: bool = True
    """Load the next job's model while another runs, where the device has room."""
    write_back: bool = True
    """Copy changed state to the host tier in the background, so that eviction finds it clean."""
    window: int = 64
    """Most calls given to a group ahead of their execution."""
    contended_window: int = 4
    """The same while another job waits."""

    strategy: Strategy = Strategy.PACK
    max_members: int = 32
    """Most jobs on one group."""
    predict_slowdown: bool = True
    """A job joins a group only if every member's predicted slowdown stays within its target."""
    correct_variation: bool = True
    """Predictions know how regular the members are; otherwise all are taken to be as erratic as exponential ones."""
    cold_spread: bool = True
    """A job of which nothing is known gets a group of its own while there is room, else the emptiest with the memory;
    otherwise it is placed like one of `cold_busy_share`."""
    cold_busy_share: float = 0.5
    """What is assumed of a job of which nothing is known."""
    share_rollout: bool = True
    """Rollout groups may be shared too; otherwise only training groups and colocated ones are."""
    min_gain: float = 0.05
    """A shared group must be predicted to do at least this much more work than its members' best alone, else swaps eat
    the gain."""
    replace_at_boundaries: bool = True
    """When a job ends, members that miss their target may move, and groups that fit into others are emptied."""
    slowdown_margin: float = 1 / 3
    """Part of the slowdown that a target allows which placement keeps free for errors of the estimates, in [0, 1]."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        if not 0.0 < self.trust <= 1.0:
            raise ValueError(f"trust is {self.trust}, want a number in (0, 1]")
        if not 1 <= self.contended_window <= self.window:
            raise ValueError(
                f"contended_window is {self.contended_window} of a window of {self.window}, want 1 to {self.window}"
            )
        if not 0.0 <= self.slowdown_margin <= 1.0:
            raise ValueError(f"slowdown_margin is {self.slowdown_margin}, want a number in [0, 1]")
        for name in ("quantum_s", "max_swap_share", "chunk_s", "starvation_bound_s", "max_members"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, want a positive number")

    def promised(self, slowdown_target: float) -> float:
        """The predicted slowdown up to which a job with this target shares a group."""
        return 1.0 + (slowdown_target - 1.0) * (1.0 - self.slowdown_margin)
