"""The pipeline: carries a plan out, under one TaskGroup, cancellable at every point.

Knows: plan, device, transfer, ledger. Must not know: models, requests.
"""
