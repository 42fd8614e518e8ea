"""The engines that serve a pair. Each file registers one: its rule, refusals, template, how it starts, its counts,
metrics and log lines.
"""
