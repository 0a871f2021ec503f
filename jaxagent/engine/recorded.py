"""What the model chose for the tokens of a turn, its experts: read from the pages when the turn ends or is interrupted.

The choices lie where the keys lie, so a prefix that is shared, copied or kept over turns brings its own. Each token's
are handed on once, as they were when a token was first sampled behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.engine.executor import Executor
from jaxagent.engine.requests import Request


def take(executor: Executor, ends: Sequence[tuple[Request, int]]) -> None:
    """Adds to `Request.choices` those of its tokens up to an end which nobody has been handed; all in one read."""
    size, wanted, spans = executor.sizes.page_tokens, [], []
    if not executor.model.choices:
        return
    for request, end in ends:
        session = request.session
        first, last = session.recorded // size, -(-end // size)
        spans.append((len(wanted) * size + session.recorded - first * size, end - session.recorded))
        wanted += [(session.shard, page) for page in session.pages.pages[first:last]]
    if not wanted:
        return
    rows = executor.read_choices(wanted).reshape(-1, executor.model.choices)
    for (request, end), (start, count) in zip(ends, spans, strict=True):
        request.choices.append(rows[start : start + count])
        request.session.recorded = end
