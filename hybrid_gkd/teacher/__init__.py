"""The teacher service: a broker, workers with scoring engines, and the protocol between them.

It knows nothing of the trainer. This file imports nothing, so that the client side stays light.
"""
