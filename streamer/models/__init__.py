"""What each architecture computes: hyperparameters, weight specs, forward over `Ops`; one file each.

Knows: metadata, operators. Must not know: which device runs, how bytes got there, requests.
"""
