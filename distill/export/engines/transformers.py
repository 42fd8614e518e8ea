"""transformers: assisted generation in Python, batch size 1."""

from distill.export.engine import Engine, register

register(Engine("transformers", "5", "transformers.j2", 4, lambda facts: "sample", language="python"))
