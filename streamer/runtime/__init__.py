"""From a model file to a running engine: reads, plans, loads, binds. Used by the service, `inspect` and
benchmarks.

Knows: every room below the server. Must not know: HTTP, systemd, signals, the command line.
"""
