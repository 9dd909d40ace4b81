"""The routes, as a table, and the application around them."""

from aiohttp import web

from streamer import __version__
from streamer.server import (
    routes_anthropic,
    routes_llamacpp,
    routes_openai,
    routes_probes,
    routes_responses,
)
from streamer.server.answers import Route
from streamer.server.connection import GuardedRunner
from streamer.server.middleware import STATE, around, expect_continue, set_request_id
from streamer.server.state import ServerState

ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("GET", "/livez", routes_probes.livez),
    ("GET", "/readyz", routes_probes.readyz),
    ("GET", "/health", routes_probes.health),
    ("GET", "/v1/health", routes_probes.health),
    ("GET", "/residency", routes_probes.residency),
    ("GET", "/metrics", routes_probes.metrics),
    ("GET", "/props", routes_probes.props),
    ("GET", "/v1/models", routes_probes.models),
    ("GET", "/models", routes_probes.models),
    ("GET", "/v1/models/{model:.+}", routes_probes.model),
    ("POST", "/v1/chat/completions", routes_openai.chat_completions),
    ("POST", "/chat/completions", routes_openai.chat_completions),
    ("POST", "/v1/completions", routes_openai.completions),
    ("POST", "/v1/embeddings", routes_openai.embeddings),
    ("POST", "/embeddings", routes_openai.embeddings),
    ("POST", "/v1/responses", routes_responses.responses),
    ("POST", "/v1/messages", routes_anthropic.messages),
    ("POST", "/v1/messages/count_tokens", routes_anthropic.count_tokens),
    ("POST", "/tokenize", routes_llamacpp.tokenize),
    ("POST", "/detokenize", routes_llamacpp.detokenize),
    ("POST", "/apply-template", routes_llamacpp.apply_template),
    ("POST", "/completion", routes_llamacpp.completion),
)

KEEPALIVE_S = 75.0  # an idle connection is closed after this
MAX_HEADER_NBYTES = 16384


def make_app(state: ServerState) -> web.Application:
    app = web.Application(middlewares=[around])
    app[STATE] = state
    app[routes_probes.BUILD] = f"ggufd {__version__}"
    app.on_response_prepare.append(set_request_id)
    for method, path, handler in ROUTES:
        app.router.add_route(method, path, handler, expect_handler=expect_continue)
        if method == "GET":
            app.router.add_route("HEAD", path, handler, expect_handler=expect_continue)
    return app


def make_runner(state: ServerState, *, shutdown_timeout_s: float = 2.0) -> GuardedRunner:
    """`await runner.setup()`, then one web.SockSite for each listening socket."""
    return GuardedRunner(
        make_app(state),
        state.rules,
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=MAX_HEADER_NBYTES,
        max_field_size=MAX_HEADER_NBYTES,
        auto_decompress=False,
        lingering_time=1.0,
    )
