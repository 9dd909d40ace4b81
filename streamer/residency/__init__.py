"""The true account of a load: states of weights, bytes, rate, ETA, stall age.

Knows: the plan. Must not know: how bytes move. A weight is resident when its last copy's event has completed.
"""
