"""Strategies that move chunks of a file into device memory; one a file, chosen by a table (`choose.py`).

Knows: mappings of files, the Device contract, chunks. Must not know: the ledger, asyncio, models.
"""
