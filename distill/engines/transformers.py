"""transformers: assisted generation in Python, batch size 1."""

from distill.engines.protocol.engine import Engine, register

register(Engine("transformers", "transformers", "5", 4, ("sample",), language="python", reads_int8=""))
