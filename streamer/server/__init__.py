"""HTTP on a socket. `openai.py` and its siblings turn JSON into requests and back (pure); `app.py` is the
routes.

Knows: engine, text, ledger snapshots. Must not know: devices, kernels, files.
"""
