"""Requests become steps: schedule, run, sample. Token ids only; text never comes in here.

Knows: the Executor, the cache's pages. Must not know: HTTP, tokenizers, model formulas, which device runs.
"""
