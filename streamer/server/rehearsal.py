"""One tiny request through the running engine before READY, so that the first client pays for nothing."""

import logging

from streamer.engine.request import FinishEvent, FinishReason, Request, SamplingParameters
from streamer.server.state import Backend

logger = logging.getLogger(__name__)


async def rehearse(backend: Backend) -> None:
    """Sample two tokens.

    A model whose output is not finite is served none the less: each request will say so.
    """
    tokenizer = backend.text.tokenizer
    request = Request(
        id="rehearsal",
        prompt_ids=[tokenizer.bos_id if tokenizer.bos_id is not None else 0],
        sampling=SamplingParameters(temperature=0.8, top_k=40, top_p=0.9, seed=1, n_logprobs=1),
        max_tokens=2,
        use_prefix_cache=False,
    )
    async for event in backend.engine.submit_nowait(request).events():
        if isinstance(event, FinishEvent) and event.reason is FinishReason.ERROR:
            logger.warning("the rehearsal failed: %s", event.error)
