"""JSON to requests and back, one file an API.

Pure: no I/O, no engine, no tokenizer; values in, values out.
"""
