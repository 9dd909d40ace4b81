"""The residency plan: which bytes go where, in which order, through which strategy. Pure values, no I/O.

Knows: directories, capabilities as values. Must not know: devices, threads, models' formulas.
"""
