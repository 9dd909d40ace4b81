"""Why a request is not taken. Raised by `Engine.submit_nowait`; the server knows what to answer."""

from streamer.errors import GgufdError


class QueueFull(GgufdError):
    """As many requests as may wait are waiting: try again later."""


class NotServing(GgufdError):
    """The engine is draining, stopped or has failed: it takes no requests (any more)."""


class PromptTooLong(GgufdError):
    """The prompt leaves no room for a single id."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(f"the prompt has {n_prompt} tokens, the context {n_ctx}")
        self.n_prompt, self.n_ctx = n_prompt, n_ctx
