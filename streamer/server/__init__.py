"""HTTP on a socket. `api/` turns JSON into calls and results into JSON (pure); `app.py` is the routes.

Knows: engine, text, ledger snapshots. Must not know: devices, kernels, files.
"""
