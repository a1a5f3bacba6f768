"""How much an engine must be given to do before it can be interrupted, which is measured on the spot."""

from dataclasses import replace

from plexrl_worker.engine import port
from tests.support.engine_subjects import SAMPLING, Model, Patient


def long_enough(model: Model, prompts: port.TokenBatch) -> port.SamplingParams:
    """Sampling that takes so long that a child, which is silent about what is over in a moment, tells its progress
    several times; twice in a row, since once may be a busy machine's.
    """

    def reports(params: port.SamplingParams) -> int:
        control = Patient()
        model.engine.generate(model.name, model.version, prompts, params, control)
        return len(control.heard)

    for n in (8, 32, 128, 512, 1024):
        params = replace(SAMPLING, n=n, max_tokens=16)
        if all(reports(params) > 2 for _ in range(2)):
            return params
    raise AssertionError("this engine is too fast to be interrupted")
