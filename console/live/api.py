"""REST API of live topics, for clients without WebSockets."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import Http404, HttpResponse
from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.api.routes import Router, answers
from console.live.access import may_see
from console.live.messages import TOPIC_PATTERN
from console.live.reading import feed_of

router = Router(tags=["live"])


class FrameOut(Schema):
    v: Literal[1]
    seq: int = Field(description="Increases with each answer; on a WebSocket, by one with each frame.")
    ts: datetime
    topic: str
    kind: Literal["snapshot", "gap"]
    data: dict[str, Any]


class LiveOut(Schema):
    frames: list[FrameOut] = Field(
        description="A snapshot, preceded by a gap if there are too many events after `since`."
    )


@router.get("/live", response=answers(LiveOut, 404))
def poll(
    request: SignedInRequest,
    topic: Annotated[str, Query(pattern=TOPIC_PATTERN, max_length=240, examples=["fleet"])],
    since: Annotated[
        int | None, Query(ge=0, lt=1 << 53, description="`event` of the last received frame.")
    ] = None,
) -> HttpResponse:
    """Get a topic's state and recent events.

    The first frames of a WebSocket at `/ws/v1/live`: see docs/live.md. Poll every five seconds.
    """
    if not may_see(request.principal, topic):
        raise Http404("There is no such topic, or you may not see it.")
    frames = feed_of(topic).opening(since, time.time())
    # The frames are JSON already.
    body = '{"frames": [' + ",".join(frame.text for frame in frames) + "]}"
    return HttpResponse(body, content_type="application/json")
