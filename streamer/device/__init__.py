"""Device memory, streams, events and the one counted door for uploads.

Knows: bytes, addresses, streams, the driver (cuda.py is its only importer besides kernels/).
Must not know: weights, files, models, requests.
"""
