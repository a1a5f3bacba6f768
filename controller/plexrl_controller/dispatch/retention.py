"""History goes after its time, from the store and from memory. Never what a live job could still ask for."""

from plexrl_controller.dispatch.core import Core, log
from plexrl_controller.domain.errors import Unavailable
from plexrl_controller.domain.ids import JobId, ModelId

PRUNE_INTERVAL_S = 600.0
HISTORY_S = 30 * 86_400.0
MIN_HISTORY_S = 3600.0
"""Well above the time for which ended jobs stay in memory."""


async def prune(core: Core, history_s: float) -> None:
    """One pass; a store that does not answer is asked again at the next."""
    before = core.clock.now() - history_s
    ledger = core.ledger
    try:
        rows = await core.store.prune(before)
    except Unavailable as error:
        log.warning("history_not_pruned", detail=error.message)
        return
    old = [
        key
        for key, request in ledger.requests.items()
        if request.create_time < before
        and JobId(request.holder_id) not in ledger.jobs
        and ModelId(request.holder_id) not in ledger.models
    ]
    for key in old:
        del ledger.requests[key]
    if rows:
        log.info("history_pruned", rows=rows, before=before)
