"""What each architecture computes: hyperparameters, weight specs, forward over `Ops`. One file an architecture.

Knows: metadata, operators. Must not know: which device runs, how bytes got there, requests.
"""
