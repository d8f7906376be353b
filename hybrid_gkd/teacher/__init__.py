"""The teacher service: a broker, workers with scoring engines, and the protocol between them.

It does not depend on the trainer. This file imports nothing, so that the client stays light.
"""
