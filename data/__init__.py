"""Makes the tokens: prompts from sources, responses from the target, a store on disk, batches for the trainer."""

from pkgutil import extend_path

# A folder `data` without __init__.py in somebody's own project stays importable beside ours.
__path__ = extend_path(__path__, __name__)
