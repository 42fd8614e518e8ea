"""TensorRT-LLM: draft and target as one model, started with a file of its own."""

from distill.export.engine import Engine, register

register(Engine("TensorRT-LLM", "1.3", "tensorrt_llm.j2", 5, lambda facts: "greedy-draft", one_pass=True))
